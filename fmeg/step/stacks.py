"""Which values of a step hold layers as a pipeline stores them, and of which scan; what meets them is stored so too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fmeg.ops.collectives import axis_index
from fmeg.pipeline.op import Pipeline, Storage
from fmeg.program.errors import NoRuleError, ShardingError
from fmeg.program.ir import Node, Program, Value, map_values
from fmeg.program.structured import Gradient, loop_of
from fmeg.sharding.rules import rule_for
from fmeg.sharding.value import Placement

if TYPE_CHECKING:
    from fmeg.sharding.partition import Partitioner


def stored_stacks(
    program: Program,
    paths: Sequence[str],
    layered: Sequence[int],
    table: Mapping[str, tuple[str, ...]],
    sizes: Mapping[str, int],
) -> tuple[Storage | None, dict[int, int]]:
    """How a step's pipelines store layers (None without one), and by id of each value that holds layers, its scan.

    paths     of the inputs
    layered   the inputs with the logical axis `layers` in front
    An input that no pipeline takes, such as a moment of an optimizer, is told by its path, which ends as its
    parameter's does, or by its number of layers.
    """
    storage: Storage | None = None
    of: dict[int, int] = {}
    known = {id(program.inputs[i]): i for i in layered}
    for n in program.nodes:
        if not isinstance(n.op, Pipeline):
            continue
        operands = n.operands()
        found = n.op.storage(table, sizes, [k for k, v in enumerate(operands) if id(v) in known])
        if found is None:
            continue
        if storage is not None and found[0] != storage:
            raise ShardingError(
                "jit: two pipelines in one function store the layers in different orders; give both the same schedule "
                "and stages"
            )
        storage, stacks = found
        of.update({id(operands[k]): scan for k, scan in stacks.of.items()})
        of.update({id(n.outs[k]): scan for k, scan in stacks.stacked.items()})
    if storage is None:
        return None, {}
    owners = {paths[known[v]]: scan for v, scan in of.items() if v in known}
    for v, i in known.items():
        if v not in of:
            of[v] = _by_path(paths[i], program.inputs[i].shape[0], owners, storage)
    for n in program.nodes:
        _follow(n, of, storage)
    return storage, of


def _by_path(path: str, layers: int, owners: Mapping[str, int], storage: Storage) -> int:
    """The scan of an input: that of the parameter whose path shares most of its end."""

    def shared(other: str) -> int:
        n = 0
        for a, b in zip(reversed(path.split(".")), reversed(other.split(".")), strict=False):
            if a != b:
                break
            n += 1
        return n

    fitting = {p: k for p, k in owners.items() if storage.lengths[k] == layers}
    best = max(map(shared, fitting), default=0)
    scans = {k for p, k in fitting.items() if shared(p) == best}
    if len({storage.orders[k] for k in scans}) != 1:
        raise ShardingError(
            f"jit: {path} has {layers} layers in front, but it cannot be told of which scan over layers: its path ends "
            f"like none of {', '.join(owners)}"
        )
    return min(scans)


def _follow(n: Node, of: dict[int, int], storage: Storage) -> None:
    """The results of a node that hold the layers that its operands hold."""
    if loop_of(n) is not None:
        return
    mine = [v for v in n.operands() if id(v) in of]
    if isinstance(n.op, Gradient):
        mine = mine[-1:]
    orders = {storage.orders[of[id(v)]] for v in mine}
    if len(orders) > 1:
        raise ShardingError(
            f"jit: {n.opname} at {n.source} combines layers of two scans, which the pipeline stores in different "
            "orders; use them one by one"
        )
    for o in n.outs:
        same: list[Value] = [v for v in mine if v.shape[:1] == o.shape[:1]]
        if same and id(o) not in of:
            of[id(o)] = of[id(same[0])]


@dataclass(frozen=True)
class AsStored:
    """Layers in their own order -> as a pipeline along `axis` stores them; each rank takes its rows of the whole."""

    axis: str
    order: tuple[int, ...]
    name: str = "as_stored"

    def partition(self, part: Partitioner, node: Node) -> None:
        (v,) = node.operands()
        given = part.placed(v)
        rest = tuple(tuple(a for a in axes if a != self.axis) for axes in given.home.dims[1:])
        whole, stored = Placement(((), *rest)), Placement(((self.axis,), *rest))
        rows = len(self.order) // part.ctx.sizes[self.axis]

        def mine(x: torch.Tensor) -> torch.Tensor:
            layers = torch.tensor([max(i, 0) for i in self.order], device=x.device).unflatten(0, (-1, rows))
            return x.index_select(0, layers.index_select(0, axis_index((self.axis,)).reshape(1)).flatten())

        (local,) = part.inline(mine, (part.get(given, whole, "operand"),), {}, [(v.type, stored)])
        part.define(node.outs[0], stored, local, weight=given.weight)


def met(nodes: Sequence[Node], of: dict[int, int], storage: Storage) -> list[Node]:
    """The nodes, where a value that holds layers in their own order (statistics of layers, a rate for each) goes
    together with one that a pipeline stores in another: it is brought into that order first."""
    out: list[Node] = []
    for n in nodes:
        swap: dict[int, Value] = {}
        for v, scan in _plain_beside_stored(n, of):
            order = storage.orders[scan]
            if order is not None and id(v) not in swap:
                first = Node(AsStored(storage.axis, order), (v,), {}, source=n.source, phase=n.phase)
                first.outs = (Value(v.type, first, name=v.name),)
                out.append(first)
                swap[id(v)] = first.outs[0]
        if swap:
            args, kwargs = _swapped(n, swap)
            n = Node(n.op, args, kwargs, n.outs, n.source, n.phase, n.tags)
        out.append(n)
    return out


def _swapped(n: Node, swap: Mapping[int, Value]) -> tuple[tuple, dict]:
    args, kwargs = map_values(lambda v: swap.get(id(v), v), (n.args, n.kwargs))
    return args, kwargs


def _plain_beside_stored(n: Node, of: dict[int, int]) -> list[tuple[Value, int]]:
    """Operands whose first dimension is, by the node's rule, the same as that of one that holds layers of a scan."""
    operands = n.operands()
    stored = [k for k, v in enumerate(operands) if id(v) in of]
    plain = [k for k, v in enumerate(operands) if id(v) not in of and v.ndim]
    if not stored or not plain or loop_of(n) is not None or hasattr(n.op, "partition"):
        return []
    try:
        ins = rule_for(n).ins
    except NoRuleError:
        return []
    return [
        (operands[k], of[id(operands[j])]) for k in plain for j in stored[:1] if ins[k][0] and ins[k][0] == ins[j][0]
    ]
