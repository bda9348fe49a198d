"""Gradients are summed over the ranks that share a stage as soon as the stage is done with its last microbatch, and its
parameters brought together before its first.

In a step's Program the reductions of gradients follow the pipeline. Those that need one gradient of it alone, over axes
other than the pipeline's, move into it: the schedule's action REDUCE begins them for a stage, after its last B or W,
and they are waited for when the pipeline ends. Each stage's rows are reduced by themselves, so no bit changes. Gathers
of parameters that the pipeline alone uses move into it likewise: GATHER begins them, the stage's first F waits for
them.

What stays behind: sums over the pipeline's own axis, and over several uses of one parameter (a tied embedding).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fmeg.program.ir import Node, Program, TensorType, Value, values_in
from fmeg.sharding.execute import take_part
from fmeg.sharding.partition import LOCAL_SLICE

_MOVES = (ALL_REDUCE, REDUCE_SCATTER, LOCAL_SLICE)


class Move(NamedTuple):
    """A step of a reduction. arg: the operation of an all_reduce, else the dimension."""

    kind: str
    axes: tuple[str, ...]
    arg: Any


@dataclass(frozen=True)
class Reductions:
    """By output of a pipeline's body: what is done with its sum over microbatches, and the local type that it has
    then."""

    moves: Mapping[int, tuple[Move, ...]] = field(default_factory=dict)
    types: Mapping[int, TensorType] = field(default_factory=dict)


def absorb(program: Program, is_pipeline: Callable[[Any], bool]) -> Program:
    """The same step, whose pipelines begin their stages' reductions and gathers themselves.

    A pipeline's op has `axis`, `staged`, `stacked` and `n_sums` (as in `LocalPipeline`), and takes `reductions` and
    `gathers`.
    """
    for n in program.nodes:
        if is_pipeline(n.op):
            program = _absorb(*_absorb_gathers(program, n))
    return program


def _absorb_gathers(program: Program, node: Node) -> tuple[Program, Node]:
    """The Program and the pipeline's node in it."""
    if not node.op.plan.schedule.gathers:
        return program, node
    uses = _uses(program)
    at = next(k for k, n in enumerate(program.nodes) if n is node)
    args = list(node.args)
    moves: dict[int, tuple[Move, ...]] = {}
    nodes: list[Node] = []
    for n in reversed(program.nodes[:at]):
        taken: dict[int, Value] = {}
        for i, v in enumerate(args) if n.op is ALL_GATHER and node.op.axis not in n.args[1] else ():
            k = next((k for k, o in enumerate(n.outs) if o is v and uses[id(o)] == 1), None)
            if k is not None and i in node.op.params and not (n.args[2][k] == 0 and i in node.op.staged):
                moves[i] = (Move(n.op.name, n.args[1], n.args[2][k]), *moves.get(i, ()))
                taken[k] = args[i] = n.operands()[k]
        nodes += [n] if not taken else _without(n, taken)
    grown = Node(replace(node.op, gathers=moves), tuple(args), {}, node.outs, node.source, node.phase, node.tags)
    nodes = [*reversed(nodes), grown, *program.nodes[at + 1 :]]
    return Program(program.inputs, nodes, program.outputs, program.names, program.name), grown


def _uses(program: Program) -> Counter[int]:
    uses = Counter(id(v) for n in program.nodes for v in n.operands())
    uses.update(id(v) for v in values_in(program.outputs))
    return uses


def _absorb(program: Program, node: Node) -> Program:
    uses = _uses(program)
    now = {id(v): i for i, v in enumerate(node.outs) if i >= node.op.n_sums}  # value -> the output that it comes of
    moves: dict[int, tuple[Move, ...]] = {}
    ends = dict(enumerate(node.outs))
    nodes: list[Node] = []
    for n in program.nodes:
        taken = _movable(n, node.op, now, uses) if n.op in _MOVES else {}
        for k, v in taken.items():
            i, out = now.pop(id(v)), n.outs[k]
            arg = n.args[2] if n.op is ALL_REDUCE else n.args[2][k]
            moves[i] = (*moves.get(i, ()), Move(n.op.name, n.args[1], arg))
            now[id(out)], ends[i] = i, out
        nodes += [n] if not taken else _without(n, taken)
    if not moves:
        return program
    reductions = Reductions(moves, {i: ends[i].type for i in moves})
    outs = tuple(ends.values())
    grown = Node(
        replace(node.op, reductions=reductions), node.args, node.kwargs, outs, node.source, node.phase, node.tags
    )
    nodes[next(k for k, n in enumerate(nodes) if n is node)] = grown
    return Program(program.inputs, nodes, program.outputs, program.names, program.name)


def _movable(n: Node, op: Any, now: Mapping[int, int], uses: Mapping[int, int]) -> dict[int, Value]:
    """Those operands, by position, for which a reduction can be done stage by stage inside the pipeline."""
    if op.axis in n.args[1]:
        return {}
    found = {}
    for k, v in enumerate(n.operands()):
        if id(v) in now and uses[id(v)] == 1:
            across_layers = n.op is not ALL_REDUCE and n.args[2][k] == 0 and now[id(v)] in op.stacked
            if not across_layers:
                found[k] = v
    return found


def _without(n: Node, taken: Iterable[int]) -> list[Node]:
    """A collective of what is left of its operands."""
    left = [k for k in range(len(n.outs)) if k not in taken]
    if not left:
        return []
    arg = n.args[2] if n.op is ALL_REDUCE else tuple(n.args[2][k] for k in left)
    xs = n.operands()
    rest = Node(n.op, ([xs[k] for k in left], n.args[1], arg), n.kwargs, (), n.source, n.phase, n.tags)
    rest.outs = tuple(n.outs[k] for k in left)
    return [rest]


@dataclass
class Started:
    """Collectives on their way: `begin` starts the first of each value's moves, `finish` waits and does the rest.

    ranks   how pipeline ranks reach their own mesh: `fmeg.pipeline.transport`
    """

    ranks: Any
    moves: list[tuple[Move, ...]]
    values: list[Any]
    waiting: list[tuple[list[int], Callable[[], list[Any]]]] = field(default_factory=list)

    def begin(self, step: int = 0) -> None:
        """Begin the moves number `step`: one collective for all that can share it."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for k, moves in enumerate(self.moves):
            if len(moves) > step:
                m = moves[step]
                groups.setdefault((m.kind, m.axes, m.arg if m.kind == "all_reduce" else None), []).append(k)
        for (kind, axes, _), at in groups.items():
            args = [self.moves[k][step].arg for k in at]
            values = [self.values[k] for k in at]
            for k in at:
                self.values[k] = None
            if kind == "local_slice":
                b = self.ranks.inner
                index, parts = b.axis_index(axes), b.mesh.axis_size(axes)
                cut = [b.call(take_part, (v, index, d, parts)) for v, d in zip(values, args, strict=True)]
                self.waiting.append((at, cut.copy))
            else:
                self.waiting.append((at, self.ranks.start(kind, values, axes, args)))

    def finish(self) -> list[Any]:
        """What the values have become."""
        for step in range(1, max(map(len, self.moves), default=0) + 1):
            for at, done in self.waiting:
                for k, value in zip(at, done(), strict=True):
                    self.values[k] = value
            self.waiting.clear()
            self.begin(step)
        return self.values
