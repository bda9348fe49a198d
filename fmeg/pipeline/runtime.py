"""Running a schedule: workers that know no transport, and two ways to drive them.

In one process a ready list runs, again and again, every rank's next action whose message has come: a schedule that
deadlocks
ends with a report of who waits for what. Across processes each runs its own list; messages are posted where the list
says,
waited for by their consumer, sends at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fmeg.pipeline.cut import Stage
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.record import begin
from fmeg.pipeline.reduce import Move, Reductions, Started
from fmeg.pipeline.schedule import Action, Schedule
from fmeg.pipeline.transport import RealRanks
from fmeg.pipeline.weights import Halves, used_inputs
from fmeg.sharding.buffers import Sum
from fmeg.sharding.execute import Executable

Key = tuple[str, int, int]  # ("F" or "B", the stage it arrives at, microbatch)


@dataclass(eq=False)
class Pieces:
    """A stage's pieces, compiled: F, and B whole or as I and W."""

    forward: Executable
    backward: Executable | None = None
    inputs: Executable | None = None
    weights: Executable | None = None
    halves: Halves | None = None
    used: frozenset[int] = frozenset()  # inputs of the body that they use


@dataclass
class Worker:
    """One pipeline rank: its stages' pieces, what they keep, what they add up."""

    stages: dict[int, Stage]
    backend: Any
    inputs: dict[int, list[list[Any]]]  # stage -> inputs of the body, by microbatch
    pieces: dict[int, Pieces]
    kept: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    late: dict[tuple[int, int], list[Any]] = field(default_factory=dict)
    sums: dict[tuple[int, int], Sum] = field(default_factory=dict)  # (output, stage)
    gradients: dict[tuple[int, int], Sum] = field(default_factory=dict)  # (output, stage)
    ranks: Any = None
    reductions: Reductions = field(default_factory=Reductions)
    stacked: Container[int] = frozenset()  # outputs that are stacks of layers
    reduced: dict[tuple[int, int], Any] = field(default_factory=dict)  # (output, stage, or -1 where stages share it)
    started: list[tuple[int, list[tuple[int, int]], Started]] = field(default_factory=list)
    done: set[int] = field(default_factory=set)  # stages whose REDUCE has begun
    gathers: Mapping[int, tuple[Move, ...]] = field(default_factory=dict)  # by input of the body
    arriving: dict[int, tuple[list[int], Started]] = field(default_factory=dict)  # stage -> inputs, and their gathers
    on_moved: Callable[[str, int], None] | None = None  # told what has been waited for

    def forward(self, s: int, j: int, carries: Sequence[Any]) -> list[Any]:
        """F: the carries that leave."""
        stage = self._mine(s)
        self._arrive(s)
        got = self.pieces[s].forward.run([*self.inputs[s][j], *carries])
        n = stage.n_carry
        for out, value in zip(stage.sums, got[n : n + len(stage.sums)], strict=True):
            self.sums.setdefault((out, s), Sum(self.backend)).add(value)
        self.kept[s, j] = got[n + len(stage.sums) :]
        return got[:n]

    def backward(self, s: int, j: int, cts: Sequence[Any]) -> list[Any]:
        """B: the cotangents that leave."""
        stage = self._mine(s)
        piece = self.pieces[s].backward
        assert piece is not None
        got = piece.run([*self.inputs[s][j], *_taken(self.kept, s, j, "F"), *cts])
        n = len(got) - len(stage.gradients)
        self._add(s, range(n, len(got)), got[n:])
        return got[:n]

    def input_gradient(self, s: int, j: int, cts: Sequence[Any]) -> list[Any]:
        """I: the cotangents that leave; what W needs is kept."""
        self._mine(s)
        p = self.pieces[s]
        assert p.inputs is not None and p.halves is not None
        given = [*self.inputs[s][j], *_taken(self.kept, s, j, "F"), *cts]
        n_in = len(given)
        held = {k: given[k] for k in used_inputs(p.halves.second, n_in)}
        got = p.inputs.run(given)
        early = p.halves.early
        n = self._n_cts(s)
        self._add(s, early[n:], got[n : len(early)])
        self.late[s, j] = [*(held.get(k) for k in range(n_in)), *got[len(early) :]]
        return got[:n]

    def weight_gradient(self, s: int, j: int) -> None:
        """W: the gradients that were left."""
        self._mine(s)
        p = self.pieces[s]
        assert p.weights is not None and p.halves is not None
        self._add(s, p.halves.late, p.weights.run(_taken(self.late, s, j, "I")))

    def reduce(self, s: int) -> None:
        """REDUCE: the reductions of gradients that this stage completes, begun."""
        self._mine(s)
        self.done.add(s)
        keys, values = [], []
        for i in self.reductions.moves:
            alone = i in self.stacked
            parts = [s] if alone else [t for t, stage in self.stages.items() if i in stage.gradients]
            having = [t for t in parts if (i, t) in self.gradients]
            if s not in parts or not having or not self.done.issuperset(parts):
                continue
            keys.append((i, s if alone else -1))
            values.append(self._total(i, having))
        started = Started(self.ranks, [self.reductions.moves[i] for i, _ in keys], values)
        started.begin()
        self.started.append((s, keys, started))
        self._fill(s, dict.fromkeys(self.gathers))  # not needed any more

    def settle(self) -> None:
        """Wait for the reductions that have begun."""
        for s, keys, started in self.started:
            self.reduced.update(zip(keys, started.finish(), strict=True))
            if self.on_moved is not None:
                self.on_moved("REDUCE", s)
        self.started.clear()

    def gather(self, s: int) -> None:
        """GATHER: the stage's parameters, begun."""
        self._mine(s)
        used = [i for i in self.gathers if i in self.pieces[s].used]
        started = Started(self.ranks, [self.gathers[i] for i in used], [self.inputs[s][0][i] for i in used])
        started.begin()
        self.arriving[s] = used, started

    def _arrive(self, s: int) -> None:
        if s in self.arriving:
            used, started = self.arriving.pop(s)
            self._fill(s, dict(zip(used, started.finish(), strict=True)))
            if self.on_moved is not None:
                self.on_moved("GATHER", s)

    def _fill(self, s: int, values: Mapping[int, Any]) -> None:
        """Inputs of a stage, for every microbatch."""
        for given in self.inputs[s]:
            for i, value in values.items():
                given[i] = value

    def gradient(self, i: int) -> Any:
        """The sum of an output that several stages may have a part of; None where none of this rank's has."""
        if (i, -1) in self.reduced:
            return self.reduced[i, -1]
        having = [t for t in self.stages if (i, t) in self.gradients]
        return self._total(i, having) if having else None

    def rows(self, i: int, s: int) -> Any:
        """A stage's own layers of a gradient, or of what a scan stacks; None where it has none."""
        if (i, s) in self.reduced:
            return self.reduced[i, s]
        made = self.gradients.get((i, s), self.sums.get((i, s)))
        return made.result() if made is not None else None

    def sum(self, i: int) -> Any:
        """A sum of the loss function; None where this rank has not the stage that makes it."""
        return next((made.result() for (k, _), made in self.sums.items() if k == i), None)

    def _total(self, i: int, stages: Sequence[int]) -> Any:
        """The last stage's part first, as the backward pass goes."""
        parts = [self.gradients.pop((i, t)).result() for t in sorted(stages, reverse=True)]
        total = parts[0]
        for p in parts[1:]:
            total = self.backend.call(torch.add, (total, p))
        return total

    def left(self) -> list[str]:
        """The actions whose results were kept and not used."""
        return [f"{s}{kind}{j}" for kind, kept in (("F", self.kept), ("I", self.late)) for s, j in kept]

    def _mine(self, s: int) -> Stage:
        if s not in self.stages:
            raise ScheduleError(f"stage {s} is not on this rank, which has {', '.join(map(str, self.stages))}")
        return self.stages[s]

    def _n_cts(self, s: int) -> int:
        return self.stages[s].n_cts

    def _add(self, s: int, outputs: Sequence[int], values: Sequence[Any]) -> None:
        """Add gradients; `outputs` are indices among the results of the backward piece."""
        gradients, n = self.stages[s].gradients, self._n_cts(s)
        for k, value in zip(outputs, values, strict=True):
            if value is None:  # of a stage without layers
                continue
            self.gradients.setdefault((gradients[k - n], s), Sum(self.backend)).add(value)


