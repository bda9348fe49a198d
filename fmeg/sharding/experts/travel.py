"""Partitioning of what moves tokens to rows and back: dispatch, collect, combine and its gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fmeg.mesh import rows as rows_
from fmeg.ops import collectives
from fmeg.ops.pack import pack_p, unpack_p, weigh_bwd_p, weigh_p
from fmeg.program.ir import Node, Value
from fmeg.program.primitive import Primitive
from fmeg.sharding.experts.counts import by_expert_p
from fmeg.sharding.experts.wire import DimAxes, Opaque, Wire, record, rows_at, settle, share, tokens_at, wire_of
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.value import Placement

spread_p = Primitive("spread_rows", rows_.spread, flops=lambda n: 0)
gathered_p = Primitive("gather_rows", rows_.gathered, flops=lambda n: 0)


def _to_rows(part: Partitioner, wire: Wire, v: Value, packed: Value, pending: frozenset[str], features: Any) -> None:
    """Rows packed by their order, sent to their experts unless they are there; `v` becomes them."""
    rows = share(part, wire, v.shape[0])

    def local(packed: Tensor, host: Tensor, table: Tensor, to_expert: Tensor | None = None) -> dict[str, Tensor]:
        out = collectives.exchange_rows(packed, host, wire.exchanged, back=False, rows=rows)
        if to_expert is not None:
            return {"rows": out.index_select(0, to_expert)}
        to_expert, to_arrival = by_expert_p(out, table)
        return {"rows": out.index_select(0, to_expert), "to_expert": to_expert, "to_arrival": to_arrival}

    def bounded(packed: Tensor, table: Tensor, to_expert: Tensor) -> dict[str, Tensor]:
        out = spread_p(packed, table[:, 0], wire.width)
        if wire.exchanged:
            out = collectives.all_to_all(out, wire.exchanged, 0, 0)
        return {"rows": out.index_select(0, to_expert)}

    if wire.experts and not wire.at_home:
        fn = local if wire.width is None else bounded
        got = record(part, fn, (packed,), wire.names("host", "table", "to_expert"))
        packed = got.pop("rows")
        wire.locals_ |= got
    placement = Placement((wire.rows, *features), pending)
    packed.placement, packed.type = placement.describe(v.type), placement.local_type(v.type, part.ctx.sizes)
    part.define(v, placement, packed, ragged=wire if wire.experts else None)


def _from_rows(part: Partitioner, wire: Wire, rows: Value, slots: int) -> Value:
    """Rows back where they were packed, zeros for those that went nowhere; those that did not travel as they are."""

    def local(rows: Tensor, host: Tensor, to_arrival: Tensor | None = None) -> dict[str, Tensor]:
        rows = rows if to_arrival is None else rows.index_select(0, to_arrival)
        return {"rows": collectives.exchange_rows(rows, host, wire.exchanged, back=True, rows=slots)}

    def bounded(rows: Tensor, table: Tensor, to_arrival: Tensor) -> dict[str, Tensor]:
        rows = rows.index_select(0, to_arrival)
        if wire.exchanged:
            rows = collectives.all_to_all(rows, wire.exchanged, 0, 0)
        return {"rows": gathered_p(rows, table[:, 0], wire.width, slots)}

    if not wire.experts or wire.at_home:
        return rows
    if wire.width is not None:
        return record(part, bounded, (rows,), wire.names("table", "to_arrival"))["rows"]
    return record(part, local, (rows,), wire.names("host", "to_arrival"))["rows"]


def _travels(wire: Wire) -> bool:
    """Whether rows are sent, so that every slot has one again, of zeros where it was dropped."""
    return bool(wire.experts) and not wire.at_home


def dispatch(part: Partitioner, node: Node) -> None:
    """x, routing -> rows."""
    x, order, *_ = node.args
    wire, k = wire_of(part, order), node.kwargs["k"]
    value, placement = tokens_at(part, wire, x)
    rows = share(part, wire, node.kwargs["rows"])

    def local(x: Tensor, order: Tensor, total: Tensor | None = None, host: Tensor | None = None) -> dict[str, Tensor]:
        x = x.flatten(0, -2)
        if wire.at_home:
            assert host is not None
            own = collectives.exchange_rows(order, host, (), back=False, rows=rows)
            return {"packed": pack_p(x, own, total, k=k)}
        if wire.experts:
            return {"packed": pack_p(x, order, None, k=k)}
        return {"packed": pack_p(x, order, total, k=k, rows=rows)}

    packed = record(part, local, (value,), wire.names("order", "total", "host"))["packed"]
    _to_rows(part, wire, node.outs[0], packed, placement.pending, placement.dims[-1:])


def collect(part: Partitioner, node: Node) -> None:
    """rows, routing -> tokens: the transpose of dispatch."""
    rows, order, *_ = node.args
    wire, k, tokens = wire_of(part, order), node.kwargs["k"], node.kwargs["tokens"]
    value, placement = rows_at(part, wire, rows)
    back, travels = _from_rows(part, wire, value, wire.locals_["inverse"].shape[0]), _travels(wire)
    shape = Placement((*_token_dims(wire, tokens), ())).local_shape((*tokens, 1), part.ctx.sizes)[:-1]

    def local(back: Tensor, inverse: Tensor, total: Tensor | None = None) -> dict[str, Tensor]:
        total = None if travels else total
        return {"out": unpack_p(back, inverse, total, k=k).unflatten(0, shape)}

    out = record(part, local, (back,), wire.names("inverse", "total"))["out"]
    placed = Placement((*_token_dims(wire, tokens), *placement.dims[1:]), placement.pending | set(wire.shared))
    settle(part, wire, node.outs[0], out, placed)


def _token_dims(wire: Wire, tokens: tuple[int, ...]) -> DimAxes:
    """Axes of the tokens' dimensions; one more, of the slots, where each slot is a token of its own."""
    return (*wire.tokens, *([()] * (len(tokens) - len(wire.tokens))))


