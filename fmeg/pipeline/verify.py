"""Everything that can be said about a schedule before it runs."""

from __future__ import annotations

from dataclasses import dataclass

from fmeg.pipeline.costs import Costs
from fmeg.pipeline.errors import DeadlockError, ScheduleError
from fmeg.pipeline.memory import peaks
from fmeg.pipeline.order import Graph
from fmeg.pipeline.schedule import COMPUTE, KINDS, PARAMETERS, Schedule
from fmeg.pipeline.simulate import capacity_needed, timeline
from fmeg.pipeline.wires import check_wires


@dataclass(frozen=True)
class Report:
    """A valid schedule in numbers.

    bubble    idle part of all ranks' time in a step
    idle      of each rank, the idle time inside its own span
    peak      of each rank, the most residuals at once, in microbatches of its share of the model
    makespan  of a step, in the unit of the costs
    """

    schedule: Schedule
    bubble: float
    idle: tuple[float, ...]
    peak: tuple[float, ...]
    makespan: float

    def __str__(self) -> str:
        return (
            f"{self.schedule!r}: bubble {self.bubble:.3f}, makespan {self.makespan:g}, "
            f"peak {' '.join(f'{p:g}' for p in self.peak)}"
        )


def verify(
    schedule: Schedule,
    costs: Costs | None = None,
    transport: str = "directed",
    capacity: int | None = None,
    after_input: float = 1.0,
) -> Report:
    """Check a schedule; ScheduleError says what is wrong, where.

    - every stage and microbatch has one F, and one B or one I and one W, on the stage's rank
    - F before B or I, I before W; a stage after the one that feeds it, where they share a rank
    - a stage's W (or B) in ascending microbatches: the order in which gradients are summed
    - one SEND after each producer and one RECV before each consumer, in the same order at both ends of a channel (but
      for transport "tags"); they are derived if they are not written out
    - no deadlock in any interleaving, where each channel holds at most `capacity` messages (None: any number)
    - GATHER before a stage's first F, REDUCE after its last W, if they occur

    costs, after_input  for the numbers of the report: see `timeline` and `peaks`

    >>> from fmeg.pipeline.one_f_one_b import one_f_one_b
    >>> print(verify(one_f_one_b(4, 8)))
    Schedule('1f1b', stages=4, microbatches=8, ranks=4): bubble 0.273, makespan 33, peak 4 3 2 1
    >>> verify(Schedule.from_text("0F0 0F1 0B0 0B1\\n1F0 1F1 1B1"))
    Traceback (most recent call last):
    ...
    fmeg.pipeline.errors.ScheduleError: schedule: rank 1 has no 1B0, and no 1I0 and 1W0
    """
    _check_compute(schedule)
    _check_parameters(schedule)
    wired = schedule if schedule.has_messages else schedule.with_messages()
    check_wires(wired, in_order=transport != "tags")
    times = timeline(schedule, costs, events=False)
    # Where both ends agree, chains of directed channels add nothing to the ranks' own order.
    chains = "tags" if transport == "directed" else transport
    if chains != "tags" or capacity is not None:
        try:
            Graph(wired, Costs(), chains, capacity).run()
        except DeadlockError as error:
            needed = capacity_needed(wired, chains)
            if needed is None:
                raise
            hint = f"channels hold too few messages: this schedule needs capacity={needed}, given capacity={capacity}"
            raise DeadlockError(f"{error}\n{hint}", error.cycle) from None
    return Report(schedule, times.bubble, times.idle, tuple(peaks(schedule, after_input)), times.makespan)


