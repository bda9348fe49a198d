"""What I leaves for W: the fewest bytes from which W's products can be made.

A cut through the backward Program between what is there after I and the operands of W's products. A value that W alone
needs may be made in either part; one that I needs as well may be made again in W if that costs little. Among the cuts
of fewest bytes the one that leaves W least to do is taken. Parameters and the batch are there anyway and weigh nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fmeg.program.ir import Node, Program, Value
from fmeg.program.memory import storages
from fmeg.sharding.residuals import is_cheap
from fmeg.sharding.structured import HANDLE

_NO_LIMIT = 1 << 62


@dataclass(eq=False)
class Handover:
    """values    what is held between I and W: inputs of the Program, and values that I makes
    again     ids of the nodes that W runs to make its operands of them
    nbytes    of the storages of `values`
    """

    values: list[Value]
    again: set[int]
    nbytes: int


def handover(program: Program, mine: Collection[int], products: Sequence[Node], free: Collection[int]) -> Handover:
    """The cheapest cut.

    mine      ids of the nodes that I runs
    products  the nodes that W must run
    free      ids of the inputs that weigh nothing
    """
    size = storages(program)
    maker = {id(o): n for n in program.nodes for o in n.outs}
    late = {id(o) for n in products for o in n.outs}
    wanted = [v for n in products for v in n.operands() if id(v) not in late]
    graph = _Flow()
    todo = list(wanted)
    for v in wanted:
        graph.edge((id(v), "out"), "sink", _NO_LIMIT)
    seen: dict[int, Value] = {}
    while todo:
        v = todo.pop()
        if id(v) in seen:
            continue
        seen[id(v)] = v
        if id(v) in free:
            continue
        graph.edge((id(v), "in"), (id(v), "out"), size[id(v)][1])
        node = maker.get(id(v))
        if node is None or (id(node) in mine and not is_cheap(node)):
            graph.edge("source", (id(v), "in"), _NO_LIMIT)
            continue
        for u in node.operands():
            graph.edge((id(u), "out"), (id(v), "in"), _NO_LIMIT)
            todo.append(u)
    below = graph.sink_side()
    values = [v for k, v in seen.items() if (k, "out") in below and (k, "in") not in below and k not in free]
    held = {id(v) for v in values}
    again: set[int] = set()
    todo = [v for v in wanted if id(v) not in held]
    while todo:
        node = maker.get(id(todo.pop()))
        if node is not None and id(node) not in again:
            again.add(id(node))
            todo += [v for v in node.operands() if id(v) not in held]
    return Handover(values, again, bytes_of(program, values))


def bytes_of(program: Program, values: Iterable[Value]) -> int:
    """Bytes of the storages that hold values of a Program, each once; what stands for a loop's residuals has none."""
    size = storages(program)
    return sum(dict(size[id(v)] for v in values if v.type != HANDLE).values())


Vertex = tuple[int, str] | str


class _Flow:
    """Maximal flow by shortest augmenting paths."""

    def __init__(self) -> None:
        self.left: dict[Vertex, dict[Vertex, int]] = {"source": {}, "sink": {}}

    def edge(self, a: Vertex, b: Vertex, capacity: int) -> None:
        self.left.setdefault(a, {})[b] = capacity
        self.left.setdefault(b, {}).setdefault(a, 0)

    def sink_side(self) -> set[Vertex]:
        """The vertices from which the sink can still be reached when the flow is maximal: of the smallest cuts, the one
        nearest to the sink."""
        while (path := self._path()) is not None:
            most = min(self.left[a][b] for a, b in path)
            for a, b in path:
                self.left[a][b] -= most
                self.left[b][a] += most
        found: set[Vertex] = {"sink"}
        todo: list[Vertex] = ["sink"]
        while todo:
            b = todo.pop()
            for a in self.left[b]:
                if a not in found and self.left[a][b]:
                    found.add(a)
                    todo.append(a)
        return found

    def _path(self) -> list[tuple[Vertex, Vertex]] | None:
        came: dict[Vertex, Vertex] = {"source": "source"}
        queue: deque[Vertex] = deque(["source"])
        while queue and "sink" not in came:
            a = queue.popleft()
            for b, room in self.left[a].items():
                if room and b not in came:
                    came[b] = a
                    queue.append(b)
        if "sink" not in came:
            return None
        path: list[tuple[Vertex, Vertex]] = []
        end: Vertex = "sink"
        while end != "source":
            path.append((came[end], end))
            end = came[end]
        return path
