"""`Mesh`: an ordered set of named axes over devices."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fmeg.mesh.backend import Backend
from fmeg.program.errors import MeshError

BACKENDS = ("auto", "loop", "vmap", "distributed")
LOOP_LIMIT = 8  # up to here the loop is as fast as vmap, and its bits are those of real processes


class Mesh:
    """Named axes over devices, major first: rank = mixed radix of the coordinates.

    Axes are keyword arguments, or a mapping (then any name is free, `backend` too). `backend` says what runs the
    ranks: "loop" and "vmap" are virtual, any size in one process; "distributed" is one process a device (`torchrun`);
    "auto" is distributed when `torch.distributed` is initialised or `WORLD_SIZE` > 1, else loop up to 8 devices and
    vmap above. Immutable and hashable; a size of 1 is a valid axis, and `Mesh()` is one device.

    Raises MeshError for a name that is no identifier, a size that is no positive int, an unknown backend.

    >>> mesh = Mesh(dp=2, tp=4)
    >>> mesh, mesh.size, mesh.axes
    (Mesh(dp=2, tp=4), 8, ('dp', 'tp'))
    >>> mesh.coordinates(6), mesh.rank({"dp": 1, "tp": 2}), mesh.axis_size(("dp", "tp"))
    ({'dp': 1, 'tp': 2}, 6, 8)
    """

    __slots__ = ("__weakref__", "_backend", "_built", "_sizes")

    _sizes: Mapping[str, int]
    _backend: str
    _built: Backend | None

    def __init__(
        self, axes: Mapping[str, int] | Iterable[tuple[str, int]] = (), /, *, backend: str = "auto", **sizes: int
    ) -> None:
        given = list(axes.items() if isinstance(axes, Mapping) else axes) + list(sizes.items())
        table: dict[str, int] = {}
        for name, size in given:
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"Mesh: an axis name must be an identifier, got {name!r}. Try Mesh(dp=2, tp=4)")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(f"Mesh: axis {name!r} must have a size that is an int >= 1, got {size!r}")
            if name in table:
                raise MeshError(f"Mesh: axis {name!r} is given twice, with sizes {table[name]} and {size}")
            table[name] = size
        if backend not in BACKENDS:
            raise MeshError(
                f"Mesh: backend must be one of {', '.join(BACKENDS)}, got {backend!r}. "
                'An axis of that name is written Mesh({"backend": 2})'
            )
        object.__setattr__(self, "_sizes", MappingProxyType(table))
        object.__setattr__(self, "_backend", backend)
        object.__setattr__(self, "_built", None)

    @classmethod
    def from_string(cls, text: str, *, backend: str = "auto") -> Mesh:
        """Parse `"dp=2,tp=4"`; the empty string is one device.

        >>> Mesh.from_string("dp=2, tp=4")
        Mesh(dp=2, tp=4)
        """
        pairs = []
        for item in filter(None, (s.strip() for s in text.split(","))):
            name, _, size = item.partition("=")
            if not size.strip().isdecimal():
                raise MeshError(f'Mesh.from_string: expected axes as in "dp=2,tp=4", got {item!r} in {text!r}')
            pairs.append((name.strip(), int(size)))
        return cls(pairs, backend=backend)

    @property
    def axes(self) -> tuple[str, ...]:
        """Axis names, major first."""
        return tuple(self._sizes)

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each axis, by name."""
        return self._sizes

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self._sizes.values())

    def axis_size(self, axes: str | tuple[str, ...]) -> int:
        """Number of devices along an axis, or along a tuple of axes together; `()` is 1."""
        names = (axes,) if isinstance(axes, str) else axes
        for i, name in enumerate(names):
            if name not in self._sizes:
                raise MeshError(
                    f"{self} has no axis {name!r}; its axes are ({', '.join(self.axes)}). "
                    f"Add it to the mesh, as in Mesh({name}=2, ...), or leave it out"
                )
            if name in names[:i]:
                raise MeshError(f"axes {names} name {name!r} twice; a mesh axis can be used once")
        return math.prod(self._sizes[name] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank on each axis; the inverse of `rank`."""
        if not 0 <= rank < self.size:
            raise MeshError(f"{self} has ranks 0 to {self.size - 1}, got rank {rank}")
        out: dict[str, int] = {}
        for name in reversed(self.axes):
            rank, out[name] = divmod(rank, self._sizes[name])
        return {name: out[name] for name in self.axes}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Rank at the given coordinate on each axis; the inverse of `coordinates`."""
        if set(coordinates) != set(self.axes):
            raise MeshError(f"{self}.rank: expected a coordinate for each of {self.axes}, got {dict(coordinates)}")
        rank = 0
        for name, size in self._sizes.items():
            if not 0 <= coordinates[name] < size:
                raise MeshError(f"{self}.rank: axis {name!r} has size {size}, got coordinate {coordinates[name]}")
            rank = rank * size + coordinates[name]
        return rank

    def backend(self) -> Backend:
        """The executor of this mesh: built at first use, then always the same object."""
        if self._built is None:
            object.__setattr__(self, "_built", self._build())
        assert self._built is not None
        return self._built

    @property
    def device(self) -> torch.device:
        """Where this process's tensors belong: on a real mesh `cuda:LOCAL_RANK` or `cpu`, else torch's default."""
        return self.backend().device

    def _build(self) -> Backend:
        from fmeg.mesh.distributed import DistributedBackend
        from fmeg.mesh.loop import LoopBackend
        from fmeg.mesh.single import SingleBackend
        from fmeg.mesh.vmap import VmapBackend

        kind = self._backend
        if kind == "auto" and ((dist.is_available() and dist.is_initialized()) or _launched()):
            kind = "distributed"
        if kind == "distributed":
            return DistributedBackend(self)
        if self.size == 1:
            return SingleBackend(self)
        if kind == "auto":
            kind = "loop" if self.size <= LOOP_LIMIT else "vmap"
        return LoopBackend(self) if kind == "loop" else VmapBackend(self)

    def _key(self) -> tuple[Any, ...]:
        return (*self._sizes.items(), self._backend)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        parts = [f"{name}={size}" for name, size in self._sizes.items()]
        if self._backend != "auto":
            parts.append(f"backend={self._backend!r}")
        return f"Mesh({', '.join(parts)})"

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"a Mesh is immutable; make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a Mesh is immutable; cannot delete {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (tuple(self._sizes.items()), self._backend))


def _rebuild(axes: tuple[tuple[str, int], ...], backend: str) -> Mesh:
    return Mesh(axes, backend=backend)


def _launched() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
