"""What pipelines really did: who ran which action from when to when, and how much each rank kept."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from fmeg.mesh.loop import Parts
from fmeg.mesh.vmap import Stack
from fmeg.pipeline.costs import Costs, Event, LayerCosts
from fmeg.pipeline.draw import Svg, draw
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.export import chrome_trace
from fmeg.pipeline.schedule import PARAMETERS, Action, Schedule

_ACTIVE: ContextVar[Recording | None] = ContextVar("fmeg.pipeline.record", default=None)


@dataclass
class Run:
    """One pass of one pipeline: a step, or a part of it.

    events      (rank, action, start, end) in seconds of `time.perf_counter`, of this process's ranks: F B I W, and
                GATHER and REDUCE from their begin until they were waited for. What a rank waits for a message is
                between its actions. On an accelerator the device is waited for at both ends. A virtual mesh runs its
                ranks one after the other
    peak        of each of these ranks, the most residuals between two of its actions, in microbatches of that rank's
                share of the model: what `peaks` predicts
    peak_bytes  the same in bytes of one device: storages that residuals keep alive beyond parameters and batch, each
                counted once
    layers      of each stage of these ranks, (first, past the last)
    split_bytes of each stage with I and W, the bytes of a microbatch's residuals before I, and of what is left for W
    peers       world ranks of this pipeline's processes, if it runs on several
    """

    schedule: Schedule
    events: list[Event] = field(default_factory=list)
    peak: dict[int, float] = field(default_factory=dict)
    peak_bytes: dict[int, int] = field(default_factory=dict)
    split_bytes: dict[int, tuple[int, int]] = field(default_factory=dict)
    layers: dict[int, tuple[int, int]] = field(default_factory=dict)
    peers: tuple[int, ...] = ()

    @property
    def after_input(self) -> float | None:
        """The part of a microbatch's residual bytes that is left between I and W, for `peaks`; None without an I.

        More than 1 where F keeps little and I computes the rest again, which W then needs.
        """
        before = sum(b for b, _ in self.split_bytes.values())
        return sum(a for _, a in self.split_bytes.values()) / before if before else None

    def gathered(self) -> Run:
        """The same with what all processes of this pipeline recorded; called on every process of the world.

        Their clocks must be one, as `time.perf_counter` is on one Linux host.
        """
        if not self.peers:
            return self
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (self.events, self.peak, self.peak_bytes, self.split_bytes, self.layers))
        out = Run(self.schedule, peers=self.peers)
        for events, peak, peak_bytes, split_bytes, layers in (every[p] for p in self.peers):
            out.events += events
            out.peak |= peak
            out.peak_bytes |= peak_bytes
            out.split_bytes |= split_bytes
            out.layers |= layers
        return out

    def watch(self, rank: int, worker: Any, act: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """`act`, timed, with an eye on what `worker` keeps."""
        meter = _Meter(_storages(worker.inputs))
        device = worker.backend.device if worker.backend is not None else torch.device("cpu")
        chunks = max(1, len(self.schedule.stages_of(rank)))
        self.peak[rank], self.peak_bytes[rank] = 0.0, 0
        self.layers |= {s: stage.layers for s, stage in worker.stages.items()}
        began: dict[tuple[str, int], float] = {}

        def moved(kind: str, stage: int) -> None:
            self.events.append((rank, Action(kind, stage), began[kind, stage], _clock(device)))

        worker.on_moved = moved

        def run(worker: Any, a: Action, message: Sequence[Any]) -> list[Any]:
            start = _clock(device)
            if a.kind in PARAMETERS:
                began[a.kind, a.stage] = start
                return act(worker, a, message)
            out = act(worker, a, message)
            self.events.append((rank, a, start, _clock(device)))
            key = a.stage, a.microbatch
            before = meter.forget(key)
            after = meter.keep(key, [worker.kept.get(key), worker.late.get(key)])
            if a.kind == "I":
                self.split_bytes[a.stage] = before, after
            self.peak[rank] = max(self.peak[rank], (len(worker.kept) + len(worker.late)) / chunks)
            self.peak_bytes[rank] = max(self.peak_bytes[rank], meter.bytes)
            return out

        return run


@dataclass
class Recording:
    """What `record` collects: a `Run` for each time that a pipeline ran.

    Durations vary: leave out the first step, which warms up, by recording later ones.
    """

    runs: list[Run] = field(default_factory=list)

    @property
    def events(self) -> list[Event]:
        """Of all runs."""
        return [e for run in self.runs for e in run.events]

    def last(self) -> Run:
        """The last run. ScheduleError if no pipeline ran."""
        if not self.runs:
            raise ScheduleError(
                "record: no pipeline ran inside the block; value_and_grad needs schedule=, the layout layers= on a "
                "mesh axis larger than 1, and the jitted step must be called inside"
            )
        return self.runs[-1]

    def costs(self, hop: float = 0.0) -> Costs:
        """`Costs.measured` of all runs: what `schedule.draw(costs=…)` and `schedule.timeline` take, in seconds."""
        return Costs.measured(self.events, self.last().schedule.stages, hop)

    def gathered(self) -> Recording:
        """The same with what all processes recorded; called on every process of the world."""
        return Recording([run.gathered() for run in self.runs])

    def layer_costs(self) -> LayerCosts:
        """What a layer costs, and what comes before and after the layers, in seconds a microbatch: for `stages=`.

        From the medians of each run's stages. Under `torchrun`: `recording.gathered().layer_costs()`, which every
        process calls, so that all cut alike.
        """
        seen = []
        for run in self.runs:
            of = Costs.measured(run.events, run.schedule.stages)
            for s, (first, past) in sorted(run.layers.items()):
                cost = sum(c[s] for c in (of.F, of.B) if isinstance(c, tuple))
                seen.append((past - first, s == 0, s == run.schedule.stages - 1, cost))
        self.last()
        return LayerCosts.fitted(seen)

    def draw(self, **options: Any) -> Svg:
        """The last run as it was: `fmeg.pipeline.draw` of its events."""
        run = self.last()
        return draw(run.schedule, events=run.events, **options)

    def chrome_trace(self) -> str:
        """All runs for chrome://tracing or Perfetto: `fmeg.pipeline.chrome_trace`."""
        return chrome_trace(self.events)


