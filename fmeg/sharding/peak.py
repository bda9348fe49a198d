"""What `torch.cuda.max_memory_allocated` will show: the executor's run of a local Program, followed value by value.

Unlike `fmeg.program.memory`, which counts what must live at once, this counts what the executor holds:

    a compiled run   holds its inputs until it returns; inside, only values that reach memory count: results of products
                     and other kernels of their own, what these read, results of reductions, and results of the run.
                     Pointwise values between them are fused, or lie where an operand lay that nothing reads any more
    a loop           has its stacks whole from the first step (compiled backward loops: from before it), its residuals
                     step by step, running sums, and the carries; a step's residuals are dropped as its run uses them
    what is given    results written into the memory of an input that is given up cost nothing

Workspaces inside kernels, rounding and what the allocator cannot reuse are not known; so what is predicted is a little
less than what is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.ops.collectives import Collective
from fmeg.program.cost import node_flops
from fmeg.program.ir import Node, Program, Value, values_in
from fmeg.program.memory import is_view
from fmeg.program.primitive import Primitive
from fmeg.program.structured import loop_of
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward
from fmeg.sharding.reuse import writers
from fmeg.sharding.segment import NOTHING

Roots = Mapping[int, tuple[int, int]]  # value -> (storage, bytes)
_GIVES = {"einsum_add": (3, "free"), "cross_entropy_bwd": (0, "")}  # results that lie where an operand lay


@dataclass
class _Kept:
    """Residuals of a forward loop: bytes a step on the device, on the host, and the storage of each."""

    step: int
    host: int
    roots: list[tuple[int, int]]


def peak(
    program: Program,
    compiled: bool,
    owned: Collection[int] = (),
    into: Mapping[int, int] = NOTHING,
) -> int:
    """Most bytes allocated while a local Program runs, its inputs included.

    compiled   whether runs of compute nodes are compiled
    owned      inputs, by number, that the caller gives up: they are free after their last use
    into       results, by number, that are written into an input, by number

    >>> from fmeg.program.trace import trace
    >>> p = trace(lambda x: ((x + 1) * 2).exp() @ x, torch.zeros(4, 4)).program
    >>> peak(p, compiled=False) // 16, peak(p, compiled=True) // 16      # x, x + 1 (then in its place), the result
    (12, 12)
    """
    into = _written(program, into)
    mine = {id(program.inputs[i]) for i in {*owned, *into.values()}}
    borrowed = sum(v.type.nbytes for v in program.inputs if id(v) not in mine)
    frame = _Frame(program, compiled, {id(v): (id(v), v.type.nbytes) for v in program.inputs if id(v) in mine})
    for o, i in into.items():
        frame.give(o, id(program.inputs[i]))
    return borrowed + frame.run()


def _written(program: Program, into: Mapping[int, int]) -> dict[int, int]:
    """Those of `into` that a run may write: nothing reads the input after it."""
    runs = _runs(program.nodes)
    made = {id(o): i for i, g in enumerate(runs) if not _alone(g[0]) for n in g for o in n.outs}
    read = {id(v): i for i, g in enumerate(runs) for n in g for v in n.operands()}
    pairs = ((o, i, id(program.outputs[o]), id(program.inputs[i])) for o, i in into.items())
    return {o: i for o, i, out, given in pairs if out in made and read.get(given, 0) <= made[out]}


@dataclass
class _Frame:
    """One Program, run above what its caller holds. `owned`: inputs that are its own, by id, with their storages."""

    program: Program
    compiled: bool
    owned: Roots
    root: dict[int, int] = field(default_factory=dict)  # value -> storage; what is borrowed has none
    size: dict[int, int] = field(default_factory=dict)  # storage -> bytes
    kept: dict[int, _Kept] = field(default_factory=dict)  # handle of a forward loop -> what it holds
    given: set[int] = field(default_factory=set)  # values written into memory that the caller has
    live: int = 0
    most: int = 0

    def __post_init__(self) -> None:
        for i, (root, size) in self.owned.items():
            self.root[i] = root
            self.size[root] = size

    def give(self, output: int, root: int | None = None) -> None:
        """A result is written into memory that is there: that of a storage of this Program, or the caller's."""
        v = self.program.outputs[output]
        if isinstance(v, Value) and v.node is not None:
            self.given.add(id(v))
            if root is not None:
                self.root[id(v)] = root

    def run(self) -> int:
        """Most bytes at once."""
        self.live = self.most = sum({r: self.size[r] for r, _ in self.owned.values()}.values())
        steps = [s for g in _runs(self.program.nodes) for s in self._steps(g)]
        for nodes, _ in steps:
            for n in nodes:
                self._place(n)
        ends = {self._root(v) for v in values_in(self.program.outputs)}
        last: dict[int, int] = {}
        for i, (nodes, _) in enumerate(steps):
            last.update((r, i) for n in nodes for v in (*n.operands(), *n.outs) if (r := self._root(v)) in self.size)
        for root in [r for r in self.size if r not in last and r not in ends]:
            self.live -= self.size.pop(root)
        for i, (nodes, reused) in enumerate(steps):
            freed = {r for r, k in last.items() if k == i and r not in ends}
            self._step(nodes, reused, freed)
        return self.most

    def _steps(self, group: Sequence[Node]) -> list[tuple[list[Node], set[int]]]:
        """Nodes between which memory is freed, with those that write into their first operand."""
        if len(group) == 1 or (self.compiled and not _opaque(group[0])):
            return [(list(group), set())]
        outside = {id(v) for v in values_in(self.program.outputs)}
        inside = {id(n) for n in group}
        outside |= {id(v) for n in self.program.nodes if id(n) not in inside for v in n.operands()}
        reused = writers(group, outside)
        return [([n], reused) for n in group]

    def _root(self, v: Value) -> int:
        return self.root.get(id(v), 0)

    def _place(self, node: Node) -> None:
        """Give each result a storage."""
        for o in node.outs:
            if id(o) in self.given:
                continue
            if is_view(node):
                self.root[id(o)] = self._root(node.operands()[0])
            else:
                self.root[id(o)] = id(o)
                self.size[id(o)] = o.type.nbytes

    def _step(self, nodes: list[Node], reused: set[int], freed: set[int]) -> None:
        node = nodes[0]
        if loop_of(node) is not None:
            self._loop(node, freed)
        elif self.compiled and not _alone(node) and not _opaque(node):
            self._compiled(nodes, freed)
        else:
            made = 0 if id(node) in reused or self._takes(node, freed) else self._made(nodes)
            self._at(made)
            self.live += self._made(nodes)
        self.live -= sum(self.size[r] for r in freed)

    def _at(self, more: int) -> None:
        self.most = max(self.most, self.live + more)

    def _made(self, nodes: Sequence[Node]) -> int:
        return sum(self.size[r] for r in {self.root.get(id(o), 0) for n in nodes for o in n.outs if self._new(o)})

    def _new(self, v: Value) -> bool:
        return self.root.get(id(v)) == id(v)

    def _takes(self, node: Node, freed: Collection[int]) -> bool:
        """Whether the result lies where an operand lay that dies here."""
        at, flag = _GIVES.get(node.opname, (-1, ""))
        if at < 0 or not (self.compiled and (not flag or node.kwargs.get(flag))):
            return False
        return self._root(node.args[at]) in freed

    # -- compiled runs ------------------------------------------------------------------------------------------------
    def _compiled(self, nodes: list[Node], freed: set[int]) -> None:
        """The inputs are held until the end; values made inside that reach memory come and go."""
        outside = {self._root(o) for n in nodes for o in n.outs} - freed  # what is used after the run
        stored = self._stored(nodes, outside)
        kernels = self._kernels(nodes, stored)
        at = [i for i, k in enumerate(kernels) for _ in k]
        when = _evaluated([n for k in kernels for n in k], stored)
        end: dict[int, int] = {}
        for n in nodes:
            for v in n.operands():
                end[self._root(v)] = max(end.get(self._root(v), 0), at[when[id(n)]])
        dying: dict[int, list[int]] = {}
        for root, i in end.items():
            if root in stored and root not in outside:
                dying.setdefault(i, []).append(root)
        here = 0
        for i, k in enumerate(kernels):
            gone, alone = dying.get(i, []), len(k) == 1
            made = [r for n in k for o in n.outs if self._new(o) and (r := self._root(o)) in stored]
            size = sum(self.size[r] for r in made)
            room = [self.size[r] for r in gone] if alone and (_fuses(k[0]) or self._takes(k[0], gone)) else []
            self._at(here + size - _fitting([self.size[r] for r in made], room))
            here += size - sum(self.size[r] for r in gone)
            here -= sum(self.size[r] for r in made if r not in end and r not in outside)
        self.live += self._made(nodes)

    def _kernels(self, nodes: Sequence[Node], stored: set[int]) -> list[list[Node]]:
        """Nodes in the order in which they run. Pointwise ones that read the same tensor, of the size of what they
        make, run as one kernel, where the last of them is."""
        kernels: list[list[Node]] = []
        reader: dict[int, Node] = {}  # of a value, the last pointwise node
        for n in nodes:
            kernels.append([n])
            if not _fuses(n) or is_view(n) or not any(self._new(o) and self._root(o) in stored for o in n.outs):
                continue
            size = n.outs[0].type.numel
            read = [id(v) for v in n.operands() if v.type.numel == size > 1]
            before = next((reader[i] for i in read if i in reader), None)
            reader.update(dict.fromkeys(read, n))
            if before is not None:
                kernels = _joined(kernels, before)
        return kernels

    def _stored(self, nodes: Sequence[Node], outside: set[int]) -> set[int]:
        """Storages of values made here that reach memory."""
        made = {self._root(o) for n in nodes for o in n.outs if self._new(o)}
        stored = made & outside
        for n in nodes:
            if not _fuses(n):
                stored |= {self._root(v) for v in (*n.outs, *(() if _reduces(n) else n.operands()))} & made
        return stored

    # -- loops --------------------------------------------------------------------------------------------------------
    def _loop(self, node: Node, freed: set[int]) -> None:
        op = node.op
        if isinstance(op, LocalScan):
            self._scan(node, op, freed)
        elif isinstance(op, LocalScanBackward):
            self._backward(node, op, freed)
        else:
            self._repeat(node)

    def _inner(self, body: Program, owned: Roots, given: Sequence[int] = ()) -> _Frame:
        frame = _Frame(body, self.compiled, owned)
        for o in given:
            frame.give(o)
        frame.run()
        return frame

    def _bytes(self, values: Sequence[Any]) -> int:
        return sum(self.size.get(r, 0) for r in {self._root(v) for v in values_in(list(values))})

    def _dying(self, values: Sequence[Value], freed: set[int]) -> int:
        """Bytes that a loop takes over from its caller."""
        return sum(self.size[r] for r in {self._root(v) for v in values} if r in freed)

    def _scan(self, node: Node, op: LocalScan, freed: set[int]) -> None:
        n_c, n_y, body = op.n_carry, op.n_ys, op.body
        inner = self._inner(body, {id(v): (id(v), v.type.nbytes) for v in body.inputs[:n_c]})
        residuals = body.outputs[n_c + n_y :]
        away = {inner._root(v) for i, v in enumerate(residuals) if i in op.host}
        kept = inner._bytes([v for v in residuals if inner._root(v) not in away])
        host = inner._bytes(residuals) - kept  # of two steps: one is on its way
        stacks = sum(o.type.nbytes for o in node.outs[n_c : n_c + n_y])
        start = self.live - self._dying(node.args[:n_c], freed)
        outs = inner._bytes(body.outputs)
        for k in {0, min(1, op.length - 1), op.length - 1}:
            here = start + k * kept + (host if k else 0)
            self.most = max(self.most, here + (stacks if k else 0) + inner.most, here + stacks + outs)
        self.live += self._made([node])
        if op.keeps:
            handle = node.outs[-1]
            self.live += op.length * kept + host - self.size[id(handle)]
            self.size[id(handle)] = op.length * kept + host
            roots = [(r := inner._root(v), inner.size.get(r, 0)) for v in residuals]
            self.kept[id(handle)] = _Kept(kept, host, roots)

    def _backward(self, node: Node, op: LocalScanBackward, freed: set[int]) -> None:
        ct_carries, _, handle, _, _ = node.args
        n_c, n_x, body, first = op.n_carry, op.n_ct_xs, op.body, op.n_carry + op.n_ys
        kept = self.kept.get(id(handle), _Kept(0, 0, []))
        owned = {id(v): (id(v), v.type.nbytes) for v in body.inputs[:n_c]}
        found = zip(body.inputs[first : first + op.n_residuals], kept.roots, strict=False)
        owned |= {id(v): root for v, root in found if root[1]}
        inner = self._inner(body, owned, range(n_c, n_c + n_x) if self.compiled else ())
        stacks = sum(o.type.nbytes for o in node.outs[n_c : n_c + n_x])
        sums = sum(o.type.nbytes for o in node.outs[n_c + n_x :])
        held = self._bytes([handle])
        start = self.live - held - self._dying(ct_carries, freed)
        outs = inner._bytes(body.outputs)
        for k in {0, min(1, op.length - 1), op.length - 1}:
            here = start + (op.length - 1 - k) * kept.step + (sums if k else 0)
            here += kept.host if k < op.length - 1 else 0  # of the step before, on its way back
            self.most = max(self.most, here + (stacks if k or self.compiled else 0) + inner.most)
            self.most = max(self.most, here + stacks + outs + (sums if k == 1 else 0))
        self.live += self._made([node])

    def _repeat(self, node: Node) -> None:
        """Microbatches, and rows of a loss in chunks: what they read is held, what they sum is added to in place."""
        loop = loop_of(node)
        if loop is None or not (isinstance(node.op, LocalAccumulate) or loop.label == "rows"):
            raise NotImplementedError(
                f"predicted_peak: {node.opname} at {node.source or 'an unknown line'} holds what its schedule says, "
                "which is not followed here; see the report of fmeg.pipeline for the bytes of each rank"
            )
        direct = not isinstance(node.op, LocalAccumulate)
        outs = loop.body.outputs
        inner = self._inner(loop.body, {}, range(loop.stacked, len(outs)) if direct else ())
        made = self._made([node])
        again = made if loop.times > 1 or direct else 0
        if self.compiled and not direct and again:
            again -= _stacked(loop.body)
        self.most = max(self.most, self.live + again + max(inner.most, inner._bytes(outs)))
        self.live += made


