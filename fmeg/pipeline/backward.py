"""The backward piece of a stage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fmeg.pipeline.places import LAYERS
from fmeg.program.ir import Node, Program, Value
from fmeg.program.passes import dce

if TYPE_CHECKING:
    from fmeg.pipeline.cut import Cutter, Where


class Backward:
    """Collects what a stage runs backward.

    cts_in, cts_out  the cotangents that arrive and leave
    residuals        forward values that it needs, inputs of the piece
    gradients        outputs of the body that it gives
    """

    def __init__(self, cut: Cutter, where: Where) -> None:
        self.cut, self.where = cut, where
        self.swap: dict[int, Any] = {}
        self.nodes: list[Node] = []
        self.seeds: set[int] = set()  # made of the batch and the count alone: a contribution in the last stage only
        self.have: set[int] = set()
        self.residuals: list[Value] = []
        back = cut.backs.get(where.leaves) if where.leaves is not None else None
        self.cts_in = [Value(v.type, name=f"ct{i}") for i, v in enumerate(back.args[0])] if back is not None else []
        leaving: list[Value] = []
        for n in cut.body.nodes:
            if n.phase != "B":
                continue
            k = cut.number.get(id(n))
            if k is None:
                self._node(n)
                continue
            cts = self._scan(n, k)
            leaving = cts if k == where.enters else leaving
        self.cts_out = leaving
        self.gradients, self.results = [], []
        for i, o in enumerate(cut.body.outputs):
            constant = id(o) in self.seeds  # zeros: the runtime makes them where nothing else is
            if i >= cut.n_sums and id(o) in self.have and not (constant and (i in cut.stacked or not where.last)):
                self.gradients.append(i)
                self.results.append(self.swap.get(id(o), o))

    def program(self) -> Program:
        inputs = (*self.cut.body.inputs, *(self.swap[id(v)] for v in self.residuals), *self.cts_in)
        return dce(Program(inputs, self.nodes, (*self.cts_out, *self.results), name=f"{self.cut.body.name}.backward"))

    def _present(self, v: Value) -> bool:
        if v.node is not None and v.node.phase == "B":
            return id(v) in self.have
        return self.cut.has(v, self.where)

    def _is_seed(self, v: Value) -> bool:
        if v.node is not None and v.node.phase == "B":
            return id(v) in self.seeds
        return self.cut.places.shared(v)

    def _bring(self, v: Value) -> None:
        """A forward value becomes a residual, an input of this piece."""
        if v.node is not None and v.node.phase == "F" and id(v) not in self.swap:
            self.residuals.append(v)
            self.swap[id(v)] = Value(v.type, name=f"residual{len(self.residuals)}", placement=v.placement)

    def _node(self, n: Node) -> None:
        operands = n.operands()
        if n.tags.get("accumulate"):
            mine = [v for v in operands if self._present(v) and (self.where.last or not self._is_seed(v))]
            if len(mine) < len(operands):
                if mine:
                    self._bring(mine[0])
                    self.swap[id(n.outs[0])] = self.swap.get(id(mine[0]), mine[0])
                    self.have.add(id(n.outs[0]))
                return
        elif not all(self._present(v) for v in operands):
            return
        if all(self._is_seed(v) for v in operands):
            self.seeds.update(id(o) for o in n.outs)
        for v in operands:
            self._bring(v)
        self.nodes.append(self.cut.copy(n, self.swap, self.nodes, self.where, self._is_seed))
        self.have.update(id(o) for o in n.outs)

    def _scan(self, n: Node, k: int) -> list[Any]:
        """A stage's part of a scan; the cotangents of the carries that its part begins with."""
        ct_carries, ct_ys, handle, xs, consts = n.args
        arrive = k == self.where.leaves
        if arrive:
            cts = list(self.cts_in)
        else:
            for v in ct_carries if k + 1 in self.where.gaps else ():
                self._bring(v)
            cts = [self.swap.get(id(v), v) for v in ct_carries]
        begins = k != self.where.enters  # what becomes of the carry's cotangent is this stage's; else it leaves
        if not self.where.has(k):
            if arrive and begins:  # a first stage without layers
                self.swap.update({id(o): c for o, c in zip(n.outs, cts, strict=False)})
                self.have.update(id(o) for o in n.outs[: n.op.n_carry])
            return cts
        for v in (*xs, *consts, handle):
            self._bring(v)
        part = self.where.parts[k]
        whole = [self.cut.cut_rows(v, part, self.swap, self.nodes) for v in xs]
        ys = [self.cut.cut_rows(v, part, self.swap, self.nodes) for v in ct_ys]
        args = (cts, ys, self.swap[id(handle)], whole, [self.swap.get(id(v), v) for v in consts])
        node = Node(replace(n.op, length=part[1] - part[0]), args, {}, source=n.source, phase="B", tags=n.tags | LAYERS)
        node.outs = tuple(Value(o.type, node, i, placement=o.placement) for i, o in enumerate(n.outs))
        self.swap.update({id(o): c for o, c in zip(n.outs, node.outs, strict=True)})
        self.have.update(id(o) for o in (n.outs if begins else n.outs[n.op.n_carry :]))
        self.nodes.append(node)
        return list(node.outs[: n.op.n_carry])
