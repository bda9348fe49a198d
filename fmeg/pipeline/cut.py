"""Cutting the local Program of a microbatch into stages.

The body holds one scan over the layers, the longest. What comes before it (a scan over other layers too) is the first
stage's, what comes after the last one's, and every stage runs the scan over its own layers. A value is, by what it
depends on,

    shared   of the batch alone or of parameters alone: every stage that needs it computes it
    before   of both, ahead of the scan: the first stage has it; it travels as the scan's carry and in no other way
    after    of the scan: the last stage has it

The backward pass follows: a stage runs the backward nodes whose operands it has. Where contributions are added, a stage
adds
those it has, so that each use of a parameter is differentiated where it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from fmeg.ops.shard import name_p
from fmeg.pipeline.errors import ScheduleError
from fmeg.program.ir import Node, Program, Value, map_values
from fmeg.program.passes import dce
from fmeg.sharding.local import LocalScan, LocalScanBackward

aten = torch.ops.aten
T = TypeVar("T")


LAYERS = {"layers": True}
"""Tag of a stage's scan over its layers, forward and backward."""


def longest(scans: Sequence[T], length: Callable[[T], int]) -> T:
    """Which of the differentiated scans is the one over the layers.

    >>> longest([3, 58, 1], lambda n: n)
    58
    """
    lengths = sorted(map(length, scans), reverse=True)
    if not scans or lengths[:1] == lengths[1:2]:
        raise ScheduleError(
            "pipeline: the loss function must have one scan over the layers that is differentiated and longer than any "
            f"other, found scans of {lengths or 'no'} steps; write the model's layers as one fmeg.scan"
        )
    return max(scans, key=length)


@dataclass(eq=False)
class Stage:
    """The pieces of one stage.

    forward    inputs of the body, then incoming carries -> outgoing carries (none in the last stage), sums (in the
               last), residuals
    backward   inputs of the body, then residuals, then incoming cotangents (none in the last) -> outgoing cotangents
               (none in
               the first), gradients
    sums       outputs of the body that `forward` gives, in order
    gradients  outputs of the body that `backward` gives, in order
    n_carry    carries of the scan; n_cts: cotangents that leave, of those carries that are differentiated
    layers     (first, past the last) of the global layers
    """

    forward: Program
    backward: Program
    sums: tuple[int, ...]
    gradients: tuple[int, ...]
    n_carry: int
    n_cts: int
    layers: tuple[int, int]
    first: bool
    last: bool