def _stacked(body: Program) -> int:
    """Bytes of the results that compiled backward loops stack: later microbatches add to those of the first."""
    back = {id(n): n.op for n in body.nodes if isinstance(n.op, LocalScanBackward)}
    outs = {id(v): v for v in values_in(body.outputs)}.values()
    made = ((v, back.get(id(v.node))) for v in outs)
    return sum(v.type.nbytes for v, op in made if op is not None and 0 <= v.index - op.n_carry < op.n_ct_xs)


def _runs(nodes: Sequence[Node]) -> list[list[Node]]:
    """Runs of compute nodes, as the executor makes them; each collective and each loop alone."""
    groups: list[list[Node]] = []
    for n in nodes:
        if not groups or _alone(n) or _alone(groups[-1][0]) or _opaque(n) != _opaque(groups[-1][0]):
            groups.append([n])
        else:
            groups[-1].append(n)
    return groups


def _alone(node: Node) -> bool:
    return isinstance(node.op, Collective) or loop_of(node) is not None or hasattr(node.op, "build")


def _opaque(node: Node) -> bool:
    return "opaque" in node.tags


def _joined(kernels: list[list[Node]], before: Node) -> list[list[Node]]:
    """The last kernel and that of an earlier node as one, what depends on it after it; as they are if the last does."""
    last = kernels[-1]
    at = next(i for i, k in enumerate(kernels) if any(n is before for n in k))
    made = {id(o) for n in kernels[at] for o in n.outs}
    later: list[list[Node]] = []
    between: list[list[Node]] = []
    for k in kernels[at + 1 :]:
        depends = any(id(v) in made for n in k for v in n.operands())
        if depends and k is last:
            return kernels
        if depends:
            made |= {id(o) for n in k for o in n.outs}
        if k is not last:
            (later if depends else between).append(k)
    return [*kernels[:at], *between, [*kernels[at], *last], *later]


