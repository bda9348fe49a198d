"""Multi-head latent attention: keys and values of all heads come from one small latent a token.

    c   = norm(w_kv_down·h)                          b s kv_latent: with k_rope all that a cache needs to hold
    k_i = [w_k_i·c ; rope(w_k_rope·h)]               of head i; the part that turns is shared by all heads
    v_i = w_v_i·c
    q_i = [q_nope ; rope(q_rope)] = w_q_i·norm(w_q_down·h), or w_q_i·h where queries are not compressed
    out = Σ_i w_o_i·attention(q_i, k_i, v_i)

A head of q and k has `nope_dim` dimensions that do not turn, then `rope_dim` that do ("decoupled" rotary embedding); a
head of v has `v_dim`. With heads on a mesh axis the up-projections are sharded and the latents stay whole; where the
residual stream is sharded along the sequence, what is gathered is the latents, not h.

Source: DeepSeek-V2, arXiv:2405.04434, §2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg import P, einsum, name, ops, region, shard
from fmeg.models.table import Param


class Sizes(Protocol):
    """What is read of a model's config.

    q_latent     size of the queries' latent; None: queries are not compressed
    latent_eps   of the norms of the latents
    attn_scale   of the products q·k
    """

    @property
    def heads(self) -> int: ...
    @property
    def q_latent(self) -> int | None: ...
    @property
    def kv_latent(self) -> int: ...
    @property
    def nope_dim(self) -> int: ...
    @property
    def rope_dim(self) -> int: ...
    @property
    def v_dim(self) -> int: ...
    @property
    def latent_eps(self) -> float: ...
    @property
    def attn_scale(self) -> float: ...


class Cache(NamedTuple):
    """What decoding keeps of a token: its latent, and the part of its key that turns, turned."""

    c: Float[Tensor, "b t r"]
    k_rope: Float[Tensor, "b t e"]


def axis_sizes(cfg: Sizes) -> dict[str, int]:
    """Sizes of the logical axes of `parameters`."""
    out = {a: getattr(cfg, a) for a in ("heads", "kv_latent", "nope_dim", "rope_dim", "v_dim")}
    ranks = {"q_rank": cfg.q_latent or 0, "q_latent": cfg.q_latent or 0, "kv_rank": cfg.kv_latent}
    return out | ranks | {"qk_dim": cfg.nope_dim + cfg.rope_dim}


def parameters(cfg: Sizes, stack: str, first: int, std: float, out: float) -> dict[str, Param]:
    """Rows of the table of parameters of a stack of layers.

    A latent's axis is `q_rank`, `kv_rank` where it is made and `q_latent`, `kv_latent` where it is used, so that one
    layout may shard all at rest: params=dict(embed="dp", q_latent="dp", kv_latent="dp").

    stack   logical axis of the stack
    first   Hugging Face's number of its first layer
    std     of the initial values; `out`: of those of the output projection
    """
    at = "model.layers.{}.self_attn."

    def row(axes: str, init: Any, name: str, hf_axes: str = "") -> Param:
        return Param(f"{stack} {axes}", init, at + name + ".weight", hf_axes, first=first)

    if cfg.q_latent is None:
        queries = {"wq": row("embed heads qk_dim", std, "q_proj", "(heads qk_dim) embed")}
    else:
        queries = {
            "wq_down": row("embed q_rank", std, "q_a_proj", "q_rank embed"),
            "q_norm": row("q_rank", "ones", "q_a_layernorm"),
            "wq": row("q_latent heads qk_dim", std, "q_b_proj", "(heads qk_dim) q_latent"),
        }
    down, up = "kv_rank|rope_dim embed", "(heads nope_dim|v_dim) kv_latent"
    return queries | {
        "wkv_down": row("embed kv_rank", std, "kv_a_proj_with_mqa", down),
        "wk_rope": row("embed rope_dim", std, "kv_a_proj_with_mqa", down),
        "kv_norm": row("kv_rank", "ones", "kv_a_layernorm"),
        "wk": row("kv_latent heads nope_dim", std, "kv_b_proj", up),
        "wv": row("kv_latent heads v_dim", std, "kv_b_proj", up),
        "wo": row("heads v_dim embed", out, "o_proj", "embed (heads v_dim)"),
    }


def queries(
    p: Mapping[str, Tensor], h: Float[Tensor, "b s d"], rope: Float[Tensor, "... s half 2"], cfg: Sizes
) -> Float[Tensor, "b s h e"]:
    """Queries of all heads, their last part turned."""
    if cfg.q_latent is not None:
        h = ops.rms_norm(einsum("b s d, d r -> b s r", h, p["wq_down"]), p["q_norm"], cfg.latent_eps)
    h = shard(h, P("batch", "seq", None))
    with region("mla_up"):
        return ops.rope(einsum("b s d, d h e -> b s h e", h, p["wq"]), rope, interleaved=True, part="last")


def latents(
    p: Mapping[str, Tensor], h: Float[Tensor, "b s d"], rope: Float[Tensor, "... s half 2"], cfg: Sizes
) -> Cache:
    """The latent of each token, and the part of its key that turns."""
    c = ops.rms_norm(einsum("b s d, d r -> b s r", h, p["wkv_down"]), p["kv_norm"], cfg.latent_eps)
    k_rope = einsum("b s d, d e -> b s e", h, p["wk_rope"])
    c, k_rope = (shard(x, P("batch", "seq", None)) for x in (c, k_rope))
    return Cache(c, ops.rope(k_rope.unsqueeze(2), rope, interleaved=True).squeeze(2))


def attention(
    p: Mapping[str, Tensor],
    h: Float[Tensor, "b s d"],
    rope: Float[Tensor, "... s half 2"],
    segments: Int[Tensor, "b s"] | None,
    cfg: Sizes,
) -> Float[Tensor, "b s d"]:
    """Causal attention of a whole sequence: keys and values of every head are made.

    h      normed residual stream, wherever it lies
    rope   of `ops.rope_table(positions, cfg.rope_dim, …)`
    """
    if cfg.q_latent is None:
        h = shard(h, P("batch", "seq", None))  # queries need all of it, so the latents are made of all of it too
    q = queries(p, h, rope, cfg)
    c, k_rope = latents(p, h, rope, cfg)
    with region("mla_up"):
        k = einsum("b s r, r h e -> b s h e", c, p["wk"])
        v = einsum("b s r, r h f -> b s h f", c, p["wv"])
        shared = k_rope.unsqueeze(2).expand(*k.shape[:3], cfg.rope_dim)
        k = torch.cat([k, shared], dim=-1)
    with region("core_attn"):
        o = ops.attention(q, k, v, segments=segments, scale=cfg.attn_scale)
    return einsum("b s h f, h f d -> b s d", name(o, "attention"), p["wo"])


def absorbed(
    p: Mapping[str, Tensor],
    h: Float[Tensor, "b s d"],
    rope: Float[Tensor, "... s half 2"],
    cache: Cache | None,
    cfg: Sizes,
) -> tuple[Float[Tensor, "b s d"], Cache]:
    """The same for decoding: the up-projections of k and v are applied to q and to the result instead.

        q_i · w_k_i·c = (w_k_iᵀ·q_i) · c,        Σ_t p_t w_v_i·c_t = w_v_i · Σ_t p_t c_t

    so that attention is of many heads to one: key [c ; k_rope], value c. Takes the tokens that come after those in the
    cache, of which nothing is made but what the cache holds; returns the result and the longer cache.
    """
    q = queries(p, h, rope, cfg)
    new = latents(p, h, rope, cfg)
    cache = new if cache is None else Cache(*(torch.cat([a, b], dim=1) for a, b in zip(cache, new, strict=True)))
    inner = einsum("b s h e, r h e -> b s h r", q[..., : cfg.nope_dim], p["wk"])
    q = torch.cat([inner, q[..., cfg.nope_dim :]], dim=-1)
    k = torch.cat(cache, dim=-1).unsqueeze(2)
    o = ops.attention(q, k, cache.c.unsqueeze(2), scale=cfg.attn_scale)
    o = einsum("b s h r, r h f -> b s h f", o, p["wv"])
    return einsum("b s h f, h f d -> b s d", o, p["wo"]), cache
