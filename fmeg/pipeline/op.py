"""The pipeline as an operation: accumulation over microbatches whose layers live on the ranks of a mesh axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch

from fmeg.lower.beside import beside
from fmeg.lower.rewrite import Known
from fmeg.pipeline.comms import with_parameters
from fmeg.pipeline.cut import Cutter, Stage
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.places import place
from fmeg.pipeline.reduce import Move, Reductions, absorb
from fmeg.pipeline.runtime import Pieces, Worker, run_real, run_virtual
from fmeg.pipeline.schedule import Schedule
from fmeg.pipeline.stacks import Stacks, find_stacks
from fmeg.pipeline.stages import Plan, Stages, plan
from fmeg.pipeline.transport import VirtualRanks, ranks_of
from fmeg.pipeline.weights import halve_stage, used_inputs
from fmeg.precision.layers import SPLIT_LAYERS
from fmeg.program.cost import flops
from fmeg.program.ir import Node, Program
from fmeg.program.structured import Accumulate, Loop, ScanForward
from fmeg.sharding.execute import Executable, Mode
from fmeg.sharding.partition import Context, Partitioner
from fmeg.sharding.residuals import rematerialise
from fmeg.sharding.structured import accumulate, sum_home
from fmeg.sharding.value import Placed, Placement

TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True)
class Storage:
    """How a pipeline stores the stacks of its scans along a mesh axis.

    orders  for each scan the global layer of each stored row, as in `Plan`; None where in their own order
    stored  layers -> rows a rank, of stacks that are stored unevenly
    """

    axis: str
    lengths: tuple[int, ...]
    orders: tuple[tuple[int, ...] | None, ...]
    stored: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, axis: str, plan: Plan) -> Storage:
        orders = tuple(
            None if n == 1 or order == tuple(range(n)) else order
            for n, order in zip(plan.lengths, plan.orders, strict=True)
        )
        uneven = {
            n: rows for n, rows, order in zip(plan.lengths, plan.rows, plan.orders, strict=True) if len(order) != n > 1
        }
        return cls(axis, plan.lengths, orders, tuple(uneven.items()))


@dataclass(eq=False)
class Pipeline(Accumulate):
    """`Accumulate`, run by a schedule where the layout puts `layers` on a mesh axis; the same sums.

    schedule  a name for `fmeg.pipeline.by_name`, or a Schedule
    stages    which layers each stage has (see `fmeg.pipeline.stages.plan`)
    """

    schedule: str | Schedule = "1f1b"
    stages: Stages = "even"

    def partition(self, part: Partitioner, node: Node) -> None:
        axis = self.axis(part.ctx.table, part.ctx.sizes)
        if axis is None:
            return accumulate(part, node)
        _Partition(part, node, self, axis).run()
        return None

    def axis(self, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]) -> str | None:
        """The mesh axis that the layout puts `layers` on, if it is larger than 1."""
        axes = tuple(a for a in table.get("layers", ()) if a in sizes)
        if len(axes) > 1:
            raise ScheduleError(f"Layout: layers={axes!r} names several mesh axes; a pipeline runs along one")
        return axes[0] if axes else None

    def storage(
        self, table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], layered: Sequence[int]
    ) -> tuple[Storage, Stacks] | None:
        """How stacks are stored, and which inputs and outputs they are; None without a pipeline's axis.

        layered   inputs with the logical axis `layers` in front
        """
        axis = self.axis(table, sizes)
        if axis is None:
            return None
        stacks = self.stacks(layered, axis)
        return Storage.of(axis, self.plan(sizes[axis], stacks)), stacks

    def stacks(self, layered: Sequence[int], axis: str) -> Stacks:
        """The scans over layers, and what has a row a layer of them."""
        if not layered:
            raise ScheduleError(
                f'Layout: layers="{axis}" but no parameter has an axis `layers` in front; a pipeline needs '
                "stacked layers"
            )
        if any(n.op is SPLIT_LAYERS for n in self.body.nodes):
            raise ScheduleError(
                "pipeline: layers that keep their precision are another scan over the same stack, and lie on other "
                "stages; "
                "take skip_first=0 and skip_last=0, or give such layers a stack of their own, which `match` leaves out"
            )
        return find_stacks(self.body, layered, self.owners)

    def plan(self, ranks: int, stacks: Stacks) -> Plan:
        """The schedule for that many ranks, and its stages' layers."""
        from fmeg.pipeline.names import by_name

        if isinstance(self.schedule, str):
            schedule = by_name(self.schedule, ranks=ranks, microbatches=self.steps)
        else:
            schedule = self.schedule
            schedule.verify()
        if schedule.ranks != ranks or schedule.microbatches != self.steps:
            raise ScheduleError(
                f"pipeline: the schedule {schedule.name!r} is for {schedule.ranks} ranks and {schedule.microbatches} "
                f"microbatches, but the mesh has {ranks} and value_and_grad "
                f"has microbatches={self.steps}"
            )
        costs = self._costs(stacks) if self.stages == "cost" else None
        return plan(schedule, stacks.lengths, self.stages, costs)

    def _costs(self, stacks: Stacks) -> tuple[float, list[float], float]:
        """Forward FLOPs of what is before the layers, of each layer, of what is behind them. What lies between two
        scans counts with the first layer behind it."""
        number = {id(n): k for k, n in enumerate(stacks.scans)}
        forward = [n for n in self.body.nodes if n.phase == "F"]
        kinds = {id(v): frozenset("p" if i in self.owners.values() else "b") for i, v in enumerate(self.body.inputs)}
        results = [o for i, o in enumerate(self.body.outputs) if i not in self.owners]
        places = place(forward, kinds, results, stacks.scans)[0]
        gaps = [0.0] * (len(number) + 1)
        for n in forward:
            if id(n) not in number and n.outs:
                gaps[places.home.get(id(n.outs[0]), 0)] += float(flops(Program((), [n], ())))
        layers: list[float] = []
        for k, n in enumerate(stacks.scans):
            each = float(flops(n.op.pair.scan.body if isinstance(n.op, ScanForward) else n.op.body))
            layers += [each + (gaps[k] if k else 0.0), *(each for _ in range(stacks.lengths[k] - 1))]
        return gaps[0], layers, gaps[-1]


