"""TransformerEngine's kernels against the references; skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, tree
from fmeg.kernels import grouped, te
from fmeg.lower import vendor
from fmeg.models import llama
from fmeg.ops.attention_math import Masking, math_backward, math_forward
from fmeg.ops.einsum import einsum_matrices
from fmeg.ops.rms_norm import rms_norm_bwd_p, rms_norm_p

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not te.available(), reason="TransformerEngine is not installed")]
BF16 = torch.bfloat16


def normal(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def worst(a, b):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@pytest.mark.parametrize(("heads", "kv", "e"), [(8, 2, 64), (8, 8, 128), (4, 1, 96)])
@pytest.mark.parametrize(("causal", "window", "t"), [(True, None, 256), (True, 65, 256), (False, None, 384)])
def test_attention(heads, kv, e, causal, window, t):
    q, do = (normal(2, 256, heads, e, seed=i) for i in (0, 3))
    k, v = (normal(2, t, kv, e, seed=i) for i in (1, 2))
    m = Masking(None, None, None, causal, window, e**-0.5)
    o, lse = math_forward(q.double(), k.double(), v.double(), m)
    want = math_backward(q.double(), k.double(), v.double(), o, lse, do.double(), m)
    got = te.attention(q, k, v, causal, window or 0, m.scale)
    assert worst(got[0], o) < 8e-3
    assert float((got[1].double() - lse).abs().max()) < 1e-4
    for a, b in zip(te.attention_backward(q, k, v, *got, do, causal, window or 0, m.scale), want, strict=True):
        assert worst(a, b) < 1e-2


@pytest.mark.parametrize("shape", [(5, 64), (3, 1000, 2048), (1, 4096)])
def test_rms_norm(shape):
    x, ct, w = normal(*shape), normal(*shape, seed=1), normal(shape[-1], seed=2)
    assert worst(te.rms_norm(x, w, 1e-5), rms_norm_p(x.double(), w.double(), eps=1e-5)) < 8e-3
    want = rms_norm_bwd_p(x.double(), w.double(), ct.double(), eps=1e-5)
    r = torch.rsqrt(x.float().square().mean(-1) + 1e-5)
    for a, b in zip(te.rms_norm_backward(x, w, ct, r), want, strict=True):
        assert worst(a, b) < 1e-2


@pytest.mark.parametrize(
    "equation",
    ["b s d, d f -> b s f", "b s f, d f -> b s d", "b s d, b s f -> d f", "b s h e, h e d -> b s d", "s b, f s -> b f"],
)
def test_products(equation):
    sizes = dict(b=4, s=64, d=128, f=256, h=4, e=32)
    terms = [t.split() for t in equation.split("->")[0].split(",")]
    x, y = (normal(*[sizes[n] for n in names], seed=i) for i, names in enumerate(terms))
    assert einsum_matrices(equation, x.shape, y.shape) is not None
    got = vendor.TE["einsum"](None, equation, x, y)
    assert worst(got, fmeg.einsum(equation, x.double(), y.double())) < 8e-3


@pytest.mark.parametrize("ends", [[64, 100, 228], [0, 128, 128], [0, 0, 0]])
def test_grouped_products(ends):
    x, y, w = normal(256, 128), normal(256, 64, seed=1), normal(3, 128, 64, seed=2)
    ends = torch.tensor(ends, dtype=torch.int32, device="cuda")
    close = lambda a, b: torch.testing.assert_close(a.double(), b, rtol=1e-2, atol=0.15)
    close(te.grouped_matmul(x, w, ends, False), grouped.loop(x.double(), w.double(), ends))
    close(te.grouped_matmul(y, w, ends, True), grouped.loop(y.double(), w.double(), ends, True))
    close(te.grouped_matmul_dw(x, y, ends), grouped.loop_dw(x.double(), y.double(), ends))


@pytest.mark.parametrize(("a", "b"), [(0, 0), (1, 2)])
def test_fp8_products(a, b):
    x, w = normal(256, 512), normal(384, 512, seed=1)
    got = te.fp8_product(te.quantized(x, a), te.quantized(w, b), split=True).double()
    want = x.double() @ w.double().t()
    assert float((got - want).norm() / want.norm()) < 0.05


@pytest.mark.parametrize("mode", ["eager", "inductor", "cudagraph"])
def test_a_step(mode):
    cfg = llama.Config(
        vocab_size=512, embed=256, layers=2, heads=4, kv_heads=2, head_dim=64, ff=512, compute_dtype=BF16
    )

    def step(params, batch):
        (loss, _), grads = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch)
        return loss, grads

    with torch.device("cuda"):
        params = llama.init(fmeg.random.key(0), cfg)
        ids = torch.randint(0, 512, (4, 129), generator=torch.Generator("cuda").manual_seed(0))
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(4, 128)}
        runs = [fmeg.jit(step, mesh=Mesh(), layout=Layout(), mode=mode, lowering=name) for name in (None, "te")]
        outs = [
            tree.map(lambda x: x.global_value().clone(), [run(params, batch) for _ in range(4)][-1]) for run in runs
        ]
    for mine, other in zip(tree.leaves(outs[1]), tree.leaves(outs[0]), strict=True):
        assert float((mine - other).norm() / other.norm()) < 2e-2
