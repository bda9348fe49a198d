"""One rank of many, alone on its GPU: what its own work costs, and what of a wire's time its schedule can hide.

The other members of every group are taken to hold what this rank holds, so a gather repeats, a sum multiplies, and what
arrives is what this rank would send to itself (of unequal rows: any of its own). The numbers that come out mean
nothing; shapes, kernels and memory are those of a rank among others. With a `Link`, each collective takes as long on a
stream of its own as a wire of that speed would need, and as many multiprocessors are busy meanwhile. What other GPUs'
reads do to this one's memory is left out. Not a measurement of several GPUs; where no shape depends on values, a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmeg import Mesh
from fmeg.mesh.distributed import DistributedBackend, Group
from fmeg.mesh.index import RankIndex
from fmeg.mesh.transport import Started, Transport, cut, in_pieces, merge


@dataclass(frozen=True)
class Link:
    """A wire: bytes a second that a rank receives, seconds before the first, multiprocessors of a collective."""

    bytes_s: float
    latency_s: float = 1e-5
    ctas: int = 16


class AloneBackend(DistributedBackend):
    """Rank 0 of the mesh, in a process without a group."""

    def __init__(self, mesh: Mesh, device: torch.device, link: Link | None) -> None:
        self.mesh = mesh
        self.index = RankIndex(mesh)
        self.rank = 0
        self.ranks = (0,)
        self._nccl = device.type == "cuda"
        self._device = device
        self._groups: dict[Any, Group] = {}
        self._indices = {}
        self._wire = Wire(link, device) if self._nccl else None

    def group(self, axes: tuple[str, ...]) -> Group:
        if axes not in self._groups:
            ranks = next(g for g in self.index.groups(axes) if 0 in g)
            self._groups[axes] = Group(ranks, ranks.index(0), AloneTransport(len(ranks), ranks.index(0), self._wire))
        return self._groups[axes]

    def peers(self, axes: tuple[str, ...]) -> None:
        return None


def alone(axis: str, size: int, device: torch.device, link: Link | None = None) -> Mesh:
    """A mesh of `size` along one axis, of which this process is rank 0."""
    mesh = Mesh({axis: size})
    object.__setattr__(mesh, "_built", AloneBackend(mesh, device, link))
    return mesh


class Wire:
    """A stream on which collectives take their time, one after the other."""

    def __init__(self, link: Link | None, device: torch.device) -> None:
        self.link = link
        self.stream = torch.cuda.Stream(device, priority=-1)
        self.began = torch.zeros(1, dtype=torch.int64, device=device)

    def carry(self, move: Callable[[], None], received: int) -> Callable[[], None]:
        """Begin `move`; a function by which the current stream waits for it."""
        here = torch.cuda.current_stream()
        self.stream.wait_stream(here)
        with torch.cuda.stream(self.stream):
            if self.link is not None:
                _stamp(self.began)
            move()
            if self.link is not None:
                _hold(self.began, self.link.latency_s + received / self.link.bytes_s, self.link.ctas)
            done = self.stream.record_event()
        return lambda: torch.cuda.current_stream().wait_event(done)


class AloneTransport(Transport):
    """Collectives among `size` members that all hold the same."""

    def __init__(self, size: int, index: int, wire: Wire | None) -> None:
        super().__init__(None, size, None, ordered=False)
        self.index = index
        self.wire = wire

    def start_all_reduce(self, xs: Sequence[Tensor], op: str, later: bool = True) -> Started:
        outs = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in xs]
        times = self.size if op == "sum" else 1

        def move() -> None:
            for o, x in zip(outs, xs, strict=True):
                torch.logical_or(x, x, out=o) if x.dtype == torch.bool else torch.mul(x, times, out=o)

        return self._carry(move, outs, xs, later, 2 * _nbytes(outs) * (self.size - 1) // self.size)

    def start_reduce_scatter(
        self, xs: Sequence[Tensor], dims: Sequence[int], later: bool = True, outs: Sequence[Tensor | None] = ()
    ) -> Started:
        given = [*outs] or [None] * len(xs)
        mine = [cut(x, d, self.size)[self.index] for x, d in zip(xs, dims, strict=True)]
        results = [torch.empty_like(m, memory_format=torch.contiguous_format) if o is None else o
                   for m, o in zip(mine, given, strict=True)]  # fmt: skip
        for x, d in zip(xs, dims, strict=True):
            if not in_pieces(x, d):
                cut(x, d, self.size).contiguous()

        def move() -> None:
            for r, m in zip(results, mine, strict=True):
                torch.mul(m, self.size, out=r)

        return self._carry(move, results, xs, later, _nbytes(results) * (self.size - 1))

    def start_exchange_rows(
        self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int], later: bool = True
    ) -> Callable[[], Tensor]:
        def move() -> None:
            for block in out.split(list(receive)):
                same = x[: len(block)]
                block[: len(same)] = same
                block[len(same) :] = 0

        others = sum(receive) - receive[self.index]
        done = self._carry(move, [out], [x], later, others * x[:1].nbytes)
        return lambda: done()[0]

    def start_gather(self, xs: Sequence[Tensor], dims: Sequence[int], later: bool = True) -> Started:
        at = [d if in_pieces(x, d) else 0 for x, d in zip(xs, dims, strict=True)]  # where it arrives
        outs = [x.new_empty(*x.shape[:i], self.size, *x.shape[i:]) for x, i in zip(xs, at, strict=True)]
        done = self._repeat(outs, [x.contiguous().unsqueeze(i) for x, i in zip(xs, at, strict=True)], later)
        return lambda: [
            y.flatten(d, d + 1) if i == d else merge(y, d) for y, i, d in zip(done(), at, dims, strict=True)
        ]

    def _exchange(self, xs: Sequence[Tensor], later: bool = False) -> Started:
        sent = [x.contiguous() for x in xs]
        return self._repeat([torch.empty_like(x) for x in sent], [x[self.index] for x in sent], later)

    def _repeat(self, outs: list[Tensor], xs: list[Tensor], later: bool) -> Started:
        def move() -> None:
            for o, x in zip(outs, xs, strict=True):
                o.copy_(x.expand_as(o))

        return self._carry(move, outs, xs, later, _nbytes(xs) * (self.size - 1))

    def _carry(
        self, move: Callable[[], None], outs: list[Tensor], held: Sequence[Tensor], later: bool, received: int
    ) -> Started:
        if self.wire is None:
            move()
            return lambda: outs
        wait, kept = self.wire.carry(move, received), [*held]
        if not later:
            wait()

        def done() -> list[Tensor]:
            if later and kept:
                wait()
            kept.clear()
            return outs

        return done


def _nbytes(xs: Sequence[Tensor]) -> int:
    return sum(x.nbytes for x in xs)


def _stamp(began: Tensor) -> None:
    _kernels()[0][(1,)](began)


def _hold(began: Tensor, seconds: float, ctas: int) -> None:
    _kernels()[1][(ctas,)](began, int(seconds * 1e9), num_warps=16)


def _kernels() -> tuple[Any, Any]:
    from benchmarks import _hold

    return _hold.stamp, _hold.hold
