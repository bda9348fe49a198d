"""Partitioning of rows sorted by expert: expert parallelism is where the layout puts the experts.

Let the experts be sharded by mesh axes A. Of those, X shard tokens as well, and G do not: tokens are the same on the
ranks of G, or are made so by a gather (`dispatch="all_gather"` gathers them over all of A that shard them). Then

    dispatch   a rank takes the slots whose experts lie at its own place on G, sorts them, and sends them over X
    rows       lie with their experts, those of one expert in the order (rank on X, slot): sharded by A, and by the axes
               that shard tokens and no experts
    combine    sends rows back over X and adds them up: a sum that is pending over G

Dispatch and combine are each other's transposes, so gradients travel the same two ways. How many rows a rank has is
known only as the program runs: types say an even share, tensors are longer or shorter, and what acts on them must not
have its size written in it. One table of counts a routing goes to the host, and is kept for the backward pass.

With `dispatch_bound` a rank has room for so many rows from each other, and the host reads nothing. Rows that do not fit
make all rows of their sender NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any

import torch
from torch import Tensor

from fmeg.mesh import rows as rows_
from fmeg.ops import collectives
from fmeg.ops.pack import pack_p, unpack_p, weigh_bwd_p, weigh_p
from fmeg.ops.routing import chunk_of, sort_slots_p
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Value
from fmeg.program.primitive import Primitive
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.spec import resolve
from fmeg.sharding.value import Placement, count

DimAxes = tuple[tuple[str, ...], ...]


# -- what runs on a rank ----------------------------------------------------------------------------------------------
def row_table(counts: Tensor, me: Tensor) -> Tensor:
    """From every rank's slots of every expert, [ranks, ranks * local experts]: [ranks, 1 + local experts], the rows
    that this rank sends to each, then those that each sends to its experts.

    >>> row_table(torch.tensor([[1, 0, 2, 3], [4, 5, 6, 7]]), torch.tensor(1)).tolist()
    [[9, 2, 3], [13, 6, 7]]
    """
    by_rank = counts.unflatten(1, (counts.shape[0], -1))
    me = me.reshape(1)
    sent = by_rank.index_select(0, me).sum(-1).t()
    return torch.cat([sent, by_rank.index_select(1, me).squeeze(1)], 1)


def arrivals(table: Tensor, width: int | None) -> Tensor:
    """[ranks, local experts]: rows that arrive, of each rank no more than `width`.

    >>> arrivals(torch.tensor([[0, 1, 4], [0, 2, 0]]), 3).tolist()
    [[1, 2], [2, 0]]
    """
    counts = table[:, 1:]
    if width is None:
        return counts
    within = counts.cumsum(1)
    return within.clamp(max=width) - (within - counts).clamp(max=width)


def row_ends(table: Tensor, width: int | None) -> Tensor:
    """Where each local expert's rows end."""
    return arrivals(table, width).sum(0).cumsum(0).to(torch.int32)


