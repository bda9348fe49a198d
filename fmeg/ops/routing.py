"""Which rows go to which expert: slots sorted by expert.

A token that goes to k experts has k *slots*; slot j of token t is number t·k + j. Sorted by expert, in the order of
their numbers within an expert, slots become *rows*. A `Routing` says which slot each row is, and where each expert's
rows end. On a mesh its tensors are each rank's own business: only the operations of `fmeg.ops.dispatch` and
`fmeg.ops.grouped` read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from fmeg.kernels import experts as kernels
from fmeg.ops._common import transformed
from fmeg.program import recorder
from fmeg.program.primitive import Primitive


@dataclass(eq=False)
class Routed(Primitive):
    """A primitive on rows sorted by expert. How it is partitioned depends on its routing: see fmeg.sharding.experts."""

    __repr__ = Primitive.__repr__


@dataclass(frozen=True)
class Routing:
    """order    the slot of each row; rows without a slot (dropped ones) come last
    inverse  the row of each slot
    ends     how many rows belong to experts 0 … e: expert e has rows ends[e - 1] … ends[e]
    tokens   shape of the tokens; `k` slots each
    rows     number of rows: slots, rounded up to a multiple of the experts, so that any layout of experts divides it
    """

    order: Tensor
    inverse: Tensor
    ends: Tensor
    tokens: tuple[int, ...]
    k: int
    rows: int


def chunk_of(ends: Int[Tensor, "n"], at: Int[Tensor, "s"]) -> Int[Tensor, "s"]:
    """In which of n chunks, which end where `ends` says, each position lies; n beyond all of them.

    >>> chunk_of(torch.tensor([1, 1, 3]), torch.arange(4)).tolist()
    [0, 2, 2, 3]
    """
    if transformed():
        return (at[:, None] >= ends).sum(1)
    return torch.searchsorted(ends, at, right=True)


def sort_slots(ids: Int[Tensor, "s"], experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Stable sort by expert: (order, its inverse, slots of each expert). An id of `experts` stands for no expert.

    >>> order, inverse, counts = sort_slots(torch.tensor([1, 0, 2, 0]), 2)
    >>> order.tolist(), inverse.tolist(), counts.tolist()
    ([1, 3, 0, 2], [2, 0, 3, 1], [2, 1])
    """
    if ids.is_cuda and not transformed():
        return kernels.sort_slots(ids, experts)
    order = torch.argsort(ids, stable=True)
    inverse = torch.zeros_like(order).scatter(0, order, torch.arange(ids.shape[0], device=ids.device))
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add(0, ids, torch.ones_like(ids))
    return order, inverse, counts[:experts]


sort_slots_p = Primitive("sort_slots", sort_slots, flops=lambda n: 0, keep=True)


def _route(indices: Tensor, keep: Tensor | None, experts: int, axes: tuple[str, str]) -> tuple[Tensor, Tensor, Tensor]:
    ids = indices.reshape(-1)
    if keep is not None:
        ids = torch.where(keep.reshape(-1), ids, experts)
    order, inverse, counts = sort_slots(ids, experts)
    return order, inverse, counts.cumsum(0).to(torch.int32)


route_p = Routed("route", _route, flops=lambda n: 0)


def route(
    indices: Int[Tensor, "*tokens k"],
    experts: int,
    keep: Bool[Tensor, "*tokens k"] | None = None,
    axes: tuple[str, str] = ("experts", "expert_ff"),
) -> Routing:
    """Sort every token's slots by expert.

    indices  the k experts of each token, int64 in [0, experts)
    keep     False drops a slot: it has no row, and weighs nothing
    axes     the logical axes of the experts, and of their inner dimension, that the layout may name. A mesh axis that
             shards experts may shard tokens too, and then takes every slot to the rank of its expert; one that shards
             the inner dimension may not: tokens are gathered over it

    >>> r = route(torch.tensor([[1, 0], [1, 2]]), experts=3)
    >>> r.order.tolist(), r.ends.tolist(), r.rows
    ([1, 0, 2, 3], [1, 3, 4], 6)
    """
    if indices.ndim < 2 or indices.dtype != torch.int64:
        raise ValueError(f"route: indices must be int64 of shape (*tokens, k), given {indices.dtype} {indices.shape}")
    if keep is not None and (keep.shape != indices.shape or keep.dtype != torch.bool):
        raise ValueError(f"route: keep must be bool of shape {tuple(indices.shape)}, given {keep.dtype} {keep.shape}")
    if experts < 1:
        raise ValueError(f"route: experts must be at least 1, given {experts}")
    rec = recorder.active()
    if rec is not None:
        rec.declared_axes.update(axes)
    order, inverse, ends = route_p(indices, keep, experts=experts, axes=tuple(axes))
    *tokens, k = indices.shape
    rows = -(-indices.numel() // experts) * experts
    return Routing(order, inverse, ends, tuple(tokens), k, rows)


def routing_args(routing: Routing) -> tuple[Any, ...]:
    """A routing's tensors, as operations take them."""
    return routing.order, routing.inverse, routing.ends
