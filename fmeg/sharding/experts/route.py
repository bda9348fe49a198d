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
from fmeg.sharding.experts.copies import arrive_p, depart_p, even_copies, size_table_p, to_host_p
from fmeg.sharding.experts.wire import Opaque, Wire, flat, minus, record, share
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
    slots, k, parts = indices.type.numel, indices.shape[-1], count(rows, ctx.sizes)
    here, members = slots // k // count(flat(tokens), ctx.sizes), count(exchanged, ctx.sizes)
    wire = Wire(node, axes, exchanged, shared, given, tokens, rows, k, here, members)
    total = -(-slots // experts) * experts
    if total % parts:
        raise ShardingError(
            f"route at {node.source}: {total} rows ({slots} slots, rounded up to a multiple of {experts} experts) are "
            f"to be shared by {rows}, {parts} ranks, which does not divide. Use more tokens, or let axes shard both"
        )
    bound = ctx.options.get("dispatch_bound")
    if bound is not None and axes:
        most = min(here * k, ceil(bound * here * k / n))
        wire.width, wire.room = min(here, most), members * most
    wire.arrivals = even_copies(here, k, experts // n, members) if wire.width is None else members * wire.width
    target = Placement((*tokens, ()))
    args = (part.get(placed, target, "rule"), None if keep is None else part.get(part.placed(keep), target, "rule"))

    def local(indices: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
        found = _places(indices, keep, experts, wire, ctx.sizes)
        return _local_route(*found, wire, share(part, wire, total))

    wire.locals_ = record(part, local, args, {})
    for v, name in zip(node.outs, ("order", "inverse", "ends"), strict=True):
        part.env[id(v)] = Opaque(wire, wire.locals_[name])  # type: ignore[assignment]


def _places(indices: Tensor, keep: Tensor | None, experts: int, wire: Wire, sizes: Any) -> tuple[Tensor, int, bool]:
    """(the place of each slot, see `copies`; experts of a member; whether a slot may go nowhere)."""
    ids = indices.reshape(-1)
    mine = None if keep is None else keep.reshape(-1)
    each = experts // count(wire.experts, sizes)
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
        ids = torch.where(mine, ids, wire.members * each)
    return ids, each, mine is not None


def _local_route(places: Tensor, each: int, partly: bool, wire: Wire, rows: int) -> dict[str, Tensor]:
    """On a rank: the local values of a `Wire` by name."""
    out: dict[str, Tensor] = {}
    if wire.exchanged:
        mine = places.view(wire.here, wire.k)
        out["out"], out["out_inverse"], sent = depart_p(mine, each, wire.members)
        small = torch.int16 if wire.members * each < 2**15 else torch.int32
        every = collectives.all_gather(mine.to(small), wire.exchanged, 0)
        me = collectives.axis_index(wire.exchanged)
        out["order"], out["inverse"], counts, received = arrive_p(every, me, each, wire.members, wire.width)
        out |= {"sent": sent, "out_total": sent.sum()}
        table = None if wire.room is not None else size_table_p(sent, received, counts, wire.k)
    else:
        out["order"], out["inverse"], counts = sort_slots_p(places, wire.members * each)
        table = None if wire.room is not None else counts.sum().reshape(1, 1).expand(1, 2)
    ends = counts.cumsum(0)
    if wire.room is not None:
        out["order"], ends = out["order"][: wire.room], ends.clamp(max=wire.room)
    elif wire.experts:
        assert table is not None
        here = to_host_p(table)
        if wire.exchanged:
            out["host"], here, slots = here[: wire.members], here[-2:-1], here[-1:]
            many = wire.arrivals * wire.k
            out["inverse"] = collectives.exchange_rows(out["inverse"], slots, (), back=False, rows=many)
        out["order"] = collectives.exchange_rows(out["order"], here, (), back=False, rows=rows)
    if wire.experts or partly:
        out["total"] = counts.sum()
    return out | {"ends": ends.to(torch.int32)}
