"""Sends and receives, derived from the lists of what is computed.

A message is an activation (F) or a cotangent (B) that its stage's neighbour on another rank consumes. A *channel* is a
directed pair of ranks. A send comes right after its producer. Receives come in the order in which their sender sends,
channel by channel, and each no later than its consumer: then first in, first out is enough, and no message needs a tag.
("Just before its consumer" is not: on a V, the F of one stage and the B of another share a channel.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import COMPUTE, PARAMETERS, Action, Schedule


class Message(NamedTuple):
    """What travels from `source` to `target` (ranks), and the actions that send and receive it.

    >>> message_from(Action("F", 1, 0), (0, 1, 0, 1))
    Message(source=1, target=0, send=1SEND_F0, receive=2RECV_F0)
    """

    source: int
    target: int
    send: Action
    receive: Action


def message_from(action: Action, rank_of: tuple[int, ...]) -> Message | None:
    """The message that an F, B or I produces; None if nobody on another rank waits for it."""
    kind, stage, microbatch = action[:3]
    if kind not in ("F", "B", "I"):
        return None
    to = stage + 1 if kind == "F" else stage - 1
    if not 0 <= to < len(rank_of) or rank_of[to] == rank_of[stage]:
        return None
    what = "F" if kind == "F" else "B"
    send, receive = Action("SEND_" + what, stage, microbatch), Action("RECV_" + what, to, microbatch)
    return Message(rank_of[stage], rank_of[to], send, receive)


def messages(schedule: Schedule) -> Iterator[Message]:
    """Every message, rank by rank in the order of its producers.

    >>> [str(m.send) for m in messages(Schedule.from_text("0F0 0B0\\n1F0 1B0"))]
    ['0SEND_F0', '1SEND_B0']
    """
    for line in schedule.actions:
        for action in line:
            if action.kind in COMPUTE and (message := message_from(action, schedule.rank_of)) is not None:
                yield message


def derive(schedule: Schedule, ahead: int = 0, parameters: bool = False) -> Schedule:
    """The schedule with SEND and RECV written out; those that were there are replaced.

    ahead       receives are posted this many compute actions before their consumer
    parameters  GATHER before a stage's first F, and REDUCE after its last B or W, are written where there are none;
                those that are there stay between the compute actions where they stand

    ScheduleError if an action waits for a message that nobody sends.

    >>> print(derive(Schedule.from_text("0F0 0B0\\n1F0 1B0"), parameters=True))
    0GATHER 0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE
    1GATHER 1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE
    """
    marks = [_marks(line) for line in (with_parameters(schedule) if parameters else schedule).actions]
    schedule = schedule.compute()
    rank_of, last = schedule.rank_of, schedule.stages - 1
    outgoing: list[list[Action | None]] = []
    channels: dict[tuple[int, int], deque[Action]] = {}
    for line in schedule.actions:
        sends: list[Action | None] = []
        for action in line:
            message = message_from(action, rank_of)
            sends.append(message.send if message else None)
            if message:
                channels.setdefault(message[:2], deque()).append(message.receive)
        outgoing.append(sends)

    lines = []
    for rank, (line, sends) in enumerate(zip(schedule.actions, outgoing, strict=True)):
        out: list[Action] = []
        arrived: set[tuple[str, int, int]] = set()
        posted = 0  # receives are written for line[:posted]
        for i, (action, send) in enumerate(zip(line, sends, strict=True)):
            out += marks[rank].get(i, ())
            until = min(len(line), i + ahead + 1 + action.pair)
            while posted < until:
                kind, stage, microbatch = line[posted][:3]
                posted += 1
                neighbour = stage - 1 if kind == "F" else stage + 1
                if kind == "W" or not 0 <= neighbour <= last or rank_of[neighbour] == rank:
                    continue
                wanted = ("RECV_F" if kind == "F" else "RECV_B", stage, microbatch)
                if wanted in arrived:
                    arrived.remove(wanted)
                    continue
                channel = channels.get((rank_of[neighbour], rank), ())
                while channel:
                    receive = channel.popleft()
                    out.append(receive)
                    if receive[:3] == wanted:
                        break
                    arrived.add(receive[:3])
                else:
                    raise ScheduleError(
                        f"schedule: {line[posted - 1]} on rank {rank} waits for a message from rank "
                        f"{rank_of[neighbour]}, which has no {neighbour}{'F' if kind == 'F' else 'B'}{microbatch}"
                    )
            out.append(action)
            if send is not None:
                out.append(send)
        lines.append((*out, *marks[rank].get(len(line), ())))
    return Schedule(tuple(lines), rank_of, schedule.microbatches, schedule.name)


def with_parameters(schedule: Schedule, kinds: Sequence[str] = PARAMETERS) -> Schedule:
    """The schedule with a GATHER before each stage's first F and a REDUCE after its last B or W, each of `kinds` that
    it has none of.

    >>> print(with_parameters(Schedule.from_text("0F0 0F1 0B0 0B1"), ["REDUCE"]))
    0F0 0F1 0B0 0B1 0REDUCE
    """
    there = {a.kind for line in schedule.actions for a in line}
    lines = []
    for line in schedule.actions:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for i, a in enumerate(line):
            if a.kind == "F":
                first.setdefault(a.stage, i)
            elif a.kind in ("B", "W"):
                last[a.stage] = i
        out: list[Action] = []
        for i, a in enumerate(line):
            if "GATHER" in kinds and "GATHER" not in there and first.get(a.stage) == i:
                out.append(Action("GATHER", a.stage))
            out.append(a)
            if "REDUCE" in kinds and "REDUCE" not in there and last.get(a.stage) == i:
                out.append(Action("REDUCE", a.stage))
        lines.append(tuple(out))
    return Schedule(tuple(lines), schedule.rank_of, schedule.microbatches, schedule.name)


def _marks(line: Sequence[Action]) -> dict[int, list[Action]]:
    """GATHER and REDUCE by the number of compute actions before them."""
    marks: dict[int, list[Action]] = {}
    before = 0
    for a in line:
        if a.kind in PARAMETERS:
            marks.setdefault(before, []).append(a)
        before += a.kind in COMPUTE
    return marks
