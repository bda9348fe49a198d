"""Programs as text."""

from __future__ import annotations

import re

import torch

from fmeg import Layout, Mesh, P, TensorType, einsum, jit, ops, scan, shard, trace, value_and_grad
from fmeg.program.printing import format_program, letters, summary

F32 = torch.float32


def code(text: str) -> str:
    """Without comments."""
    return "\n".join(re.sub(r"\s*#.*", "", line) for line in text.splitlines())


def layer(x, w):
    return torch.tanh(einsum("b d, d f -> b f", x, w)), None


def model(x, ws):
    return scan(layer, x, ws)[0].sum()


X, WS = TensorType((4, 8), F32), TensorType((3, 8, 8), F32)


def test_a_scan_prints_its_body_inside():
    assert code(str(trace(model, X, WS).program)) == "\n".join(
        [
            "model(",
            "  a: f32[4, 8]",
            "  b: f32[3, 8, 8]",
            ") {",
            "  c: f32[4, 8] = scan[times=3]",
            "    scan body(",
            "      d: f32[4, 8] = a",
            "      e: f32[8, 8] = b",
            "    ) {",
            '      f: f32[4, 8] = einsum("b d, d f -> b f", d, e)',
            "      g: f32[4, 8] = aten.tanh.default(f)",
            "      return g",
            "    }",
            "  h: f32[] = aten.sum.default(c)",
            "  return h",
            "}",
        ]
    )


def test_sources_end_at_the_width():
    text = format_program(trace(model, X, WS).program, 100)
    (line,) = [t for t in text.splitlines() if "tanh" in t]
    assert len(line) == 100 and re.search(r"# test_printing\.py:\d+ layer$", line)
    assert all(len(t) == 100 for t in text.splitlines() if "#" in t)


def test_a_comment_that_does_not_fit_follows_the_code():
    text = format_program(trace(model, X, WS).program, 20)
    (line,) = [t for t in text.splitlines() if "tanh" in t]
    assert re.search(r"default\(f\)  # test_printing", line)


def test_two_traces_print_alike():
    step = value_and_grad(lambda w, x: (model(x, w), 4), microbatches=2)
    first, second = (str(trace(step, WS, X).program) for _ in range(2))
    assert first == second


def test_names_are_unique_through_bodies():
    step = value_and_grad(lambda w, x: (model(x, w), 4), microbatches=2)
    text = code(str(trace(step, WS, X).program))
    defined = re.findall(r"\b([a-z]+): (?:f32|bool)\[", text)
    assert len(defined) == len(set(defined)) > 30
    assert sorted(defined, key=lambda n: (len(n), n)) == [letters(i) for i in range(len(defined))]


def test_phases_and_the_two_halves_of_a_scan():
    step = value_and_grad(lambda w, x: (model(x, w), 4))
    text = code(str(trace(step, WS, X).program))
    assert re.search(r"\n +F [a-z]+: f32\[4, 8\] = scan_forward\[times=3\]\n +scan body\(", text)
    assert re.search(r"\n +B [a-z]+: f32\[4, 8\], [a-z]+: f32\[3, 8, 8\] = scan_backward\[times=3\]\(", text)
    forward = text.split("scan body(")[1].split("}")[0]
    backward = text.split("scan body backward(")[1].split("}")[0]
    assert "mirror" not in forward and "mirror" in backward
    (kept,) = re.findall(r"keep (.*)", forward)
    # the backward half uses the names of the forward half, and defines none of them again
    inputs = backward.split(") {")[0]
    assert set(kept.split(", ")) <= set(re.findall(r"\b[a-z]+\b", inputs.splitlines()[-2]))
    assert not any(re.search(rf"\b{name}: ", backward) for name in kept.split(", "))


def test_a_local_program_shows_placements_collectives_and_reasons():
    def mlp(params, batch):
        h = ops.swiglu(einsum("b d, d f -> b f", batch, params), einsum("b d, d f -> b f", batch, params))
        return shard(einsum("b f, d f -> b d", h, params), P("batch", None))

    mesh, layout = Mesh(dp=2, tp=2), Layout(batch="dp", ff="tp")
    lowered = jit(mlp, mesh=mesh, layout=layout, axes={"params": "embed ff"}).lower(TensorType((8, 16), F32), X)
    text = str(lowered)
    assert re.search(r"a: f32\[8, 16@tp\] +# params", text)
    assert re.search(r"f32\[4@dp, 8\]\{P:tp\} = einsum\(\"b f, d f -> b d\", [a-z]+, a\) +# test_printing", text)
    assert re.search(r'f32\[4@dp, 8\] = all_reduce\[axes=\("tp",\), op="sum"\]\([a-z]\) +# shard; test_printing', text)
    assert "all_reduce" not in lowered.text("global") and "@" not in lowered.text("global")
    assert repr(lowered).startswith("Lowered(Program(mlp: 2 inputs, 5 nodes, 1 outputs), Mesh(dp=2, tp=2), Layout(")


def test_values_inside_a_rule_are_marked_local():
    def look(params, batch):
        return ops.embedding(params, batch)

    ids = TensorType((4, 8), torch.int64)
    lowered = jit(look, mesh=Mesh(tp=2), layout=Layout(vocab="tp"), axes={"params": "vocab embed"})
    text = str(lowered.lower(TensorType((8, 16), F32), ids))
    assert re.search(r'[a-z]: local i64\[\] = axis_index\[axes=\("tp",\)\]\(\)', text)
    assert re.search(r'f32\[4, 8, 16\] = all_reduce\[axes=\("tp",\), op="sum"\]', text)


def test_results_that_do_not_fit_stand_below_each_other():
    def f(x):
        return torch.var_mean(x, dim=1, keepdim=True)

    text = format_program(trace(f, X).program, 70)
    lines = [line.strip() for line in code(text).splitlines()]
    at = lines.index("b: f32[4, 1],")
    assert lines[at + 1] == "c: f32[4, 1]" and lines[at + 2].startswith("= aten.var_mean")


def test_constants_and_dtypes():
    def f(x):
        return (x + torch.tensor([1.0, 2.0])).to(torch.float64)

    text = code(str(trace(f, TensorType((2,), F32)).program))
    assert "constant([1.0, 2.0])" in text and "_to_copy.default(c, dtype=f64)" in text


def test_summary():
    program = trace(model, X, WS).program
    assert repr(program) == summary(program) == "Program(model: 2 inputs, 2 nodes (and 2 in bodies), 1 outputs)"
