"""Mutation: leave any one collective of a local Program out, do it twice, or over another axis; a test must see it.

If a check of equivalence passes with a collective broken, either the check is blind or the collective is useless. So
every communicating node of a partitioned training step is broken in every way below, each tensor of a coalesced one
alone, and the step is run with every rank computing for itself (nothing is taken to be equal because it should be).

    drop      the collective is left out: all_reduce, ppermute keep what the rank has; all_gather repeats its own block;
              reduce_scatter keeps its block of its own summand; all_to_all reorders its own blocks; exchange_rows keeps
              the rank's own rows, as many as would arrive
    twice     all_reduce over the reduced, reduce_scatter of the reduced, ppermute of the permuted; what all_gather,
              all_to_all and exchange_rows bring is doubled
    axis      over another axis of the same size instead, for each such axis
    order     over the same axes, the last one major: ranks hold each other's blocks (where there are several axes)
    splits    exchange_rows sends to each rank as many rows as are meant for the next

Left out, because they change nothing: a maximum taken twice; the order of axes in an all_reduce; twice the counts of
experts that a batch's balance loss divides by their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmeg import tree
from fmeg.mesh import LoopBackend, Mesh
from fmeg.mesh.rows import sent_and_received_tensors
from fmeg.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AXIS_INDEX,
    EXCHANGE_ROWS,
    PPERMUTE,
    REDUCE_SCATTER,
)
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.structured import loop_of
from fmeg.sharding.execute import Executable
from fmeg.step import Lowered, jit
from fmeg.testing.equivalent import FLOOR, relative_error
from fmeg.testing.matrix import Case
from fmeg.testing.verify import TOLERANCE, Job, jobs, make_step, on_one_device, optimizer_under_test, problem

EXCHANGES = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, EXCHANGE_ROWS, PPERMUTE, REDUCE_SCATTER)
LAYOUTS = (
    "zero3 tp2+sp",
    "zero1 ring2 tp2",
    "hsdp ulysses2",
    "zero3 gather2 tp2+sp",
    "zero3 2x2 tp2+sp",
    "moe: zero1 ulysses2 all_to_all",
    "moe: zero1 gather2 tp2+sp all_to_all",
)
"""Rows of the matrices of `fmeg verify` that between them have every kind of collective for every reason."""


@dataclass(frozen=True)
class Mutant:
    """One broken collective: tensor `index` of `node`, a node of `program` (the whole, or a nested body)."""

    program: Program
    node: Node
    index: int
    kind: str
    axes: tuple[str, ...]
    """For kinds "axis" and "order": the axes it is done over instead."""

    def __str__(self) -> str:
        where = (
            f"{self.node.op.name} over {self.node.args[1]} [{self.node.tags.get('reason', '')}] at {self.node.source}"
        )
        return f"{self.kind} {where}" + (f" -> {self.axes}" if self.axes else "")


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: the largest relative error on any rank of each group of outputs, or None for a crash."""

    mutant: Mutant
    errors: dict[str, float] | None

    @property
    def worst(self) -> float:
        return max(self.errors.values()) if self.errors else float("inf")

    def seen_by(self, group: str, tolerance: float = TOLERANCE) -> bool:
        """Whether a comparison of this group of outputs alone finds the mutant; a crash is found by all."""
        return self.errors is None or not self.errors.get(group, 0.0) <= tolerance

    def killed(self, tolerance: float = TOLERANCE) -> bool:
        return not self.worst <= tolerance


def mutants(program: Program, mesh: Mesh) -> Iterator[Mutant]:
    """Every mutant of a local Program, nested bodies included."""
    readers: dict[int, list[Node]] = {}
    for node in program.nodes:
        for v in node.operands():
            readers.setdefault(id(v), []).append(node)
    for node in program.nodes:
        if (loop := loop_of(node)) is not None:
            yield from mutants(loop.body, mesh)
        if node.op not in EXCHANGES or not node.args[1]:
            continue
        for index, out in enumerate(node.outs):
            yield Mutant(program, node, index, "drop", ())
            if not (node.op is ALL_REDUCE and (node.args[2] == "max" or _shares(out, readers))):
                yield Mutant(program, node, index, "twice", ())
            for other in _other_axes(tuple(node.args[1]), mesh):
                yield Mutant(program, node, index, "axis", other)
            if len(node.args[1]) > 1 and node.op is not ALL_REDUCE:
                yield Mutant(program, node, index, "order", tuple(reversed(node.args[1])))
            if node.op is EXCHANGE_ROWS:
                yield Mutant(program, node, index, "splits", ())


def _shares(counts: Value, readers: Mapping[int, Sequence[Node]]) -> bool:
    """Whether these are counts of a balance loss of the whole batch, which only their ratios matter to."""
    reading = [n.opname for n in readers.get(id(counts), ())]
    return counts.ndim == 1 and counts.dtype == torch.int64 and set(reading) == {"aten.clamp_min.default"}