def _taken(kept: dict[tuple[int, int], list[Any]], s: int, j: int, maker: str) -> list[Any]:
    if (s, j) not in kept:
        raise ScheduleError(f"it needs what {s}{maker}{j} keeps, which has not run, or was used already")
    return kept.pop((s, j))


def _wants(a: Action, stages: int) -> Key | None:
    """The message that an action consumes."""
    if a.kind == "F":
        return ("F", a.stage, a.microbatch) if a.stage else None
    if a.kind not in ("B", "I"):
        return None
    return ("B", a.stage, a.microbatch) if a.stage < stages - 1 else None


def _gives(a: Action, stages: int) -> Key | None:
    """The message that an action makes."""
    if a.kind == "F":
        return ("F", a.stage + 1, a.microbatch) if a.stage < stages - 1 else None
    if a.kind not in ("B", "I"):
        return None
    return ("B", a.stage - 1, a.microbatch) if a.stage else None


def _act(worker: Worker, a: Action, message: Sequence[Any]) -> list[Any]:
    if a.kind == "F":
        return worker.forward(a.stage, a.microbatch, message)
    if a.kind == "B":
        return worker.backward(a.stage, a.microbatch, message)
    if a.kind == "I":
        return worker.input_gradient(a.stage, a.microbatch, message)
    if a.kind == "W":
        worker.weight_gradient(a.stage, a.microbatch)
        return []
    if a.kind == "REDUCE":
        worker.reduce(a.stage)
        return []
    if a.kind == "GATHER":
        worker.gather(a.stage)
        return []
    raise ScheduleError(f"pipeline: the runtime has no action {a.kind} ({a})")


