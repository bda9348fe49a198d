"""Latent attention, sinks and mixtures of experts on a GPU: kernels for their shapes, and whole steps against the
CPU."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, ops, random, tree
from fmeg.kernels import attention as kernels
from fmeg.models import batch_axes, model_of, presets
from fmeg.ops.attention_math import Masking, math_backward, math_forward

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def normal(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, device=CUDA, generator=g).to(dtype)


def worst(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize(("e", "f"), [(192, 128), (160, 192), (576, 512)])
def test_heads_of_two_sizes(e, f):
    """Multi-head latent attention, plain and absorbed: flash with heads padded to one size; the absorbed sizes are too
    large for a kernel."""
    q, k = (normal(2, 256, 4, e, dtype=torch.bfloat16, seed=i) for i in range(2))
    v, do = (normal(2, 256, 4, f, dtype=torch.bfloat16, seed=i) for i in (2, 3))
    name = kernels.kernel(q, k, v, causal=True, window=None, shift=None, segments=False)
    assert name == ("flash" if e <= 256 else None)
    m = Masking(None, None, None, True, None, e**-0.5)
    o, lse = math_forward(q.double(), k.double(), v.double(), m)
    if name is None:
        assert worst(ops.attention(q, k, v), o) < 8e-3
        return
    grads = math_backward(q.double(), k.double(), v.double(), o, lse, do.double(), m)
    got = kernels.flash_forward(q, k, v, True, None, m.scale)
    back = kernels.flash_backward(q, k, v, *got, do, True, None, m.scale)
    assert worst(got[0], o) < 8e-3 and got[0].shape == o.shape
    assert float((got[1].double() - lse).abs().max()) < 1e-5
    for a, b in zip(back, grads, strict=True):
        assert worst(a, b) < 1e-2 and a.shape == b.shape


@pytest.mark.parametrize("window", [None, 33])
def test_sinks_ride_on_the_kernels(window):
    """Forward and backward of cuDNN's and flash's kernels, with the sink merged in, against float64."""
    leaves = [normal(2, 256, h, 64, dtype=torch.bfloat16, seed=i) for i, h in enumerate((8, 2, 2))]
    leaves.append(normal(8, seed=3))
    exact = [x.double().requires_grad_() for x in leaves]
    quick = [x.requires_grad_() for x in leaves]
    want, got = (ops.attention(q, k, v, sinks=s, window=window) for q, k, v, s in (exact, quick))
    assert worst(got, want) < 1e-2
    ct = normal(*want.shape, seed=4)
    wants = torch.autograd.grad(want, exact, ct.double())
    for a, b in zip(torch.autograd.grad(got, quick, ct.bfloat16()), wants, strict=True):
        assert worst(a, b) < 2e-2


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-deepseek"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_step_on_the_gpu(name, dtype):
    """Loss, counts and gradients of a jitted step are those of the CPU in float64. In bfloat16 a token may change its
    expert: the loss is near."""
    cfg = presets.get(name, dtype=torch.float64)
    model = model_of(cfg)
    params = model.init(random.key(0), cfg)
    torch.manual_seed(0)
    tokens, targets = torch.randint(cfg.vocab_size, (2, 4, 32))
    batch = {"tokens": tokens, "targets": targets, "mask": torch.ones(4, 32, dtype=torch.float64)}
    batch["positions"] = torch.arange(32, dtype=torch.float64).expand(4, 32).contiguous()  # a float64 rotary table
    (want, aux), grads = fmeg.value_and_grad(lambda p, b: model.loss(p, b, cfg))(params, batch)

    there = presets.get(name, dtype=torch.float64 if dtype == torch.float64 else torch.float32, compute_dtype=dtype)
    to = lambda x: x.to(CUDA, there.dtype if x.is_floating_point() else x.dtype)

    def step(params, batch):
        return fmeg.value_and_grad(lambda p, b: model.loss(p, b, there))(params, batch)

    axes = {"params": model.logical_axes(cfg), "batch": {**batch_axes(), "positions": "batch seq"}}
    jitted = fmeg.jit(step, mesh=Mesh(dp=1), layout=Layout(batch="dp", experts="dp"), axes=axes, strict=True)
    with CUDA:
        (loss, here), got = jitted(tree.map(to, params), tree.map(to, batch))
    value = lambda x: (x.global_value() if hasattr(x, "global_value") else x).cpu()
    if dtype == torch.float64:
        torch.testing.assert_close(value(loss), want, rtol=1e-10, atol=0)
        assert torch.equal(value(here["counts"]), aux["counts"])
        for path, a, b in zip(tree.paths(grads), tree.leaves(got), tree.leaves(grads), strict=True):
            torch.testing.assert_close(value(a), b, rtol=1e-8, atol=1e-10, msg=lambda m, path=path: f"{path}: {m}")
    else:
        assert abs(float(value(loss)) - float(want)) < 0.02
        assert all(value(g).isfinite().all() for g in tree.leaves(got))
        assert int(value(here["counts"]).sum()) == int(aux["counts"].sum())
