"""Blocks of global tensors: reading those a rank holds, and checking those it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fmeg.mesh import checks
from fmeg.mesh.backend import Dims, Source
from fmeg.mesh.index import RankIndex
from fmeg.mesh.mesh import Mesh
from fmeg.program.errors import MeshError, ShardingError


def global_shape(mesh: Mesh, local: Sequence[int], dims: Dims) -> tuple[int, ...]:
    """Global shape of a local one."""
    return tuple(size * mesh.axis_size(axes) for size, axes in zip(local, dims, strict=True))


def reader(index: RankIndex, source: Source, dims: Dims, shape: Sequence[int] | None) -> Callable[[int], Tensor]:
    """A function from a rank to the block of `source` that it holds, contiguous and in memory of its own.

    A tensor that is cut nowhere is returned itself.
    """
    if isinstance(source, Tensor):
        shape = source.shape
    elif shape is None:
        raise MeshError("scatter: a function as source needs the global shape, as in scatter(read, dims, shape=(8, 4))")
    whole = tuple(int(s) for s in shape)
    checks.divisible(index.mesh, whole, dims)
    uncut = index.mask(tuple(a for axes in dims for a in axes)) == 0

    def read(rank: int) -> Tensor:
        if isinstance(source, Tensor):
            block = source if uncut else source[index.block(rank, whole, dims)]
            return block if uncut else block.clone(memory_format=torch.contiguous_format)
        where = index.block(rank, whole, dims)
        block = source(where)
        expected = tuple(s.stop - s.start for s in where)
        if tuple(block.shape) != expected:
            got = tuple(block.shape)
            raise ShardingError(f"scatter: asked for {where}, expected a block of shape {expected}, got {got}")
        return block.contiguous()

    return read


def check_local(mesh: Mesh, tensors: Sequence[Tensor], dims: Dims, ranks: Sequence[int]) -> None:
    """One tensor a rank, all of one shape and dtype, with a valid placement."""
    if len(tensors) != len(ranks):
        raise MeshError(
            f"from_local: expected {len(ranks)} tensors, one for each rank of {mesh} that runs in this process, "
            f"got {len(tensors)}"
        )
    kinds = {(tuple(t.shape), t.dtype) for t in tensors}
    if len(kinds) > 1:
        raise MeshError(f"from_local: local tensors must agree in shape and dtype, got {sorted(map(str, kinds))}")
    checks.placement(mesh, dims, tensors[0].ndim, "from_local")
