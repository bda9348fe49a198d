"""What the partitioner knows of a routing, and where the tokens and rows lie that belong to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Value
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.value import Placement, count

DimAxes = tuple[tuple[str, ...], ...]


def minus(dims: DimAxes, gone: Any) -> DimAxes:
    """Without some axes."""
    return tuple(tuple(a for a in d if a not in gone) for d in dims)


def flat(dims: DimAxes) -> tuple[str, ...]:
    """All axes, major first."""
    return tuple(a for d in dims for a in d)


@dataclass
class Wire:
    """How one routing lies on the mesh.

    experts   the axes A of the experts, major first; `exchanged` X, `shared` G
    given     dims of the tokens as they came; `tokens`, after the gather over `gathered`, axes of G
    rows      axes that shard rows: those of the experts, then others that shard tokens
    k         slots of a token; `here`, tokens of a rank; `members`, ranks of X
    width     with a bound: copies of tokens that one rank may send to another; `room`, rows that a rank may have
    arrivals  copies that come to a rank, as types say
    locals_   local values by name: order, inverse, ends, total of the rows that a rank makes of tokens that it has, or
              that came; out, out_inverse, out_total, sent of the copies of its own tokens; host, sizes of the exchange;
              places, counts. Those that there are
    arrived   weights of slots by those of tokens that they came from: (these, those)
    kept      values that the partitioner knows by their identity
    """

    node: Node
    experts: tuple[str, ...]
    exchanged: tuple[str, ...]
    shared: tuple[str, ...]
    given: DimAxes
    tokens: DimAxes
    rows: tuple[str, ...]
    k: int
    here: int
    members: int
    arrivals: int = 0
    width: int | None = None
    room: int | None = None
    arrived: dict[int, tuple[Value, Value]] = field(default_factory=dict)
    locals_: dict[str, Value] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    @property
    def gathered(self) -> set[str]:
        return set(flat(self.given)) - set(flat(self.tokens))

    @property
    def columns(self) -> int:
        """Ranks that a token may go to."""
        return min(self.k, self.members)

    def names(self, *names: str) -> dict[str, Value]:
        return {n: self.locals_[n] for n in names if n in self.locals_}


class Opaque:
    """In place of a `Placed`: a value that is each rank's own business, for the operations of this package alone."""

    def __init__(self, wire: Wire, local: Value, pending: frozenset[str] = frozenset()) -> None:
        self.wire, self.local, self.pending = wire, local, pending

    def __getattr__(self, name: str) -> Any:
        raise ShardingError(
            f"the routing made at {self.wire.node.source} is read by something else than dispatch, combine and the "
            "grouped products, or leaves the body that made it; on a mesh its tensors mean nothing to anyone else. For "
            "statistics, count the experts' indices themselves"
        )


def wire_of(part: Partitioner, v: Value) -> Wire:
    """Of the routing that a value is part of."""
    p: Any = part.env[id(v)]
    if not isinstance(p, Opaque):
        raise ShardingError(f"{part.source}: the routing is not one that fmeg.ops.route made in this body")
    return p.wire


def record(part: Partitioner, fn: Callable[..., dict[str, Tensor]], args: tuple, kwargs: dict) -> dict[str, Value]:
    """Trace `fn` at local shapes; its results by name. They have no placement that others could use."""
    names: list[str] = []

    def listed(*a: Any, **k: Any) -> list[Tensor]:
        out = fn(*a, **k)
        names[:] = list(out)
        return list(out.values())

    values = part.trace_in(listed, args, kwargs)
    return dict(zip(names, values, strict=True))


def share(part: Partitioner, wire: Wire, rows: int) -> int:
    """An even share of the rows: what types say that a rank has."""
    return rows // count(wire.rows, part.ctx.sizes)


def rows_at(part: Partitioner, wire: Wire, v: Value, keep_pending: bool = True) -> tuple[Value, Placement]:
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


def tokens_at(part: Partitioner, wire: Wire, v: Value) -> tuple[Value, Placement]:
    """Local tokens with their last dimension, gathered as the routing wants them; no pending sum that it could mix."""
    p = part.placed(v)
    busy = {*wire.rows, *wire.shared}
    last = tuple(a for a in p.home.dims[-1] if a not in busy)
    dims = (*wire.tokens, *([()] * (v.ndim - 1 - len(wire.tokens))), last)
    target = Placement(dims, p.home.pending - busy - set(flat(dims)))
    return part.get(p, target, "rule"), target


def settle(part: Partitioner, wire: Wire, v: Value, local: Value, placement: Placement) -> None:
    """A result for tokens: what was gathered for it goes back to where it came from, as a sum."""
    local.placement = placement.describe(v.type)
    p = part.define(v, placement, local)
    if wire.gathered:
        home = Placement((*wire.given, *placement.dims[len(wire.given) :]), placement.pending - wire.gathered)
        part.get(p, home, "rule")
        p.home = home
