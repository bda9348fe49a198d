from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops import attention_math
from fmeg.ops.attention import attention, attention_bwd_p, attention_p
from tests.ops.checks import close, node_of, rand

# name -> (s, t, options); segments are given as lists
MASKS = {
    "causal": (6, 6, {}),
    "full": (6, 6, {"causal": False}),
    "cross": (3, 7, {"causal": False}),
    "decode": (2, 7, {}),
    "more_queries_than_keys": (7, 4, {}),
    "window": (6, 6, {"window": 2}),
    "window_decode": (3, 8, {"window": 3}),
    "window_empty_rows": (8, 3, {"window": 2}),
    "segments": (6, 6, {"segments": [0, 0, 1, 1, 1, 2]}),
    "segments_full": (6, 6, {"segments": [0, 0, 1, 1, 1, 2], "causal": False}),
    "kv_segments": (3, 5, {"segments": [1, 2, 5], "kv_segments": [0, 0, 1, 1, 2], "causal": False}),
    "all": (6, 6, {"segments": [0, 0, 0, 1, 1, 1], "window": 2, "scale": 0.3}),
}
HEADS = [(1, 1), (4, 4), (4, 2), (6, 1)]


def _inputs(s, t, h=4, k=2, e=5, f=3, dtype=torch.float64):
    return rand(2, s, h, e, dtype=dtype), rand(2, t, k, e, seed=1, dtype=dtype), rand(2, t, k, f, seed=2, dtype=dtype)


def _options(options):
    """Segments as tensors [2, …], different in the two rows."""
    seg = {n: torch.tensor([options[n], options[n]]) for n in ("segments", "kv_segments") if n in options}
    if "kv_segments" not in seg:
        for x in seg.values():
            x[1] = x[1].flip(0)
    return {**options, **seg}


def _mask(s, t, causal=True, window=None, segments=None, kv_segments=None, scale=None):
    """The definition, by a loop."""
    mask = torch.ones(2, s, t, dtype=torch.bool)
    for b, i, j in itertools.product(range(2), range(s), range(t)):
        p = i + t - s
        ok = not causal or j <= p
        ok = ok and (window is None or j > p - window)
        if segments is not None:
            ok = ok and bool(segments[b, i] == (segments if kv_segments is None else kv_segments)[b, j])
        mask[b, i, j] = ok
    return mask


