"""Sinks and output gates: against the definition, Hugging Face's gpt-oss, and themselves on several ranks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import fmeg
from fmeg import Layout, Mesh, P, ops, shard
from fmeg.ops.attention import attention
from fmeg.ops.attention_sinks import attention_sinks_bwd_p, attention_sinks_p
from fmeg.testing import assert_equivalent
from tests.ops.checks import close, node_of, rand
from tests.ops.ranks import spmd
from tests.ops.test_attention_cp import KINDS, MASKS, MESH, _case


def _definition(q, k, v, sinks, mask, scale):
    """Softmax over the keys seen and the sink, whose value is 0."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    x = torch.exp(torch.einsum("bshe,bthe->bsht", q, k) * scale) * mask[:, :, None]
    total = x.sum(-1, keepdim=True) + torch.exp(sinks)[:, None]
    return torch.einsum("bsht,bthf->bshf", x / total, v), total.squeeze(-1).log()


def _mask(case, s=8):
    o = MASKS[case]
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    mask = (j <= i) if o["causal"] else torch.ones(s, s, dtype=torch.bool)
    mask = mask & (j > i - o["window"]) if o["window"] else mask
    if "segments" not in o:
        return mask.expand(2, s, s)
    return mask & (o["segments"][:, :, None] == o.get("kv_segments", o["segments"])[:, None])


