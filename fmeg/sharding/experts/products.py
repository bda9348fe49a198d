"""Partitioning of the grouped products: rows stay with their experts, features may be sharded."""

from __future__ import annotations

from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Value
from fmeg.sharding.experts.wire import Wire, rows_at, wire_of
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.value import Placement


def weight_at(part: Partitioner, wire: Wire, v: Value) -> tuple[Value, Placement]:
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


def matmul(part: Partitioner, node: Node) -> None:
    """rows, weights -> rows: weights stay, rows get their features."""
    rows, w, ends = node.args
    wire, transposed = wire_of(part, ends), node.kwargs["transposed"]
    weight, at = weight_at(part, wire, w)
    inner, outer = (at.dims[2], at.dims[1]) if transposed else (at.dims[1], at.dims[2])
    p = part.placed(rows)
    rows_at(part, wire, rows)
    target = Placement((wire.rows, inner), p.home.pending - set(inner) - set(outer))
    value = part.get(p, target, "weights stay")
    placed = Placement((wire.rows, outer), target.pending | set(inner))
    out = part.emit(node.op, (value, weight, wire.locals_["ends"]), node.kwargs, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0], ragged=wire if wire.experts else None)


def matmul_dw(part: Partitioner, node: Node) -> None:
    """rows, rows -> the weights' gradient, pending over the axes of rows that hold the same experts."""
    x, y, ends = node.args
    wire = wire_of(part, ends)
    (a, at_a), (b, at_b) = rows_at(part, wire, x), rows_at(part, wire, y)
    if at_a.pending and at_b.pending:
        a, at_a = rows_at(part, wire, x, keep_pending=False)
    d, f = at_a.dims[1], tuple(axis for axis in at_b.dims[1] if axis not in at_a.dims[1])
    pending = at_a.pending | at_b.pending
    if f != at_b.dims[1] or pending & {*d, *f}:
        a, at_a = part.get(part.placed(x), Placement((wire.rows, d)), "rule"), Placement((wire.rows, d))
        b, at_b = part.get(part.placed(y), Placement((wire.rows, f)), "rule"), Placement((wire.rows, f))
        pending = frozenset()
    placed = Placement((wire.experts, d, f), pending | (set(wire.rows) - set(wire.experts)))
    out = part.emit(node.op, (a, b, wire.locals_["ends"]), {}, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0])


def bias(part: Partitioner, node: Node) -> None:
    """rows, a vector for each expert -> rows."""
    rows, b, ends = node.args
    wire = wire_of(part, ends)
    added, at = weight_at(part, wire, b)
    target = Placement((wire.rows, at.dims[1]))
    value = part.get(part.placed(rows), target, "rule")
    out = part.emit(node.op, (value, added, wire.locals_["ends"]), {}, [(node.outs[0].type, target)])
    part.define(node.outs[0], target, out[0], ragged=wire if wire.experts else None)


def sums(part: Partitioner, node: Node) -> None:
    """rows -> their sum for each expert, pending as a weights' gradient is."""
    rows, ends = node.args
    wire = wire_of(part, ends)
    value, at = rows_at(part, wire, rows)
    placed = Placement((wire.experts, at.dims[1]), at.pending | (set(wire.rows) - set(wire.experts)))
    out = part.emit(node.op, (value, wire.locals_["ends"]), {}, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0])
