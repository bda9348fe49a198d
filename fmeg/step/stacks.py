"""Which values of a step hold layers as a pipeline stores them, and of which scan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fmeg.pipeline.op import Pipeline, Storage
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Program, Value
from fmeg.program.structured import Gradient, loop_of


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
