"""Which values to keep for the backward pass, as a minimum cut of the forward graph.

Each value v is kept, computed again, or not needed; each operation n is done again or not. On the side of the source
is what the backward pass does not have:

    source -> n, price(n)      n is done again at its price; without a price it cannot be
    n -> v                     v is computed again only if n is
    v -> v', bytes(v)          v is kept
    u' -> n                    to do n again is to have its operands
    v' -> sink                 v is wanted

The finite edges that a cut crosses are what is kept and what is done again; a minimum cut costs the least, and of all
those this takes the one that does the least again.

Source: He & Yu 2023, "Transcending Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware" (MLSys).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import networkx

from fmeg.program.cost import node_bytes, node_flops
from fmeg.program.ir import Node, Program, Value
from fmeg.program.memory import storages

Price = Callable[[Node], float | None]
SCALE = 1 << 20  # a byte in a graph's capacities, which are integers
ROUNDS = 40  # of the search for the weight of time against bytes


@dataclass(frozen=True)
class Cut:
    """kept: values by id; again: ids of operations that are done again."""

    kept: dict[int, Value]
    again: set[int]


@dataclass
class Forward:
    """The forward nodes of a joint Program: what is free, what is wanted, what each value takes.

    free    ids of the inputs that the backward pass has anyway
    wanted  what the backward pass reads
    never   ids of values that must not be kept
    """

    joint: Program
    nodes: Sequence[Node]
    free: Collection[int]
    wanted: Iterable[Value]
    never: Collection[int] = ()

    def __post_init__(self) -> None:
        self.bytes = {i: size for i, (_, size) in storages(self.joint).items()}

    def size(self, values: Iterable[Value]) -> int:
        """Bytes of some values."""
        return sum(self.bytes[id(v)] for v in values)

    def cut(self, price: Price) -> Cut:
        """The cheapest choice when an operation costs `price`, in bytes, to do again; None: it is not done again.

        >>> import torch
        >>> from fmeg.program.trace import trace
        >>> p = trace(lambda x: x.double().sin(), torch.zeros(3)).program
        >>> forward = Forward(p, p.nodes, (), [p.nodes[0].outs[0]])           # wanted: x.double()
        >>> [v is p.inputs[0] for v in forward.cut(lambda n: 0.0).kept.values()]
        [True]
        """
        g = networkx.DiGraph()
        g.add_nodes_from(("source", "sink"))
        values: dict[int, Value] = {}

        def add(v: Value) -> tuple[str, int]:
            if id(v) not in values and id(v) not in self.free:
                values[id(v)] = v
                g.add_edge(("before", id(v)), ("after", id(v)), **_capacity(id(v), self.bytes, self.never))
                if v.node is None:
                    g.add_edge("source", ("before", id(v)))
            return ("after", id(v))

        for n in self.nodes:
            paid = price(n)
            g.add_edge("source", ("node", id(n)), **({} if paid is None else {"capacity": round(paid * SCALE)}))
            for v in n.operands():
                if id(v) not in self.free:
                    g.add_edge(add(v), ("node", id(n)))
            for o in n.outs:
                add(o)
                g.add_edge(("node", id(n)), ("before", id(o)))
        for v in self.wanted:
            if id(v) not in self.free:
                g.add_edge(add(v), "sink")
        _, (_, ours) = networkx.minimum_cut(g, "source", "sink")
        kept = {i: v for i, v in values.items() if ("after", i) in ours and ("before", i) not in ours}
        return Cut(kept, {id(n) for n in self.nodes if ("node", id(n)) in ours})

    def within(self, limit: int, seconds: Price) -> Cut:
        """The choice of at most `limit` bytes that takes the least time, as far as weights of time find it."""

        def at(weight: float) -> Cut:
            return self.cut(lambda n: None if (t := seconds(n)) is None else t * weight)

        def fits(c: Cut) -> bool:
            return self.size(c.kept.values()) <= limit

        best = at(0.0)
        if not fits(best):
            raise ValueError(
                f"budget: {self.joint.name} keeps at least {self.size(best.kept.values())} bytes on a rank, given a "
                f"budget of {limit}; raise it, or shard the residual stream"
            )
        low, high = 0.0, 2.0**70
        if fits(c := at(high)):
            return c
        for _ in range(ROUNDS):
            middle = (low * high) ** 0.5 if low else high / 2**10
            c = at(middle)
            low, high, best = (middle, high, c) if fits(c) else (low, middle, best)
            if low and high / low < 1.01:
                break
        return self._filled(best, limit, seconds)

    def _filled(self, c: Cut, limit: int, seconds: Price) -> Cut:
        """What is left of the budget goes to the values that save most time a byte."""
        kept = dict(c.kept)
        while True:
            again = self._again(kept)
            now, room = _time(again, seconds), limit - self.size(kept.values())
            best, saved = None, 0.0
            for v in (o for n in again for o in n.outs):
                size = self.bytes[id(v)]
                if id(v) in kept or id(v) in self.never or not 0 < size <= room:
                    continue
                gain = (now - _time(self._again({**kept, id(v): v}), seconds)) / size
                if gain > saved:
                    best, saved = v, gain
            if best is None:
                return Cut(self._needed(kept), {id(n) for n in again})
            kept[id(best)] = best

    def _again(self, kept: Mapping[int, Value]) -> list[Node]:
        """What is done again when these are kept."""
        found: set[int] = set()
        todo = list(self.wanted)
        while todo:
            v = todo.pop()
            if id(v) not in self.free and id(v) not in kept and v.node is not None and id(v.node) not in found:
                found.add(id(v.node))
                todo += v.node.operands()
        return [n for n in self.nodes if id(n) in found]

    def _needed(self, kept: Mapping[int, Value]) -> dict[int, Value]:
        read = {id(v) for v in self.wanted} | {id(v) for n in self._again(kept) for v in n.operands()}
        return {i: v for i, v in kept.items() if i in read}


def _capacity(i: int, sizes: Mapping[int, int], never: Collection[int]) -> dict[str, int]:
    return {} if i in never else {"capacity": sizes[i] * SCALE}


def _time(nodes: Iterable[Node], seconds: Price) -> float:
    return sum(seconds(n) or 0.0 for n in nodes)


def seconds(node: Node, flops: float, bandwidth: float) -> float:
    """How long an operation takes at these rates."""
    return node_flops(node) / flops + node_bytes(node) / bandwidth
