"""Attention on one rank of a mesh: its heads, and the ways to see keys that other ranks hold.

Sequences may be sharded on both sides by one tuple of axes ("context parallel"), by one of three kinds:

    all_gather   gather keys and values; their gradients are reduce-scattered
    ring         keys and values travel round the ranks, merged by log-sum-exp; their gradients travel with them
    ulysses      exchange sequence for heads, attend to the whole sequence, exchange back: a matter of placements, done
                 by the partitioner (see `Rule.exchange`), so what comes here has whole sequences

If keys alone are sharded (a long cache, few queries) each rank attends to its own and the results are merged by two
reductions; if queries alone are, nothing moves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.ops._common import wide
from fmeg.program.errors import ShardingError
from fmeg.program.rule import Local

Masks = tuple[Tensor, ...]  # () or (segments, kv_segments)


class _Place:
    """Where this rank's queries and keys lie, and the two attention primitives with the right shift."""

    def __init__(self, info: Local, options: dict[str, Any]) -> None:
        self.info, self.options, self.causal = info, options, options["causal"]
        self.seq, self.kv_seq = info.axes("s"), info.axes("t")
        self.parts, self.t = info.parts("t"), info.size("t")
        # key position of the first local query
        self.first = info.offset("s") + self.t * self.parts - info.size("s") * info.parts("s")

    def masks(self, q: Tensor, k: Tensor, masks: Masks, first_key: Any) -> tuple:
        """Mask operands for local queries and keys that begin at `first_key`."""
        shift = self.first - first_key if self.causal else None
        if isinstance(shift, int) and shift == k.shape[1] - q.shape[1]:
            shift = None
        return masks if shift is None else (*(masks or (None, None)), shift)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, masks: Masks, first_key: Any) -> tuple[Tensor, Tensor]:
        from fmeg.ops.attention import attention_p

        return attention_p(q, k, v, *self.masks(q, k, masks, first_key), **self.options)

    def backward(self, q: Tensor, k: Tensor, v: Tensor, o: tuple, masks: Masks, first_key: Any) -> tuple:
        from fmeg.ops.attention import attention_bwd_p

        return attention_bwd_p(q, k, v, *o, *self.masks(q, k, masks, first_key), **self.options)

    def kind(self) -> str:
        """Which of this module's ways applies."""
        if not self.kv_seq:
            return "local"
        if both := set(self.kv_seq) & set(self.info.axes("h")):
            raise ShardingError(f"attention: {sorted(both)} cannot shard both the heads and the keys' sequence")
        if not self.seq:
            return "split_keys"
        if self.seq != self.kv_seq:
            raise ShardingError(
                f"attention: queries are sharded along the sequence by {self.seq}, keys by {self.kv_seq}; they must "
                "have the same axes, or one of them none"
            )
        return self.info.option("attention", "all_gather")


