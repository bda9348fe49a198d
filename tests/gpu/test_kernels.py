"""Kernels on a GPU against their plain references."""

from __future__ import annotations

import pytest
import torch

from fmeg.kernels import attention as attention_kernels
from fmeg.kernels import rows
from fmeg.ops.attention_math import Masking, math_backward, math_forward
from fmeg.ops.contract import matrices, product_into, product_plus
from fmeg.ops.cross_entropy import (
    cross_entropy_bwd_p,
    cross_entropy_join_p,
    cross_entropy_p,
    cross_entropy_part_p,
    gradient_of_part,
    loss_and_gradient,
)
from fmeg.ops.rms_norm import rms_norm_bwd_p
from fmeg.ops.rope import rope_p, rope_table

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def normal(*shape, dtype=torch.float32, seed=0):
    g = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(*shape, device=CUDA, generator=g).to(dtype)


def worst(a, b):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


@pytest.mark.parametrize("name", ["cudnn", "flash"])
@pytest.mark.parametrize(("heads", "kv", "e"), [(8, 2, 64), (8, 8, 128), (4, 4, 96)])
def test_attention(name, heads, kv, e):
    q, k, v, do = (normal(2, 256, h, e, dtype=torch.bfloat16, seed=i) for i, h in enumerate((heads, kv, kv, heads)))
    m = Masking(None, None, None, True, None if name == "cudnn" else 33, e**-0.5)
    assert attention_kernels.kernel(q, k, v, causal=True, window=m.window, shift=None, segments=False) == name
    o, lse = math_forward(q.double(), k.double(), v.double(), m)
    grads = math_backward(q.double(), k.double(), v.double(), o, lse, do.double(), m)
    if name == "cudnn":
        got = attention_kernels.cudnn_forward(q, k, v, True, m.scale)
        back = attention_kernels.cudnn_backward(q, k, v, *got, do, True, m.scale)
    else:
        got = attention_kernels.flash_forward(q, k, v, True, 33, m.scale)
        back = attention_kernels.flash_backward(q, k, v, *got, do, True, 33, m.scale)
    assert worst(got[0], o) < 8e-3
    assert float((got[1].double() - lse).abs().max()) < 1e-5
    for a, b in zip(back, grads, strict=True):
        assert worst(a, b) < 1e-2