def by_expert(rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that arrived (rank, expert) in the order (expert, rank), as an index; and the inverse. Rows beyond those of
    the table stay in place.

    >>> [i.tolist() for i in by_expert(torch.zeros(4, 1), torch.tensor([[0, 1, 1], [0, 2, 0]]))]
    [[0, 2, 3, 1], [0, 3, 1, 2]]
    """
    counts = table[:, 1:]
    at = torch.arange(rows.shape[0], device=rows.device)
    arrived = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    wanted = (counts.t().flatten().cumsum(0) - counts.t().flatten()).view(counts.t().shape)
    return _moved(at, counts.t(), wanted, arrived.t()), _moved(at, counts, arrived, wanted.t())


def _moved(at: Tensor, counts: Tensor, here: Tensor, there: Tensor) -> Tensor:
    """Position `there` of the row at each position `here`, chunks of `counts` rows."""
    ends = counts.flatten().cumsum(0)
    chunk = chunk_of(ends, at).clamp(max=ends.shape[0] - 1)
    shift = (there - here).flatten().index_select(0, chunk)
    return torch.where(at < ends[-1], at + shift, at)


def from_blocks(table: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As `by_expert`, for rows that arrived in a block of `width` from each rank: real ones first, then the others.

    >>> [i.tolist() for i in from_blocks(torch.tensor([[0, 1, 1], [0, 2, 0]]), 3)]
    [[0, 3, 4, 1, 2, 5], [0, 3, 4, 1, 2, 5]]
    """
    counts = arrivals(table, width)
    within, sizes = counts.cumsum(1), counts.sum(1)
    at = torch.arange(width, device=table.device)
    expert = (at[None, :, None] >= within[:, None, :]).sum(-1).clamp(max=counts.shape[1] - 1)
    wanted = (counts.t().flatten().cumsum(0) - counts.t().flatten()).view(counts.t().shape).t()
    real = at + (wanted - within + counts).gather(1, expert)
    empty = width - sizes
    other = sizes.sum() + (empty.cumsum(0) - empty - sizes)[:, None] + at
    to_arrival = torch.where(at < sizes[:, None], real, other).flatten()
    every = torch.arange(to_arrival.shape[0], device=table.device)
    return torch.zeros_like(to_arrival).scatter(0, to_arrival, every), to_arrival


row_table_p = Primitive("row_table", row_table, flops=lambda n: 0, keep=True)
to_host_p = Primitive("to_host", lambda table: table.to("cpu"), fake=torch.clone, flops=lambda n: 0, keep=True)
row_ends_p = Primitive("row_ends", row_ends, flops=lambda n: 0, keep=True)
by_expert_p = Primitive("by_expert", by_expert, flops=lambda n: 0, keep=True)
from_blocks_p = Primitive("from_blocks", from_blocks, flops=lambda n: 0, keep=True)
spread_p = Primitive("spread_rows", rows_.spread, flops=lambda n: 0)
gathered_p = Primitive("gather_rows", rows_.gathered, flops=lambda n: 0)


# -- what the partitioner knows of a routing --------------------------------------------------------------------------
@dataclass
class Wire:
    """How one routing lies on the mesh.

    experts   the axes A of the experts, major first; `exchanged` X, `shared` G
    given     dims of the tokens as they came; `tokens`, after the gather over `gathered`, axes of G
    rows      axes that shard rows: those of the experts, then others that shard tokens
    width     with a bound: rows that one rank may send to another
    locals_   local values by name: order, inverse, ends; total, table, host, to_expert, to_arrival where there are such
    """

    node: Node
    experts: tuple[str, ...]
    exchanged: tuple[str, ...]
    shared: tuple[str, ...]
    given: DimAxes
    tokens: DimAxes
    rows: tuple[str, ...]
    width: int | None = None
    locals_: dict[str, Value] = field(default_factory=dict)

    @property
    def gathered(self) -> set[str]:
        return {a for d in self.given for a in d} - {a for d in self.tokens for a in d}

    def names(self, *names: str) -> dict[str, Value]:
        return {n: self.locals_[n] for n in names if n in self.locals_}


class Opaque:
    """In place of a `Placed`: a value that is each rank's own business, for the operations of this module alone."""

    def __init__(self, wire: Wire, local: Value, pending: frozenset[str] = frozenset()) -> None:
        self.wire, self.local, self.pending = wire, local, pending

    def __getattr__(self, name: str) -> Any:
        raise ShardingError(
            f"the routing made at {self.wire.node.source} is read by something else than dispatch, combine and the "
            "grouped products, or leaves the body that made it; on a mesh its tensors mean nothing to anyone else. For "
            "statistics, count the experts' indices themselves"
        )


def partition(part: Partitioner, node: Node) -> None:
    """Partition a node whose op is a `Routed` primitive."""
    if _spread(part, node):
        part.tags = {**part.tags, "opaque": True}
    if not part.ctx.sizes:
        part._whole(node)
    else:
        _HANDLERS[node.op.name](part, node)


def _spread(part: Partitioner, node: Node) -> bool:
    """Whether a mesh axis shards the experts; else every shape is known before the program runs."""
    if node.op.name == "route":
        return bool(resolve(node.kwargs["axes"][:1], part.ctx.table, part.ctx.sizes)[0])
    routings: list[Any] = [part.env[id(v)] for v in node.operands()]
    return any(p.wire.experts for p in routings if isinstance(p, Opaque))


def _wire(part: Partitioner, v: Value) -> Wire:
    p: Any = part.env[id(v)]
    if not isinstance(p, Opaque):
        raise ShardingError(f"{part.source}: the routing is not one that fmeg.ops.route made in this body")
    return p.wire


def _record(part: Partitioner, fn: Callable[..., dict[str, Tensor]], args: tuple, kwargs: dict) -> dict[str, Value]:
    """Trace `fn` at local shapes; its results by name. They have no placement that others could use."""
    names: list[str] = []

    def flat(*a: Any, **k: Any) -> list[Tensor]:
        out = fn(*a, **k)
        names[:] = list(out)
        return list(out.values())

    values = part.trace_in(flat, args, kwargs)
    return dict(zip(names, values, strict=True))


def _minus(dims: DimAxes, gone: Any) -> DimAxes:
    return tuple(tuple(a for a in d if a not in gone) for d in dims)


def _flat(dims: DimAxes) -> tuple[str, ...]:
    return tuple(a for d in dims for a in d)


# -- route ------------------------------------------------------------------------------------------------------------
def _route(part: Partitioner, node: Node) -> None:
    indices, keep = node.args
    ctx, experts = part.ctx, node.kwargs["experts"]
    placed = part.placed(indices)
    axes, inner = resolve(node.kwargs["axes"], ctx.table, ctx.sizes, f"route at {node.source}")
    n = count(axes, ctx.sizes)
    if experts % n:
        raise ShardingError(
            f"route at {node.source}: {experts} experts are to be split over {axes}, {n} parts, which does not divide"
        )
    given = _minus(placed.home.dims[:-1], inner)
    by_gather = ctx.options.get("dispatch") == "all_gather"
    exchanged = () if by_gather else tuple(a for a in axes if a in _flat(given))
    shared = tuple(a for a in axes if a not in exchanged)
    tokens = _minus(given, shared)
    rows = (*axes, *(a for a in _flat(tokens) if a not in axes))
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
        here = slots // count(_flat(tokens), ctx.sizes)
        wire.width = min(here, ceil(bound * here / n))
    target = Placement((*tokens, ()))
    args = (part.get(placed, target, "rule"), None if keep is None else part.get(part.placed(keep), target, "rule"))

    def local(indices: Tensor, keep: Tensor | None) -> dict[str, Tensor]:
        return _local_route(indices, keep, experts, wire, ctx.sizes)

    wire.locals_ = _record(part, local, args, {})
    for v, name in zip(node.outs, ("order", "inverse", "ends"), strict=True):
        part.env[id(v)] = Opaque(wire, wire.locals_[name])  # type: ignore[assignment]


def _local_route(indices: Tensor, keep: Tensor | None, experts: int, wire: Wire, sizes: Any) -> dict[str, Tensor]:
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


# -- tokens to rows and back ------------------------------------------------------------------------------------------
def _share(part: Partitioner, wire: Wire, rows: int) -> int:
    return rows // count(wire.rows, part.ctx.sizes)


def _to_rows(part: Partitioner, wire: Wire, v: Value, packed: Value, pending: frozenset[str], features: Any) -> None:
    """Rows packed by their order, sent to their experts; `v` becomes them."""
    rows = _share(part, wire, v.shape[0])

    def local(packed: Tensor, host: Tensor, table: Tensor, to_expert: Tensor | None = None) -> dict[str, Tensor]:
        out = collectives.exchange_rows(packed, host, wire.exchanged, back=False, rows=rows)
        if not wire.exchanged:
            return {"rows": out}
        if to_expert is not None:
            return {"rows": out.index_select(0, to_expert)}
        to_expert, to_arrival = by_expert_p(out, table)
        return {"rows": out.index_select(0, to_expert), "to_expert": to_expert, "to_arrival": to_arrival}

    def bounded(packed: Tensor, table: Tensor, to_expert: Tensor) -> dict[str, Tensor]:
        out = spread_p(packed, table[:, 0], wire.width)
        if wire.exchanged:
            out = collectives.all_to_all(out, wire.exchanged, 0, 0)
        return {"rows": out.index_select(0, to_expert)}

    if wire.experts:
        fn = local if wire.width is None else bounded
        got = _record(part, fn, (packed,), wire.names("host", "table", "to_expert"))
        packed = got.pop("rows")
        wire.locals_ |= got
    placement = Placement((wire.rows, *features), pending)
    packed.placement, packed.type = placement.describe(v.type), placement.local_type(v.type, part.ctx.sizes)
    part.define(v, placement, packed, ragged=wire if wire.experts else None)


def _from_rows(part: Partitioner, wire: Wire, rows: Value, slots: int) -> Value:
    """Rows back where they were packed, zeros for those that went nowhere; on one rank as they are."""

    def local(rows: Tensor, host: Tensor, to_arrival: Tensor | None = None) -> dict[str, Tensor]:
        rows = rows if to_arrival is None else rows.index_select(0, to_arrival)
        return {"rows": collectives.exchange_rows(rows, host, wire.exchanged, back=True, rows=slots)}

    def bounded(rows: Tensor, table: Tensor, to_arrival: Tensor) -> dict[str, Tensor]:
        rows = rows.index_select(0, to_arrival)
        if wire.exchanged:
            rows = collectives.all_to_all(rows, wire.exchanged, 0, 0)
        return {"rows": gathered_p(rows, table[:, 0], wire.width, slots)}

    if not wire.experts:
        return rows
    if wire.width is not None:
        return _record(part, bounded, (rows,), wire.names("table", "to_arrival"))["rows"]
    return _record(part, local, (rows,), wire.names("host", "to_arrival"))["rows"]


def _rows(part: Partitioner, wire: Wire, v: Value, keep_pending: bool = True) -> tuple[Value, Placement]:
    """Local rows, and their placement, which must be that of the routing."""
    p = part.placed(v)
    if p.home.dims[0] != wire.rows:
        raise ShardingError(
            f"{part.source}: rows lie on {p.home.dims[0]}, but their routing (made at {wire.node.source}) on "
            f"{wire.rows}. Rows are for the routing that they came with"
        )
    features = tuple(tuple(a for a in d if a not in wire.rows) for d in p.home.dims[1:])
    target = Placement((wire.rows, *features), p.home.pending if keep_pending else frozenset())
    return part.get(p, target, "rule"), target


def _tokens(part: Partitioner, wire: Wire, v: Value) -> tuple[Value, Placement]:
    """Local tokens with their last dimension, gathered as the routing wants them; no pending sum that it could mix."""
    p = part.placed(v)
    busy = {*wire.rows, *wire.shared}
    last = tuple(a for a in p.home.dims[-1] if a not in busy)
    dims = (*wire.tokens, *([()] * (v.ndim - 1 - len(wire.tokens))), last)
    target = Placement(dims, p.home.pending - busy - set(_flat(dims)))
    return part.get(p, target, "rule"), target


def _settle(part: Partitioner, wire: Wire, v: Value, local: Value, placement: Placement) -> None:
    """A result for tokens: what was gathered for it goes back to where it came from, as a sum."""
    local.placement = placement.describe(v.type)
    p = part.define(v, placement, local)
    if wire.gathered:
        home = Placement((*wire.given, *placement.dims[len(wire.given) :]), placement.pending - wire.gathered)
        part.get(p, home, "rule")
        p.home = home


def _slots(part: Partitioner, wire: Wire, tokens: tuple[int, ...], k: int) -> int:
    n = k
    for size in tokens:
        n *= size
    return n // count(_flat(wire.tokens), part.ctx.sizes)


def _dispatch(part: Partitioner, node: Node) -> None:
    x, order, *_ = node.args
    wire, k = _wire(part, order), node.kwargs["k"]
    value, placement = _tokens(part, wire, x)
    rows = _share(part, wire, node.kwargs["rows"])

    def local(x: Tensor, order: Tensor, total: Tensor | None = None) -> dict[str, Tensor]:
        x = x.flatten(0, -2)
        if wire.experts:
            return {"packed": pack_p(x, order, None, k=k, rows=order.shape[0])}
        return {"packed": pack_p(x, order, total, k=k, rows=rows)}

    packed = _record(part, local, (value,), wire.names("order", "total"))["packed"]
    _to_rows(part, wire, node.outs[0], packed, placement.pending, placement.dims[-1:])


def _collect(part: Partitioner, node: Node) -> None:
    rows, order, *_ = node.args
    wire, k, tokens = _wire(part, order), node.kwargs["k"], node.kwargs["tokens"]
    value, placement = _rows(part, wire, rows)
    back = _from_rows(part, wire, value, wire.locals_["inverse"].shape[0])
    shape = Placement((*_token_dims(wire, tokens), ())).local_shape((*tokens, 1), part.ctx.sizes)[:-1]

    def local(back: Tensor, inverse: Tensor, total: Tensor | None = None) -> dict[str, Tensor]:
        total = None if wire.experts else total
        return {"out": unpack_p(back, inverse, total, k=k).unflatten(0, shape)}

    out = _record(part, local, (back,), wire.names("inverse", "total"))["out"]
    placed = Placement((*_token_dims(wire, tokens), *placement.dims[1:]), placement.pending | set(wire.shared))
    _settle(part, wire, node.outs[0], out, placed)


def _token_dims(wire: Wire, tokens: tuple[int, ...]) -> DimAxes:
    """Axes of the tokens' dimensions; one more, of the slots, where each slot is a token of its own."""
    return (*wire.tokens, *([()] * (len(tokens) - len(wire.tokens))))


def _combine(part: Partitioner, node: Node) -> None:
    rows, weights, order, *_ = node.args
    wire = _wire(part, order)
    value, placement = _rows(part, wire, rows)
    back = _from_rows(part, wire, value, wire.locals_["inverse"].shape[0])
    w = part.get(part.placed(weights), Placement((*wire.tokens, ())), "rule")

    def local(back: Tensor, w: Tensor, inverse: Tensor, total: Tensor | None = None) -> dict[str, Tensor]:
        total = None if wire.experts else total
        out = weigh_p(back, inverse, total, w.flatten(0, -2))
        return {"out": out.unflatten(0, w.shape[:-1])}

    out = _record(part, local, (back, w), wire.names("inverse", "total"))["out"]
    part.env[id(node.outs[1])] = Opaque(wire, back, placement.pending)  # type: ignore[assignment]
    placed = Placement((*wire.tokens, *placement.dims[1:]), placement.pending | set(wire.shared))
    _settle(part, wire, node.outs[0], out, placed)


def _combine_bwd(part: Partitioner, node: Node) -> None:
    ct, weights, back, order, *_ = node.args
    wire, kept = _wire(part, order), part.env[id(back)]
    assert isinstance(kept, Opaque)
    p = part.placed(ct)
    last = tuple(a for a in p.home.dims[-1] if a not in {*wire.rows, *wire.shared})
    placement = Placement((*wire.tokens, last))
    value = part.get(p, placement, "rule")
    w = part.get(part.placed(weights), Placement((*wire.tokens, ())), "rule")
    rows = _share(part, wire, node.outs[0].shape[0])

    def local(
        ct: Tensor, w: Tensor, back: Tensor, order: Tensor, inverse: Tensor, total: Tensor | None = None
    ) -> dict[str, Tensor]:
        total = None if wire.experts else total
        out_rows = order.shape[0] if wire.experts else rows
        drows, dw = weigh_bwd_p(ct.flatten(0, -2), back, order, inverse, total, w.flatten(0, -2), out_rows)
        return {"packed": drows, "dw": dw.unflatten(0, w.shape[:-1])}

    got = _record(part, local, (value, w, kept.local), wire.names("order", "inverse", "total"))
    _to_rows(part, wire, node.outs[0], got["packed"], frozenset(), placement.dims[-1:])
    pending = kept.pending | set(wire.shared) | set(last)
    _settle(part, wire, node.outs[1], got["dw"], Placement((*wire.tokens, ()), pending))


# -- products ---------------------------------------------------------------------------------------------------------
def _weight(part: Partitioner, wire: Wire, v: Value) -> tuple[Value, Placement]:
    """A parameter of the experts, in use; its experts must lie where the routing has them."""
    p = part.placed(v)
    home = (p.use if p.use is not None else p.home).whole()
    if home.dims[0] != wire.experts:
        raise ShardingError(
            f"{part.source}: {p.name or 'the weights of the experts'} have their experts on {home.dims[0]}, but the "
            f"routing made at {wire.node.source} on {wire.experts}. Declare their first dimension as "
            f"{wire.node.kwargs['axes'][0]!r}, or give route(axes=…) the name that it has"
        )
    if busy := [a for d in home.dims[1:] for a in d if a in wire.rows]:
        raise ShardingError(
            f"{part.source}: {p.name or 'the weights of the experts'} {home.describe(v.type)} are sharded by {busy}, "
            f"which shard the tokens too. Declare that dimension as {wire.node.kwargs['axes'][1]!r}, over which tokens "
            "are gathered, or take the axis from it"
        )
    return part.get(p, home, "parameter" if p.use is not None else "rule"), home


def _matmul(part: Partitioner, node: Node) -> None:
    rows, w, ends = node.args
    wire, transposed = _wire(part, ends), node.kwargs["transposed"]
    weight, at = _weight(part, wire, w)
    inner, outer = (at.dims[2], at.dims[1]) if transposed else (at.dims[1], at.dims[2])
    p = part.placed(rows)
    _rows(part, wire, rows)
    target = Placement((wire.rows, inner), p.home.pending - set(inner) - set(outer))
    value = part.get(p, target, "weights stay")
    placed = Placement((wire.rows, outer), target.pending | set(inner))
    out = part.emit(node.op, (value, weight, wire.locals_["ends"]), node.kwargs, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0], ragged=wire if wire.experts else None)


