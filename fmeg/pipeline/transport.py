"""How stages reach one another: values of one pipeline rank on a mesh, and messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmeg.mesh import Mesh
from fmeg.mesh.loop import LoopBackend, Parts
from fmeg.mesh.vmap import Stack, VmapBackend

Started = Callable[[], list[Any]]
"""What has begun: call it to wait for the values."""


class VirtualRanks:
    """The pipeline ranks of a virtual mesh: each a virtual mesh of the other axes, all in this process."""

    def __init__(self, backend: LoopBackend | VmapBackend, axis: str) -> None:
        mesh: Mesh = backend.mesh
        self.backend, self.axis = backend, axis
        self.mine = tuple(range(mesh.sizes[axis]))
        others = {a: n for a, n in mesh.sizes.items() if a != axis}
        inner = Mesh(others, backend="loop" if isinstance(backend, LoopBackend) else "vmap")
        self.inner: Any = inner.backend()

    def take(self, value: Any, rank: int) -> Any:
        """A value of the whole mesh as that pipeline rank has it."""
        if not isinstance(value, (Parts, Stack)):
            return value
        outer, full = self.backend.index, self.backend.mesh
        axes = tuple(a for a in outer.axes(value.mask) if a != self.axis)
        part = outer.part(value.mask)
        picked = []
        for coordinates in self._coordinates(axes):
            picked.append(part[full.rank({**dict.fromkeys(full.axes, 0), **coordinates, self.axis: rank})])
        if not axes:
            return value.tensors[picked[0]] if isinstance(value, Parts) else value.tensor[picked[0]]
        mask = self.inner.index.mask(axes)
        if isinstance(value, Parts):
            return Parts(mask, [value.tensors[i] for i in picked])
        return Stack(mask, value.tensor[torch.tensor(picked)])

    def _coordinates(self, axes: tuple[str, ...]) -> list[dict[str, int]]:
        """Coordinates on `axes` (in mesh order), major first."""
        out: list[dict[str, int]] = [{}]
        for a in axes:
            out = [{**c, a: i} for c in out for i in range(self.backend.mesh.sizes[a])]
        return out

    def join(self, values: Sequence[Any]) -> Any:
        """One value a pipeline rank as a value of the whole mesh."""
        full, inner = self.backend.mesh, self.inner
        mask = 0
        for v in values:
            mask |= getattr(v, "mask", 0)
        axes = inner.index.axes(mask) if mask else ()
        tensors: list[torch.Tensor] = []
        for coordinates in self._coordinates(tuple(a for a in full.axes if a in axes or a == self.axis)):
            v = values[coordinates[self.axis]]
            if isinstance(v, (Parts, Stack)):
                sub = inner.mesh.rank(
                    {**dict.fromkeys(inner.mesh.axes, 0), **{a: c for a, c in coordinates.items() if a != self.axis}}
                )
                i = inner.index.part(v.mask)[sub]
                tensors.append(v.tensors[i] if isinstance(v, Parts) else v.tensor[i])
            else:
                tensors.append(v)
        whole = self.backend.index.mask((*axes, self.axis))
        if isinstance(self.backend, LoopBackend):
            return Parts(whole, tensors)
        return Stack(whole, torch.stack(tensors))

    def start(self, kind: str, values: Sequence[Any], axes: tuple[str, ...], args: Sequence[Any]) -> Started:
        """A collective inside each pipeline rank, done at once; args as in `RealRanks.start`."""
        done = getattr(self.inner, kind)(values, axes, args[0] if kind == "all_reduce" else args)
        return lambda: done


class RealRanks:
    """This process's pipeline rank on a real mesh; a value is the local tensor."""

    def __init__(self, backend: Any, axis: str) -> None:
        self.backend, self.axis = backend, axis
        rank = backend.ranks[0]
        self.coordinates = backend.mesh.coordinates(rank)
        self.mine = (self.coordinates[axis],)
        self.inner = backend

    def take(self, value: Any, rank: int) -> Any:
        return value

    def join(self, values: Sequence[Any]) -> Any:
        return values[0]

    def peer(self, rank: int) -> int:
        """World rank of the process with this one's coordinates on a neighbouring pipeline rank."""
        return self.backend.mesh.rank({**self.coordinates, self.axis: rank})

    def start(self, kind: str, values: Sequence[Any], axes: tuple[str, ...], args: Sequence[Any]) -> Started:
        """A collective ("all_reduce", args: the operation; "reduce_scatter", "all_gather", args: a dimension a value),
        begun."""
        start = getattr(self.backend, f"start_{kind}")
        return start(values, axes, args[0] if kind == "all_reduce" else args)


def ranks_of(backend: Any, axis: str) -> VirtualRanks | RealRanks:
    """The pipeline ranks of a mesh along `axis`."""
    return VirtualRanks(backend, axis) if isinstance(backend, (LoopBackend, VmapBackend)) else RealRanks(backend, axis)