def _check_compute(schedule: Schedule) -> None:
    rank_of, stages, width = schedule.rank_of, schedule.stages, schedule.microbatches
    forward, backward, weights = ([-1] * (stages * width) for _ in range(3))
    for rank, line in enumerate(schedule.actions):
        first = None
        for at, action in enumerate(line):
            kind, stage, microbatch, pair = action
            if kind not in KINDS:
                raise ScheduleError(f"schedule: rank {rank} has a {kind!r}; there are {' '.join(KINDS)}")
            if not 0 <= stage < stages or rank_of[stage] != rank:
                home = f"is on rank {rank_of[stage]}" if 0 <= stage < stages else f"does not exist: there are {stages}"
                raise ScheduleError(f"schedule: rank {rank} has {action}, but stage {stage} {home}")
            if kind in PARAMETERS:
                continue
            if not 0 <= microbatch < width:
                raise ScheduleError(f"schedule: rank {rank} has {action}, but there are {width} microbatches")
            if kind not in COMPUTE:
                continue
            key = stage * width + microbatch
            if kind == "F":
                twice, forward[key] = forward[key] >= 0, at
            elif kind == "W":
                twice, weights[key] = weights[key] >= 0, at
            elif kind == "I":
                twice, backward[key] = backward[key] >= 0, at
            else:
                twice, backward[key], weights[key] = backward[key] >= 0 or weights[key] >= 0, at, at
            if twice:
                whole = "" if kind == "F" else "; a backward is one B, or one I and one W"
                raise ScheduleError(f"schedule: rank {rank} has {action} twice, the second as action {at}{whole}")
            if first is not None and (first.kind == "F") == (kind == "F"):
                raise ScheduleError(
                    f"schedule: rank {rank} marks {first} as a pair with {action}; a pair is an F and a B"
                )
            first = action if pair else None
        if first is not None:
            raise ScheduleError(f"schedule: rank {rank} marks {first} as a pair with what follows it, but nothing does")
    for stage, rank in enumerate(rank_of):
        above = stage + 1 < stages and rank_of[stage + 1] == rank
        latest = -1
        for microbatch in range(width):
            key = stage * width + microbatch
            f, b, w = forward[key], backward[key], weights[key]
            if f < 0 or b < 0 or w < 0:
                raise ScheduleError(f"schedule: rank {rank} has no {_missing(stage, microbatch, f, b, w)}")
            if b < f:
                _before(schedule, rank, b, f, "a backward needs its forward's residuals")
            if w < b:
                _before(schedule, rank, w, b, "W needs what I leaves")
            if above and forward[key + width] < f:
                _before(schedule, rank, forward[key + width], f, "which feeds it")
            if above and b < backward[key + width]:
                _before(schedule, rank, b, backward[key + width], "which feeds it")
            if w < latest:
                _before(schedule, rank, w, latest, "gradients are summed in ascending microbatches")
            latest = w


def _missing(stage: int, microbatch: int, f: int, b: int, w: int) -> str:
    if f < 0:
        return f"{stage}F{microbatch}"
    if b < 0 and w < 0:
        return f"{stage}B{microbatch}, and no {stage}I{microbatch} and {stage}W{microbatch}"
    return f"{stage}{'I' if b < 0 else 'W'}{microbatch}"


def _before(schedule: Schedule, rank: int, early: int, late: int, why: str) -> None:
    line = schedule.actions[rank]
    raise ScheduleError(
        f"schedule: rank {rank} runs {line[early]} (action {early}) before {line[late]} (action {late}): {why}"
    )


def _check_parameters(schedule: Schedule) -> None:
    for rank, line in enumerate(schedule.actions):
        marked = [(at, a) for at, a in enumerate(line) if a.kind in PARAMETERS]
        if not marked:
            continue
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for at, action in enumerate(line):
            if action.kind == "F":
                first.setdefault(action.stage, at)
            elif action.kind in ("B", "W"):
                last[action.stage] = at
        gathers = {a.stage: at for at, a in reversed(marked) if a.kind == "GATHER"}
        reduces = [(a.stage, at) for at, a in marked if a.kind == "REDUCE"]
        for stage, at in gathers.items():
            if first[stage] < at:
                _before(schedule, rank, first[stage], at, "a forward needs its stage's parameters")
        for stage, at in reduces:
            if at < last[stage]:
                _before(schedule, rank, at, last[stage], "gradients are summed over ranks when they are complete")
        for kind, stages in (("GATHER", list(gathers)), ("REDUCE", [stage for stage, _ in reduces])):
            for stage in schedule.stages_of(rank) if stages else ():
                if stages.count(stage) != 1:
                    raise ScheduleError(
                        f"schedule: rank {rank} has {stages.count(stage)} of {stage}{kind}; one for each stage, or none"
                    )
