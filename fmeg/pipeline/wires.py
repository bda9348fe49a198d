"""Where messages begin and end, and whether sends and receives fit what is computed and each other."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import NoReturn

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import Schedule


@dataclass(frozen=True)
class Wires:
    """Of each message the number of its producer, SEND, RECV and consumer, counting all actions, rank by rank.

    A message is known by its consumer: 2 (stage · microbatches + microbatch), and 1 more for a cotangent.

    >>> Wires.of(Schedule.from_text("0F0 0B0\\n1F0 1B0"))
    Wires(producer={2: 0, 1: 3}, sent={}, received={}, consumer={1: 1, 2: 2})
    """

    producer: dict[int, int]
    sent: dict[int, int]
    received: dict[int, int]
    consumer: dict[int, int]

    @classmethod
    def of(cls, schedule: Schedule) -> Wires:
        rank_of, width = schedule.rank_of, schedule.microbatches
        crosses = [a != b for a, b in zip(rank_of, rank_of[1:], strict=False)]  # between stages s and s + 1
        down, up = [*crosses, False], [False, *crosses]
        producer: dict[int, int] = {}
        sent: dict[int, int] = {}
        received: dict[int, int] = {}
        consumer: dict[int, int] = {}
        node = -1
        for line in schedule.actions:
            for kind, stage, microbatch, _ in line:
                node += 1
                here = 2 * (stage * width + microbatch)
                if kind == "F":
                    if down[stage]:
                        producer[here + 2 * width] = node
                    if up[stage]:
                        consumer[here] = node
                elif kind == "B" or kind == "I":
                    if up[stage]:
                        producer[here - 2 * width + 1] = node
                    if down[stage]:
                        consumer[here + 1] = node
                elif kind == "SEND_F":
                    sent[here + 2 * width] = node
                elif kind == "SEND_B":
                    sent[here - 2 * width + 1] = node
                elif kind == "RECV_F":
                    received[here] = node
                elif kind == "RECV_B":
                    received[here + 1] = node
        return cls(producer, sent, received, consumer)


def check_wires(schedule: Schedule, in_order: bool = True) -> None:
    """One SEND after each producer, one RECV before each consumer, and no others; `in_order`: both ends of a channel
    (from rank to rank) list its messages in the same order. ScheduleError says which one does not.

    >>> check_wires(Schedule.from_text("0F0 0SEND_F0 0B0 0RECV_B0\\n1RECV_F0 1F0 1B0 1SEND_B0"))
    Traceback (most recent call last):
    ...
    fmeg.pipeline.errors.ScheduleError: schedule: rank 0 runs 0B0 (action 2) before 0RECV_B0 (action 3), which ...
    """
    wires = Wires.of(schedule)
    producer, sent, received, consumer = wires.producer, wires.sent, wires.received, wires.consumer
    counted = sum(a[0].startswith(("SEND", "RECV")) for line in schedule.actions for a in line)
    if not (producer.keys() == sent.keys() == received.keys() and counted == len(sent) + len(received)):
        _wrong_messages(schedule, wires)
    for key, node in sent.items():
        if node < producer[key]:
            _swapped(schedule, node, producer[key], "which makes what it sends")
        if consumer[key] < received[key]:
            _swapped(schedule, consumer[key], received[key], "which brings its input")
    if in_order:
        latest: dict[tuple[int, int], int] = {}
        rank_of, width = schedule.rank_of, schedule.microbatches
        for key in sent:  # in the order of sending
            stage = key // (2 * width)
            channel = rank_of[stage + 1 if key % 2 else stage - 1], rank_of[stage]
            before = latest.get(channel, -1)
            if received[key] < before:
                (_, first), (_, second) = _where(schedule, received[key]), _where(schedule, before)
                raise ScheduleError(
                    f"schedule: rank {channel[1]} has {first} before {second}, but rank {channel[0]} sends what they "
                    f"receive in the other order: without tags each gets the other's data"
                )
            latest[channel] = received[key]


def _where(schedule: Schedule, node: int) -> tuple[int, str]:
    """The rank of a node, and its action with its place in the rank's list."""
    ends = list(accumulate(map(len, schedule.actions)))
    rank = bisect_right(ends, node)
    at = node - (ends[rank - 1] if rank else 0)
    return rank, f"{schedule.actions[rank][at]} (action {at})"


def _swapped(schedule: Schedule, early: int, late: int, why: str) -> NoReturn:
    rank, first = _where(schedule, early)
    raise ScheduleError(f"schedule: rank {rank} runs {first} before {_where(schedule, late)[1]}, {why}")


def _wrong_messages(schedule: Schedule, wires: Wires) -> NoReturn:
    """A send or a receive that is missing, there twice, or there for nothing."""
    seen: set[tuple[str, int, int]] = set()
    for rank, line in enumerate(schedule.actions):
        for at, action in enumerate(line):
            if action.kind.startswith(("SEND", "RECV")):
                if action[:3] in seen:
                    raise ScheduleError(f"schedule: rank {rank} has {action} twice, the second as action {at}")
                seen.add(action[:3])
    width = schedule.microbatches
    for key, node in wires.producer.items():
        stage, microbatch = key // 2 // width, key // 2 % width
        from_stage, what = (stage + 1, "B") if key % 2 else (stage - 1, "F")
        for there, stage_, name in ((wires.sent, from_stage, "SEND_"), (wires.received, stage, "RECV_")):
            if key not in there:
                raise ScheduleError(
                    f"schedule: rank {schedule.rank_of[stage_]} has no {stage_}{name}{what}{microbatch}, but "
                    f"{_where(schedule, node)[1]} of rank {schedule.rank_of[from_stage]} makes what "
                    f"{stage}{what}{microbatch} of rank {schedule.rank_of[stage]} consumes"
                )
    for there in (wires.sent, wires.received):
        for key, node in there.items():
            if key not in wires.producer:
                rank, extra = _where(schedule, node)
                raise ScheduleError(f"schedule: rank {rank} has {extra}, but no other rank makes or consumes that")
    raise AssertionError("unreachable: the messages are as they should be")