@pytest.mark.parametrize(("width", "vocab"), [(128256, 128256), (300, 290), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient(width, vocab, dtype):
    x, c = normal(37, width, dtype=dtype), normal(37, seed=1).abs()
    c[3] = 0.0
    t = torch.randint(0, vocab, (37,), device=CUDA, generator=torch.Generator(CUDA).manual_seed(2))
    options = dict(z_loss=1e-3, label_smoothing=0.1, vocab=vocab)
    loss, lse = cross_entropy_p(x, t, **options)
    want = cross_entropy_bwd_p(x.float(), t, lse, c, **options)
    got, d = loss_and_gradient(x.clone(), t, c, **options)
    assert torch.allclose(got, loss, rtol=1e-5, atol=1e-5)
    assert torch.allclose(d.float(), want, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-6)
    assert not d[3].any()


@pytest.mark.parametrize(
    ("width", "vocab", "parts"),
    [(64128, 128256, 2), (64128, 64100, 2), (5000, 14000, 3), (300, 299, 2), (1, 3, 3)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_of_shards(width, vocab, parts, dtype):
    """Against the formula in float64 on a CPU. The last shard may have padding, or nothing but padding."""
    x, c = normal(2, 19, parts * width, dtype=dtype), normal(2, 19, seed=1).abs()
    c[0, 3] = 0.0
    t = torch.randint(0, vocab, (2, 19), device=CUDA, generator=torch.Generator(CUDA).manual_seed(2))
    options = dict(z_loss=1e-3, label_smoothing=0.1, vocab=vocab)
    loss, lse = cross_entropy_p(x.double().cpu(), t.cpu(), **options)
    want = cross_entropy_bwd_p(x.double().cpu(), t.cpu(), lse, c.double().cpu(), **options)
    offsets = [torch.tensor(i * width, device=CUDA) for i in range(parts)]
    shards = [s.contiguous() for s in x.split(width, -1)]
    pairs = [*zip(shards, offsets, strict=True)]
    found = [cross_entropy_part_p(s, t, o, vocab=vocab, label_smoothing=0.1) for s, o in pairs]
    top = torch.stack([f[0] for f in found]).amax(0)
    assert top.isfinite().all()
    for f, o in zip(found, offsets, strict=True):
        empty = int(o) >= vocab
        assert f[0].isneginf().all() == empty and (f[1] == 0).all() == empty
    sums = [sum(f[1] * torch.exp(f[0] - top) for f in found), *(sum(f[k] for f in found) for k in (2, 3))]
    got, total = cross_entropy_join_p(top, *sums, **options)
    assert torch.allclose(got.double().cpu(), loss, rtol=1e-5, atol=1e-5)
    fewer = cross_entropy_part_p(shards[0], t, offsets[0], vocab=vocab, label_smoothing=0.0)
    assert len(fewer) == 3 and all(torch.equal(a, b) for a, b in zip(fewer, found[0][:3], strict=True))
    for i, (s, o) in enumerate(pairs):
        d = gradient_of_part(s, t, total, c, o, **options)
        assert d is s
        here = want[..., i * width : (i + 1) * width]
        rtol = 1e-2 if dtype is torch.bfloat16 else 2e-5
        assert torch.allclose(d.double().cpu(), here, rtol=rtol, atol=1e-6)
        assert not d[0, 3].any() and not d[..., max(0, vocab - i * width) :].any()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_loss_of_shards_shows_what_is_not_finite(value):
    x, t, zero = normal(3, 700), torch.zeros(3, dtype=torch.int64, device=CUDA), torch.tensor(0, device=CUDA)
    x[1, 650], x[2] = value, -torch.inf
    top, sumexp, picked = cross_entropy_part_p(x, t, zero, vocab=700, label_smoothing=0.0)
    assert sumexp[0].isfinite() and sumexp[1].isnan() and sumexp[2] == 0
    assert top[2].isneginf() and picked[2].isneginf()


@pytest.mark.parametrize("shape", [(5, 64), (3, 1000, 2048), (1, 100)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_backward(shape, weighted):
    x, ct, res = (normal(*shape, dtype=torch.bfloat16, seed=i) for i in range(3))
    w = normal(shape[-1], dtype=torch.bfloat16, seed=3) if weighted else None
    want = rms_norm_bwd_p(x.double(), None if w is None else w.double(), ct.double(), eps=1e-5)
    dx, dw = want if weighted else (want, None)
    got, gw = rows.rms_norm_backward(x, w, ct, res, 1e-5)
    assert worst(got, dx + res.double()) < 8e-3
    if weighted:
        assert worst(gw, dw) < 8e-3
        apart = torch.stack([w, w + 1], 1)[:, 0]
        assert torch.equal(rows.rms_norm_backward(x, apart, ct, res, 1e-5)[0], got)
    parts = [ct, *(normal(*shape, dtype=torch.bfloat16, seed=i) for i in (4, 5))]
    for n in (2, 3):
        total = sum(p.double() for p in parts[:n])
        want = rms_norm_bwd_p(x.double(), None if w is None else w.double(), total, eps=1e-5)
        got, _ = rows.rms_norm_backward(x, w, ct, None, 1e-5, *parts[1:n])
        assert worst(got, want[0] if weighted else want) < 8e-3


@pytest.mark.parametrize("inverse", [False, True])
def test_rope(inverse):
    table = rope_table(torch.arange(100, device=CUDA), 64)
    x = normal(3, 100, 9, 64, dtype=torch.bfloat16)
    for y in (x, x[:, :, 2:5], x.transpose(0, 1)[:100].transpose(0, 1)):
        want = rope_p(y.double(), table.double(), inverse=inverse)
        assert worst(rows.rope(y, table, inverse), want) < 8e-3


@pytest.mark.parametrize("add", [False, True])
def test_products_into_float32(add):
    x, y = normal(2, 64, 48, dtype=torch.bfloat16), normal(2, 64, 3, 16, dtype=torch.bfloat16, seed=1)
    m = matrices(("b", "s", "d"), ("b", "s", "h", "e"), ("d", "h", "e"), x.shape, y.shape)
    stack = normal(4, 48, 3, 16, seed=2)
    before = stack.clone()
    product_into(m, stack[2], x, y, add)
    want = torch.einsum("bsd,bshe->dhe", x.double(), y.double()) + (before[2].double() if add else 0.0)
    assert worst(stack[2], want) < 1e-5
    assert torch.equal(stack[[0, 1, 3]], before[[0, 1, 3]])


def test_a_product_that_begins_from_a_tensor():
    x, w, c = (
        normal(*s, dtype=torch.bfloat16, seed=i) for i, s in enumerate([(2, 64, 3, 16), (48, 3, 16), (2, 64, 48)])
    )
    m = matrices(("b", "s", "h", "e"), ("d", "h", "e"), ("b", "s", "d"), x.shape, w.shape)
    want = c.double() + torch.einsum("bshe,dhe->bsd", x.double(), w.double())
    assert worst(product_plus(m, c, x, w, False), want) < 8e-3
    assert product_plus(m, c, x, w, True) is c
    assert worst(c, want) < 8e-3
