"""Partitioning of what moves tokens to rows and back: dispatch, collect, combine and its gradient.

token      sent once to each rank that has some of its experts
rows       made by that rank, one for each of these experts
partial    sum of their results, made by that rank, sent back
sum        of the partial sums, in the order of ranks
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmeg.mesh import rows as rows_
from fmeg.ops import collectives
from fmeg.ops.pack import pack_p, slots_p, unpack_p, weigh_bwd_p, weigh_p
from fmeg.program.ir import Node, Value
from fmeg.program.primitive import Primitive
from fmeg.sharding.experts.wire import Opaque, Wire, record, rows_at, settle, share, tokens_at, wire_of
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.value import Placement

spread_p = Primitive("spread_rows", rows_.spread, flops=lambda n: 0)
gathered_p = Primitive("gather_rows", rows_.gathered, flops=lambda n: 0)
_WIRE = ("out", "out_inverse", "out_total", "sent", "host")


# -- on a rank --------------------------------------------------------------------------------------------------------
def _sent(wire: Wire, x: Tensor, at: dict[str, Tensor]) -> Tensor:
    """[tokens, *shape] -> [copies that came, *shape]: each token to the ranks that it is for. As it is if tokens stay
    where they are."""
    if not wire.exchanged:
        return x
    packed = pack_p(x.flatten(1), at["out"], None, k=wire.columns).unflatten(1, x.shape[1:])
    if wire.width is None:
        return collectives.exchange_rows(
            packed, at["host"], wire.exchanged, back=False, rows=wire.arrivals, width=wire.here
        )
    return collectives.all_to_all(spread_p(packed, at["sent"], wire.width), wire.exchanged, 0, 0)


def _returned(wire: Wire, x: Tensor, at: dict[str, Tensor]) -> Tensor:
    """[copies that came, *shape] -> [tokens, *shape]: back where they came from, and those of a token added up."""
    if not wire.exchanged:
        return x
    most = wire.here * wire.columns
    if wire.width is None:
        back = collectives.exchange_rows(x, at["host"], wire.exchanged, back=True, rows=most, width=wire.here)
    else:
        back = gathered_p(collectives.all_to_all(x, wire.exchanged, 0, 0), at["sent"], wire.width, most)
    out = unpack_p(back.flatten(1), at["out_inverse"], at["out_total"], k=wire.columns)
    return out.unflatten(1, back.shape[1:])


def _packed(wire: Wire, x: Tensor, at: dict[str, Tensor], k: int, rows: int) -> Tensor:
    """Rows of the tokens that a rank has, or that came; all NaN where there is no room for them."""
    out = pack_p(x, at["order"], at.get("total"), k=k, rows=None if wire.experts else rows)
    return _within(wire, out, at)


def _within(wire: Wire, rows: Tensor, at: dict[str, Tensor]) -> Tensor:
    if wire.room is None or wire.room == wire.members * wire.here * wire.k:
        return rows
    fits = at["total"] <= wire.room
    if rows.dtype in rows_.BYTES:  # of both, 127 is no number
        return torch.where(fits, rows.view(torch.uint8), 127).view(rows.dtype)
    return torch.where(fits, rows, torch.nan)


# -- of the Program ---------------------------------------------------------------------------------------------------
def _define_rows(part: Partitioner, wire: Wire, v: Value, local: Value, placement: Placement) -> None:
    local.placement, local.type = placement.describe(v.type), placement.local_type(v.type, part.ctx.sizes)
    part.define(v, placement, local, ragged=wire if wire.experts else None)


def dispatch(part: Partitioner, node: Node) -> None:
    """x, routing -> rows."""
    x, order, *_ = node.args
    wire, k = wire_of(part, order), node.kwargs["k"]
    value, placement = tokens_at(part, wire, x)
    rows = share(part, wire, node.kwargs["rows"])

    def local(x: Tensor, **at: Tensor) -> dict[str, Tensor]:
        x = _sent(wire, x.flatten(0, len(wire.tokens) - 1), at)
        return {"rows": _packed(wire, x, at, k, rows)}

    got = record(part, local, (value,), wire.names("order", "total", *_WIRE))
    at = Placement((wire.rows, *placement.dims[-1:]), placement.pending)
    _define_rows(part, wire, node.outs[0], got["rows"], at)


def collect(part: Partitioner, node: Node) -> None:
    """rows, routing -> tokens: the transpose of dispatch. Where each slot is a token of its own, there is a dimension
    more."""
    rows, order, *_ = node.args
    wire, k, tokens = wire_of(part, order), node.kwargs["k"], node.kwargs["tokens"]
    value, placement = rows_at(part, wire, rows)
    slots = len(tokens) > len(wire.tokens)
    dims = (*wire.tokens, *([()] * slots))
    shape = Placement(wire.tokens).local_shape(tokens[: len(wire.tokens)], part.ctx.sizes)

    def local(rows: Tensor, inverse: Tensor, total: Tensor | None = None, **at: Tensor) -> dict[str, Tensor]:
        out = slots_p(rows, inverse, total, k=wire.k) if slots else unpack_p(rows, inverse, total, k=k)
        return {"out": _returned(wire, out, at).unflatten(0, shape)}

    out = record(part, local, (value,), wire.names("inverse", "total", *_WIRE))["out"]
    placed = Placement((*dims, *placement.dims[1:]), placement.pending | set(wire.shared))
    settle(part, wire, node.outs[0], out, placed)


def _weights(part: Partitioner, wire: Wire, v: Value) -> Value:
    """Weights of the slots of the tokens that a rank has, or that came: these are sent once."""
    w = part.get(part.placed(v), Placement((*wire.tokens, ())), "rule")
    if id(w) not in wire.arrived:

        def local(w: Tensor, **at: Tensor) -> dict[str, Tensor]:
            return {"w": _sent(wire, w.flatten(0, -2), at)}

        wire.arrived[id(w)] = record(part, local, (w,), wire.names(*_WIRE))["w"], w
    return wire.arrived[id(w)][0]


def combine(part: Partitioner, node: Node) -> None:
    """rows, weights, routing -> tokens, and the rows, for the gradient."""
    rows, weights, order, *_ = node.args
    wire = wire_of(part, order)
    value, placement = rows_at(part, wire, rows)
    w = _weights(part, wire, weights)
    shape = Placement(wire.tokens).local_shape(weights.shape[:-1], part.ctx.sizes)

    def local(rows: Tensor, w: Tensor, inverse: Tensor, total: Tensor | None = None, **at: Tensor) -> dict[str, Tensor]:
        return {"out": _returned(wire, weigh_p(rows, inverse, total, w), at).unflatten(0, shape)}

    out = record(part, local, (value, w), wire.names("inverse", "total", *_WIRE))["out"]
    part.env[id(node.outs[1])] = Opaque(wire, value, placement.pending)  # type: ignore[assignment]
    placed = Placement((*wire.tokens, *placement.dims[1:]), placement.pending | set(wire.shared))
    settle(part, wire, node.outs[0], out, placed)


def combine_bwd(part: Partitioner, node: Node) -> None:
    """Cotangent of the tokens, weights, rows, routing -> cotangents of rows and weights."""
    ct, weights, kept_rows, order, *_ = node.args
    wire, kept = wire_of(part, order), part.env[id(kept_rows)]
    assert isinstance(kept, Opaque)
    p = part.placed(ct)
    last = tuple(a for a in p.home.dims[-1] if a not in {*wire.rows, *wire.shared})
    placement = Placement((*wire.tokens, last))
    value, w = part.get(p, placement, "rule"), _weights(part, wire, weights)
    shape = placement.local_shape((*weights.shape[:-1], ct.shape[-1]), part.ctx.sizes)[:-1]
    rows = None if wire.experts else share(part, wire, node.outs[0].shape[0])

    def local(ct: Tensor, w: Tensor, kept: Tensor, **at: Tensor) -> dict[str, Tensor]:
        ct = _sent(wire, ct.flatten(0, -2), at)
        drows, dw = weigh_bwd_p(ct, kept, at["order"], at["inverse"], at.get("total"), w, rows)
        return {"rows": _within(wire, drows, at), "dw": _returned(wire, dw, at).unflatten(0, shape)}

    got = record(part, local, (value, w, kept.local), wire.names("order", "inverse", "total", *_WIRE))
    _define_rows(part, wire, node.outs[0], got["rows"], Placement((wire.rows, last)))
    pending = kept.pending | set(wire.shared) | set(last)
    settle(part, wire, node.outs[1], got["dw"], Placement((*wire.tokens, ()), pending))