@contextmanager
def record() -> Iterator[Recording]:
    """Record the pipelines that run inside, in this thread. Without it nothing is timed.

        with record() as recording:
            step(state, batch)
        schedule.draw(costs=recording.costs())

    >>> with record() as recording:
    ...     pass
    >>> recording.runs
    []
    """
    recording = Recording()
    token = _ACTIVE.set(recording)
    try:
        yield recording
    finally:
        _ACTIVE.reset(token)


def begin(schedule: Schedule, peers: tuple[int, ...] = ()) -> Run | None:
    """A new run of the recording that is on, if one is."""
    recording = _ACTIVE.get()
    if recording is None:
        return None
    recording.runs.append(Run(schedule, peers=peers))
    return recording.runs[-1]


def _clock(device: torch.device) -> float:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class _Meter:
    """Bytes of the storages that entries keep alive, each once, but for `known` ones."""

    def __init__(self, known: Iterable[int]) -> None:
        self.known = frozenset(known)
        self.entries: dict[tuple[int, int], dict[int, int]] = {}
        self.users: Counter[int] = Counter()
        self.bytes = 0

    def keep(self, key: tuple[int, int], values: Any) -> int:
        """Bytes of the entry."""
        entry = {p: n for p, n in _storages(values).items() if p not in self.known}
        if entry:
            self.entries[key] = entry
        self.bytes += sum(n for p, n in entry.items() if not self.users[p])
        self.users.update(entry.keys())
        return sum(entry.values())

    def forget(self, key: tuple[int, int]) -> int:
        entry = self.entries.pop(key, {})
        self.users.subtract(entry.keys())
        self.bytes -= sum(n for p, n in entry.items() if not self.users[p])
        return sum(entry.values())


def _storages(value: Any) -> dict[int, int]:
    """Address -> bytes on one device of the storages of nested values."""
    found: dict[int, int] = {}

    def add(tensor: torch.Tensor, devices: int = 1) -> None:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes() // devices

    def visit(x: Any) -> None:
        if isinstance(x, torch.Tensor):
            add(x)
        elif isinstance(x, Parts):
            add(x.tensors[0])
        elif isinstance(x, Stack):
            add(x.tensor, x.tensor.shape[0])
        elif isinstance(x, dict):
            visit(list(x.values()))
        elif isinstance(x, (list, tuple)):
            for y in x:
                visit(y)

    visit(value)
    return found
