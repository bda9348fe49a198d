"""Partitioning of `fmeg.ops.route`: which axes experts, tokens and rows lie on, and each rank's own slots in order."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from fmeg.ops import collectives
from fmeg.ops.routing import sort_slots_p
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node
from fmeg.sharding.experts.counts import from_blocks_p, row_ends_p, row_table_p, to_host_p
from fmeg.sharding.experts.wire import Opaque, Wire, flat, minus, record
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.spec import resolve
from fmeg.sharding.value import Placement, count


def route(part: Partitioner, node: Node) -> None:
    """Its results are `Opaque`, with the `Wire` that all else of this routing goes by."""
    indices, keep = node.args
    ctx, experts = part.ctx, node.kwargs["experts"]
    placed = part.placed(indices)
    axes, inner = resolve(node.kwargs["axes"], ctx.table, ctx.sizes, f"route at {node.source}")
    n = count(axes, ctx.sizes)
    if experts % n:
        raise ShardingError(
            f"route at {node.source}: {experts} experts are to be split over {axes}, {n} parts, which does not divide"
        )
    given = minus(placed.home.dims[:-1], inner)
    by_gather = ctx.options.get("dispatch") == "all_gather"
    exchanged = () if by_gather else tuple(a for a in axes if a in flat(given))
    shared = tuple(a for a in axes if a not in exchanged)
    tokens = minus(given, shared)
    rows = (*axes, *(a for a in flat(tokens) if a not in axes))
    wire = Wire(node, axes, exchanged, shared, given, tokens, rows)
    slots, parts = indices.type.numel, count(rows, ctx.sizes)
    total = -(-slots // experts) * experts
    if total % parts:
        raise ShardingError(
            f"route at {node.source}: {total} rows ({slots} slots, rounded up to a multiple of {experts} experts) are "
            f"to be shared by {rows}, {parts} ranks, which does not divide. Use more tokens, or let axes shard both"
        )
    bound = ctx.options.get("dispatch_bound")
    if bound is not None and axes:
        here = slots // count(flat(tokens), ctx.sizes)
        wire.width = min(here, ceil(bound * here / n))
    target = Placement((*tokens, ()))
    args = (part.get(placed, target, "rule"), None if keep is None else part.get(part.placed(keep), target, "rule"))

    def local(indices: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
        return _local_route(indices, keep, experts, wire, ctx.sizes)

    wire.locals_ = record(part, local, args, {})
    for v, name in zip(node.outs, ("order", "inverse", "ends"), strict=True):
        part.env[id(v)] = Opaque(wire, wire.locals_[name])  # type: ignore[assignment]


def _local_route(indices: Tensor, keep: Tensor | None, experts: int, wire: Wire, sizes: Any) -> dict[str, Tensor]:
    """On a rank: the local values of a `Wire` by name, but those that are known once rows arrive."""
    ids = indices.reshape(-1)
    mine = None if keep is None else keep.reshape(-1)
    each = experts // count(wire.experts, sizes)
    members = count(wire.exchanged, sizes)
    if wire.shared:
        owner, member = ids // each, torch.zeros_like(ids)
        stride = count(wire.experts, sizes)
        for a in wire.experts:
            stride //= sizes[a]
            place = owner // stride % sizes[a]
            if a in wire.exchanged:
                member = member * sizes[a] + place
            else:
                here = place == collectives.axis_index((a,))
                mine = here if mine is None else mine & here
        ids = member * each + ids % each
    if mine is not None:
        ids = torch.where(mine, ids, members * each)
    order, inverse, counts = sort_slots_p(ids, members * each)
    out = {"order": order, "inverse": inverse}
    if mine is not None:
        out["total"] = counts.sum()
    if not wire.experts:
        return out | {"ends": counts.cumsum(0).to(torch.int32)}
    counts = counts.unsqueeze(0)
    if wire.exchanged:
        table = row_table_p(collectives.all_gather(counts, wire.exchanged, 0), collectives.axis_index(wire.exchanged))
    else:
        table = row_table_p(counts, torch.zeros((), dtype=torch.int64))
    if wire.width is not None:
        to_expert, to_arrival = from_blocks_p(table, wire.width)
        placed = {"to_expert": to_expert, "to_arrival": to_arrival}
    else:
        placed = {"host": to_host_p(table)}
    return out | placed | {"table": table, "ends": row_ends_p(table, wire.width)}
