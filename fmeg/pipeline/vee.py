"""Schedules on a V: rank r of R has stages r and 2R - 1 - r, so that the last stage is beside the first.

A microbatch goes down the ranks and back up; its loss is on rank 0, where it began.
"""

from __future__ import annotations

from collections import deque

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.one_f_one_b import _at_least_one
from fmeg.pipeline.schedule import Action, Schedule, stage_map


class _Line:
    """A rank's actions; `add` takes each stage's next microbatch of a kind."""

    def __init__(self, microbatches: int):
        self.actions: list[Action] = []
        self.microbatches = microbatches
        self.next: dict[tuple[str, int], int] = {}
        self.later: deque[int] = deque()

    def count(self, kind: str, stage: int) -> int:
        return self.next.get((kind, stage), 0)

    def add(self, kind: str, stage: int, pair: bool = False) -> None:
        """F, I, W, or B, which is the stage's next I and W at once. Past the last microbatch: nothing."""
        microbatch = self.count("I" if kind == "B" else kind, stage)
        for part in ("I", "W") if kind == "B" else (kind,):
            self.next[part, stage] = self.count(part, stage) + 1
        if kind == "I":
            self.later.append(stage)
        if microbatch < self.microbatches:
            self.actions.append(Action(kind, stage, microbatch, pair))

    def both(self, forward: int, backward: int) -> None:
        """An F and a B that overlap."""
        self.add("F", forward, pair=True)
        self.add("B", backward)

    def weights(self) -> None:
        """The oldest W that an I left for later, if any."""
        if self.later:
            self.add("W", self.later.popleft())


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al. 2023, arXiv:2401.10241, section 6): no bubble inside a rank's span where F = I = W.

    It holds what 1F1B's first rank holds, on every rank.

    >>> print(zb_v(2, 3))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2
    """
    _at_least_one(ranks=ranks, microbatches=microbatches)
    full = max(2 * ranks - 1, microbatches)
    lines = []
    for rank in range(ranks):
        down, up, line = rank, 2 * ranks - 1 - rank, _Line(microbatches)
        for _ in range(2 * (ranks - rank) - 1):
            line.add("F", down)
        for _ in range(rank):
            line.add("F", up)
            line.add("F", down)
        for _ in range(ranks - rank):
            line.add("F", up)
            line.add("I", up)
            line.add("W", up)
        while line.count("F", up) < line.count("F", down) or line.count("F", down) < full:
            if line.count("F", down) < full:
                line.add("F", down)
            for kind, stage in (("I", down), ("W", down), ("F", up), ("I", up), ("W", up)):
                line.add(kind, stage)
        for _ in range(rank):
            line.add("I", down)
            line.add("I", up)
        for _ in range(ranks - rank):
            line.add("I", down)
            line.add("W", down)
        for stage in (up, down):
            while line.count("W", stage) < line.count("I", stage):
                line.add("W", stage)
        lines.append(tuple(line.actions))
    return Schedule(tuple(lines), stage_map("vee", ranks, 2), microbatches, "zb_v")


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """DualPipeV (DeepSeek-AI 2024, arXiv:2412.19437, and their DualPipe repository): in the steady part every F is
    marked as a pair with a B of the other direction, so that one computes while the other exchanges tokens.

    ScheduleError with fewer than 2·ranks microbatches: the two directions would not meet.

    >>> print(dualpipe_v(2, 4))
    0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3& 3B1 3F2& 0B0 3B2 3F3& 0B1 3B3 0I2 0W2 0I3 0W3
    1F0 2F0 1F1 2F1 1F2 2B0 2F2& 1B0 1F3& 2B1 2F3& 1B1 2B2 1B2 2I3 1I3 2W3 1W3
    """
    _at_least_one(ranks=ranks, microbatches=microbatches)
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"dualpipe_v: needs at least as many microbatches as stages, 2 x {ranks} ranks = {2 * ranks}, given "
            f"{microbatches}; use more microbatches, or zb_v, which takes any number"
        )
    lines = []
    for rank in range(ranks):
        down, up, line = rank, 2 * ranks - 1 - rank, _Line(microbatches)
        for _ in range(2 * (ranks - rank - 1)):
            line.add("F", down)
        for _ in range(rank + 1):
            line.add("F", down)
            line.add("F", up)
        for _ in range(ranks - rank - 1):
            line.add("I", up)
            line.weights()
            line.add("F", up)
        for i in range(microbatches - 2 * ranks + rank + 1):
            if i == 0 and rank == ranks - 1:  # where the V turns, in a row they leave a smaller bubble
                line.add("F", down)
                line.add("B", up)
            else:
                line.both(down, up)
            line.both(up, down)
        for _ in range(ranks - rank - 1):
            line.add("B", up)
            line.both(up, down)
        # The last rank + 1 backwards of both directions: from half of them on in two parts, W last.
        whole = rank + 1
        for i in range(2 * (rank + 1)):
            line.add("B" if i < whole else "I", down if i % 2 else up)
        for _ in range(ranks - rank - 1):
            line.weights()
            line.add("I", down)
        for _ in range(rank + 1):
            line.weights()
        lines.append(tuple(line.actions))
    return Schedule(tuple(lines), stage_map("vee", ranks, 2), microbatches, "dualpipe_v")