@pytest.mark.parametrize(("h", "k"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("case", MASKS)
def test_equals_the_definition(case, h, k):
    """Also where a query sees nothing: the sink takes all, and the result is 0."""
    qkv, masks, options = _case(case, h=h, k=k)
    sinks = rand(h, seed=5)
    leaves = [x.clone().requires_grad_() for x in (*qkv, sinks)]
    want, want_lse = _definition(*leaves, _mask(case), options["scale"])
    o, lse = attention_sinks_p(*leaves, *masks, **options)
    close(o, want)
    close(lse, want_lse)
    ct = rand(*o.shape, seed=7)
    grads = torch.autograd.grad(o, leaves, ct)
    for g, e in zip(grads, torch.autograd.grad(want, leaves, ct), strict=True):
        close(g, e)
    for x in (attention_sinks_p.reference.plain(*qkv, sinks, *masks, **options), (want, want_lse)):
        close(x[0], o)
        close(x[1], lse)
    given = attention_sinks_p.vjp((*qkv, sinks, *masks), options, (o.detach(), lse.detach()), (ct, None))
    assert given[4:] == (None,) * len(masks)
    assert all(torch.equal(a, b) for a, b in zip(given, grads, strict=False))


def test_equals_gpt_oss():
    model = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    q, k, v = rand(2, 6, 4, 8), rand(2, 6, 2, 8, seed=1), rand(2, 6, 2, 8, seed=2)
    sinks = rand(4, seed=3)
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    mask = torch.full((6, 6), -torch.inf, dtype=torch.float64).triu(1)
    want, _ = model.eager_attention_forward(module, *(x.transpose(1, 2) for x in (q, k, v)), mask[None, None], 8**-0.5)
    close(attention(q, k, v, sinks=sinks), want)


def test_higher_derivatives_and_transforms():
    inputs = [x.requires_grad_() for x in (rand(1, 3, 2, 2), rand(1, 3, 1, 2, seed=1), rand(1, 3, 1, 2, seed=2))]
    inputs.append(rand(2, seed=3).requires_grad_())
    f = lambda q, k, v, sinks: attention(q, k, v, sinks=sinks)
    assert gradcheck(f, inputs, check_forward_ad=True)
    assert gradgradcheck(f, inputs)
    q, k, v, sinks = (x.detach() for x in inputs)
    batch = torch.func.vmap(f, in_dims=(None, None, None, 0))(q, k, v, torch.stack([sinks, -sinks]))
    close(batch, torch.stack([f(q, k, v, sinks), f(q, k, v, -sinks)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    """On a CPU torch's kernel computes the attention, and the sink is merged in."""
    exact = [x.requires_grad_() for x in (rand(2, 8, 4, 8), rand(2, 8, 2, 8, seed=1), rand(2, 8, 2, 8, seed=2))]
    exact.append(rand(4, seed=3).requires_grad_())
    quick = [x.detach().to(dtype).requires_grad_() for x in exact]
    tol = dict(atol=1e-5, rtol=1e-5) if dtype == torch.float32 else dict(atol=0.1, rtol=0.1)
    got, want = (attention(q, k, v, sinks=s, window=3) for q, k, v, s in (quick, exact))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, **tol)
    grads = [torch.autograd.grad(o.sum(), leaves) for o, leaves in ((got, quick), (want, exact))]
    for g, e in zip(*grads, strict=True):
        assert g.dtype == dtype
        torch.testing.assert_close(g.double(), e, **tol)


def test_a_sink_far_below_is_none_and_one_far_above_takes_all():
    q, k, v = rand(1, 5, 2, 4), rand(1, 5, 2, 4, seed=1), rand(1, 5, 2, 4, seed=2)
    low, high = torch.full((2,), -1e3).double(), torch.full((2,), 1e3).double()
    close(attention(q, k, v, sinks=low), attention(q, k, v))
    assert not attention(q, k, v, sinks=high).any()
    assert attention(q[:0], k[:0], v[:0], sinks=low).shape == (0, 5, 2, 4)


def _check(place, mask, kind, **sizes):
    qkv, masks, options = _case(mask, **sizes)
    args = (*qkv, rand(qkv[0].shape[2], seed=4), *masks)
    want = attention_sinks_p(*args, **options)
    got, fwd = spmd(attention_sinks_p, args, options, place, MESH, {"attention": kind})
    for g, e in zip(got, want, strict=True):
        close(g, e)
    args = (*args[:4], *want, rand(*want[0].shape, seed=3), *masks)
    got, bwd = spmd(attention_sinks_bwd_p, args, options, place, MESH, {"attention": kind})
    for g, e in zip(got, attention_sinks_bwd_p(*args, **options), strict=True):
        close(g, e)
    return fwd, bwd


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", ["causal", "window2", "segments", "segments_disjoint"])
def test_on_ranks(mask, kind):
    _check({"s": ("x", "y"), "t": ("x", "y")}, mask, kind)
    _check({"s": ("x",), "t": ("x",), "h": ("y",), "k": ("y",)}, mask, kind, h=8, k=4)
    _check({"t": ("x", "y")}, mask, kind)
    fwd, bwd = _check({"b": ("y",), "h": ("x",)}, mask, kind, h=4, k=2)
    assert fwd == bwd == {}


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        ({"tp": 2}, dict(heads="tp", kv_heads="tp")),
        ({"dp": 2, "tp": 2}, dict(batch="dp", heads="tp", params=dict(heads=("tp", "dp")))),
        ({"cp": 2}, dict(seq="cp", attention="all_gather")),
        ({"cp": 2}, dict(seq="cp", attention="ring")),
        ({"cp": 2, "tp": 2}, dict(seq="cp", heads="tp", kv_heads="tp", attention="ulysses")),
    ],
    ids=str,
)
def test_equals_one_device_on_a_mesh(mesh, layout):
    """With sinks and a gate, gradients too, and nothing moves that is not owed."""
    params = {"q": rand(6, 4, 3), "k": rand(6, 4, 3, seed=1), "v": rand(6, 4, 2, seed=2), "gate": rand(6, 4, 2, seed=3)}
    params["sinks"] = rand(4, seed=4)
    axes = {"q": "embed heads e", "k": "embed kv_heads e", "v": "embed kv_heads f", "gate": "embed heads f"}
    axes["sinks"] = "heads"

    def loss(p, x):
        x = shard(x, P("batch", "seq", None))
        q, k, v, g = (fmeg.einsum("b s d, d h e -> b s h e", x, p[n]) for n in ("q", "k", "v", "gate"))
        o = ops.attention(q, k, v, sinks=p["sinks"], gate=g, window=3)
        return (o * torch.arange(8.0, dtype=torch.float64).reshape(4, 2)).square().sum(), 32

    def step(params, batch):
        return fmeg.value_and_grad(loss)(params, batch)

    assert_equivalent(
        step,
        params,
        rand(4, 8, 6, seed=5),
        mesh=Mesh(**mesh),
        layout=Layout(**layout),
        axes={"params": axes, "batch": "batch seq _"},
        strict=True,
    )


def test_flops_and_errors():
    q, k, v = rand(2, 6, 4, 5), rand(2, 6, 2, 5, seed=1), rand(2, 6, 2, 3, seed=2)
    node = node_of(attention_sinks_p, q, k, v, rand(4), causal=True, window=None, scale=1.0)
    assert attention_sinks_p.flops(node) == 2 * 2 * 21 * 4 * (5 + 3)
    with pytest.raises(ValueError, match="sinks must have shape"):
        attention(q, k, v, sinks=rand(2))
    with pytest.raises(ValueError, match="gate must have shape"):
        attention(q, k, v, gate=rand(2, 6, 4, 5))
    close(attention(q, k, v, gate=torch.zeros(2, 6, 4, 3).double()), attention(q, k, v) / 2)
