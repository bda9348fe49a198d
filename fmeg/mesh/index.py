"""Integer tables of a mesh: which rank holds which block, who is in whose group.

Virtual backends keep one tensor for each coordinate on the axes over which a value varies. Such a set of axes is an
int, one bit an axis (none for an axis of size 1, over which nothing varies). The tensors are numbered by
*representatives*: ranks with coordinate 0 on all other axes, ascending.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from fmeg.mesh.backend import Axes, Dims
from fmeg.mesh.mesh import Mesh


@dataclass(frozen=True)
class Table:
    """Where the members of each group sit, for a value that varies over `mask` and a collective over some axes.

    rest        axes of the value that are not the collective's: one group for each coordinate
    full        axes of both
    reads       for each group, in the order of rest's parts: the member's part of the value
    writes      the same, in a value that varies over `full`
    """

    rest: int
    full: int
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]


class RankIndex:
    """Tables of one mesh, each computed once."""

    mask: Callable[[Axes], int]
    """Bits of axes, checked."""
    representatives: Callable[[int], tuple[int, ...]]
    """For each part of a value that varies over `mask`: its lowest rank."""
    part: Callable[[int], tuple[int, ...]]
    """For each rank: its part of a value that varies over `mask`."""
    project: Callable[[int, int], tuple[int, ...]]
    """project(small, big): for each part over `big`, the part over `small` of the same ranks."""
    table: Callable[[int, Axes], Table]
    """Groups of a collective over axes, for a value that varies over `mask`."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.strides: dict[str, int] = {}
        stride = 1
        for name in reversed(mesh.axes):
            self.strides[name] = stride
            stride *= mesh.sizes[name]
        self.bits = {name: (1 << i if mesh.sizes[name] > 1 else 0) for i, name in enumerate(mesh.axes)}
        self.all = self._mask(mesh.axes)
        self.mask, self.representatives, self.part = cache(self._mask), cache(self._representatives), cache(self._part)
        self.project, self.table = cache(self._project), cache(self._table)

    def axes(self, mask: int) -> Axes:
        """The axes of a mask, in mesh order."""
        return tuple(name for name in self.mesh.axes if mask & self.bits[name])

    def offsets(self, axes: Axes) -> tuple[int, ...]:
        """Rank of each group member less that of member 0, in group order."""
        self.mesh.axis_size(axes)
        return tuple(
            sum(i * self.strides[a] for i, a in zip(c, axes, strict=True))
            for c in itertools.product(*(range(self.mesh.sizes[a]) for a in axes))
        )

    def groups(self, axes: Axes) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`, each a tuple of ranks in group order."""
        rest = self.all & ~self.mask(axes)
        return tuple(tuple(r + o for o in self.offsets(axes)) for r in self.representatives(rest))

    def index(self, rank: int, axes: Axes) -> int:
        """Index of a rank in its group: the mixed radix of its coordinates on `axes`."""
        coordinates = self.mesh.coordinates(rank)
        out = 0
        for a in axes:
            out = out * self.mesh.sizes[a] + coordinates[a]
        return out

    def block(self, rank: int, shape: Sequence[int], dims: Dims) -> tuple[slice, ...]:
        """The block of a global tensor that a rank holds."""
        out = []
        for size, axes in zip(shape, dims, strict=True):
            local = size // self.mesh.axis_size(axes)
            start = self.index(rank, axes) * local
            out.append(slice(start, start + local))
        return tuple(out)

    def _mask(self, axes: Axes) -> int:
        self.mesh.axis_size(axes)
        return sum(self.bits[a] for a in axes)

    def _representatives(self, mask: int) -> tuple[int, ...]:
        return tuple(sorted(self.offsets(self.axes(mask))))

    def _part(self, mask: int) -> tuple[int, ...]:
        return tuple(self.index(r, self.axes(mask)) for r in range(self.mesh.size))

    def _project(self, small: int, big: int) -> tuple[int, ...]:
        return tuple(self.part(small)[r] for r in self.representatives(big))

    def _table(self, mask: int, axes: Axes) -> Table:
        mine = self.mask(axes)
        rest, full = mask & ~mine, mask | mine
        members = [[r + o for o in self.offsets(axes)] for r in self.representatives(rest)]
        read, write = self.part(mask), self.part(full)
        return Table(
            rest,
            full,
            tuple(tuple(read[r] for r in g) for g in members),
            tuple(tuple(write[r] for r in g) for g in members),
        )
