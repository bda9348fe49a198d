"""Runs a schedule with its sends and receives written out: values are terms, ranks go on in random order.

A rank sends into a channel while that holds fewer messages than the receiver has posted receives, plus `capacity`; a
receive is bound to the oldest message of its channel that none is bound to; who consumes it waits for it. No tags:
where the ends disagree on the order, terms are wrong. It says in another way what `fmeg.pipeline.order` says by graph.
"""

from __future__ import annotations

import random
from typing import Any

from fmeg.pipeline import Action, Schedule


class Stuck(Exception):
    """No rank can go on."""


def run(schedule: Schedule, capacity: int | None = None, seed: int = 0) -> dict[int, Any]:
    """What was added to the gradient of each stage, in order. Stuck, or KeyError where something is not there."""
    ranks = [_Rank(schedule, r) for r in range(schedule.ranks)]
    channels: dict[tuple[int, int], list[Any]] = {}
    posted: dict[tuple[int, int], int] = {}
    gradients: dict[int, list[Any]] = {s: [] for s in range(schedule.stages)}
    draw = random.Random(seed)
    running = [r for r in ranks if r.actions]
    while running:
        able = [r for r in running if r.can(channels, posted, capacity)]
        if not able:
            raise Stuck([r.actions[0] for r in running])
        rank = draw.choice(able)
        rank.step(channels, posted, gradients)
        running = [r for r in ranks if r.actions]
    return gradients


def expected(schedule: Schedule) -> dict[int, Any]:
    """The gradients of gradient accumulation: each stage's microbatches in ascending order."""
    last = schedule.stages - 1

    def forward(stage: int, m: int) -> Any:
        return ("F", stage, m, forward(stage - 1, m) if stage else ())

    def backward(stage: int, m: int) -> Any:
        return ("B", forward(stage, m), backward(stage + 1, m) if stage < last else ())

    return {s: [("W", backward(s, m)) for m in range(schedule.microbatches)] for s in range(schedule.stages)}


class _Rank:
    def __init__(self, schedule: Schedule, rank: int):
        self.rank, self.rank_of, self.last = rank, schedule.rank_of, schedule.stages - 1
        self.actions = list(schedule.actions[rank])
        self.values: dict[tuple[str, int, int], Any] = {}  # ("F" | "B" | "residual" | "input", stage, microbatch)
        self.bound: dict[tuple[str, int, int], tuple[tuple[int, int], int]] = {}  # receive -> channel, place in it

    def peer(self, action: Action) -> tuple[int, int]:
        """The channel of a SEND or RECV."""
        away = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        other = self.rank_of[action.stage + away]
        return (self.rank, other) if action.kind.startswith("SEND") else (other, self.rank)

    def source(self, action: Action) -> tuple[str, int, int] | None:
        """What a compute action consumes: the value of a neighbouring stage, here or received."""
        kind, stage, m, _ = action
        if kind == "F":
            return ("F", stage - 1, m) if stage else None
        return ("B", stage + 1, m) if kind in ("B", "I") and stage < self.last else None

    def can(self, channels: Any, posted: Any, capacity: int | None) -> bool:
        action = self.actions[0]
        if action.kind.startswith("SEND") and capacity is not None:
            channel = self.peer(action)
            return len(channels.get(channel, ())) < posted.get(channel, 0) + capacity
        source = self.source(action)
        if source in self.bound:
            channel, place = self.bound[source]
            return len(channels.get(channel, ())) > place
        return True

    def step(self, channels: Any, posted: Any, gradients: Any) -> None:
        action = self.actions.pop(0)
        kind, stage, m, _ = action
        if kind.startswith("SEND"):
            channels.setdefault(self.peer(action), []).append(self.values["F" if kind == "SEND_F" else "B", stage, m])
        elif kind.startswith("RECV"):
            channel = self.peer(action)
            place = posted[channel] = posted.get(channel, 0) + 1
            key = ("F", stage - 1, m) if kind == "RECV_F" else ("B", stage + 1, m)
            self.bound[key] = channel, place - 1
        elif kind == "F":
            self.values["F", stage, m] = ("F", stage, m, self.take(action, channels))
        elif kind in ("B", "I"):
            cotangent = ("B", self.values["F", stage, m], self.take(action, channels))
            self.values["B", stage, m] = cotangent
            if kind == "B":
                gradients[stage].append(("W", cotangent))
        elif kind == "W":
            gradients[stage].append(("W", self.values["B", stage, m]))

    def take(self, action: Action, channels: Any) -> Any:
        source = self.source(action)
        if source is None:
            return ()
        if source in self.bound:
            channel, place = self.bound[source]
            return channels[channel][place]
        return self.values[source]