def _matmul_dw(part: Partitioner, node: Node) -> None:
    x, y, ends = node.args
    wire = _wire(part, ends)
    (a, at_a), (b, at_b) = _rows(part, wire, x), _rows(part, wire, y)
    if at_a.pending and at_b.pending:
        a, at_a = _rows(part, wire, x, keep_pending=False)
    d, f = at_a.dims[1], tuple(axis for axis in at_b.dims[1] if axis not in at_a.dims[1])
    pending = at_a.pending | at_b.pending
    if f != at_b.dims[1] or pending & {*d, *f}:
        a, at_a = part.get(part.placed(x), Placement((wire.rows, d)), "rule"), Placement((wire.rows, d))
        b, at_b = part.get(part.placed(y), Placement((wire.rows, f)), "rule"), Placement((wire.rows, f))
        pending = frozenset()
    placed = Placement((wire.experts, d, f), pending | (set(wire.rows) - set(wire.experts)))
    out = part.emit(node.op, (a, b, wire.locals_["ends"]), {}, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0])


def _bias(part: Partitioner, node: Node) -> None:
    rows, b, ends = node.args
    wire = _wire(part, ends)
    bias, at = _weight(part, wire, b)
    target = Placement((wire.rows, at.dims[1]))
    value = part.get(part.placed(rows), target, "rule")
    out = part.emit(node.op, (value, bias, wire.locals_["ends"]), {}, [(node.outs[0].type, target)])
    part.define(node.outs[0], target, out[0], ragged=wire if wire.experts else None)


def _sums(part: Partitioner, node: Node) -> None:
    rows, ends = node.args
    wire = _wire(part, ends)
    value, at = _rows(part, wire, rows)
    placed = Placement((wire.experts, at.dims[1]), at.pending | (set(wire.rows) - set(wire.experts)))
    out = part.emit(node.op, (value, wire.locals_["ends"]), {}, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0])


_HANDLERS: dict[str, Callable[[Partitioner, Node], None]] = {
    "route": _route,
    "dispatch": _dispatch,
    "collect": _collect,
    "combine": _combine,
    "combine_bwd": _combine_bwd,
    "grouped_matmul": _matmul,
    "grouped_matmul_dw": _matmul_dw,
    "grouped_bias": _bias,
    "expert_sums": _sums,
}
