"""Losses in chunks where the vocabulary is sharded: the same numbers, a rank's logits never whole."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, TensorType, ops, tree
from fmeg.lower import pipeline
from fmeg.lower.chunked_loss import ChunkedLoss, chunked
from fmeg.lower.common import share
from fmeg.lower.rewrite import everywhere
from fmeg.models import llama
from fmeg.program.structured import loop_of, walk
from fmeg.sharding.execute import Executable
from fmeg.sharding.explain import explain
from fmeg.testing.verify import config, make_batch, make_params
from tests.mesh import processes

AXES = {
    "params": {"head": "vocab embed", "scale": "embed"},
    "batch": {"x": "batch seq embed", "t": "batch seq", "mask": "batch seq"},
}
V, ROWS = 12, (4, 6)
TP = Layout(vocab="tp")
EVERY = dict(z_loss=1e-3, label_smoothing=0.1)


def step_of(weigh=lambda losses, mask: (losses * mask).sum(), **options):
    def loss(p, batch):
        logits = fmeg.einsum("b s d, v d -> b s v", batch["x"].tanh() * p["scale"], p["head"])
        return weigh(ops.cross_entropy(logits, batch["t"], **options), batch["mask"]), batch["mask"].sum()

    return lambda params, batch: fmeg.value_and_grad(loss)(params, batch)


def example(dtype=torch.float64, vocab=V):
    g = torch.Generator().manual_seed(0)
    params = {"head": torch.randn(V, 6, generator=g, dtype=dtype), "scale": torch.randn(6, generator=g, dtype=dtype)}
    batch = {
        "x": torch.randn(*ROWS, 6, generator=g, dtype=dtype),
        "t": torch.randint(0, vocab, ROWS, generator=g),
        "mask": (torch.rand(ROWS, generator=g) > 0.3).to(dtype),
    }
    return params, batch


def lowered(step, args, mesh, layout, axes=AXES):
    return fmeg.jit(step, mesh=mesh, layout=layout, axes=axes).lower(*args)


def in_chunks(low, rows, least=None):
    """The local Program with losses in chunks of so many rows."""
    program = everywhere(share, low.program)
    each = max(n.args[0].type.nbytes for n, _, _ in walk(program) if n.opname == "cross_entropy_bwd") // 24
    program = everywhere(chunked(rows * each, None if least is None else least * each), program)
    program.check()
    return program


def run(low, program, args):
    """The results of a local Program as global tensors."""
    b = low.mesh.backend()
    values = [b.scatter(x, p.dims) for x, p in zip(tree.leaves(args), low.inputs, strict=True)]
    outs = zip(Executable(program, b)(values), low.outputs, strict=True)
    return [b.gather(x, p.dims) for x, p in outs if p is not None]


def chunks_of(program):
    return [n.op.chunks for n, _, _ in walk(program) if isinstance(n.op, ChunkedLoss)]


def near(got, want, tol=1e-12):
    got, want = list(got), [x for x in tree.leaves(want) if isinstance(x, torch.Tensor)]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    ("vocab", "options"),
    [(V, {}), (10, {}), (9, EVERY), (7, EVERY), (V, dict(label_smoothing=0.2)), (V, dict(z_loss=0.1))],
)
def test_equal_to_one_device(backend, tp, vocab, options):
    """With 9 classes of 12 on 4 ranks, the last has padding alone; with 10 on 4 and on 3 it has some."""
    args, step = example(vocab=vocab), step_of(vocab=vocab, **options)
    low = lowered(step, args, Mesh(tp=tp, backend=backend), TP)
    want = step(*args)
    for rows, chunks in ((12, 2), (7, 4), (1, 24)):
        program = in_chunks(low, rows)
        assert chunks_of(program) == [chunks]
        near(run(low, program, args), want)


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (Mesh(x=2, y=2, backend="loop"), Layout(vocab=("x", "y"))),
        (Mesh(x=2, y=2, backend="loop"), Layout(vocab=("y", "x"))),
        (Mesh(dp=2, tp=2, backend="loop"), Layout(batch="dp", vocab="tp")),
        (Mesh(dp=2, tp=2, backend="loop"), Layout(batch="dp", vocab="tp", params=dict(embed="dp"))),
        (Mesh(tp=2, backend="loop"), Layout(vocab="tp", seq="tp")),
        (Mesh(cp=2, tp=2, backend="loop"), Layout(seq="cp", vocab="tp")),
    ],
    ids=str,
)
def test_other_layouts(mesh, layout):
    args, step = example(vocab=11), step_of(vocab=11, **EVERY)
    low = lowered(step, args, mesh, layout)
    program = in_chunks(low, 3)
    assert len(chunks_of(program)) == 1 and chunks_of(program)[0] > 1
    near(run(low, program, args), step(*args))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_chunk_has_the_bits_of_the_whole(dtype):
    args = example(dtype, vocab=10)
    low = lowered(step_of(vocab=10, **EVERY), args, Mesh(tp=3, backend="loop"), TP)
    program = in_chunks(low, 24, 1)
    assert chunks_of(program) == [1]
    for a, b in zip(run(low, program, args), run(low, low.program, args), strict=True):
        assert torch.equal(a, b)


def test_bf16():
    """Each chunk's dw is rounded before it is added, to 2^-9 of numbers up to about 4; logits, gradients likewise."""
    args = example(torch.bfloat16, vocab=10)
    low = lowered(step_of(vocab=10, **EVERY), args, Mesh(tp=4, backend="loop"), TP)
    wide = tree.map(lambda x: x.double() if x.is_floating_point() else x, args)
    for program in (low.program, in_chunks(low, 6)):
        got = [x.double() for x in run(low, program, args)]
        near(got, step_of(vocab=10, **EVERY)(*wide), tol=3e-2)


