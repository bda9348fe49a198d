"""A schedule for the costs at hand: the other generators take F = I = W and free messages, which is seldom so."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush

from fmeg.pipeline.costs import Costs
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import Action, Schedule, stage_map


def greedy(
    ranks: int,
    microbatches: int,
    chunks: int = 1,
    costs: Costs | None = None,
    limit: int | None = None,
    split: bool = True,
    shape: str = "cyclic",
) -> Schedule:
    """List scheduling: whenever a rank is free it takes a backward that can run, else a forward, else a W.

    costs  what actions and messages take
    limit  microbatches that a rank may have begun and not finished, W included; by default 2·ranks - 1, the memory of
           ZB-H2 (arXiv:2401.10241). With less, such as the `ranks` of 1F1B, zb_h1 and zb_v are often better
    split  whether backwards are I and W, or B
    shape  where the stages are: see `stage_map`

    A rank lets a microbatch in at its first stage only, with room for all its stages, and in ascending order: the
    oldest one can always go on, so there is no deadlock at any limit.

    >>> from fmeg.pipeline.one_f_one_b import zb_h1
    >>> costs = Costs(F=2, B=3, I=2, W=1, hop=0.5)
    >>> print(zb_h1(4, 8).verify(costs))
    Schedule('zb_h1', stages=4, microbatches=8, ranks=4): bubble 0.273, makespan 55, peak 4 4 4 4
    >>> print(greedy(4, 8, costs=costs).verify(costs))
    Schedule('greedy', stages=4, microbatches=8, ranks=4): bubble 0.184, makespan 49, peak 7 7 7 7
    """
    limit, costs = 2 * ranks - 1 if limit is None else limit, costs or Costs()
    if min(ranks, microbatches, chunks, limit) < 1:
        raise ScheduleError(
            f"greedy: ranks, microbatches, chunks and limit must be at least 1, given {ranks}, {microbatches}, "
            f"{chunks} and {limit}"
        )
    rank_of = stage_map(shape, ranks, chunks)
    return Schedule(_Run(rank_of, ranks, microbatches, costs, limit, split).actions(), rank_of, microbatches, "greedy")


class _Run:
    """The ranks at work. `events` are (time, rank, kind, stage, microbatch): an input that arrives, or, with no kind, a
    rank that is free again. `live` counts, of each rank, what it has begun and not finished, one for each of its
    stages."""

    def __init__(self, rank_of: tuple[int, ...], ranks: int, microbatches: int, costs: Costs, limit: int, split: bool):
        self.rank_of, self.costs, self.back = rank_of, costs, "I" if split else "B"
        self.first = [rank_of.index(rank) for rank in range(ranks)]
        self.chunks = len(rank_of) // ranks
        self.room = limit * self.chunks
        self.lines: list[list[Action]] = [[] for _ in range(ranks)]
        self.forwards: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.backwards: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.weights: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.live = [0] * ranks
        self.free = [0.0] * ranks
        self.events = [(0.0, rank_of[0], "F", 0, microbatch) for microbatch in range(microbatches)]

    def actions(self) -> tuple[tuple[Action, ...], ...]:
        while self.events:
            now, changed = self.events[0][0], set()
            while self.events and self.events[0][0] == now:
                _, rank, kind, stage, microbatch = heappop(self.events)
                if kind == "F":
                    heappush(self.forwards[rank], (-stage, microbatch))
                elif kind:
                    heappush(self.backwards[rank], (microbatch, -stage))
                changed.add(rank)
            for rank in sorted(changed):
                if self.free[rank] <= now and (action := self.choose(rank)) is not None:
                    self.start(rank, action, now)
        return tuple(map(tuple, self.lines))

    def choose(self, rank: int) -> Action | None:
        """The oldest backward; else a forward, the deepest stage's oldest, if there is room; else the oldest W."""
        if self.backwards[rank]:
            microbatch, stage = heappop(self.backwards[rank])
            return Action(self.back, -stage, microbatch)
        if self.forwards[rank]:
            enters = -self.forwards[rank][0][0] == self.first[rank]
            if not enters or self.live[rank] + self.chunks <= self.room:
                stage, microbatch = heappop(self.forwards[rank])
                self.live[rank] += self.chunks if enters else 0
                return Action("F", -stage, microbatch)
        return self.weights[rank].popleft() if self.weights[rank] else None

    def start(self, rank: int, action: Action, now: float) -> None:
        kind, stage, microbatch, _ = action
        self.lines[rank].append(action)
        end = self.free[rank] = now + self.costs.of(action)
        heappush(self.events, (end, rank, "", 0, 0))
        if kind == "I":
            self.weights[rank].append(Action("W", stage, microbatch))
        else:
            self.live[rank] -= kind != "F"
        if kind == "W":
            return
        if kind == "F" and stage + 1 == len(self.rank_of):
            to, kind = stage, self.back
        else:
            to = stage + 1 if kind == "F" else stage - 1
        if to >= 0:
            arrives = end + (self.costs.hop if self.rank_of[to] != rank else 0.0)
            heappush(self.events, (arrives, self.rank_of[to], kind, to, microbatch))
