"""Partitioning of rows sorted by expert in low precision: largest values, quantised rows and their products.

A largest value, and so a scale, is that of all who share it, wherever they lie: a rank's own are reduced over the axes
that cut a group of rows or columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fmeg.ops.collectives import all_reduce
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Value
from fmeg.sharding.experts.places import in_order, places_of
from fmeg.sharding.experts.products import weight_at
from fmeg.sharding.experts.wire import Opaque, Wire, record, rows_at, wire_of
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.policy import split_dims
from fmeg.sharding.value import Placement, count

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Cut:
    """A dimension sharded over `axes`: which of these shard its scales, which lie within a group of neighbours that
    share one, and the grid at local size."""

    axes: Axes
    of_scale: Axes
    within: Axes
    grid: int


def cut(part: Partitioner, axes: Axes, size: int, grid: int) -> Cut | None:
    """How sharding a dimension cuts a grid's groups; None where it cuts some and not others."""
    if grid < 2:
        return Cut(axes, axes if grid else (), () if grid else axes, grid)
    sizes = {"block": size // grid, "in": grid}
    got = split_dims((("block", "in"),), (axes,), sizes, part.ctx.sizes)
    outer, inner = got.get("block", ()), got.get("in", ())
    if (*outer, *inner) != axes or (inner and count(outer, part.ctx.sizes) != sizes["block"]):
        return None
    return Cut(axes, outer, inner, grid // count(inner, part.ctx.sizes))


def _even(part: Partitioner, axes: Axes, size: int, grid: int) -> Cut:
    """The same of an operand as it was quantised, which no axis cuts unevenly."""
    found = cut(part, axes, size, grid)
    if found is None:
        raise ShardingError(
            f"{part.source}: a dimension of {size} in blocks of {grid} is sharded over {axes}, "
            f"{count(axes, part.ctx.sizes)} parts, which cuts blocks unevenly. Shard it by whole blocks, or leave it "
            "out"
        )
    return found


def _rows(part: Partitioner, wire: Wire, v: Value, grid: int) -> tuple[Value, Placement, Cut]:
    """Rows where they are scaled: their columns gathered where blocks would be cut unevenly."""
    value, at = rows_at(part, wire, v, keep_pending=False)
    c = cut(part, at.dims[1], v.shape[1], grid)
    if c is None:
        at, c = Placement((wire.rows, ())), _even(part, (), v.shape[1], grid)
        value = part.get(part.placed(v), at, "conflict")
    return value, at, c


class Scales(Opaque):
    """Scales, or largest values, of runs of rows: as many as the routing says, for who knows it."""

    def __init__(self, wire: Wire, local: Value, columns: Axes) -> None:
        super().__init__(wire, local)
        self.columns = columns


def _between(wire: Wire, share: int) -> Axes:
    """Axes of rows that share a scale; `share`: the grid of rows."""
    if share == 1:
        return ()
    return wire.rows if share == 0 else tuple(a for a in wire.rows if a not in wire.experts)


def _placement(wire: Wire, share: int, columns: Axes) -> Placement:
    dims = {0: (), 1: wire.rows}.get(share, wire.experts)
    return Placement((dims, columns))


def _define(part: Partitioner, wire: Wire, v: Value, local: Value, share: int, columns: Axes) -> None:
    if share > 1:
        part.env[id(v)] = Scales(wire, local, columns)  # type: ignore[assignment]
        return
    at = _placement(wire, share, columns)
    local.placement, local.type = at.describe(v.type), at.local_type(v.type, part.ctx.sizes)
    part.define(v, at, local, ragged=wire if share == 1 and wire.experts else None)


def _scales(part: Partitioner, wire: Wire, v: Value, share: int, columns: Axes) -> Value:
    """Local scales where an operand of rows is: with its columns, if they differ by columns."""
    p: Any = part.env[id(v)]
    if not isinstance(p, Scales):
        share = 0 if v.shape[0] == 1 and p.home.dims[0] == () else share
        return part.get(p, _placement(wire, share, columns), "rule")
    if p.columns != columns:
        raise ShardingError(
            f"{part.source}: rows in low precision were scaled by runs of rows with their columns on {p.columns}, and "
            f"are needed on {columns}. Let the layout keep them there, or choose another recipe for these parameters"
        )
    return p.local


def _runs(part: Partitioner, wire: Wire, share: int) -> dict[str, Value]:
    """What else says which run of an expert's rows a row is in, where this does not follow from the rank's own."""
    return places_of(part, wire) if share > 1 and not in_order(wire, part.ctx.sizes) else {}


def amax(part: Partitioner, node: Node) -> None:
    """rows -> largest values."""
    x, ends, (share, columns) = node.args[:3]
    wire = wire_of(part, ends)
    value, _, c = _rows(part, wire, x, columns)
    runs = _runs(part, wire, share)
    room = None
    if runs:
        here = ends.shape[0] // count(wire.experts, part.ctx.sizes)
        room = (x.shape[0] + here * (share - 1)) // share
    axes = (*_between(wire, share), *c.within)

    def local(x: Tensor, ends: Tensor, places: Tensor | None = None, counts: Tensor | None = None) -> dict[str, Tensor]:
        m = node.op(x, ends, (share, c.grid), places, counts, room)
        return {"amax": all_reduce(m, axes, "max") if axes else m}

    got = record(part, local, (value, wire.locals_["ends"]), runs)
    _define(part, wire, node.outs[0], got["amax"], share, c.of_scale)


def quantize(part: Partitioner, node: Node) -> None:
    """rows, largest values -> rows in low precision, and their scales."""
    x, top_of, top, ends, (share, columns), format = node.args[:6]
    wire = wire_of(part, ends)
    value, at, c = _rows(part, wire, x, columns)
    m = _scales(part, wire, top_of, share, c.of_scale)
    t = None if top is None else part.get(part.placed(top), Placement(((), ())), "rule")
    runs = _runs(part, wire, share)

    def local(x: Tensor, m: Tensor, t: Tensor | None, ends: Tensor, **runs: Tensor) -> dict[str, Tensor]:
        q, s = node.op(x, m, t, ends, (share, c.grid), format, **runs)
        return {"q": q, "scale": s}

    got = record(part, local, (value, m, t, wire.locals_["ends"]), runs)
    q = node.outs[0]
    got["q"].placement, got["q"].type = at.describe(q.type), at.local_type(q.type, part.ctx.sizes)
    part.define(q, at, got["q"], ragged=wire if wire.experts else None)
    _define(part, wire, node.outs[1], got["scale"], share, c.of_scale)


def matmul(part: Partitioner, node: Node) -> None:
    """rows, weights -> rows: weights stay, rows get their features."""
    x, sx, w, sw, ends, (grid_x, grid_w), transposed, dtype, fast = node.args
    wire = wire_of(part, ends)
    matrices, at = weight_at(part, wire, w)
    inner, outer = (at.dims[2], at.dims[1]) if transposed else (at.dims[1], at.dims[2])
    rows_at(part, wire, x)
    value = part.get(part.placed(x), Placement((wire.rows, inner)), "weights stay")
    c = _even(part, inner, x.shape[1], grid_x[1])
    of_rows = _scales(part, wire, sx, grid_x[0], c.of_scale)
    cuts = [_even(part, axes, n, g) for axes, n, g in zip(at.dims, w.shape, grid_w, strict=True)]
    of_weights = part.get(part.placed(sw), Placement(tuple(k.of_scale for k in cuts)), "parameter")
    grids = (grid_x[0], c.grid), tuple(k.grid for k in cuts)
    placed = Placement((wire.rows, outer), frozenset(inner))
    args = (value, of_rows, matrices, of_weights, wire.locals_["ends"], grids, transposed, dtype, fast)
    out = part.emit(node.op, args, {}, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0], ragged=wire if wire.experts else None)


def matmul_dw(part: Partitioner, node: Node) -> None:
    """rows, rows -> the weights' gradient, pending over the axes of rows that hold the same experts."""
    x, sx, y, sy, ends, grids, dtype = node.args[:7]
    wire = wire_of(part, ends)
    d = rows_at(part, wire, x)[1].dims[1]
    f = tuple(a for a in rows_at(part, wire, y)[1].dims[1] if a not in d)
    args, local_grids = [], []
    for v, s, axes, grid in zip((x, y), (sx, sy), (d, f), grids, strict=True):
        c = _even(part, axes, v.shape[1], grid[1])
        args += [
            part.get(part.placed(v), Placement((wire.rows, axes)), "rule"),
            _scales(part, wire, s, grid[0], c.of_scale),
        ]
        local_grids.append((grid[0], c.grid))
    runs = _runs(part, wire, grids[0][0])
    placed = Placement((wire.experts, d, f), frozenset(wire.rows) - set(wire.experts))
    given = (*args, wire.locals_["ends"], tuple(local_grids), dtype, *runs.values())
    out = part.emit(node.op, given, {}, [(node.outs[0].type, placed)])
    part.define(node.outs[0], placed, out[0])