def test_masked_rows_have_no_gradient_and_what_is_not_finite_shows():
    params, batch = example()
    batch["mask"][0], batch["mask"][1] = 0.0, 1.0
    batch["x"][0, 0] = torch.nan

    def step(params, batch):
        def loss(p, b):
            logits = fmeg.einsum("b s d, v d -> b s v", b["x"], p["head"])
            return torch.where(b["mask"] > 0, ops.cross_entropy(logits, b["t"]), 0.0).sum(), 1

        return fmeg.value_and_grad(lambda p, b: loss({"head": params["head"]}, {**b, "x": p}))(batch["x"], batch)

    low = lowered(step, (params, batch), Mesh(tp=2, backend="loop"), TP)
    program = in_chunks(low, 6)
    for got in (run(low, program, (params, batch)), run(low, low.program, (params, batch))):
        assert got[0].isfinite() and got[-1][1:].isfinite().all() and (got[-1][0, 1:] == 0).all()


def test_reductions_are_two_a_chunk():
    args = example()
    low = lowered(step_of(label_smoothing=0.1), args, Mesh(tp=2, backend="loop"), TP)
    whole = low.explain()
    assert whole.select(phase="F").counts()["all_reduce"] == 2
    program = in_chunks(low, 6)
    inside = explain(program, low.mesh).select(segment="rows")
    assert inside.executed() == {"all_reduce": 2 * 4}
    assert [r.tensors for r in inside.rows] == [1, 3]
    assert sum(r.total for r in inside.rows) == sum(r.total for r in whole.select(phase="F", reason="rule").rows)


def test_a_cotangent_that_depends_on_the_loss_keeps_it_whole():
    args, twice = example(), step_of(lambda losses, m: (losses * losses * m).sum())
    assert chunks_of(in_chunks(lowered(twice, args, Mesh(tp=2, backend="loop"), TP), 1)) == []


READERS = {
    "logits": lambda logits, t: logits.square().sum(),
    "what shards say": lambda logits, t: ops.cross_entropy(logits, t).sum(),  # the same whatever the z-term
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_second_reader_keeps_it_whole(read):
    args = example()

    def loss(p, batch):
        logits = fmeg.einsum("b s d, v d -> b s v", batch["x"] * p["scale"], p["head"])
        losses = ops.cross_entropy(logits, batch["t"], z_loss=0.1)
        return (losses.sum(), 1), {"seen": read(logits.detach(), batch["t"])}

    step = lambda params, batch: fmeg.value_and_grad(loss)(params, batch)
    low = lowered(step, args, Mesh(tp=2, backend="loop"), TP)
    program = in_chunks(low, 1)
    assert chunks_of(program) == []
    near(run(low, program, args), step(*args))


# -- a model -----------------------------------------------------------------------------------------------------------
LAYOUT = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
LAYOUTS = {
    "tp": (Mesh(tp=2, backend="loop"), Layout(**LAYOUT)),
    "sequence": (Mesh(tp=4, backend="loop"), Layout(**LAYOUT, res_seq="tp")),
    "zero": (
        Mesh(dp=2, tp=2, backend="loop"),
        Layout(batch="dp", **LAYOUT, res_seq="tp", params=dict(embed="dp")),
    ),
}


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_model(mesh, layout, microbatches, monkeypatch):
    cfg = config()
    args = make_params(cfg), make_batch(cfg, 8, 16, 0)

    def step(params, batch):
        return fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=microbatches)(params, batch)

    low = lowered(step, args, mesh, layout, {"params": llama.logical_axes(cfg)})
    monkeypatch.setattr(pipeline, "LOGITS", 2000)
    monkeypatch.setattr(pipeline, "FUSED", 1000)
    program = pipeline.lower(low.program)
    program.check()
    assert len(chunks_of(program)) == 1 and chunks_of(program)[0] > 1
    got = tree.leaves(low.compile("inductor")(tree.leaves(args)))
    near([x.global_value() for x in got if isinstance(x, fmeg.Array)], step(*args))


