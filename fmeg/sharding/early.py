"""The order of a body's nodes on a mesh where collectives go on while others compute: begin early, wait late.

The nodes that lead to a collective are the body's spine; the others, such as products for weights' gradients, can wait.
In the given order, but:

    a collective                       begins as soon as its operands are there
    what needs one that is under way   comes after nodes off the spine whose estimated time covers it, if there are any
    nodes off the spine                are kept for that
    what the host reads                comes after all of the spine that is ready: the GPU goes on while the host waits

Every node still comes after those it needs, so no result changes.
"""

from __future__ import annotations

from collections.abc import Sequence

from fmeg.program.cost import node_bytes, node_flops
from fmeg.program.ir import Node
from fmeg.program.structured import loop_of
from fmeg.sharding.experts.copies import to_host_p
from fmeg.sharding.groups import communicates

ARITHMETIC, MEMORY, LINK = 5e14, 3e12, 2.5e11  # operations and bytes a second of one H200 with its neighbours


def early(nodes: Sequence[Node]) -> list[Node]:
    """The nodes in that order; as they are where there is a loop, or nothing to overlap."""
    if not any(communicates(n) for n in nodes) or any(_stays(n) for n in nodes):
        return list(nodes)
    return _Order(nodes).run()


def _stays(n: Node) -> bool:
    """Whether it is a step of its own that says nothing of its time."""
    return loop_of(n) is not None or (hasattr(n.op, "build") and not getattr(n.op, "movable", False))


class _Order:
    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.place = {id(n): i for i, n in enumerate(nodes)}
        maker = {id(o): n for n in nodes for o in n.outs}
        self.needs = {id(n): list({id(m): m for v in n.operands() if (m := maker.get(id(v)))}.values()) for n in nodes}
        self.spine: set[int] = set()
        for n in reversed(nodes):
            if communicates(n) or id(n) in self.spine:
                self.spine.update(id(m) for m in self.needs[id(n)])
        self.missing = {id(n): len(self.needs[id(n)]) for n in nodes}
        self.users: dict[int, list[Node]] = {}
        for n in nodes:
            for m in self.needs[id(n)]:
                self.users.setdefault(id(m), []).append(n)
        self.ready = [n for n in nodes if not self.missing[id(n)]]
        self.now = 0.0
        self.link = 0.0  # when the link is free
        self.ends: dict[int, float] = {}  # of collectives under way

    def run(self) -> list[Node]:
        out: list[Node] = []
        while self.ready:
            n = min(self.ready, key=self._rank)
            self.ready.remove(n)
            self._place(n)
            out.append(n)
            for u in self.users.get(id(n), ()):
                self.missing[id(u)] -= 1
                if not self.missing[id(u)]:
                    self.ready.append(u)
        return out

    def _rank(self, n: Node) -> tuple[float, int, int]:
        """What must wait least first; of those that need not, collectives, the spine, what the host reads, the others,
        in the given order."""
        kind = 0 if communicates(n) else 2 if n.op is to_host_p else 1 if id(n) in self.spine else 3
        return max(self._arrived(n), self.now), kind, self.place[id(n)]

    def _arrived(self, n: Node) -> float:
        """When all that it needs is there."""
        return max((self.ends.get(id(m), 0.0) for m in self.needs[id(n)]), default=0.0)

    def _place(self, n: Node) -> None:
        self.now = max(self.now, self._arrived(n))
        if communicates(n):
            self.link = max(self.link, self.now) + node_bytes(n) / LINK
            self.ends[id(n)] = self.link
        else:
            self.now += max(node_flops(n) / ARITHMETIC, node_bytes(n) / MEMORY)
