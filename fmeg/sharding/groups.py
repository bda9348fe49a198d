"""The nodes of a local Program as steps: runs of compute nodes, and between them collectives and loops, each alone.

Where a backend can begin a collective and wait for it later, its step begins it, and the first step that needs a result
waits first. A run of compute nodes is cut there, so that what does not need the results is before the wait.

Collectives that stand behind a loop and do not need its results are begun in its last step, which hides them, with what
they need: they ride. What a loop gathers for its first step is begun behind the loop before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fmeg.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AXIS_INDEX,
    EXCHANGE_ROWS,
    PPERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from fmeg.program.ir import Node, Value
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward

SCANS = (LocalScan, LocalScanBackward)
LOOPS = (*SCANS, LocalAccumulate)
BEGUN = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE_ROWS, PPERMUTE, REDUCE_SCATTER)


@dataclass
class Group:
    """nodes   of one step
    begins     the step begins a collective, whose results are there when a later step has waited for it
    waits      steps, by number, to wait for before this one
    rides      it is run in the last step of the loop before it
    """

    nodes: list[Node]
    begins: bool = False
    waits: list[int] = field(default_factory=list)
    rides: bool = False

    @property
    def carries(self) -> bool:
        """Whether it is a loop in whose last step others may run."""
        return isinstance(self.nodes[0].op, SCANS)


def alone(node: Node) -> bool:
    """Whether a node is a step of its own: a collective, a loop, or what brings its own way to run."""
    return isinstance(node.op, (Collective, *LOOPS)) or hasattr(node.op, "build")


def communicates(node: Node) -> bool:
    """Whether a node is a collective that can be begun and waited for later: rows over no axes do not move."""
    return node.op in BEGUN and bool(node.args[1])


def opaque(node: Node) -> bool:
    """Whether its shapes, or what it does, depend on data: it runs as it is written and is not compiled."""
    return "opaque" in node.tags


def grouped(nodes: Sequence[Node], begin: bool = False, later: bool = False) -> tuple[list[Group], list[int]]:
    """The steps, and those that are waited for at the end. A rank's index, which needs nothing, comes first.

    begin   collectives are begun and waited for, if there is a step between
    later   there may be something between the last step and the end
    """
    groups = [Group([n]) for n in nodes if n.op is AXIS_INDEX]
    open_run = False
    flying: dict[int, int] = {}  # value -> the step that makes it
    for n in nodes:
        if n.op is AXIS_INDEX:
            continue
        waits = list(dict.fromkeys(flying[id(v)] for v in n.operands() if id(v) in flying))
        if alone(n) or not open_run or waits or opaque(n) != opaque(groups[-1].nodes[0]):
            groups.append(Group([n], waits=waits))
        else:
            groups[-1].nodes.append(n)
        open_run = not alone(n)
        flying = {v: g for v, g in flying.items() if g not in waits}
        if begin and communicates(n):
            groups[-1].begins = True
            flying.update((id(o), len(groups) - 1) for o in n.outs)
    for i, g in enumerate(groups):
        if begin and g.carries:
            for rider in riders(groups, i):
                rider.rides = True
    for i, g in enumerate(groups):
        g.waits = _worth(groups, g.waits, i)
    last = list(dict.fromkeys(flying.values()))
    return groups, last if later else _worth(groups, last, len(groups))


def _worth(groups: Sequence[Group], waits: list[int], here: int) -> list[int]:
    """No waits where nothing could run meanwhile: the collectives then run where they stand."""
    if len(waits) == here - min(waits, default=here) and not any(groups[g].rides for g in waits):
        for g in waits:
            groups[g].begins = False
        return []
    return waits


def riders(groups: Sequence[Group], loop: int) -> list[Group]:
    """Steps right behind a loop, up to the last that begins a collective, that need neither its results nor a wait."""
    made = {id(o) for o in groups[loop].nodes[0].outs}
    found, begun = [], 0
    for g in groups[loop + 1 :]:
        ready = not g.waits and not any(id(v) in made for n in g.nodes for v in n.operands())
        if not ready or (alone(g.nodes[0]) and not g.begins):
            break
        found.append(g)
        begun = len(found) if g.begins else begun
    return found[:begun]


def first_ahead(groups: Sequence[Group], loop: int, needs: Sequence[Value]) -> int:
    """Before which step what a loop's first step is given can be begun: when all it needs is there, and behind the loop
    before; that of the loop itself where nothing would run meanwhile."""
    needed = set(map(id, needs))
    at = loop
    for i in reversed(range(loop)):
        g = groups[i]
        makes = any(id(o) in needed for n in g.nodes for o in n.outs)
        if makes and g.begins:
            return loop
        if makes or g.rides or isinstance(g.nodes[0].op, LOOPS):
            break
        at = i
    return at if any(not g.begins for g in groups[at:loop]) else loop
