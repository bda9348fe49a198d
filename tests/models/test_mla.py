"""Multi-head latent attention: absorbed equals plain, decoding equals the whole sequence, any mesh equals one
device."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, P, ops, random, shard
from fmeg.models import mla
from fmeg.models.table import axes_of, init_params
from fmeg.testing import assert_equivalent

F64 = torch.float64


@dataclass(frozen=True)
class Sizes:
    heads: int = 4
    q_latent: int | None = 12
    kv_latent: int = 8
    nope_dim: int = 6
    rope_dim: int = 4
    v_dim: int = 5
    latent_eps: float = 1e-6
    attn_scale: float = 0.3


def _setup(cfg, embed=16):
    table = mla.parameters(cfg, "layers", 0, 0.5, 0.5)
    sizes = {"embed": embed, "layers": 1, **mla.axis_sizes(cfg)}
    params = init_params(random.key(0), table, sizes, F64)
    params = {k: v[0] + (0.1 * torch.randn(v[0].shape, dtype=F64) if "norm" in k else 0) for k, v in params.items()}
    return params, {k: a.removeprefix("layers ") for k, a in axes_of(table).items()}


def _rope(cfg, n, start=0):
    return ops.rope_table(torch.arange(start, n, dtype=F64), cfg.rope_dim)


@pytest.mark.parametrize("q_latent", [12, None])
def test_by_the_formula(q_latent):
    """Head by head, token by token, from the paper's equations."""
    torch.manual_seed(0)
    cfg = Sizes(q_latent=q_latent)
    p, _ = _setup(cfg)
    h = torch.randn(2, 7, 16, dtype=F64)

    def norm(x, w):
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * w

    def turn(x, t):
        angle = t * 1e4 ** (-torch.arange(0, 4, 2, dtype=F64) / 4)
        z = torch.view_as_complex(x.reshape(2, 2)) * torch.polar(torch.ones(2, dtype=F64), angle)
        return torch.view_as_real(z).reshape(4)

    out = torch.zeros(2, 7, 16, dtype=F64)
    for b in range(2):
        c = norm(h[b] @ p["wkv_down"], p["kv_norm"])
        shared = torch.stack([turn(x, t) for t, x in enumerate(h[b] @ p["wk_rope"])])
        inner = h[b] if q_latent is None else norm(h[b] @ p["wq_down"], p["q_norm"])
        for i in range(cfg.heads):
            q = inner @ p["wq"][:, i]
            q = torch.stack([torch.cat([x[:6], turn(x[6:], t)]) for t, x in enumerate(q)])
            k = torch.cat([c @ p["wk"][:, i], shared], -1)
            for t in range(7):
                weight = torch.softmax(0.3 * k[: t + 1] @ q[t], 0)
                out[b, t] += weight @ (c[: t + 1] @ p["wv"][:, i]) @ p["wo"][i]
    got = mla.attention(p, h, _rope(cfg, 7), None, cfg)
    torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q_latent", [12, None])
@pytest.mark.parametrize("pieces", [(9,), (4, 1, 1, 3), (1,) * 9])
def test_absorbed_equals_plain(q_latent, pieces):
    """Decoding piece by piece from the cache of latents."""
    torch.manual_seed(0)
    cfg = Sizes(q_latent=q_latent)
    p, _ = _setup(cfg)
    h = torch.randn(2, 9, 16, dtype=F64)
    want = mla.attention(p, h, _rope(cfg, 9), None, cfg)
    cache, got, at = None, [], 0
    for n in pieces:
        o, cache = mla.absorbed(p, h[:, at : at + n], _rope(cfg, at + n, at), cache, cfg)
        got.append(o)
        at += n
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-12, atol=1e-12)
    assert cache.c.shape == (2, 9, cfg.kv_latent) and cache.k_rope.shape == (2, 9, cfg.rope_dim)