def wide_model():
    """A step of two ranks with 2^16 classes each, where logits of 4096 tokens are 1 GiB a rank; shapes only."""
    cfg = llama.Config(vocab_size=2**17, embed=16, layers=2, heads=2, kv_heads=2, head_dim=8, ff=16)
    params = tree.map(lambda p: TensorType(p.shape(cfg.sizes), torch.float32), llama.parameters(cfg))
    ids, mask = TensorType((4, 1024), torch.int64), TensorType((4, 1024), torch.float32)

    def step(params, batch):
        return fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch)

    args = params, {"tokens": ids, "targets": ids, "mask": mask}
    return lowered(
        step, args, Mesh(tp=2, backend="loop"), Layout(**LAYOUT, res_seq="tp"), {"params": llama.logical_axes(cfg)}
    )


def test_no_value_is_as_large_as_the_logits(monkeypatch):
    low, logits = wide_model(), 4 * 4096 * 2**16
    monkeypatch.setattr(pipeline, "LOGITS", 2 * logits)
    monkeypatch.setattr(pipeline, "FUSED", 2 * logits)
    before = low.predicted_peak("inductor")
    monkeypatch.setattr(pipeline, "LOGITS", logits // 16)
    program = pipeline.lower(low.program)
    assert chunks_of(program) == [16]
    assert max(o.type.nbytes for n, _, _ in walk(program) for o in n.outs) <= logits // 16
    after = low.predicted_peak("inductor")
    assert before > logits and after < before - logits * 15 // 16 + logits // 32
    [loss] = [n for n in program.nodes if isinstance(n.op, ChunkedLoss)]
    body = loop_of(loss).body
    assert sum(o.type.nbytes == logits // 16 for n in body.nodes for o in n.outs) == 2  # logits, and their gradient


# -- real processes ----------------------------------------------------------------------------------------------------
def on_processes() -> None:
    """Each rank's results are those of the virtual one, bit for bit, in one chunk and in several."""
    for vocab, options, layout in ((V, {}, TP), (7, EVERY, TP), (7, EVERY, Layout(vocab="tp", seq="tp"))):
        args, step = example(vocab=vocab), step_of(vocab=vocab, **options)
        real, virtual = (lowered(step, args, Mesh(tp=2, backend=kind), layout) for kind in ("distributed", "loop"))
        for rows in (24, 6, 1):
            got, want = (run(low, in_chunks(low, rows, 1), args) for low in (real, virtual))
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b), (vocab, rows)


def compiled_on_processes() -> None:
    """The same through `jit`: compiled, the loss of a model in chunks."""
    cfg = config()
    args = make_params(cfg), make_batch(cfg, 8, 16, 0)

    def step(params, batch):
        return fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch)

    pipeline.LOGITS, pipeline.FUSED = 2000, 1000
    f = fmeg.jit(step, mesh=Mesh(tp=2, backend="distributed"), layout=Layout(**LAYOUT, res_seq="tp"),
                 axes={"params": llama.logical_axes(cfg)}, mode="inductor")  # fmt: skip
    got = [x.global_value() for x in tree.leaves(f(*args)) if isinstance(x, fmeg.Array)]
    near(got, step(*args))


@pytest.mark.distributed
@pytest.mark.parametrize("check", [on_processes, compiled_on_processes], ids=lambda f: f.__name__)
def test_processes(check):
    failures = processes.run((check,), 2)[check.__name__]
    assert not failures, "\n".join(failures)
