"""Another library's kernels: where they are put, what they are handed, and what happens where they do not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, tree
from fmeg.kernels import grouped, te
from fmeg.lower import vendor
from fmeg.models import llama


def step(params, batch):
    cfg = llama.Config(vocab_size=32, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, ff=24)
    (loss, _), grads = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch)
    return loss, grads


def example():
    cfg = llama.Config(vocab_size=32, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, ff=24)
    ids = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(2, 8)}
    return llama.init(fmeg.random.key(0), cfg), batch


def results(mesh, layout, **options):
    out = fmeg.jit(step, mesh=mesh, layout=layout, **options)(*example())
    return [x.global_value() for x in tree.leaves(out)]


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2)])
def test_kernels_are_put_into_the_bodies_of_loops(mesh, monkeypatch):
    counts = dict.fromkeys(vendor.TE, 0)

    def counting(name):
        def run(own, *args, **kwargs):
            counts[name] += 1
            return own(*args, **kwargs)

        return run

    monkeypatch.setattr(vendor, "TE", {name: counting(name) for name in counts})
    monkeypatch.setattr(te, "available", lambda: True)
    layout = Layout(batch="dp") if mesh.size > 1 else Layout()
    got, want = results(mesh, layout, lowering="te"), results(mesh, layout)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    ranks, layers = mesh.size, 2
    assert counts["attention"] >= layers * ranks and counts["attention_bwd"] == layers * ranks
    assert counts["rms_norm_bwd"] == (2 * layers + 1) * ranks
    assert counts["einsum"] > 0 and counts["grouped_matmul"] == 0


def test_what_does_not_fit_runs_as_without(monkeypatch):
    monkeypatch.setattr(te, "available", lambda: True)
    monkeypatch.setattr(te, "_te", lambda: pytest.fail("nothing fits on a CPU"))
    got, want = results(Mesh(), Layout(), lowering="te"), results(Mesh(), Layout())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_unknown_and_missing_libraries_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="lowering must be None or one of te"):
        fmeg.jit(step, lowering="other")
    monkeypatch.setattr(te, "available", lambda: False)
    with pytest.raises(ImportError, match=r"fmeg\[te\]"):
        fmeg.jit(step, lowering="te")


# -- what the library is handed, with its products written in torch ----------------------------------------------------
def _gemm(first, second, out_dtype=None, layout="TN"):
    assert first.is_contiguous() and second.is_contiguous()
    x, y = (t.t() if flag == "T" else t for t, flag in zip((first, second), layout, strict=True))
    return (y @ x).to(out_dtype), None, None, None


def _grouped_gemm(first, second, out, quantizers, dtype, layout="TN", m_splits=None, grad=False, single_output=False):
    assert len(first) == len(second) == len(quantizers) == len(m_splits) and all(m_splits)
    made = [_gemm(a, b, dtype, layout)[0] for a, b in zip(first, second, strict=True)]
    for o, m in zip(out[0].split(m_splits) if single_output else out, made, strict=True):
        o.copy_(m)


@pytest.fixture
def library(monkeypatch):
    ext = SimpleNamespace(general_gemm=_gemm, general_grouped_gemm=_grouped_gemm)
    monkeypatch.setattr(te, "_te", lambda: SimpleNamespace(ext=ext))
    monkeypatch.setattr(vendor, "_fits", lambda *tensors: True)


@pytest.mark.parametrize(
    "equation",
    [
        "b s d, d f -> b s f", "b s f, d f -> b s d", "b s d, b s f -> d f", "b s f, b s d -> d f", "s b, f s -> b f",
        "b s d, d h e -> b s h e", "b s h e, h e d -> b s d", "b s h e, b s d -> h e d", "b h s, b h f -> b s f",
        "b s, d f -> b s d f",
    ],
)  # fmt: skip
def test_products(equation, library):
    sizes = dict(b=2, s=3, d=4, f=5, h=6, e=7)
    terms = [t.split() for t in equation.split("->")[0].split(",")]
    operands = [torch.randn([sizes[n] for n in names], dtype=torch.float64) for names in terms]
    own = lambda equation, *operands, dtype=None: fmeg.einsum(equation, *operands)
    got, want = vendor.TE["einsum"](own, equation, *operands), fmeg.einsum(equation, *operands)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("ends", [[2, 5, 9], [0, 4, 4], [0, 0, 0], [9, 9, 9]])
def test_grouped_products(ends, library):
    x, y = torch.randn(9, 4, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    w, ends = torch.randn(3, 4, 5, dtype=torch.float64), torch.tensor(ends, dtype=torch.int32)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
    close(vendor.TE["grouped_matmul"](None, x, w, ends), grouped.loop(x, w, ends))
    close(vendor.TE["grouped_matmul"](None, y, w, ends, transposed=True), grouped.loop(y, w, ends, True))
    close(vendor.TE["grouped_matmul_dw"](None, x, y, ends), grouped.loop_dw(x, y, ends))