def _waits(schedule: Schedule, a: Action, want: Key) -> str:
    """What an action waits for, in words."""
    kind, stage, j = want
    source = stage - 1 if kind == "F" else stage + 1
    what = "the activation" if kind == "F" else "the cotangent"
    kinds = "F" if kind == "F" else "BI"
    makers = [
        f"{made} of rank {r} (action {i})"
        for r, line in enumerate(schedule.actions)
        for i, made in enumerate(line)
        if made.stage == source and made.microbatch == j and made.kind in kinds
    ]
    return f"{a} waits for {what} of {' or '.join(makers) or f'{source}{kinds[0]}{j}, which no rank runs'}"


def run_virtual(schedule: Schedule, workers: Sequence[Worker]) -> None:
    """All ranks in this process, by a ready list. `schedule`: without messages."""
    lists, run = schedule.actions, begin(schedule)
    acts = [_act if run is None else run.watch(r, w, _act) for r, w in enumerate(workers)]
    at = [0] * len(lists)
    mail: dict[Key, list[Any]] = {}
    while any(i < len(line) for i, line in zip(at, lists, strict=True)):
        progress = False
        for r, line in enumerate(lists):
            while at[r] < len(line):
                a = line[at[r]]
                want = _wants(a, schedule.stages)
                if want is not None and want not in mail:
                    break
                try:
                    out = acts[r](workers[r], a, mail.pop(want) if want is not None else [])
                except ScheduleError as e:
                    raise ScheduleError(f"pipeline: rank {r} at {a} (action {at[r]} of {len(line)}): {e}") from None
                give = _gives(a, schedule.stages)
                if give is not None:
                    mail[give] = out
                workers[r].settle()
                at[r] += 1
                progress = True
        if not progress:
            waits = [
                f"rank {r} at action {i} of {len(line)}: {_waits(schedule, line[i], want)}"
                for r, (i, line) in enumerate(zip(at, lists, strict=True))
                if i < len(line) and (want := _wants(line[i], schedule.stages)) is not None
            ]
            raise ScheduleError("pipeline: deadlock. " + "; ".join(waits))
    _check_left(dict(enumerate(workers)))
    if mail:
        kind, stage, j = next(iter(mail))
        raise ScheduleError(f"pipeline: at the end {stage}{kind}{j} has not run, for which there is a message")


