"""The vmap backend: all ranks of a virtual mesh at once, stacked in a leading dimension, under one `torch.func.vmap`.

The cost of a node hardly depends on the number of ranks, so hundreds are practical. Values keep the axes over which
they vary, as in the loop backend. Batched kernels and sums have an order of their own: equal to the loop's results up
to rounding, not bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch
from torch import Tensor

from fmeg.mesh import blocks, checks
from fmeg.mesh.backend import NO_KWARGS, Axes, Dims, Source, Value
from fmeg.mesh.index import RankIndex
from fmeg.mesh.mesh import Mesh
from fmeg.mesh.rows import gathered, sent_and_received_tensors, spread

# Strides under vmap are not those that a view was recorded with.
_RELAXED: dict[Any, Any] = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}


class Stack:
    """Tensors of each coordinate on the axes in `mask` (see `RankIndex`), stacked in dimension 0."""

    __slots__ = ("mask", "tensor")

    def __init__(self, mask: int, tensor: Tensor) -> None:
        self.mask = mask
        self.tensor = tensor

    def __repr__(self) -> str:
        return f"Stack({self.tensor.shape[0]} x {tuple(self.tensor.shape[1:])} {self.tensor.dtype})"


class VmapBackend:
    """Runs all ranks stacked. A value is a `Stack`, or a plain tensor when it varies over no axis.

    What `call` runs must work under `torch.func.vmap`: no random aten operations, no `.item()`, no writes to arguments.
    """

    name = "vmap"
    plain = False

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.ranks = tuple(range(mesh.size))
        self.index = RankIndex(mesh)
        self._indices: dict[Axes, Value] = {}

    @property
    def device(self) -> torch.device:
        return torch.get_default_device()

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = NO_KWARGS) -> Any:
        arguments: Any = (tuple(args), dict(kwargs))
        leaves, tree = optree.tree_flatten(arguments)
        at = [i for i, leaf in enumerate(leaves) if type(leaf) is Stack]
        if not at:
            return fn(*args, **kwargs)
        mask = 0
        for i in at:
            mask |= leaves[i].mask
        run = _RELAXED.get(fn, fn)
        outs: list[Any] = []
        out_tree: list[Any] = []

        def local(*tensors: Tensor) -> tuple[Tensor, ...]:
            for i, t in zip(at, tensors, strict=True):
                leaves[i] = t
            a, kw = optree.tree_unflatten(tree, leaves)
            flat, spec = optree.tree_flatten(run(*a, **kw))
            outs[:], out_tree[:] = flat, [spec]
            return tuple(t for t in flat if isinstance(t, Tensor))

        stacked = torch.func.vmap(local, randomness="error")(*[self._broadcast(leaves[i], mask) for i in at])
        tensors = iter(stacked)
        outs = [Stack(mask, next(tensors)) if isinstance(t, Tensor) else t for t in outs]
        return optree.tree_unflatten(out_tree[0], outs)

    def varies(self, value: Value) -> int:
        return value.mask if type(value) is Stack else 0

    def all_reduce(self, xs: Sequence[Value], axes: Axes, op: str = "sum") -> list[Value]:
        checks.reduction(op)
        return [self._reduced(x, axes, op) for x in xs]

    def all_gather(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        dims = checks.dimensions("all_gather", dims, [_shape(x) for x in xs])
        if self.mesh.axis_size(axes) == 1:
            return list(xs)
        out = []
        for x, d in zip(xs, dims, strict=True):
            t, rest = self._front(x, axes)  # rest, member, *local
            out.append(_wrap(rest, t.movedim(1, 1 + d).flatten(1 + d, 2 + d).contiguous()))
        return out

    def reduce_scatter(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        n = self.mesh.axis_size(axes)
        dims = checks.split_dimensions("reduce_scatter", dims, [_shape(x) for x in xs], axes, n)
        if n == 1:
            return list(xs)
        out = []
        for x, d in zip(xs, dims, strict=True):
            total = self._reduced(x, axes, "sum")
            t = total.tensor if type(total) is Stack else total[None]
            rest = total.mask if type(total) is Stack else 0
            out.append(self._back(_cut(t, 1 + d, n).movedim(1 + d, 1), rest, axes))
        return out

    def all_to_all(
        self, xs: Sequence[Value], axes: Axes, split_dims: Sequence[int], concat_dims: Sequence[int]
    ) -> list[Value]:
        n = self.mesh.axis_size(axes)
        split = checks.split_dimensions("all_to_all", split_dims, [_shape(x) for x in xs], axes, n)
        concat = checks.dimensions("all_to_all", concat_dims, [_shape(x) for x in xs])
        if n == 1:
            return list(xs)
        out = []
        for x, s, c in zip(xs, split, concat, strict=True):
            t, rest = self._front(x, axes)
            t = _cut(t, 2 + s, n).movedim(2 + s, 1)  # rest, receiver, sender, *block
            out.append(self._back(t.movedim(2, 2 + c).flatten(2 + c, 3 + c), rest, axes))
        return out

    def ppermute(self, x: Value, axes: Axes, perm: Sequence[tuple[int, int]]) -> Value:
        n = self.mesh.axis_size(axes)
        source = checks.permutation(perm, axes, n)
        t, rest = self._front(x, axes)
        moved = torch.zeros_like(t, memory_format=torch.contiguous_format)
        if source:
            moved[:, list(source)] = t[:, list(source.values())]
        return self._back(moved, rest, axes)

    def exchange_rows(
        self, x: Value, table: Value, axes: Axes, back: bool, rows: int, width: int | None = None
    ) -> Value:
        n = self.mesh.axis_size(axes)
        if width is None:
            width = _shape(x)[0] // n if back else _shape(x)[0]
        counts = self.call(sent_and_received_tensors, (table, back))
        out = self.call(spread, (x, counts[0], width))
        [out] = self.all_to_all([out], axes, [0], [0])
        return self.call(gathered, (out, counts[1], width, rows if back else n * width))

    def axis_index(self, axes: Axes) -> Value:
        if axes not in self._indices:
            index = torch.arange(self.mesh.axis_size(axes), device=self.device)
            self._indices[axes] = self._back(index[None], 0, axes)
        return self._indices[axes]

    def scatter(self, source: Source, dims: Dims, shape: Sequence[int] | None = None) -> Value:
        read = blocks.reader(self.index, source, dims, shape)
        mask = self.index.mask(tuple(a for axes in dims for a in axes))
        ranks = self.index.representatives(mask)
        return Stack(mask, torch.stack([read(r) for r in ranks])) if mask else read(0)

    def gather(self, value: Value, dims: Dims) -> Tensor:
        local = _shape(value)
        checks.placement(self.mesh, dims, len(local), "gather")
        cut = self.index.mask(tuple(a for axes in dims for a in axes))
        part = self.index.part(value.mask if type(value) is Stack else 0)
        tensors = value.tensor if type(value) is Stack else value[None]
        if not cut:
            return tensors[0]
        shape = blocks.global_shape(self.mesh, local, dims)
        out = tensors.new_empty(shape)
        for r in self.index.representatives(cut):
            out[self.index.block(r, shape, dims)] = tensors[part[r]]
        return out

    def local(self, value: Value) -> list[Tensor]:
        if type(value) is not Stack:
            return [value for _ in self.ranks]
        return [value.tensor[i] for i in self.index.part(value.mask)]

    def from_local(self, tensors: Sequence[Tensor], dims: Dims) -> Value:
        blocks.check_local(self.mesh, tensors, dims, self.ranks)
        mask = self.index.mask(tuple(a for axes in dims for a in axes))
        return Stack(mask, torch.stack([tensors[r] for r in self.index.representatives(mask)])) if mask else tensors[0]

    def prepare(self, axes: Axes) -> None:
        self.mesh.axis_size(axes)

    def _sizes(self, axes: Axes) -> list[int]:
        return [self.mesh.sizes[a] for a in axes]

    def _spread(self, x: Value, mask: int) -> Tensor:
        """x with one leading dimension for each axis in `mask`, a superset of those over which it varies."""
        mine, t = (x.mask, x.tensor) if type(x) is Stack else (0, x[None])
        axes, local = self.index.axes(mask), t.shape[1:]
        kept = [self.mesh.sizes[a] if mine & self.index.bits[a] else 1 for a in axes]
        return t.reshape((*kept, *local)).expand((*self._sizes(axes), *local))

    def _broadcast(self, x: Stack, mask: int) -> Tensor:
        """x stacked over all axes in `mask`."""
        if x.mask == mask:
            return x.tensor
        return self._spread(x, mask).reshape(-1, *x.tensor.shape[1:])

    def _front(self, x: Value, axes: Axes) -> tuple[Tensor, int]:
        """x as [group, member in group order, *local], and the axes that number the groups."""
        mask = x.mask if type(x) is Stack else 0
        mine = self.index.mask(axes)
        rest, full = mask & ~mine, self.index.axes(mask | mine)
        order = [full.index(a) for a in (*self.index.axes(rest), *axes) if a in full]
        t, local = self._spread(x, mask | mine), _shape(x)
        t = t.permute((*order, *range(len(full), t.ndim)))
        return t.reshape(math.prod(self._sizes(self.index.axes(rest))), self.mesh.axis_size(axes), *local), rest

    def _back(self, t: Tensor, rest: int, axes: Axes) -> Value:
        """The inverse of `_front`: [group, member, *local] as a value that varies over `rest` and `axes`."""
        mask = rest | self.index.mask(axes)
        if not mask:
            return t[0, 0]
        given = (*self.index.axes(rest), *(a for a in axes if self.index.bits[a]))
        local = t.shape[2:]
        t = t.reshape((*self._sizes(given), *local))
        order = [given.index(a) for a in self.index.axes(mask)]
        t = t.permute((*order, *range(len(given), t.ndim)))
        return Stack(mask, t.reshape(-1, *local).contiguous())

    def _reduced(self, x: Value, axes: Axes, op: str) -> Value:
        n, mask = self.mesh.axis_size(axes), x.mask if type(x) is Stack else 0
        if n == 1:
            return x
        varying = self.index.axes(self.index.mask(axes) & mask)
        t, rest = self._front(x, varying)  # rest, member, *local
        if op == "max":
            t = t.amax(1)
        elif t.dtype == torch.bool:
            t = t.any(1)
        else:
            t = t.sum(1, dtype=t.dtype) * (n // self.mesh.axis_size(varying))  # the group holds so many copies of each
        return _wrap(rest, t.contiguous())


def _cut(t: Tensor, dim: int, n: int) -> Tensor:
    return t.unflatten(dim, (n, t.shape[dim] // n))


def _wrap(mask: int, t: Tensor) -> Value:
    """[group, *local] as a value."""
    return Stack(mask, t) if mask else t[0]


def _shape(x: Value) -> torch.Size:
    return x.tensor.shape[1:] if type(x) is Stack else x.shape
