"""What each rank of a pipeline holds, in bytes, counted before anything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fmeg.pipeline.cut import Cutter, Stage
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.handover import bytes_of
from fmeg.pipeline.op import LocalPipeline
from fmeg.pipeline.schedule import Schedule
from fmeg.pipeline.weights import ScanInputs, halve_stage
from fmeg.program.printing import size
from fmeg.sharding.local import LocalScanBackward

if TYPE_CHECKING:
    from fmeg.step.lowered import Lowered


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one microbatch on a stage, beyond parameters and batch.

    kept   between F and B or I: what F leaves
    after  between I and W: what I leaves
    """

    rank: int
    stage: int
    layers: tuple[int, int]
    kept: int
    after: int


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Stage by stage, and the most that each rank holds at once, as its list of actions goes."""

    schedule: Schedule
    stages: tuple[StageMemory, ...]

    @property
    def after_input(self) -> float:
        """The part of its residuals that a microbatch holds after I, on average: for `peaks` and `verify`."""
        kept = sum(s.kept for s in self.stages)
        return sum(s.after for s in self.stages) / kept if kept else 1.0

    @property
    def peak(self) -> tuple[int, ...]:
        """Bytes, one number a rank."""
        return tuple(_peak(self.schedule, r, {s.stage: s for s in self.stages}) for r in range(self.schedule.ranks))

    def __repr__(self) -> str:
        lines = [f"{self.schedule!r}: bytes beyond parameters and batch"]
        for s in self.stages:
            first, past = s.layers
            ratio = f" ({s.after / s.kept:.2f})" if s.kept else ""
            which = f"layers {first} to {past - 1}" if past > first else "no layers"
            lines.append(
                f"  stage {s.stage} on rank {s.rank}, {which}: a microbatch keeps {size(s.kept)} "
                "after F, "
                f"{size(s.after)} after I{ratio}"
            )
        return "\n".join([*lines, f"  peak {', '.join(map(size, self.peak))}"])


def memory_report(lowered: Lowered) -> MemoryReport:
    """The report of a lowered step with one pipeline: `memory_report(step.lower(…))`. Nothing runs.

    kept: what F leaves for the backward pass. after: what I leaves for W, by the split that schedules with I and W use.
    ScheduleError if the step has no pipeline.
    """
    found = [n.op for n in lowered.program.nodes if isinstance(n.op, LocalPipeline)]
    if len(found) != 1:
        raise ScheduleError(
            f"memory_report: the step has {len(found)} pipelines, expected one: value_and_grad with schedule=, under a "
            "layout with layers= on a mesh axis larger than 1"
        )
    (op,) = found
    schedule, spans = op.plan.schedule, op.plan.spans
    cutter = Cutter(op.body, op.params, op.layered, op.n_sums, op.stacked)
    rows = []
    for s, rank in enumerate(schedule.rank_of):
        stage = cutter.stage(spans[s], s == 0, s == schedule.stages - 1)
        kept, after = _bytes(stage, len(op.body.inputs))
        rows.append(StageMemory(rank, s, spans[s], kept, after))
    return MemoryReport(schedule, tuple(rows))


def _bytes(stage: Stage, n_given: int) -> tuple[int, int]:
    scans = [n.op for n in stage.backward.nodes if isinstance(n.op, LocalScanBackward) and "layers" in n.tags]
    halves = halve_stage(stage, n_given)
    inner = [n.op for n in halves.first.nodes if isinstance(n.op, ScanInputs)]
    before, after = halves.before, halves.after
    for scan in scans:
        first, past = scan.loop().residuals
        before += scan.length * bytes_of(scan.body, scan.body.inputs[first:past])
    return before, after + sum(op.scan.length * op.halves.after for op in inner)


def _peak(schedule: Schedule, rank: int, stages: Mapping[int, StageMemory]) -> int:
    live = most = 0
    split = {(a.stage, a.microbatch) for a in schedule.actions[rank] if a.kind == "I"}
    for a in schedule.actions[rank]:
        s = stages[a.stage]
        if a.kind == "F":
            live += s.kept
        elif a.kind == "B":
            live -= s.kept
        elif a.kind == "I":
            live += s.after - s.kept
        elif a.kind == "W" and (a.stage, a.microbatch) in split:
            live -= s.after
        most = max(most, live)
    return most