class Cutter:
    """Cuts one body; see the module docstring.

    params  indices of the inputs that are parameters
    staged  those of them that are stacks of layers: at run time a stage is given its own rows
    n_sums  how many of the outputs are sums of the loss function (the others are gradients)
    stacked indices of the outputs that are gradients of stacks of layers

    A stage holds its own layers of a stack, so outside the scan only operations that keep the layers apart may use one.
    """

    def __init__(
        self, body: Program, params: Sequence[int], staged: Sequence[int], n_sums: int, stacked: Iterable[int] = ()
    ) -> None:
        self.body, self.n_sums, self.stacked = body, n_sums, frozenset(stacked)
        forward = [n for n in body.nodes if isinstance(n.op, LocalScan) and n.op.keeps]
        self.scan = longest(forward, lambda n: n.op.length)
        handle = self.scan.outs[-1]
        self.back = next(n for n in body.nodes if isinstance(n.op, LocalScanBackward) and n.args[2] is handle)
        self.op: LocalScan = self.scan.op
        used = {id(v) for n in body.nodes for v in n.operands()} | {id(o) for o in body.outputs}
        if any(id(o) in used for o in self.scan.outs[self.op.n_carry : self.op.n_carry + self.op.n_ys]):
            raise ScheduleError(
                f"pipeline: the results that the scan at {self.scan.source} stacks lie on several stages; add them up "
                "in the "
                "carry instead"
            )
        self.kind: dict[int, str] = {}
        self.rows: set[int] = set()  # ids of values that hold a stage's own layers
        self._classify(set(params), set(staged))

    def _classify(self, params: set[int], staged: set[int]) -> None:
        of: dict[int, frozenset[str]] = {}
        for i, v in enumerate(self.body.inputs):
            of[id(v)] = frozenset({"p"}) if i in params else frozenset({"b"})
            self.kind[id(v)] = "shared"
            if i in staged:
                self.rows.add(id(v))
        for n in self.body.nodes:
            if n.phase != "F":
                if _keeps_layers_apart(n) and any(id(v) in self.rows for v in n.operands()):
                    self.rows.update(id(o) for o in n.outs)  # done again for the backward pass
                continue
            deps = frozenset().union(*(of[id(v)] for v in n.operands())) if n.operands() else frozenset()
            deps = deps | {"s"} if n is self.scan else deps
            kind = "after" if "s" in deps else "before" if {"p", "b"} <= deps else "shared"
            rows = self._rows(n, params)
            for o in n.outs:
                of[id(o)], self.kind[id(o)] = deps, kind
                if rows:
                    self.rows.add(id(o))

        for o in self.body.outputs[: self.n_sums]:
            if id(o) in self.rows:
                raise ScheduleError(
                    "pipeline: the loss function returns a stack of layers, which lies on several stages"
                )

    def _rows(self, n: Node, params: set[int]) -> bool:
        """Whether the results hold a stage's own layers. ScheduleError for what a stage cannot do with its own
        alone."""
        if n is self.scan:
            first, past = self.op.n_carry, self.op.n_carry + self.op.n_xs
            for i, v in enumerate(n.args):
                own = id(v) in self.rows
                if own and not first <= i < past:
                    raise ScheduleError(
                        f"pipeline: the scan at {n.source} takes a stack of layers as a carry or a constant"
                    )
                if first <= i < past and not own and any(v is w for w in self._of_params(params)):
                    raise ScheduleError(
                        f"pipeline: {v.name or 'a value'} is scanned at {n.source} and depends on parameters, but is "
                        "not "
                        "stored by layers; declare `layers` as the first logical axis of the parameter"
                    )
            return False
        if not any(id(v) in self.rows for v in n.operands()):
            return False
        if _keeps_layers_apart(n):
            return True
        raise ScheduleError(
            f"pipeline: {n.opname} at {n.source} reads the layers of several stages at once (outside the scan over "
            "layers only "
            "elementwise operations may); compute it in the scan's body and add it up in the carry"
        )

    def _of_params(self, params: set[int]) -> list[Value]:
        """Values that depend on parameters."""
        on = {id(v) for i, v in enumerate(self.body.inputs) if i in params}
        found = [v for i, v in enumerate(self.body.inputs) if i in params]
        for n in self.body.nodes:
            if n.phase == "F" and n is not self.scan and any(id(v) in on for v in n.operands()):
                on.update(id(o) for o in n.outs)
                found += n.outs
        return found

    def stage(self, layers: tuple[int, int], first: bool, last: bool) -> Stage:
        """The pieces of the stage that runs these layers."""
        op = self.op
        swap: dict[int, Any] = {}
        carries_in = (
            [] if first else [Value(v.type, name=f"carry{i}") for i, v in enumerate(self.scan.args[: op.n_carry])]
        )
        nodes: list[Node] = []
        for n in self.body.nodes:
            if n.phase != "F" or not self._runs(n, first, last):
                continue
            if n is self.scan:
                self._forward_scan(n, layers, carries_in, swap, nodes)
            else:
                self._need(n.operands(), first, last, n)
                nodes.append(self._copy(n, swap))
        outs = self.scan.outs
        carries = [] if last else [swap[id(o)] for o in outs[: op.n_carry]]
        sums = tuple(range(self.n_sums)) if last else ()
        back = _Backward(self, layers, first, last)
        residuals = back.residuals
        results = (
            *carries,
            *(swap.get(id(o), o) for o in (self.body.outputs[i] for i in sums)),
            *(swap[id(v)] for v in residuals),
        )
        forward = dce(Program((*self.body.inputs, *carries_in), nodes, results, name=f"{self.body.name}.forward"))
        return Stage(
            forward, back.program(), sums, tuple(back.gradients), op.n_carry, len(back.cts_out), layers, first, last
        )

    def _runs(self, n: Node, first: bool, last: bool) -> bool:
        kind = self.kind[id(n.outs[0])]
        return n is self.scan or kind == "shared" or (kind == "before" and first) or (kind == "after" and last)

    def has(self, v: Value, first: bool, last: bool) -> bool:
        """Whether a stage has a forward value."""
        if v.node is self.scan:
            return last or v is self.scan.outs[-1]
        kind = self.kind[id(v)]
        return kind == "shared" or (kind == "before" and first) or (kind == "after" and last)

    def _need(self, values: Sequence[Value], first: bool, last: bool, user: Node) -> None:
        for v in values:
            if not self.has(v, first, last):
                where = v.node.source if v.node is not None else v.name
                raise ScheduleError(
                    f"pipeline: the value made at {where} depends on parameters and on the batch, and is used again "
                    f"at {user.source}, on another stage. Only the scan's "
                    "carry travels between stages: make it part of the carry"
                )

    def _copy(self, n: Node, swap: dict[int, Any], op: Any = None) -> Node:
        args, kwargs = map_values(lambda v: swap.get(id(v), v), (n.args, n.kwargs))
        copy = Node(op or n.op, args, kwargs, source=n.source, phase=n.phase, tags=n.tags)
        copy.outs = tuple(Value(o.type, copy, i, placement=o.placement) for i, o in enumerate(n.outs))
        swap.update({id(o): c for o, c in zip(n.outs, copy.outs, strict=True)})
        return copy

    def slices(
        self, values: Sequence[Value], layers: tuple[int, int], swap: dict[int, Any], nodes: list[Node]
    ) -> list[Value]:
        """Scanned operands for some layers: a stage's own rows as they are, whole stacks cut."""
        out = []
        for v in values:
            w = swap.get(id(v), v)
            if id(v) not in self.rows:
                node = Node(aten.slice.Tensor, (w, 0, *layers), {}, phase="F")
                node.outs = (Value(v.type, node),)
                nodes.append(node)
                w = node.outs[0]
            out.append(w)
        return out

    def _forward_scan(
        self, n: Node, layers: tuple[int, int], carries_in: list[Value], swap: dict[int, Any], nodes: list[Node]
    ) -> None:
        op = self.op
        xs = self.slices(n.args[op.n_carry : op.n_carry + op.n_xs], layers, swap, nodes)
        rest = n.args[op.n_carry + op.n_xs :]
        self._need(rest, bool(not carries_in), False, n)
        # by position: one value may be two carries
        carries = carries_in or [swap.get(id(v), v) for v in n.args[: op.n_carry]]
        node = Node(
            replace(op, length=layers[1] - layers[0]),
            (*carries, *xs, *(swap.get(id(v), v) for v in rest)),
            {},
            source=n.source,
            phase="F",
            tags=n.tags | LAYERS,
        )
        node.outs = tuple(Value(o.type, node, i, placement=o.placement) for i, o in enumerate(n.outs))
        swap.update({id(o): c for o, c in zip(n.outs, node.outs, strict=True)})
        nodes.append(node)