def _check_left(workers: dict[int, Worker]) -> None:
    left = [f"{', '.join(names)} of rank {r}" for r, w in workers.items() if (names := w.left())]
    if left:
        raise ScheduleError(f"pipeline: at the end no backward has used what was kept by {'; '.join(left)}")


def run_real(
    schedule: Schedule,
    worker: Worker,
    ranks: RealRanks,
    like: Mapping[tuple[str, int], Sequence[torch.Tensor]],
    timeout: timedelta,
) -> None:
    """This process's rank. `schedule`: with messages; `like`: empty tensors like what arrives at each stage, forward
    ("F") and back ("B")."""
    me = ranks.mine[0]
    line = schedule.actions[me]
    run = begin(schedule, tuple(ranks.peer(r) for r in range(schedule.ranks)))
    act = _act if run is None else run.watch(me, worker, _act)
    arrived: dict[Key, tuple[list[Any], list[torch.Tensor]]] = {}
    local: dict[Key, list[Any]] = {}
    sent: list[tuple[Any, torch.Tensor]] = []
    for i, a in enumerate(line):
        try:
            if a.kind in ("RECV_F", "RECV_B"):
                source = schedule.rank_of[a.stage - 1 if a.kind == "RECV_F" else a.stage + 1]
                buffers = [torch.empty_like(c) for c in like[a.kind[-1], a.stage]]
                works: list[Any] = [
                    dist.irecv(b, ranks.peer(source), tag=_tag(a, k, schedule)) for k, b in enumerate(buffers)
                ]
                arrived[a.kind[-1], a.stage, a.microbatch] = (works, buffers)
            elif a.kind in ("SEND_F", "SEND_B"):
                to = a.stage + 1 if a.kind == "SEND_F" else a.stage - 1
                for k, value in enumerate(local.pop((a.kind[-1], to, a.microbatch))):
                    tensor = value.contiguous()
                    work = dist.isend(
                        tensor,
                        ranks.peer(schedule.rank_of[to]),
                        tag=_tag(a._replace(kind=f"RECV_{a.kind[-1]}", stage=to), k, schedule),
                    )
                    sent.append((work, tensor))
            else:
                want, message = _wants(a, schedule.stages), []
                if want is not None and want in local:
                    message = local.pop(want)
                elif want is not None:
                    works, message = arrived.pop(want)
                    for w in works:
                        w.wait(timeout)
                give = _gives(a, schedule.stages)
                out = act(worker, a, message)
                if give is not None:
                    local[give] = out
        except RuntimeError as e:
            raise ScheduleError(
                f"pipeline: rank {me} at {a} ({i + 1}/{len(line)}) failed or waited longer than {timeout}: {e}"
            ) from e
    try:
        for work, _ in sent:
            work.wait(timeout)
    except RuntimeError as e:
        raise ScheduleError(f"pipeline: rank {me} sent what was not received within {timeout}: {e}") from e
    worker.settle()
    _check_left({me: worker})


def _tag(receive: Action, k: int, schedule: Schedule) -> int:
    """A tag for the k-th tensor of a message, the same on both sides."""
    return ((receive.microbatch * schedule.stages + receive.stage) * 2 + (receive.kind == "RECV_B")) * 64 + k