def _oracle(q, k, v, **options):
    """Softmax under the explicit mask; empty rows are 0."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    mask = _mask(q.shape[1], k.shape[1], **options)
    scale = options.get("scale") or q.shape[-1] ** -0.5
    x = torch.einsum("bshe,bthe->bhst", q, k) * scale
    weight = torch.where(mask[:, None], torch.exp(x), 0.0)
    total = weight.sum(-1, keepdim=True)
    return torch.einsum("bhst,bthf->bshf", weight / torch.where(total == 0, 1.0, total), v)


@pytest.mark.parametrize("case", MASKS)
def test_value_and_gradients_equal_the_definition(case):
    s, t, options = MASKS[case]
    options = _options(options)
    inputs = [x.requires_grad_() for x in _inputs(s, t)]
    out, expected = attention(*inputs, **options), _oracle(*inputs, **options)
    close(out, expected)
    ct = rand(*out.shape, seed=7)
    for g, e in zip(torch.autograd.grad(out, inputs, ct), torch.autograd.grad(expected, inputs, ct), strict=True):
        close(g, e)


@pytest.mark.parametrize(("h", "k"), HEADS)
def test_groups_and_torch(h, k):
    q, kk, v = _inputs(7, 7, h=h, k=k, f=5)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, kk, v)), is_causal=True, enable_gqa=h != k
    ).transpose(1, 2)
    close(attention(q, kk, v), expected)
    close(attention(q, kk, v), _oracle(q, kk, v))


@pytest.mark.parametrize("case", MASKS)
def test_mathematics_under_autograd_equals_the_backward_formula(case):
    """`math_forward` differentiated by torch against `math_backward`, and lse against its definition."""
    s, t, options = MASKS[case]
    options = _options(options)
    q, k, v = (x.requires_grad_() for x in _inputs(s, t))
    seg = options.get("segments")
    kv_seg, causal = options.get("kv_segments", seg), options.get("causal", True)
    masking = attention_math.Masking(seg, kv_seg, None, causal, options.get("window"), scale=0.4)
    o, lse = attention_math.math_forward(q, k, v, masking)
    do = rand(*o.shape, seed=3)
    with torch.no_grad():
        given = attention_math.math_backward(q, k, v, o, lse, do, masking)
    for g, e in zip(given, torch.autograd.grad(o, (q, k, v), do), strict=True):
        close(g, e)
    mask = _mask(s, t, **{n: x for n, x in options.items() if n != "scale"})
    x = torch.einsum("bshe,bthe->bsht", q, k.repeat_interleave(2, 2)) * 0.4
    close(lse, torch.logsumexp(x.masked_fill(~mask[:, :, None], -torch.inf), -1))


@pytest.mark.parametrize("case", ["causal", "window_empty_rows", "all", "kv_segments"])
def test_double_backward_and_forward_mode(case):
    s, t, options = MASKS[case]
    options = _options(options)
    inputs = [x[:1, :, :2].detach().requires_grad_() for x in _inputs(s, t, h=2, k=1, e=2, f=2)]
    options = {n: x[:1] if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    f = lambda q, k, v: attention(q, k, v, **options)
    assert gradcheck(f, inputs, check_forward_ad=True)
    assert gradgradcheck(f, inputs)


def test_functional_transforms():
    q, k, v = _inputs(5, 5)
    many = [torch.stack([x, -x, 2 * x]) for x in (q, k, v)]
    out = torch.func.vmap(attention)(*many)
    close(out, torch.stack([attention(*xs) for xs in zip(*many, strict=True)]))
    loss = lambda q: attention(q, k, v).square().sum()
    leaf = q.clone().requires_grad_()
    close(torch.func.grad(loss)(q), torch.autograd.grad(loss(leaf), leaf)[0])
    _, tangent = torch.func.jvp(lambda v: attention(q, k, v), (v,), (v,))
    close(tangent, attention(q, k, v))
    per_sample = torch.func.vmap(torch.func.grad(lambda q, k, v: attention(q[None], k[None], v[None]).sum()))(q, k, v)
    close(per_sample, torch.autograd.grad(attention(leaf, k, v).sum(), leaf)[0])


def test_rows_that_see_nothing_give_zero_and_no_gradient():
    inputs = [x.requires_grad_() for x in _inputs(4, 4)]
    segments = torch.tensor([[0, 1, 2, 3]] * 2)
    out = attention(*inputs, segments=segments, kv_segments=segments + 9)
    assert (out == 0).all()
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), inputs))


def test_vjp_is_the_backward_of_eager():
    q, k, v = _inputs(6, 6)
    segments = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    options = {"causal": True, "window": 3, "scale": 0.5}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    o, lse = attention_p(*leaves, segments, segments, **options)
    do = rand(*o.shape, seed=5)
    expected = torch.autograd.grad(o, leaves, do)
    given = attention_p.vjp((q, k, v, segments, segments), options, (o.detach(), lse.detach()), (do, None))
    assert given[3:] == (None, None)
    assert all(torch.equal(g, e) for g, e in zip(given, expected, strict=False))


def test_backward_primitive_is_differentiable():
    q, k, v = (x[:1] for x in _inputs(3, 3, h=2, k=1, e=2, f=2))
    options = {"causal": True, "window": None, "scale": 0.5}
    o, lse = attention_p(q, k, v, **options)
    inputs = [x.clone().requires_grad_() for x in (q, k, v, o, lse, rand(*o.shape, seed=3))]
    assert gradcheck(lambda *xs: attention_bwd_p(*xs, **options), inputs)


@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize(("h", "k"), [(4, 4), (4, 2)])
def test_float32_kernel_equals_float64(case, h, k):
    """On a CPU float32 runs torch's flash kernel."""
    s, t, options = MASKS[case]
    options = _options(options)
    exact = [x.requires_grad_() for x in _inputs(s, t, h=h, k=k, e=8, f=8)]
    quick = [x.detach().float().requires_grad_() for x in exact]
    assert attention_math.fits_cpu_kernel(*quick) and not attention_math.fits_cpu_kernel(*exact)
    out, expected = attention(*quick, **options), attention(*exact, **options)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)
    ct = rand(*out.shape, seed=7)
    grads = torch.autograd.grad(out, quick, ct.float(), retain_graph=True)
    for g, e in zip(grads, torch.autograd.grad(expected, exact, ct), strict=True):
        torch.testing.assert_close(g.double(), e, atol=5e-6, rtol=1e-5)
    (again,) = torch.autograd.grad(out, quick[:1], ct.float(), create_graph=True)
    assert again.requires_grad
    torch.testing.assert_close(again, grads[0], atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("shift", [0, 2, -3])
def test_shift_places_queries_among_keys(shift):
    """A block of keys, as a ring sees it: the numbers of the rows and columns that the whole would compute."""
    q, k, v = _inputs(4, 5)
    options = {"causal": True, "window": 3, "scale": 0.5}
    mask = torch.tensor([[i + shift - 3 < j <= i + shift for j in range(5)] for i in range(4)])
    x = torch.einsum("bshe,bthe->bsht", q, k.repeat_interleave(2, 2)) * 0.5
    weight = torch.exp(x) * mask[None, :, None]
    o = torch.einsum("bsht,bthf->bshf", weight, v.repeat_interleave(2, 2)) / weight.sum(-1, keepdim=True)
    for given in (shift, torch.tensor(shift)):
        out, lse = attention_p(q, k, v, None, None, given, **options)
        close(out, o.nan_to_num(0.0))
        close(lse, weight.sum(-1).log())


def test_bfloat16_and_empty_batch():
    q, k, v = _inputs(7, 7, e=8, f=8, dtype=torch.bfloat16)
    out = attention(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), attention(q.double(), k.double(), v.double()), atol=0.02, rtol=0.02)
    assert attention(q[:0], k[:0], v[:0]).shape == (0, 7, 4, 8)
    assert attention(q[..., :3], k[..., :3], v).shape == (2, 7, 4, 8)


