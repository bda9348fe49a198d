"""`Peers` without GPUs: threads whose launches are ordered by clocks, and processes that share files."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = Counter
Lane = tuple[int, str]  # of a rank: "main", "apart"


@dataclass
class Access:
    """A read or a write of bytes; `at`: how many accesses its lane had made; `seen`: of each lane, how many of its
    accesses are known to come before."""

    begin: int
    end: int
    write: bool
    lane: Lane
    at: int
    seen: Clock
    op: str


@dataclass
class Group:
    """n ranks, one thread each. `skip`: launches that are left out, by kind, rank 0's first being number 0."""

    n: int
    skip: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.gate = threading.Barrier(self.n, timeout=20)
        self.memory: list[Tensor | None] = [None] * self.n
        self.meeting: list[Clock] = [Counter() for _ in range(self.n)]
        self.accesses: list[Access] = []
        self.shared: set[tuple[int, int]] = set()

    def run(self, fn: Callable[[Recorded], Any]) -> list[Any]:
        """fn on each rank; its results."""
        results: list[Any] = [None] * self.n
        failed: list[BaseException] = []

        def work(rank: int) -> None:
            try:
                with (peers := Recorded(self, rank)):
                    results[rank] = fn(peers)
            except BaseException as error:
                failed.append(error)
                self.gate.abort()

        threads = [threading.Thread(target=work, args=(r,)) for r in range(self.n)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if failed:
            raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
        return results

    def races(self) -> list[str]:
        """Pairs of accesses to the same bytes, one of them a write, that nothing orders. Memory that is not shared is
        compared within a rank."""
        found = []
        for i, a in enumerate(self.accesses):
            for b in self.accesses[i + 1 :]:
                if a.lane == b.lane or not (a.write or b.write) or a.end <= b.begin or b.end <= a.begin:
                    continue
                if a.lane[0] != b.lane[0] and not any(lo <= a.begin < hi for lo, hi in self.shared):
                    continue
                if b.seen[a.lane] < a.at and a.seen[b.lane] < b.at:
                    found.append(f"{a.lane} {a.op} and {b.lane} {b.op}")
        return found


class Recorded(TorchDispatchMode):
    """One rank's `Peers`. What is launched runs at once; what would have been free to run at another time is known from
    the clocks."""

    def __init__(self, group: Group, rank: int) -> None:
        super().__init__()
        self.group, self.index, self.size = group, rank, group.n
        self.lane: Lane = (rank, "main")
        self.clocks: dict[Lane, Clock] = {(rank, "main"): Counter(), (rank, "apart"): Counter()}
        self.reserved = 0
        self.calls: Counter[str] = Counter()

    def _skipped(self, kind: str) -> bool:
        self.calls[kind] += 1
        return self.group.skip.get(kind) == self.calls[kind] - 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            return out  # a view
        clock = self.clocks[self.lane]
        clock[self.lane] += 1
        written = {
            id(x)
            for a, x in (*zip(schema.arguments, args, strict=False), *self._named(schema, kwargs or {}))
            if a.alias_info is not None and a.alias_info.is_write
        }
        fresh = func is not torch.ops.aten.empty.memory_format and "empty" not in schema.name
        touched = [(x, id(x) in written) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        touched += [(x, True) for x in tree_leaves(out) if isinstance(x, Tensor) and fresh]
        for x, write in touched:
            for begin, end in _spans(x):
                at = clock[self.lane]
                access = Access(begin, end, write, self.lane, at, clock.copy(), schema.name)
                self.group.accesses.append(access)
        return out

    @staticmethod
    def _named(schema: Any, kwargs: dict[str, Any]) -> list[tuple[Any, Any]]:
        return [(a, kwargs[a.name]) for a in schema.arguments if a.name in kwargs]

    def reserve(self, nbytes: int) -> None:
        self.reserved = max(self.reserved, nbytes)

    def buffers(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        need = prod(shape) * dtype.itemsize
        g = self.group
        if g.memory[self.index] is None:
            mine = torch.full((max(need, self.reserved),), 255, dtype=torch.uint8)
            g.shared.add((mine.data_ptr(), mine.data_ptr() + mine.numel()))
            g.memory[self.index] = mine
            g.gate.wait()
        return [m[:need].view(dtype).view(shape) for m in g.memory if m is not None]

    def barrier(self) -> None:
        g = self.group
        g.meeting[self.index] = self.clocks[self.lane].copy()
        g.gate.wait()
        if not self._skipped("barrier"):
            for other in g.meeting:
                self.clocks[self.lane] |= other
        g.gate.wait()

    @contextmanager
    def apart(self) -> Iterator[None]:
        here, there = (self.index, "main"), (self.index, "apart")
        if not self._skipped("apart"):
            self.clocks[there] |= self.clocks[here]
        self.lane = there
        yield
        self.lane = here

    def mark(self) -> Clock:
        return self.clocks[self.index, "apart"].copy()

    def wait(self, mark: Clock) -> None:
        if not self._skipped("wait"):
            self.clocks[self.index, "main"] |= mark

    def join(self) -> None:
        if not self._skipped("join"):
            self.clocks[self.index, "main"] |= self.clocks[self.index, "apart"]


def _spans(x: Tensor) -> list[tuple[int, int]]:
    """The bytes of a tensor: of each of its slices if it does not lie in one piece."""
    if x.is_contiguous():
        return [(x.data_ptr(), x.data_ptr() + x.nbytes)] if x.numel() else []
    return [s for part in x for s in _spans(part)]


class Files:
    """Between processes that see the same folder: memory is files, launches run at once."""

    def __init__(self, folder: str, ranks: Sequence[int], index: int, group: Any) -> None:
        self.folder, self.ranks, self.index, self.size, self.group = Path(folder), ranks, index, len(ranks), group
        self.least = self.have = self.uses = 0
        self.memory: list[Tensor] = []

    def reserve(self, nbytes: int) -> None:
        self.least = max(self.least, nbytes)

    def buffers(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        need = prod(shape) * dtype.itemsize
        self.uses += 1
        if need > self.have:
            self.have = max(need, self.least)
            name = "-".join(map(str, sorted(self.ranks)))
            files = [str(self.folder / f"{name}.{r}.{self.have}") for r in self.ranks]
            mine = torch.from_file(files[self.index], shared=True, size=self.have, dtype=torch.uint8)
            mine.fill_(255)
            self.barrier()
            self.memory = [torch.from_file(f, shared=True, size=self.have, dtype=torch.uint8) for f in files]
        return [m[:need].view(dtype).view(list(shape)) for m in self.memory]

    def barrier(self) -> None:
        dist.barrier(self.group)

    @contextmanager
    def apart(self) -> Iterator[None]:
        yield

    def mark(self) -> None:
        return None

    def wait(self, mark: None) -> None:
        return None

    def join(self) -> None:
        return None
