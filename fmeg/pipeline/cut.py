"""Cutting the local Program of a microbatch into stages.

The body holds scans over layers; a stage has some of the layers that they have one after the other, and may have the
end of one and the beginning of the next. What lies between two scans is run by the stage with the first layer behind
it, so that the carries of the scan before are what travels; what lies before all of them is the first stage's, behind
all of them the last one's. `fmeg.pipeline.places` says which value is made where. Values that are shared, of the batch
alone or of parameters alone, every stage that needs them computes.

The backward pass follows: a stage runs the backward nodes whose operands it has. Where contributions are added, a stage
adds those it has, so that each use of a parameter is differentiated where it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmeg.pipeline.backward import Backward
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.places import LAYERS, Places, place, scan_of
from fmeg.pipeline.stacks import rows_of, xs_of
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.program.passes import dce
from fmeg.sharding.local import LocalScan, LocalScanBackward

aten = torch.ops.aten
Span = tuple[int, int]


@dataclass(eq=False)
class Stage:
    """The pieces of one stage.

    forward    inputs of the body, then incoming carries -> outgoing carries (none in the last stage), sums, residuals
    backward   inputs of the body, then residuals, then incoming cotangents (none in the last) -> outgoing cotangents
               (none in the first), gradients
    sums       outputs of the body that `forward` gives, in order: in the last stage all but rows of layers
    gradients  outputs of the body that `backward` gives, in order
    n_carry    carries that leave; n_cts: cotangents that leave, of those carries that are differentiated
    arriving   types of the carries and of the cotangents that arrive
    layers     (first, past the last) in the list of all layers
    """

    forward: Program
    backward: Program
    sums: tuple[int, ...]
    gradients: tuple[int, ...]
    n_carry: int
    n_cts: int
    arriving: dict[str, list[TensorType]]
    layers: Span


@dataclass(frozen=True)
class Where:
    """A stage's place: its part of each scan, the gaps that it runs (0 before the first scan), and the scans (None at
    the ends) whose carries arrive at it and leave it."""

    parts: tuple[Span, ...]
    gaps: frozenset[int]
    enters: int | None
    leaves: int | None

    @property
    def first(self) -> bool:
        return self.enters is None

    @property
    def last(self) -> bool:
        return self.leaves is None

    def has(self, scan: int) -> bool:
        return self.parts[scan][0] < self.parts[scan][1]

    @classmethod
    def of(cls, span: Span, lengths: Sequence[int], first: bool, last: bool) -> Where:
        """Of the stage with these of all layers.

        >>> Where.of((3, 7), [3, 4, 1], first=False, last=False)
        Where(parts=((3, 3), (0, 4), (0, 0)), gaps=frozenset({1}), enters=0, leaves=1)
        """
        a, b = span
        ends = [sum(lengths[: k + 1]) for k in range(len(lengths))]
        parts = tuple(
            (min(max(a - end + n, 0), n), min(max(b - end + n, 0), n)) for end, n in zip(ends, lengths, strict=True)
        )
        gaps = {k for k, end in enumerate(ends[:-1], 1) if a <= end < b}
        at = lambda border: next(k for k, end in enumerate(ends) if border <= end)
        return cls(
            parts,
            frozenset(gaps | ({0} if first else set()) | ({len(lengths)} if last else set())),
            None if first else at(a),
            None if last else at(b),
        )


class Cutter:
    """Cuts one body; see the module docstring.

    params  indices of the inputs that are parameters
    layered by index of those of them that are stacks of layers, the number of their scan; at run time a stage is given
            its own rows, of a stack of one layer that one
    n_sums  how many of the outputs are sums of the loss function (the others are gradients)
    stacked by index of the outputs that are stored by stage, the number of their scan

    A stage holds its own layers of a stack, so outside the scans only operations that keep the layers apart may use
    one.
    """

    def __init__(
        self,
        body: Program,
        params: Sequence[int],
        layered: Mapping[int, int],
        n_sums: int,
        stacked: Mapping[int, int],
    ) -> None:
        self.body, self.n_sums, self.stacked = body, n_sums, dict(stacked)
        forward = [n for n in body.nodes if n.phase == "F"]
        self.rows = rows_of(forward, {id(body.inputs[i]): k for i, k in layered.items()})
        self.scans = [n for n in forward if scan_of(n.op) and any(id(v) in self.rows for v in xs_of(n))]
        self.number = {id(n): k for k, n in enumerate(self.scans)}
        self.handles = {id(n.outs[-1]): k for k, n in enumerate(self.scans) if n.op.keeps}
        self.backs: dict[int, Node] = {}
        for n in body.nodes:
            if isinstance(n.op, LocalScanBackward) and (k := self.number.get(id(n.args[2].node))) is not None:
                self.backs[k] = n
                self.number[id(n)] = k
        kinds = {id(v): frozenset("p" if i in params else "b") for i, v in enumerate(body.inputs)}
        self.places: Places = place(forward, kinds, list(body.outputs[:n_sums]), self.scans)[0]
        self.ys = {id(o): k for k, n in enumerate(self.scans) for o in n.outs[n.op.n_carry : n.op.n_carry + n.op.n_ys]}
        self._check(forward, self._depending_on_parameters(set(params)))
        self.rows.update({v: k - 1 for v, k in self.places.apart.items()})
        for k, n in self.backs.items():
            self.rows.update({id(o): k for o in n.outs[n.op.n_carry : n.op.n_carry + n.op.n_ct_xs]})
        self.rows = rows_of([n for n in body.nodes if n.phase != "F"], self.rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(n.op.length for n in self.scans)

    # -- what cannot be cut ---------------------------------------------------------------------------------------
    def _check(self, forward: Sequence[Node], on: set[int]) -> None:
        """ScheduleError for what a stage cannot do with its own layers alone."""
        for n in forward:
            if id(n) in self.number:
                self._check_scan(n, on)
            elif any(id(v) in self.rows for v in n.operands()) and not all(id(o) in self.rows for o in n.outs):
                raise ScheduleError(
                    f"pipeline: {n.opname} at {n.source} reads the layers of several stages at once (outside the scan "
                    "over layers only elementwise operations, sums and means may); compute it in the scan's body and "
                    "add it up in the carry"
                )
        for i, o in enumerate(self.body.outputs[: self.n_sums]):
            if id(o) in self.rows and id(o) not in self.places.apart:
                raise ScheduleError(
                    "pipeline: the loss function returns a stack of layers, which lies on several stages"
                )
            stored = id(o) in self.places.apart and self.lengths[self.places.apart[id(o)] - 1] > 1
            assert stored == (i in self.stacked), "what is stored by stage is known before partitioning"

    def _check_scan(self, n: Node, on: set[int]) -> None:
        xs, number = xs_of(n), self.number[id(n)]
        for v in n.operands():
            if id(v) in self.rows and all(v is not x for x in xs):
                raise ScheduleError(
                    f"pipeline: the scan at {n.source} takes a stack of layers as a carry or a constant"
                )
        for v in xs:
            if self.rows.get(id(v), number) != number:
                raise ScheduleError(f"pipeline: the scan at {n.source} runs over the layers of another scan")
            if id(v) not in self.rows and id(v) in on and self.places.shared(v):
                raise ScheduleError(
                    f"pipeline: {v.name or 'a value'} is scanned at {n.source} and depends on parameters, but is not "
                    "stored by layers; declare `layers` as the first logical axis of the parameter"
                )

    def _depending_on_parameters(self, params: set[int]) -> set[int]:
        on = {id(v) for i, v in enumerate(self.body.inputs) if i in params}
        for n in self.body.nodes:
            if n.phase == "F" and id(n) not in self.number and any(id(v) in on for v in n.operands()):
                on.update(id(o) for o in n.outs)
        return on

    def _check_whole(self, where: Where) -> None:
        """What a scan stacks and is needed whole must be made by one stage, the one that uses it."""
        for k, n in enumerate(self.scans):
            whole = [o for o in n.outs if id(o) in self.ys and id(o) not in self.places.apart and self._used(o)]
            if whole and where.has(k) and (where.parts[k] != (0, n.op.length) or k + 1 not in where.gaps):
                raise ScheduleError(
                    f"pipeline: what the scan at {n.source} stacks is needed whole, but its layers lie on several "
                    "stages or its results are used on another; add them up in the carry, or give one stage all of the "
                    "scan and what comes after it"
                )

    def _used(self, v: Value) -> bool:
        return any(v is u for n in self.body.nodes for u in n.operands()) or any(v is o for o in self.body.outputs)

    # -- stages ---------------------------------------------------------------------------------------------------
    def stage(self, span: Span, first: bool, last: bool) -> Stage:
        """The pieces of the stage that runs these of all layers."""
        where = Where.of(span, self.lengths, first, last)
        self._check_whole(where)
        swap: dict[int, Any] = {}
        nodes: list[Node] = []
        given = [] if where.enters is None else self.scans[where.enters].args[: self.scans[where.enters].op.n_carry]
        carries_in = [Value(v.type, name=f"carry{i}") for i, v in enumerate(given)]
        leaving: list[Value] = []
        for n in self.body.nodes:
            if n.phase != "F":
                continue
            k = self.number.get(id(n))
            if k is not None:
                carries = self._scan(n, k, where, carries_in, swap, nodes)
                leaving = carries if k == where.leaves else leaving
            elif self._runs(n, where):
                self._need(n.operands(), where, n)
                nodes.append(self.copy(n, swap, nodes, where, self.places.shared))
        back = Backward(self, where)
        sums = tuple(i for i, o in enumerate(self.body.outputs[: self.n_sums]) if self._gives(o, where))
        results = (
            *leaving,
            *(swap.get(id(o), o) for o in (self.body.outputs[i] for i in sums)),
            *(swap[id(v)] for v in back.residuals),
        )
        forward = dce(Program((*self.body.inputs, *carries_in), nodes, results, name=f"{self.body.name}.forward"))
        arriving = {"F": [v.type for v in carries_in], "B": [v.type for v in back.cts_in]}
        return Stage(
            forward, back.program(), sums, tuple(back.gradients), len(leaving), len(back.cts_out), arriving, span
        )

    def _gives(self, output: Value, where: Where) -> bool:
        """Whether a stage gives a sum: the last one does, and what a scan stacks whoever runs it."""
        apart = self.places.apart.get(id(output))
        return where.last if apart is None else where.has(apart - 1)

    def _runs(self, n: Node, where: Where) -> bool:
        return not n.outs or self.has(n.outs[0], where)

    def has(self, v: Value, where: Where) -> bool:
        """Whether a stage has a forward value."""
        if id(v) in self.handles:
            return where.has(self.handles[id(v)])
        if id(v) in self.places.apart:
            return where.has(self.places.apart[id(v)] - 1)
        return id(v) not in self.places.home or self.places.home[id(v)] in where.gaps

    def _need(self, values: Sequence[Value], where: Where, user: Node) -> None:
        for v in values:
            if not self.has(v, where):
                at = v.node.source if v.node is not None else v.name
                raise ScheduleError(
                    f"pipeline: the value made at {at} depends on parameters and on the batch, and is used again "
                    f"at {user.source}, on another stage. Only the scans' carries travel between stages: make it part "
                    "of the carry"
                )

    def copy(
        self, n: Node, swap: dict[int, Any], nodes: list[Node], where: Where, shared: Callable[[Value], bool]
    ) -> Node:
        """A node of a stage. Beside a stage's own rows, of operands that are whole stacks and `shared` only those rows
        are taken."""
        part: dict[int, Value] = {}
        if n.outs and id(n.outs[0]) in self.rows:
            k = self.rows[id(n.outs[0])]
            like = (self.lengths[k], n.outs[0].ndim)
            for v in n.operands():
                if id(v) not in self.rows and (v.shape[:1], v.ndim) == (like[:1], like[1]) and shared(v):
                    part[id(v)] = self.cut_rows(v, where.parts[k], swap, nodes)
        args, kwargs = map_values(lambda v: part.get(id(v)) or swap.get(id(v), v), (n.args, n.kwargs))
        copy = Node(n.op, args, kwargs, source=n.source, phase=n.phase, tags=n.tags)
        copy.outs = tuple(Value(o.type, copy, i, placement=o.placement) for i, o in enumerate(n.outs))
        swap.update({id(o): c for o, c in zip(n.outs, copy.outs, strict=True)})
        return copy

    def cut_rows(self, v: Value, part: Span, swap: dict[int, Any], nodes: list[Node]) -> Value:
        """The rows of some layers: a stage's own as they are, whole stacks cut."""
        w = swap.get(id(v), v)
        if id(v) in self.rows or part == (0, v.shape[0]) or v.shape[0] == 1:
            return w
        node = Node(aten.slice.Tensor, (w, 0, *part), {}, phase="F")
        node.outs = (Value(TensorType((part[1] - part[0], *v.shape[1:]), v.dtype), node, placement=v.placement),)
        nodes.append(node)
        return node.outs[0]

    def _scan(
        self, n: Node, k: int, where: Where, carries_in: list[Value], swap: dict[int, Any], nodes: list[Node]
    ) -> list[Value]:
        """A stage's part of a scan; its carries, where the stage has them."""
        op: LocalScan = n.op
        starts = carries_in if k == where.enters else [swap.get(id(v), v) for v in n.args[: op.n_carry]]
        if not where.has(k):
            if k == where.enters:
                swap.update({id(o): v for o, v in zip(n.outs, carries_in, strict=False)})
            return starts
        rest = n.args[op.n_carry + op.n_xs :]
        self._need((*xs_of(n), *rest), where, n)
        xs = [self.cut_rows(v, where.parts[k], swap, nodes) for v in xs_of(n)]
        lo, hi = where.parts[k]
        args = (*starts, *xs, *(swap.get(id(v), v) for v in rest))
        node = Node(replace(op, length=hi - lo), args, {}, source=n.source, phase="F", tags=n.tags | LAYERS)
        node.outs = tuple(Value(o.type, node, i, placement=o.placement) for i, o in enumerate(n.outs))
        swap.update({id(o): c for o, c in zip(n.outs, node.outs, strict=True)})
        nodes.append(node)
        return list(node.outs[: op.n_carry])