def _other_axes(axes: tuple[str, ...], mesh: Mesh) -> Iterator[tuple[str, ...]]:
    """`axes` with one of them exchanged for another of its size that is not among them."""
    for i, old in enumerate(axes):
        for new in mesh.axes:
            if new not in axes and mesh.sizes[new] == mesh.sizes[old]:
                yield (*axes[:i], new, *axes[i + 1 :])


@contextmanager
def applied(m: Mutant, mesh: Mesh) -> Iterator[None]:
    """The Program with the mutant in it; as before on leaving."""
    nodes, outs = m.program.nodes, m.node.outs
    i = next(k for k, n in enumerate(nodes) if n is m.node)
    wanted = outs[m.index]
    real = Value(wanted.type, m.node, m.index)
    new = _replacement(m, mesh, m.node.args[0][m.index], real, wanted.type)
    new[-1].outs = (wanted,)
    m.node.outs = (*outs[: m.index], real, *outs[m.index + 1 :])
    m.program.nodes = [*nodes[: i + 1], *new, *nodes[i + 1 :]]
    try:
        yield
    finally:
        m.node.outs, m.program.nodes = outs, nodes


def _replacement(m: Mutant, mesh: Mesh, given: Value, real: Value, t: TensorType) -> list[Node]:
    """Nodes whose last makes the mutated result out of the collective's operand or its real result."""
    op, axes = m.node.op, tuple(m.node.args[1])
    if op is EXCHANGE_ROWS:
        return _other_rows(m, real)
    rest = tuple(r if op in (ALL_REDUCE, PPERMUTE) else (r[m.index],) for r in m.node.args[2:])
    again = lambda x, over: Node(op, ([x], over, *rest), {})
    if m.kind in ("axis", "order"):
        return [again(given, m.axes)]
    if m.kind == "twice":
        if op in (ALL_REDUCE, PPERMUTE):
            return [again(real, axes)]
        if op is REDUCE_SCATTER:
            reduced = Node(ALL_REDUCE, ([given], axes, "sum"), {})
            reduced.outs = (Value(given.type, reduced),)
            return [reduced, again(reduced.outs[0], axes)]
        return [Node(_doubled, (real,), {})]
    n = mesh.axis_size(axes)
    if op in (ALL_REDUCE, PPERMUTE):
        return [Node(_kept, (given,), {})]
    if op is ALL_GATHER:
        return [Node(_repeated, (given, n, rest[0][0]), {})]
    if op is REDUCE_SCATTER:
        index = Node(AXIS_INDEX, ([], axes), {})
        index.outs = (Value(TensorType((), torch.int64), index),)
        return [index, Node(_own_block, (given, index.outs[0], n, rest[0][0]), {})]
    assert op is ALL_TO_ALL, op
    return [Node(_own_blocks, (given, n, rest[0][0], rest[1][0]), {})]


def _other_rows(m: Mutant, real: Value) -> list[Node]:
    """As `_replacement`, for an exchange of rows."""
    (x, table), axes, *rest = m.node.args
    if m.kind in ("axis", "order"):
        return [Node(EXCHANGE_ROWS, ([x, table], m.axes, *rest), {})]
    if m.kind == "twice":
        return [Node(_doubled, (real,), {})]
    if m.kind == "drop":
        return [Node(_own_rows, (x, table, *rest[:2]), {})]
    turned = Node(_turned, (table,), {})
    turned.outs = (Value(table.type, turned),)
    return [turned, Node(EXCHANGE_ROWS, ([x, turned.outs[0]], axes, *rest), {})]


def _own_rows(x: Tensor, table: Tensor, back: bool, rows: int) -> Tensor:
    wanted = rows if back else int(sent_and_received_tensors(table, back)[1].sum())
    return torch.cat([x, x.new_zeros(max(0, wanted - x.shape[0]), *x.shape[1:])])[:wanted]


def _turned(table: Tensor) -> Tensor:
    return table.roll(1, 0)


def _kept(x: Tensor) -> Tensor:
    return x.clone()


def _doubled(x: Tensor) -> Tensor:
    return x + x


def _repeated(x: Tensor, n: int, dim: int) -> Tensor:
    return torch.cat([x] * n, dim)


def _own_block(x: Tensor, index: Tensor, n: int, dim: int) -> Tensor:
    return x.tensor_split(n, dim)[int(index)].contiguous()


def _own_blocks(x: Tensor, n: int, split: int, concat: int) -> Tensor:
    return torch.cat(x.tensor_split(n, split), concat)


