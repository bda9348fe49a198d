"""When the actions of a schedule run, from what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from fmeg.pipeline.costs import Costs, Event
from fmeg.pipeline.errors import DeadlockError
from fmeg.pipeline.order import Graph
from fmeg.pipeline.schedule import COMPUTE, Schedule


@dataclass(frozen=True)
class Timeline:
    """When a schedule's actions run.

    makespan  from the start of the step to the end of its last action
    busy      of each rank, the time in which it computes
    span      of each rank, from its first start to its last end
    events    (rank, action, start, end) of all that is computed, and of REDUCE, rank by rank

    >>> from fmeg.pipeline.one_f_one_b import gpipe
    >>> times = timeline(gpipe(2, 2))
    >>> times.makespan, times.busy, times.idle
    (9.0, (6.0, 6.0), (3.0, 0.0))
    """

    makespan: float
    busy: tuple[float, ...]
    span: tuple[float, ...]
    events: tuple[Event, ...]

    @property
    def bubble(self) -> float:
        """The part of all ranks' time that is idle: 1 - Σ busy / (ranks · makespan)."""
        total = len(self.busy) * self.makespan
        return (total - sum(self.busy)) / total if total else 0.0

    @property
    def idle(self) -> tuple[float, ...]:
        """Of each rank, the idle time inside its own span: what the papers call zero in ZB-V."""
        return tuple(span - busy for span, busy in zip(self.span, self.busy, strict=True))


def timeline(
    schedule: Schedule,
    costs: Costs | None = None,
    transport: str = "tags",
    capacity: int | None = None,
    events: bool = True,
) -> Timeline:
    """Run the schedule on paper: the longest path through `fmeg.pipeline.order.Graph`.

    transport, capacity  as there; sends and receives are derived if they matter and are not written out
    events               False leaves them out

    DeadlockError if there is a cycle.
    """
    if (transport != "tags" or capacity is not None) and not schedule.has_messages:
        schedule = schedule.with_messages()
    graph = Graph(schedule, costs or Costs(), transport, capacity)
    end = graph.run()
    bounds = [0, *accumulate(map(len, schedule.actions))]
    reduce = graph.costs.per_stage("REDUCE", schedule.stages)
    busy, span, listed, last = [], [], [], 0.0
    for rank, (begin, until) in enumerate(zip(bounds, bounds[1:], strict=False)):
        nodes = [i for i in range(begin, until) if graph.actions[i][0] in COMPUTE]
        busy.append(sum(graph.cost[i] for i in nodes))
        span.append(end[nodes[-1]] - (end[nodes[0]] - graph.cost[nodes[0]]) if nodes else 0.0)
        free = 0.0  # when the rank's reductions before this one have ended
        sums = []
        for i in range(begin, until):
            if graph.actions[i][0] == "REDUCE":
                start, free = max(end[i], free), max(end[i], free) + reduce[graph.actions[i][1]]
                sums.append((rank, graph.actions[i], start, free))
        last = max(last, free)
        if events:
            listed += [(rank, graph.actions[i], end[i] - graph.cost[i], end[i]) for i in nodes] + sums
    makespan = max(last, *end[: graph.transfers]) if graph.transfers else 0.0
    return Timeline(makespan, tuple(busy), tuple(span), tuple(listed))


def capacity_needed(schedule: Schedule, transport: str = "directed") -> int | None:
    """The fewest messages that each channel must hold between SEND and RECV; None if no number of them is enough.

    >>> from fmeg.pipeline.vee import zb_v
    >>> from fmeg.pipeline.one_f_one_b import gpipe, one_f_one_b
    >>> [capacity_needed(f(4, 8)) for f in (gpipe, one_f_one_b, zb_v)]
    [0, 1, 2]
    """
    if not schedule.has_messages:
        schedule = schedule.with_messages()

    def enough(capacity: int | None) -> bool:
        try:
            Graph(schedule, Costs(), transport, capacity).run()
        except DeadlockError:
            return False
        return True

    if not enough(None):
        return None
    few, many = -1, 0
    while not enough(many):
        few, many = many, 2 * many + 1
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if enough(middle) else (middle, many)
    return many