@dataclass(eq=False)
class LocalPipeline:
    """A pipelined accumulation in a local Program. `body` is one microbatch on a rank of the other axes, all layers."""

    body: Program
    plan: Plan
    batched: tuple[bool, ...]
    axis: str
    params: tuple[int, ...]
    layered: Mapping[int, int]  # inputs that are stacks of layers -> their scan
    staged: Mapping[int, int]  # those of them that are stored by stage
    n_sums: int
    stacked: Mapping[int, int]  # outputs that are stored by stage: gradients, and what scans stack -> their scan
    reductions: Reductions = field(default_factory=Reductions)
    gathers: Mapping[int, tuple[Move, ...]] = field(default_factory=dict)  # by input, begun by GATHER
    beside: tuple[str, ...] = ()  # axes whose gathers and reductions go on beside products
    name: str = "pipeline"

    def loop(self) -> Loop:
        return Loop(self.body, self.plan.schedule.microbatches, "microbatch", summed=len(self.body.outputs))

    def build(self, backend: Any, mode: Mode) -> Callable[[Sequence[Any]], list[Any]]:
        """Ready to run: pieces compiled for the ranks of this process."""
        return _Runner(self, backend, mode)


class _Partition:
    """Partitions the body on the other axes, and places what the stages give."""

    def __init__(self, part: Partitioner, node: Node, op: Pipeline, axis: str) -> None:
        self.part, self.node, self.op, self.axis = part, node, op, axis
        self.gathers = isinstance(op.schedule, Schedule) and op.schedule.gathers
        ctx = part.ctx
        sizes = {a: n for a, n in ctx.sizes.items() if a != axis}
        inner = {a: n for a, n in ctx.all_sizes.items() if a != axis}
        self.child = Partitioner(Context(sizes, ctx.table, ctx.options, ctx.strict, inner), op.body.name)

    def run(self) -> None:
        part, op, child = self.part, self.op, self.child
        operands = [part.placed(v) for v in self.node.operands()]
        layered = [i for i, p in enumerate(operands) if p.in_use is not None and p.layers]
        stacks = op.stacks(layered, self.axis)
        staged, stacked = stacks.staged, stacks.stacked
        inputs, args, params = [], [], []
        for i, (v, p, batched) in enumerate(zip(op.body.inputs, operands, op.batched, strict=True)):
            own = p.in_use is not None
            if own:
                params.append(i)
            if i in staged:
                home = self._at_start(p, p.home.whole())
                inner = Placed(v.type, self._without(home), {}, self._in_use(p), self._in_use(p), None, True)
            else:
                home = Placement(((), *p.home.dims[1:])) if batched else self._at_start(p, self._off(p.home))
                use = self._off(p.in_use) if p.in_use is not None else None
                inner = Placed(v.type, Placement(home.dims[1:]) if batched else home, {}, use, use, None, own)
            args.append(part.get(p, home, "parameter" if own and self.gathers else "border"))
            inputs.append(child.input(v, inner))
        child.run(op.body.nodes)
        child.phase = "B"
        homes = [child.placed(o).home for o in op.body.outputs]
        for i, owner in op.owners.items():
            if (grads := operands[owner].grads) is not None:
                homes[i] = sum_home(homes[i], self._without(grads) if owner in staged else self._off(grads))
        outs = [child.get(child.placed(o), h, "border") for o, h in zip(op.body.outputs, homes, strict=True)]
        body = rematerialise(child.finish(inputs, outs, op.body.names))
        n_sums = len(op.body.outputs) - len(op.owners)
        local = LocalPipeline(
            body,
            op.plan(part.ctx.sizes[self.axis], stacks),
            op.batched,
            self.axis,
            tuple(params),
            stacks.of,
            staged,
            n_sums,
            stacked,
        )
        types = [
            (o.type, self._outer(i, h, stacked)) for i, (o, h) in enumerate(zip(self.node.outs, homes, strict=True))
        ]
        values = part.emit(local, tuple(args), {}, types)
        for i, (o, (_, placement), value) in enumerate(zip(self.node.outs, types, values, strict=True)):
            inner = child.placed(op.body.outputs[i])
            summed = i < n_sums and (inner.reduced or not inner.home.pending)  # over microbatches and stages
            part.define(o, placement, value, reduced=summed)

    def _at_start(self, p: Placed, home: Placement) -> Placement:
        """Where a parameter lies when the pipeline is given it: where it is used, if the schedule gathers."""
        if p.in_use is None or not self.gathers:
            return home
        staged = p.layers and home.dims[0] == (self.axis,)
        return Placement((home.dims[0], *p.in_use.dims[1:])) if staged else self._off(p.in_use)

    def _off(self, p: Placement) -> Placement:
        """Whole along the pipeline's axis."""
        return Placement(tuple(tuple(a for a in d if a != self.axis) for d in p.dims))

    def _without(self, p: Placement) -> Placement:
        return Placement(((), *p.dims[1:]), p.pending)

    def _in_use(self, p: Placed) -> Placement | None:
        return self._without(p.in_use) if p.in_use is not None else None

    def _outer(self, i: int, home: Placement, stacked: Mapping[int, int]) -> Placement:
        if i in stacked:
            return Placement(((self.axis,), *home.dims[1:]), home.pending)
        return Placement(home.dims, home.pending | {self.axis})