def _fitting(sizes: Sequence[int], room: list[int]) -> int:
    """Bytes of those that find room of just their size."""
    free = Counter(room)
    return sum(size * min(n, free[size]) for size, n in Counter(sizes).items())


def _evaluated(nodes: Sequence[Node], stored: set[int]) -> dict[int, int]:
    """When each node is computed: a fused one where those that read it are."""
    when = {id(n): i for i, n in enumerate(nodes)}
    readers: dict[int, list[Node]] = {}
    for n in nodes:
        for v in n.operands():
            readers.setdefault(id(v), []).append(n)
    for n in reversed(nodes):
        if (_fuses(n) or is_view(n)) and not any(id(o) in stored for o in n.outs):
            when[id(n)] = max([when[id(n)], *(when[id(r)] for o in n.outs for r in readers.get(id(o), ()))])
    return when


def _reduces(node: Node) -> bool:
    """Whether Inductor generates the kernel, so that what it reads may be fused into it, but its result is not."""
    return isinstance(node.op, torch._ops.OpOverload) and not node_flops(node) and "sort" not in node.opname


def _fuses(node: Node) -> bool:
    """Pointwise operations and views: a kernel computes them where they are needed."""
    op = node.op
    if isinstance(op, torch._ops.OpOverload):
        return (
            torch.Tag.pointwise in op.tags
            or is_view(node)
            or op is torch.ops.aten._to_copy.default
            or not node.operands()
        )
    return is_view(node) or (isinstance(op, Primitive) and op.cheap)