def _keeps_layers_apart(n: Node) -> bool:
    pointwise = isinstance(n.op, torch._ops.OpOverload) and torch.Tag.pointwise in n.op.tags
    return pointwise or n.op is aten._to_copy.default or n.op is name_p


class _Backward:
    """The backward piece of a stage."""

    def __init__(self, cut: Cutter, layers: tuple[int, int], first: bool, last: bool) -> None:
        self.cut, self.layers, self.first, self.last = cut, layers, first, last
        self.swap: dict[int, Any] = {}
        self.nodes: list[Node] = []
        self.seeds: set[int] = set()  # made of the batch and the count alone: a contribution in the last stage only
        self.have: set[int] = set()
        self.residuals: list[Value] = []
        back = cut.back.op
        self.cts_in = [] if last else [Value(v.type, name=f"ct{i}") for i, v in enumerate(cut.back.args[0])]
        for n in cut.body.nodes:
            if n.phase == "B":
                self._node(n)
        self.cts_out = [] if first else [self.swap[id(o)] for o in cut.back.outs[: back.n_carry]]
        self.gradients, self.results = [], []
        for i, o in enumerate(cut.body.outputs):
            constant = id(o) in self.seeds  # zeros: the runtime makes them where nothing else is
            if i >= cut.n_sums and id(o) in self.have and not (constant and (i in cut.stacked or not last)):
                self.gradients.append(i)
                self.results.append(self.swap.get(id(o), o))

    def program(self) -> Program:
        inputs = (*self.cut.body.inputs, *(self.swap[id(v)] for v in self.residuals), *self.cts_in)
        return dce(Program(inputs, self.nodes, (*self.cts_out, *self.results), name=f"{self.cut.body.name}.backward"))

    def _present(self, v: Value) -> bool:
        if v.node is not None and v.node.phase == "B":
            return id(v) in self.have
        return self.cut.has(v, self.first, self.last)

    def _is_seed(self, v: Value) -> bool:
        if v.node is not None and v.node.phase == "B":
            return id(v) in self.seeds
        return self.cut.kind.get(id(v)) == "shared"

    def _bring(self, v: Value) -> None:
        """A forward value becomes a residual, an input of this piece."""
        if v.node is not None and v.node.phase == "F" and id(v) not in self.swap:
            self.residuals.append(v)
            self.swap[id(v)] = Value(v.type, name=f"residual{len(self.residuals)}", placement=v.placement)

    def _node(self, n: Node) -> None:
        if n is self.cut.back:
            return self._scan(n)
        operands = n.operands()
        if n.tags.get("accumulate"):
            mine = [v for v in operands if self._present(v) and (self.last or not self._is_seed(v))]
            if len(mine) < len(operands):
                if mine:
                    self._bring(mine[0])
                    self.swap[id(n.outs[0])] = self.swap.get(id(mine[0]), mine[0])
                    self.have.add(id(n.outs[0]))
                return None
        elif not all(self._present(v) for v in operands):
            return None
        if all(self._is_seed(v) for v in operands):
            self.seeds.update(id(o) for o in n.outs)
        for v in operands:
            self._bring(v)
        self.nodes.append(self.cut._copy(n, self.swap))
        self.have.update(id(o) for o in n.outs)
        return None

    def _scan(self, n: Node) -> None:
        ct_carries, ct_ys, handle, xs, consts = n.args
        for v in (*ct_carries, *xs, *consts) if self.last else (*xs, *consts):
            self._bring(v)
        self._bring(handle)
        if self.layers[0] == self.layers[1] and consts and len(n.outs) > n.op.n_carry + n.op.n_ct_xs:
            raise ScheduleError(
                "pipeline: a stage without layers cannot be differentiated by what the scan shares between layers; "
                "give every stage a layer"
            )
        whole = self.cut.slices(xs, self.layers, self.swap, self.nodes)
        cts = self.cts_in or [self.swap.get(id(v), v) for v in ct_carries]
        args = (cts, ct_ys, self.swap[id(handle)], whole, [self.swap.get(id(v), v) for v in consts])
        node = Node(
            replace(n.op, length=self.layers[1] - self.layers[0]),
            args,
            {},
            source=n.source,
            phase="B",
            tags=n.tags | LAYERS,
        )
        node.outs = tuple(Value(o.type, node, i, placement=o.placement) for i, o in enumerate(n.outs))
        self.swap.update({id(o): c for o, c in zip(n.outs, node.outs, strict=True)})
        # what becomes of the carry's cotangent is the first stage's; elsewhere it leaves
        self.have.update(id(o) for o in (n.outs if self.first else n.outs[n.op.n_carry :]))
        self.nodes.append(node)