class _Runner:
    """Builds the stages of this process's ranks once, and runs them every step."""

    def __init__(self, op: LocalPipeline, backend: Any, mode: Mode) -> None:
        self.op, self.ranks, self.mode = op, ranks_of(backend, op.axis), mode
        cutter = Cutter(op.body, op.params, op.layered, op.n_sums, op.stacked)
        schedule, spans = op.plan.schedule, op.plan.spans
        if op.reductions.moves:
            schedule = with_parameters(schedule, ["REDUCE"])
        virtual = isinstance(self.ranks, VirtualRanks)
        self.schedule = schedule.without_messages() if virtual else schedule.with_messages()
        mine = {s for r in self.ranks.mine for s in schedule.stages_of(r)}
        last = schedule.stages - 1
        self.stages = {s: cutter.stage(spans[s], s == 0, s == last) for s in sorted(mine)}
        self.bodies: dict[int, Executable] = {}
        self.known: Known = {}
        self.pieces = {s: self._pieces(st, s) for s, st in self.stages.items()}

    def _pieces(self, stage: Stage, s: int) -> Pieces:
        op = self.op

        def executable(program: Program) -> Executable:
            return Executable(beside(program, op.beside, self.known), self.ranks.inner, self.bodies, self.mode)

        forward, n = executable(stage.forward), len(self.op.body.inputs)
        used = {i for p in (stage.forward, stage.backward) for i in used_inputs(p, n)}
        kinds = {a.kind for line in self.op.plan.schedule.actions for a in line if a.stage == s}
        whole = executable(stage.backward) if "B" in kinds else None
        if "I" not in kinds:
            return Pieces(forward, whole, used=frozenset(used))
        halves = halve_stage(stage, n)
        return Pieces(forward, whole, executable(halves.first), executable(halves.second), halves, frozenset(used))

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        op, schedule = self.op, self.schedule
        workers = [self._worker(args, r) for r in self.ranks.mine]
        if isinstance(self.ranks, VirtualRanks):
            run_virtual(schedule, workers)
        else:
            device = self.ranks.inner.device
            like = {
                (way, s): [torch.empty(t.shape, dtype=t.dtype, device=device) for t in types]
                for s, stage in self.stages.items()
                for way, types in stage.arriving.items()
            }
            run_real(schedule, workers[0], self.ranks, like, TIMEOUT)
        return [
            self.ranks.join([self._result(w, r, i) for w, r in zip(workers, self.ranks.mine, strict=True)])
            for i in range(len(op.body.outputs))
        ]

    def _worker(self, args: Sequence[Any], rank: int) -> Worker:
        op, b = self.op, self.ranks.inner
        owned = op.plan.schedule.stages_of(rank)
        mine = [self.ranks.take(a, rank) for a in args]
        per_batch = [
            list(b.call(torch.unbind, (a,))) if batched else None for a, batched in zip(mine, op.batched, strict=True)
        ]
        inputs: dict[int, list[list[Any]]] = {}
        at = [0] * len(op.plan.lengths)
        for s in owned:
            rows = list(mine)
            sizes = [hi - lo for lo, hi in (op.plan.part(s, k) for k in range(len(at)))]
            for i, k in op.staged.items():
                if sizes[k] != op.plan.rows[k]:
                    rows[i] = b.call(torch.narrow, (mine[i], 0, at[k], sizes[k]))
            at = [a + n for a, n in zip(at, sizes, strict=True)]
            inputs[s] = [
                [rows[i] if c is None else c[j] for i, c in enumerate(per_batch)]
                for j in range(op.plan.schedule.microbatches)
            ]
        return Worker(
            {s: self.stages[s] for s in owned},
            b,
            inputs,
            {s: self.pieces[s] for s in owned},
            ranks=self.ranks,
            reductions=op.reductions,
            gathers=op.gathers,
            stacked=op.stacked,
        )

    def _result(self, worker: Worker, rank: int, i: int) -> Any:
        b, op = self.ranks.inner, self.op
        owned = op.plan.schedule.stages_of(rank)
        if i in op.stacked:
            k = op.stacked[i]
            sizes = [hi - lo for lo, hi in (op.plan.part(s, k) for s in owned)]
            parts = [
                self._zeros(i, n) if (rows := worker.rows(i, s)) is None else rows
                for s, n in zip(owned, sizes, strict=True)
            ]
            if padding := op.plan.rows[k] - sum(sizes):
                parts.append(self._zeros(i, padding))
            return parts[0] if len(parts) == 1 else b.call(torch.cat, (parts,))
        total = worker.sum(i) if i < op.n_sums else worker.gradient(i)
        return self._zeros(i) if total is None else total

    def _zeros(self, i: int, rows: int | None = None) -> torch.Tensor:
        t = self.op.reductions.types.get(i) or self.op.body.outputs[i].type
        shape = t.shape if rows is None else (rows, *t.shape[1:])
        return torch.zeros(shape, dtype=t.dtype, device=self.ranks.inner.device)


def start_early(program: Program) -> Program:
    """The same step, in which pipelines begin the reductions of their gradients: `fmeg.pipeline.reduce.absorb`."""
    return absorb(program, lambda op: isinstance(op, LocalPipeline))