# -- heads ------------------------------------------------------------------------------------------------------------
def kv_index(info: Local) -> Tensor | None:
    """Local kv heads that the local query heads read, in order; None when these are all, and grouped as usual."""
    axes, kv_axes = info.axes("h"), info.axes("k")
    if axes == kv_axes:
        return None
    if axes[: len(kv_axes)] != kv_axes:
        raise ShardingError(
            f"attention: heads are sharded by {axes} and kv_heads by {kv_axes}, which must be a prefix of it. When "
            "kv_heads do not divide, either split the mesh axis, as in Mesh(tk=4, tr=2) with "
            'Layout(heads=("tk", "tr"), kv_heads="tk"), or replicate them: kv_heads=()'
        )
    heads, kv_heads = info.size("h"), info.size("k")
    group = heads * info.parts("h") // (kv_heads * info.parts("k"))
    used = heads // group if heads % group == 0 else 1 if group % heads == 0 else heads
    first_of_each = torch.arange(used) * (heads // used) + info.offset("h")
    return first_of_each // group - info.offset("k")


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x.index_select(2, index)


def _put(x: Tensor, index: Tensor | None, kv_heads: int) -> Tensor:
    """The transpose of `_take`."""
    if index is None:
        return x
    onehot = (index[:, None] == torch.arange(kv_heads)).to(wide(x).dtype)
    return torch.einsum("btne,nk->btke", wide(x), onehot).to(x.dtype)


# -- the two local functions ------------------------------------------------------------------------------------------
def forward(info: Local, q: Tensor, k: Tensor, v: Tensor, *masks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Local part of `attention`: (o, lse) of this rank's queries and heads."""
    index = kv_index(info)
    place = _Place(info, options)
    return _FORWARD[place.kind()](place, q, _take(k, index), _take(v, index), masks)


def backward(
    info: Local, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, *masks: Any, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Local part of `attention_bwd`: (dq, dk, dv), dk and dv still to be summed over axes that shard only queries."""
    index = kv_index(info)
    place = _Place(info, options)
    dq, dk, dv = _BACKWARD[place.kind()](place, q, _take(k, index), _take(v, index), (o, lse, do), masks)
    return dq, _put(dk, index, info.size("k")), _put(dv, index, info.size("k"))


def _local(p: _Place, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    return p.forward(q, k, v, masks, 0)


def _local_bwd(p: _Place, q: Tensor, k: Tensor, v: Tensor, o: tuple, masks: Masks) -> tuple:
    return p.backward(q, k, v, o, masks, 0)


# -- keys sharded, queries not ----------------------------------------------------------------------------------------
def _split_keys(p: _Place, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    from fmeg.ops.collectives import all_reduce

    o, lse = p.forward(q, k, v, masks, p.info.offset("t"))
    top = _finite(all_reduce(lse, p.kv_seq, op="max"))
    weight = torch.exp(lse - top).unsqueeze(-1)
    sums = all_reduce(torch.cat([wide(o) * weight, weight], dim=-1), p.kv_seq)
    total = sums[..., -1]
    return (sums[..., :-1] / _nonzero(total).unsqueeze(-1)).to(o.dtype), top + torch.log(total)


def _split_keys_bwd(p: _Place, q: Tensor, k: Tensor, v: Tensor, o: tuple, masks: Masks) -> tuple:
    from fmeg.ops.collectives import all_reduce

    dq, dk, dv = p.backward(q, k, v, o, masks, p.info.offset("t"))
    return all_reduce(dq, p.kv_seq), dk, dv


# -- all_gather -------------------------------------------------------------------------------------------------------
def _gather(p: _Place, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor, Masks]:
    from fmeg.ops.collectives import all_gather

    if masks:
        masks = (masks[0], all_gather(masks[1], p.kv_seq, 1))
    return all_gather(k, p.kv_seq, 1), all_gather(v, p.kv_seq, 1), masks


def _all_gather(p: _Place, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    k, v, masks = _gather(p, k, v, masks)
    return p.forward(q, k, v, masks, 0)


def _all_gather_bwd(p: _Place, q: Tensor, k: Tensor, v: Tensor, o: tuple, masks: Masks) -> tuple:
    from fmeg.ops.collectives import reduce_scatter

    k, v, masks = _gather(p, k, v, masks)
    dq, dk, dv = p.backward(q, k, v, o, masks, 0)
    return dq, reduce_scatter(dk, p.kv_seq, 1), reduce_scatter(dv, p.kv_seq, 1)


# -- ring -------------------------------------------------------------------------------------------------------------
def _steps(p: _Place) -> int:
    """How many blocks of keys any rank needs, its own first, then its predecessors': a window sees only the nearest."""
    window = p.options["window"]
    square = p.info.size("s") == p.t
    return min(p.parts, (window - 2) // p.t + 2) if window is not None and square else p.parts


def _send(p: _Place, hops: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Every tensor to the rank `hops` further on."""
    from fmeg.ops.collectives import ppermute

    perm = [(i, (i + hops) % p.parts) for i in range(p.parts)]
    return tuple(ppermute(x, p.kv_seq, perm) for x in tensors)


def _first_keys(p: _Place, steps: int) -> list[Any]:
    """Key position at which the block at hand begins, by step."""
    me = p.info.offset("t") // p.t
    return [(me - i) % p.parts * p.t for i in range(steps)]


def _ring(p: _Place, q: Tensor, k: Tensor, v: Tensor, masks: Masks) -> tuple[Tensor, Tensor]:
    travel = (k, v, *masks[1:])
    first, *rest = _first_keys(p, _steps(p))
    o, lse = p.forward(q, k, v, masks, first)
    out = wide(o)
    for first_key in rest:
        travel = _send(p, 1, *travel)
        k, v, *kv_segments = travel
        o_i, lse_i = p.forward(q, k, v, (*masks[:1], *kv_segments), first_key)
        out, lse = _merge(out, lse, wide(o_i), lse_i)
    return out.to(q.dtype), lse


def _ring_bwd(p: _Place, q: Tensor, k: Tensor, v: Tensor, o: tuple, masks: Masks) -> tuple:
    travel = (k, v, *masks[1:])
    first, *rest = _first_keys(p, _steps(p))
    dq, dk, dv = map(wide, p.backward(q, k, v, o, masks, first))
    for first_key in rest:
        travel, (dk, dv) = _send(p, 1, *travel), _send(p, 1, dk, dv)
        k, v, *kv_segments = travel
        dq_i, dk_i, dv_i = p.backward(q, k, v, o, (*masks[:1], *kv_segments), first_key)
        dq, dk, dv = dq + wide(dq_i), dk + wide(dk_i), dv + wide(dv_i)
    if rest:
        dk, dv = _send(p, -len(rest), dk, dv)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _merge(o: Tensor, lse: Tensor, o_i: Tensor, lse_i: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two sets of keys, from attention to each."""
    top = _finite(torch.maximum(lse, lse_i))
    w, w_i = torch.exp(lse - top), torch.exp(lse_i - top)
    total = w + w_i
    scale = _nonzero(total)
    return o * (w / scale).unsqueeze(-1) + o_i * (w_i / scale).unsqueeze(-1), top + torch.log(total)


def _finite(x: Tensor) -> Tensor:
    return torch.where(x == -torch.inf, 0.0, x)


def _nonzero(x: Tensor) -> Tensor:
    return torch.where(x == 0.0, 1.0, x)


_FORWARD = {
    "local": _local,
    "split_keys": _split_keys,
    "all_gather": _all_gather,
    "ring": _ring,
}
_BACKWARD = {
    "local": _local_bwd,
    "split_keys": _split_keys_bwd,
    "all_gather": _all_gather_bwd,
    "ring": _ring_bwd,
}