def test_absorbed_has_the_gradients_of_plain():
    torch.manual_seed(0)
    cfg = Sizes()
    p, _ = _setup(cfg)
    h = torch.randn(2, 6, 16, dtype=F64)
    grads = []
    plain = lambda p: mla.attention(p, h, _rope(cfg, 6), None, cfg)
    for f in (plain, lambda p: mla.absorbed(p, h, _rope(cfg, 6), None, cfg)[0]):
        leaves = {k: v.clone().requires_grad_() for k, v in p.items()}
        grads.append(torch.autograd.grad(f(leaves).square().sum(), list(leaves.values())))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


LAYOUTS = {
    "dp": dict(batch="dp"),
    "tp": dict(heads="tp"),
    "sp": dict(batch="dp", heads="tp", res_seq="tp"),
    "cp": dict(batch="dp", seq="tp", res_seq="tp"),
    "ring": dict(batch="dp", seq="tp", res_seq="tp", attention="ring"),
    "ulysses": dict(seq="dp", res_seq=("dp", "tp"), heads="tp", attention="ulysses"),
    "zero3": dict(batch=("dp", "tp"), params=dict(embed="dp", kv_latent=("dp", "tp"))),
    "sp+zero3": dict(batch="dp", heads="tp", res_seq="tp", params=dict(embed="dp", kv_latent="dp")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("q_latent", [12, None])
def test_equals_one_device(layout, q_latent):
    torch.manual_seed(0)
    cfg = Sizes(q_latent=q_latent)
    params, axes = _setup(cfg)
    params["norm"], axes["norm"] = torch.rand(16, dtype=F64) + 0.5, "embed"
    x = torch.randn(4, 8, 16, dtype=F64)
    segments = (torch.arange(8) >= torch.tensor([[2], [3], [5], [8]])).long()
    params["out"], axes["out"] = torch.randn(16, dtype=F64), "embed"

    def loss(p, batch):
        x = shard(batch["x"], P("batch", "res_seq", None))
        o = mla.attention(p, ops.rms_norm(x, p["norm"]), _rope(cfg, 8), batch["segments"], cfg)
        return ((x + shard(o, P("batch", "res_seq", None))) * p["out"]).square().sum(), 32

    def step(params, batch):
        return fmeg.value_and_grad(loss)(params, batch)

    assert_equivalent(
        step,
        params,
        {"x": x, "segments": segments},
        mesh=Mesh(dp=2, tp=2),
        layout=Layout(**LAYOUTS[layout]),
        axes={"params": axes, "batch": {"x": "batch res_seq _", "segments": "batch seq"}},
        strict=True,
    )


def test_latents_stay_whole_and_are_what_is_gathered():
    """Heads on an axis: up-projections are sharded, down-projections are not; under sequence parallelism the latents
    are gathered, of 12 + 8 + 4 numbers a token, and not h, of 16."""
    cfg = Sizes()
    params, axes = _setup(cfg)
    x = torch.randn(2, 8, 16, dtype=F64)

    def forward(params, batch):
        x = shard(batch, P("batch", "res_seq", None))
        return shard(mla.attention(params, x, _rope(cfg, 8), None, cfg), P("batch", "res_seq", None))

    jitted = fmeg.jit(
        forward,
        mesh=Mesh(tp=2),
        layout=Layout(heads="tp", res_seq="tp"),
        axes={"params": axes, "batch": "batch res_seq _"},
        strict=True,
    )
    got = jitted(params, x)
    torch.testing.assert_close(got.global_value(), forward(params, x), rtol=1e-12, atol=1e-12)
    assert got.global_value().shape == x.shape
    rows = jitted.lower(params, x).explain().rows
    gathered = sum(r.nbytes for r in rows if r.kind == "all_gather")
    assert gathered == 2 * 4 * (12 + 8 + 4) * 8  # half of the 8 positions of 2 rows, float64
    assert sorted({r.kind for r in rows}) == ["all_gather", "reduce_scatter"]
    assert sum(r.kind == "reduce_scatter" for r in rows) == 1
