"""Argument checks that all backends share; each returns what it checked in normal form."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fmeg.mesh.backend import Axes, Dims
from fmeg.mesh.mesh import Mesh
from fmeg.program.errors import MeshError, ShardingError

REDUCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum}


def reduction(op: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The binary function of a reduction's name."""
    if op not in REDUCTIONS:
        raise MeshError(f"all_reduce: op must be one of {', '.join(REDUCTIONS)}, got {op!r}")
    return REDUCTIONS[op]


def dimensions(what: str, dims: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[int]:
    """One dimension a value, counted from the front."""
    if len(dims) != len(shapes):
        raise MeshError(f"{what}: expected one dimension a value, got {len(shapes)} values and dimensions {list(dims)}")
    for dim, shape in zip(dims, shapes, strict=True):
        if not -len(shape) <= dim < len(shape):
            raise MeshError(f"{what}: dimension {dim} is out of range for local shape {tuple(shape)}")
    return [dim % len(shape) for dim, shape in zip(dims, shapes, strict=True)]


def split_dimensions(what: str, dims: Sequence[int], shapes: Sequence[Sequence[int]], axes: Axes, n: int) -> list[int]:
    """One dimension a value, counted from the front, that n equal blocks make up."""
    out = dimensions(what, dims, shapes)
    for dim, shape in zip(out, shapes, strict=True):
        if shape[dim] % n:
            raise ShardingError(
                f"{what} over {axes}: dimension {dim} of local shape {tuple(shape)} is to be cut into {n} equal "
                f"blocks, but {n} does not divide {shape[dim]}. Pad the dimension at the edge, or use other mesh axes"
            )
    return out


def permutation(perm: Sequence[tuple[int, int]], axes: Axes, n: int) -> dict[int, int]:
    """dst -> src of a ppermute, which must name every source and every destination at most once."""
    sources = [s for s, _ in perm]
    targets = [d for _, d in perm]
    if not all(0 <= i < n for i in (*sources, *targets)):
        raise MeshError(f"ppermute over {axes}: members are 0 to {n - 1}, got perm {list(perm)}")
    if len(set(sources)) < len(perm) or len(set(targets)) < len(perm):
        raise MeshError(f"ppermute over {axes}: a member may send once and receive once, got perm {list(perm)}")
    return {d: s for s, d in perm}


def placement(mesh: Mesh, dims: Dims, ndim: int, what: str = "scatter") -> None:
    """Each mesh axis at most once, one entry a dimension."""
    if len(dims) != ndim:
        raise ShardingError(f"{what}: expected one tuple of mesh axes for each of {ndim} dimensions, got {dims}")
    used: dict[str, int] = {}
    for d, axes in enumerate(dims):
        mesh.axis_size(axes)
        for axis in axes:
            if axis in used:
                raise ShardingError(
                    f"{what}: mesh axis {axis!r} cuts dimensions {used[axis]} and {d} of spec {dims}; an axis cuts one "
                    "dimension. Drop it from one of them"
                )
            used[axis] = d


def divisible(mesh: Mesh, shape: Sequence[int], dims: Dims, what: str = "scatter") -> None:
    """Every dimension divides by the devices along its axes. Reports all dimensions that do not."""
    placement(mesh, dims, len(shape), what)
    bad = [
        f"dimension {d} (size {size}) is cut over {axes}, {mesh.axis_size(axes)} devices"
        for d, (size, axes) in enumerate(zip(shape, dims, strict=True))
        if size % mesh.axis_size(axes)
    ]
    if bad:
        raise ShardingError(
            f"{what}: shape {tuple(shape)} does not divide over {mesh} by spec {dims}: {'; '.join(bad)}. "
            "Pad the dimension at the edge, or map it to other mesh axes"
        )
