"""Multi-token prediction: modules that predict further tokens, from the stream of those before.

Module k, of depth D, takes the stream h from before it and the embedding of the token k further on, and predicts the
one after that with the model's own head,

    h_k = norm(layer(w·[norm(embed(t_{i+k})) ; norm(h_{k-1})])),       loss + weight/D · Σ_k mean of its cross entropy

All modules are one stack of layers, one scan. Source: DeepSeek-V3, arXiv:2412.19437, §2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from fmeg import P, einsum, ops, remat, scan, shard
from fmeg.models import mixture
from fmeg.models.table import Param


class Sizes(mixture.Sizes, Protocol):
    """What is read of a model's config: `mtp_layers` is D, `mtp_weight` the weight of all its losses."""

    @property
    def mtp_layers(self) -> int: ...
    @property
    def mtp_weight(self) -> float: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def z_loss(self) -> float: ...
    @property
    def compute_dtype(self) -> torch.dtype | None: ...
    @property
    def remat(self) -> Any: ...


def parameters(first: int, std: float) -> dict[str, Param]:
    """Rows of the table of parameters that a module has beside its layer's. `first`: Hugging Face's number of the
    first; `mtp_in` is twice `embed`."""

    def row(axes: str, init: Any, name: str, theirs: str = "") -> Param:
        return Param(f"mtp_layers {axes}", init, f"model.layers.{{}}.{name}.weight", theirs, first=first)

    return {
        "token_norm": row("embed", "ones", "enorm"),
        "stream_norm": row("embed", "ones", "hnorm"),
        "w_in": row("mtp_in embed", std, "eh_proj", "embed mtp_in"),
        "final_norm": row("embed", "ones", "shared_head.norm"),
    }


def module(
    p: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    later: Float[Tensor, "b s d"],
    layer: Callable[..., tuple[Tensor, ops.RouterOutput]],
    cfg: Sizes,
) -> tuple[Float[Tensor, "b s d"], ops.RouterOutput]:
    """From the stream `x` and the embeddings of later tokens, what the head is applied to, and where tokens went."""
    both = [ops.rms_norm(later, p["token_norm"], cfg.norm_eps), ops.rms_norm(x, p["stream_norm"], cfg.norm_eps)]
    x = shard(einsum("b s c, c d -> b s d", torch.cat(both, dim=-1), p["w_in"]), P("batch", "res_seq", None))
    x, chosen = layer(p, x)
    return ops.rms_norm(x, p["final_norm"], cfg.norm_eps), chosen


def further(
    params: Mapping[str, Any],
    batch: Mapping[str, Tensor],
    cfg: Sizes,
    x: Float[Tensor, "b s d"],
    stats: mixture.Stats,
    rope: Tensor,
    *,
    layer: Callable[..., tuple[Tensor, ops.RouterOutput]],
    embed: Callable[..., Tensor],
    head: Callable[..., Tensor],
) -> tuple[list[tuple[Tensor, Tensor]], mixture.Stats]:
    """The model's further predictions: a pair (weighted sum, count) for each depth, and the routers' sums with its own.

    At depth k position i counts if the token it predicts, at i + k, does and is of the same segment.

    x                   what the head is applied to
    layer, embed, head  the model's: (p, x, rope, segments, cfg, real), (params, tokens, cfg), (params, x, cfg)
    """
    depths = range(1, cfg.mtp_layers + 1)
    segments, mask = batch.get("segments"), batch["mask"].to(torch.promote_types(x.dtype, torch.float32))
    masks = [ops.shift(mask, k) for k in depths]
    if segments is not None:
        masks = [m * (ops.shift(segments, k) == segments) for m, k in zip(masks, depths, strict=True)]
    later = [torch.stack([ops.shift(batch[n], k) for k in depths]) for n in ("tokens", "targets")]

    def body(carry: Any, one: Any, w: Any, rope: Tensor, segments: Any, real: Any) -> tuple[Any, None]:
        (x, sums, stats), (p, i, tokens, targets, mask) = carry, one
        its = lambda p, x: layer(p, x, rope, segments, cfg, real)
        x, chosen = module(mixture.cast_layer(p, cfg.compute_dtype), x, embed(w, tokens, cfg), its, cfg)
        losses = ops.cross_entropy(head(w, x, cfg), targets, z_loss=cfg.z_loss, vocab=cfg.vocab_size)
        here = torch.arange(cfg.mtp_layers, device=x.device) == i
        sums = sums + here * (losses * mask).sum()
        return (x, sums, mixture.add_stats(stats, chosen, i)), None

    shared = {k: params[k] for k in ("embed", "head") if k in params}
    sums = torch.zeros(cfg.mtp_layers, dtype=mask.dtype, device=x.device)
    start = (x, sums, mixture.no_stats(cfg, cfg.mtp_layers, x))
    each = (params["mtp_layers"], torch.arange(cfg.mtp_layers, device=x.device), *later, torch.stack(masks))
    where = rope, segments, batch.get("real")
    (_, sums, own), _ = scan(remat(body, cfg.remat) if cfg.remat else body, start, each, shared, *where)
    pairs = [(cfg.mtp_weight / cfg.mtp_layers * sums[k - 1], masks[k - 1].sum()) for k in depths]
    return pairs, mixture.join_stats([stats, own])