def group_of(path: str) -> str:
    """Which comparison an output of a training step belongs to: "loss", "gradients", "parameters" or "moments".

    >>> [group_of(p) for p in ("1.loss", "0.opt.0.layers.wq", "0.params.embed", "0.opt.2.mu.embed")]
    ['loss', 'gradients', 'parameters', 'moments']
    """
    for prefix, group in (("1.", "loss"), ("0.params.", "parameters"), ("0.opt.0.", "gradients")):
        if path.startswith(prefix):
            return group
    return "moments"


class Bench:
    """A lowered step, its arguments, and the results that one device gives; says how wrong each output of a mutant is.

    groups    path of an output -> the group under which its error is reported
    """

    def __init__(self, lowered: Lowered, args: Any, want: Any, groups: Callable[[str], str] = group_of):
        self.lowered, self.mesh = lowered, lowered.mesh
        self.backend = LoopBackend(lowered.mesh, dedupe=False)
        self.inputs = []
        for x, home, blocks in zip(tree.leaves(args), lowered.inputs, lowered.blocks, strict=True):
            dims = home.dims
            if blocks > 1:
                x, dims = x.unflatten(0, (blocks, -1)), ((), *dims)
            self.inputs.append(self.backend.scatter(x, dims))
        self.want = [(groups(p), w.double()) for p, w in zip(tree.paths(want), tree.leaves(want), strict=True)]

    def run(self) -> dict[str, float]:
        """Largest relative error of any output on any rank, by group."""
        with torch.no_grad():
            outs = Executable(self.lowered.program, self.backend)(self.inputs)
        found = dict.fromkeys((group for group, _ in self.want), 0.0)
        for value, placement, (group, want) in zip(outs, self.lowered.outputs, self.want, strict=True):
            assert placement is not None
            scale = max(float(want.abs().max()), FLOOR)
            for rank, local in enumerate(self.backend.local(value)):
                block = want[self.backend.index.block(rank, want.shape, placement.dims)]
                found[group] = max(found[group], relative_error(local.double(), block, scale))
        return found

    def outcome(self, m: Mutant) -> Outcome:
        with applied(m, self.mesh):
            try:
                return Outcome(m, self.run())
            except Exception:
                return Outcome(m, None)


def known() -> dict[str, Job]:
    """The rows that there are, by name, each with its model's config; those of pipelines apart.

    >>> case, cfg = known()["moe: zero1 ulysses2 all_to_all"]
    >>> dict(case.layout.compute)["experts"]
    ('dp', 'cp')
    """
    every = jobs(everything=True)
    return {case.name: (case, cfg) for case, cfg in every if case.schedule is None and not case.routing}


def bench(case: Case, cfg: Any) -> Bench:
    """The second optimizer step of a case of the layout matrix, so that no parameter and no moment is constant."""
    (state, _), want = on_one_device(cfg, case.microbatches, 2)
    _, batch = problem(cfg)
    one = make_step(cfg, optimizer_under_test(), case.microbatches)
    step = jit(one, mesh=case.mesh, layout=case.layout, strict=True)
    return Bench(step.lower(state, batch), (state, batch), want)


def mutate(bench: Bench, pick: Callable[[int], bool] = lambda i: True) -> Iterator[Outcome]:
    """Run every mutant whose number `pick` chooses. Raises AssertionError if the Program is wrong as it is."""
    errors = bench.run()
    assert max(errors.values()) <= TOLERANCE, f"without a mutation the errors are {errors}"
    for i, m in enumerate(list(mutants(bench.lowered.program, bench.mesh))):
        if pick(i):
            yield bench.outcome(m)


def table(outcomes: Sequence[Outcome], tolerance: float = TOLERANCE) -> list[dict[str, Any]]:
    """A row for each kind of collective and of mutation: how many; killed by numbers, by a crash; survived; how many a
    comparison of the loss alone, of the gradients alone finds; the smallest error of those that numbers killed."""
    rows: dict[tuple[str, str], list[Outcome]] = {}
    for o in outcomes:
        rows.setdefault((o.mutant.node.op.name, o.mutant.kind), []).append(o)
    out = []
    for (collective, kind), some in sorted(rows.items()):
        numbers = [o for o in some if o.errors is not None]
        dead = [o for o in numbers if o.killed(tolerance)]
        out.append(
            dict(
                collective=collective,
                mutation=kind,
                mutants=len(some),
                killed=len(dead),
                crashed=len(some) - len(numbers),
                survived=len(numbers) - len(dead),
                by_loss=sum(o.seen_by("loss", tolerance) for o in some),
                by_gradients=sum(o.seen_by("gradients", tolerance) for o in some),
                by_parameters=sum(o.seen_by("parameters", tolerance) for o in some),
                least=min((o.worst for o in dead), default=None),
            )
        )
    return out