def test_flops_count_visible_pairs():
    def count(s, t, **kw):
        q, k, v = _inputs(s, t)
        node = node_of(attention_p, q, k, v, **{"causal": True, "window": None, "scale": 1.0, **kw})
        return attention_p.flops(node) / (2 * 4 * (5 + 3))

    for s, t, kw in [(6, 6, {}), (2, 7, {}), (7, 4, {}), (6, 6, {"window": 2}), (6, 6, {"causal": False})]:
        assert count(s, t, **kw) == _mask(s, t, **kw).sum()
    q, k, v = _inputs(6, 6)
    options = {"causal": False, "window": None, "scale": 1.0}
    o, lse = attention_p(q, k, v, **options)
    node = node_of(attention_bwd_p, q, k, v, o, lse, o, **options)
    assert attention_bwd_p.flops(node) == 2 * 2 * 4 * 36 * (3 * 5 + 2 * 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": rand(2, 4, 3, 5), "v": rand(2, 4, 3, 3)}, "q's heads must be a multiple of k's, given 4 and 3"),
        ({"k": rand(2, 4, 2, 6)}, "k must have shape"),
        ({"v": rand(2, 5, 2, 3)}, "v must have shape"),
        ({"q": rand(4, 4, 5)}, "must be 'b s h e'"),
        ({"window": 2, "causal": False}, "window must be at least 1 and causal"),
        ({"window": 0}, "window must be at least 1"),
        ({"kv_segments": torch.zeros(2, 4, dtype=torch.int64)}, "segments are not; give both"),
        ({"segments": torch.zeros(2, 3, dtype=torch.int64)}, r"segments must have shape \(2, 4\)"),
    ],
)
def test_errors(change, message):
    q, k, v = _inputs(4, 4)
    with pytest.raises(ValueError, match=message):
        attention(**{"q": q, "k": k, "v": v, **change})


def test_segments_are_integers():
    q, k, v = _inputs(4, 4)
    ids = torch.zeros(2, 4)
    with pytest.raises(TypeError, match="attention: segments must be integers, given torch.float32"):
        attention(q, k, v, segments=ids)
    with pytest.raises(TypeError, match="attention: kv_segments must be integers"):
        attention(q, k, v, segments=ids.bool(), kv_segments=ids)
    assert torch.equal(attention(q, k, v, segments=ids.bool()), attention(q, k, v))