def combine(part: Partitioner, node: Node) -> None:
    """rows, weights, routing -> tokens, and the rows as they came back, for the gradient."""
    rows, weights, order, *_ = node.args
    wire = wire_of(part, order)
    value, placement = rows_at(part, wire, rows)
    back, travels = _from_rows(part, wire, value, wire.locals_["inverse"].shape[0]), _travels(wire)
    w = part.get(part.placed(weights), Placement((*wire.tokens, ())), "rule")

    def local(back: Tensor, w: Tensor, inverse: Tensor, total: Tensor | None = None) -> dict[str, Tensor]:
        total = None if travels else total
        out = weigh_p(back, inverse, total, w.flatten(0, -2))
        return {"out": out.unflatten(0, w.shape[:-1])}

    out = record(part, local, (back, w), wire.names("inverse", "total"))["out"]
    part.env[id(node.outs[1])] = Opaque(wire, back, placement.pending)  # type: ignore[assignment]
    placed = Placement((*wire.tokens, *placement.dims[1:]), placement.pending | set(wire.shared))
    settle(part, wire, node.outs[0], out, placed)


def combine_bwd(part: Partitioner, node: Node) -> None:
    """Cotangent of the tokens, weights, rows as they came back, routing -> cotangents of rows and weights."""
    ct, weights, back, order, *_ = node.args
    wire, kept = wire_of(part, order), part.env[id(back)]
    assert isinstance(kept, Opaque)
    p = part.placed(ct)
    last = tuple(a for a in p.home.dims[-1] if a not in {*wire.rows, *wire.shared})
    placement = Placement((*wire.tokens, last))
    value = part.get(p, placement, "rule")
    w = part.get(part.placed(weights), Placement((*wire.tokens, ())), "rule")
    rows, travels = share(part, wire, node.outs[0].shape[0]), _travels(wire)

    def local(
        ct: Tensor, w: Tensor, back: Tensor, order: Tensor, inverse: Tensor, total: Tensor | None = None
    ) -> dict[str, Tensor]:
        total = None if travels else total
        out_rows = None if wire.at_home else order.shape[0] if travels else rows
        drows, dw = weigh_bwd_p(ct.flatten(0, -2), back, order, inverse, total, w.flatten(0, -2), out_rows)
        return {"packed": drows, "dw": dw.unflatten(0, w.shape[:-1])}

    got = record(part, local, (value, w, kept.local), wire.names("order", "inverse", "total"))
    _to_rows(part, wire, node.outs[0], got["packed"], frozenset(), placement.dims[-1:])
    pending = kept.pending | set(wire.shared) | set(last)
    settle(part, wire, node.outs[1], got["dw"], Placement((*wire.tokens, ()), pending))
