"""The loop backend: every rank of a virtual mesh in one process, one after the other, node by node.

A value keeps the mesh axes over which its tensors may differ, by dataflow, and one tensor for each coordinate on those
axes only. So work that ranks would repeat is done once, and a virtual mesh costs little more than one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fmeg.mesh import blocks, checks
from fmeg.mesh.backend import NO_KWARGS, Axes, Dims, Source, Value
from fmeg.mesh.index import RankIndex
from fmeg.mesh.mesh import Mesh
from fmeg.mesh.rows import padded, sent_and_received


class Parts:
    """One tensor for each coordinate on the axes in `mask` (see `RankIndex`); nested arguments are looked through."""

    __slots__ = ("mask", "tensors")

    def __init__(self, mask: int, tensors: list[Tensor]) -> None:
        self.mask = mask
        self.tensors = tensors

    def __repr__(self) -> str:
        return f"Parts({len(self.tensors)} x {tuple(self.tensors[0].shape)} {self.tensors[0].dtype})"


class LoopBackend:
    """Runs ranks one by one. A value is `Parts`, or a plain tensor when it varies over no axis.

    `dedupe=False` computes and keeps every rank's tensor: slow, and equal bit for bit (the tests' witness).
    Sums add group members in ascending index, left to right.
    """

    name = "loop"
    plain = False

    def __init__(self, mesh: Mesh, *, dedupe: bool = True) -> None:
        self.mesh = mesh
        self.ranks = tuple(range(mesh.size))
        self.index = RankIndex(mesh)
        self._least = 0 if dedupe else self.index.all  # axes over which every computed value is taken to vary
        self._indices: dict[Axes, Value] = {}

    @property
    def device(self) -> torch.device:
        return torch.get_default_device()

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = NO_KWARGS) -> Any:
        mask = self._least
        for a in args:
            t = type(a)
            if t is Parts:
                mask |= a.mask
            elif t is tuple or t is list or t is dict:
                mask |= _mask(a)
        if kwargs:
            mask |= _mask(kwargs)
        if not mask:
            return fn(*args, **kwargs)
        n = len(self.index.representatives(mask))
        rows = zip(*[self._column(a, mask, n) for a in args], strict=True) if args else [()] * n
        if not kwargs:
            return _join(mask, [fn(*row) for row in rows])
        named = self._column(dict(kwargs), mask, n)
        return _join(mask, [fn(*row, **kw) for row, kw in zip(rows, named, strict=True)])

    def varies(self, value: Value) -> int:
        return value.mask if type(value) is Parts else 0

    def all_reduce(self, xs: Sequence[Value], axes: Axes, op: str = "sum") -> list[Value]:
        combine = checks.reduction(op)
        return self._to_all(xs, axes, lambda tensors, i: reduce(combine, tensors).contiguous())

    def all_gather(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        dims = checks.dimensions("all_gather", dims, [_shape(x) for x in xs])
        return self._to_all(xs, axes, lambda tensors, i: torch.cat(tensors, dims[i]).contiguous())

    def reduce_scatter(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        n = self.mesh.axis_size(axes)
        dims = checks.split_dimensions("reduce_scatter", dims, [_shape(x) for x in xs], axes, n)

        def blocks_of_sum(tensors: list[Tensor], i: int) -> list[Tensor]:
            return [_own(b) for b in reduce(torch.add, tensors).tensor_split(n, dims[i])]

        return self._to_each(xs, axes, blocks_of_sum)

    def all_to_all(
        self, xs: Sequence[Value], axes: Axes, split_dims: Sequence[int], concat_dims: Sequence[int]
    ) -> list[Value]:
        n = self.mesh.axis_size(axes)
        split = checks.split_dimensions("all_to_all", split_dims, [_shape(x) for x in xs], axes, n)
        concat = checks.dimensions("all_to_all", concat_dims, [_shape(x) for x in xs])

        def exchange(tensors: list[Tensor], i: int) -> list[Tensor]:
            sent = [t.tensor_split(n, split[i]) for t in tensors]
            return [torch.cat([s[j] for s in sent], concat[i]).contiguous() for j in range(n)]

        return self._to_each(xs, axes, exchange)

    def ppermute(self, x: Value, axes: Axes, perm: Sequence[tuple[int, int]]) -> Value:
        n = self.mesh.axis_size(axes)
        source = checks.permutation(perm, axes, n)

        def permute(tensors: list[Tensor], i: int) -> list[Tensor]:
            zeros = torch.zeros_like(tensors[0], memory_format=torch.contiguous_format)
            return [tensors[source[j]].contiguous() if j in source else zeros for j in range(n)]

        return self._to_each([x], axes, permute, skip_one=False)[0]

    def exchange_rows(
        self, x: Value, table: Value, axes: Axes, back: bool, rows: int, width: int | None = None
    ) -> Value:
        mask = self._least | self.varies(x) | self.varies(table)
        n = len(self.index.representatives(mask))
        plan = self.index.table(mask, axes)
        tensors = self._column(x, mask, n)
        counts = [sent_and_received(t, back)[0] for t in self._column(table, mask, n)]
        sent = [t[: sum(c)].split(c) for t, c in zip(tensors, counts, strict=True)]
        made = [tensors[0]] * len(self.index.representatives(plan.full))
        for reads, writes in zip(plan.reads, plan.writes, strict=True):
            for j, w in enumerate(writes):
                made[w] = padded(torch.cat([sent[i][j] for i in reads]), rows if back else None)
        return _wrap(plan.full, made)

    def axis_index(self, axes: Axes) -> Value:
        if axes not in self._indices:
            table = self.index.table(self._least, axes)
            tensors = [torch.zeros(())] * len(self.index.representatives(table.full))
            for writes in table.writes:
                for i, w in enumerate(writes):
                    tensors[w] = torch.tensor(i, device=self.device)
            self._indices[axes] = _wrap(table.full, tensors)
        return self._indices[axes]

    def scatter(self, source: Source, dims: Dims, shape: Sequence[int] | None = None) -> Value:
        read = blocks.reader(self.index, source, dims, shape)
        mask = self._least | self.index.mask(tuple(a for axes in dims for a in axes))
        return _wrap(mask, [read(r) for r in self.index.representatives(mask)])

    def gather(self, value: Value, dims: Dims) -> Tensor:
        local = _shape(value)
        checks.placement(self.mesh, dims, len(local), "gather")
        mask, tensors = _parts(value)
        part = self.index.part(mask)
        cut = self.index.mask(tuple(a for axes in dims for a in axes))
        if not cut:
            return tensors[0]
        shape = blocks.global_shape(self.mesh, local, dims)
        out = tensors[0].new_empty(shape)
        for r in self.index.representatives(cut):
            out[self.index.block(r, shape, dims)] = tensors[part[r]]
        return out

    def local(self, value: Value) -> list[Tensor]:
        mask, tensors = _parts(value)
        return [tensors[i] for i in self.index.part(mask)]

    def from_local(self, tensors: Sequence[Tensor], dims: Dims) -> Value:
        blocks.check_local(self.mesh, tensors, dims, self.ranks)
        mask = self._least | self.index.mask(tuple(a for axes in dims for a in axes))
        return _wrap(mask, [tensors[r] for r in self.index.representatives(mask)])

    def prepare(self, axes: Axes) -> None:
        self.mesh.axis_size(axes)

    def _to_all(self, xs: Sequence[Value], axes: Axes, combine: Callable[[list[Tensor], int], Tensor]) -> list[Value]:
        """Every member of a group gets `combine(the group's tensors, i)`; so the result does not vary over `axes`."""
        if not self._least:
            return [self._to_group(x, axes, combine, i) for i, x in enumerate(xs)]
        n = self.mesh.axis_size(axes)
        return self._to_each(xs, axes, lambda tensors, i: [combine(tensors, i) for _ in range(n)])

    def _to_group(self, x: Value, axes: Axes, combine: Callable[[list[Tensor], int], Tensor], i: int) -> Value:
        mask, tensors = _parts(x)
        table = self.index.table(mask, axes)
        if table.full == table.rest:
            return x
        return _wrap(table.rest, [combine([tensors[j] for j in reads], i) for reads in table.reads])

    def _to_each(
        self,
        xs: Sequence[Value],
        axes: Axes,
        split: Callable[[list[Tensor], int], list[Tensor]],
        skip_one: bool = True,
    ) -> list[Value]:
        """Member j of a group gets `split(the group's tensors, i)[j]`; so the result varies over `axes`."""
        if skip_one and self.mesh.axis_size(axes) == 1:
            return list(xs)
        out = []
        for i, x in enumerate(xs):
            mask, tensors = _parts(x)
            table = self.index.table(mask, axes)
            made = [tensors[0]] * len(self.index.representatives(table.full))
            for reads, writes in zip(table.reads, table.writes, strict=True):
                for w, t in zip(writes, split([tensors[j] for j in reads], i), strict=True):
                    made[w] = t
            out.append(_wrap(table.full, made))
        return out

    def _column(self, a: Any, mask: int, n: int) -> list[Any]:
        """An argument on each of the n coordinates of `mask`."""
        t = type(a)
        if t is Parts:
            return a.tensors if a.mask == mask else [a.tensors[i] for i in self.index.project(a.mask, mask)]
        if (t is tuple or t is list) and _has_parts(a):
            rows = zip(*[self._column(b, mask, n) for b in a], strict=True)
            return list(rows) if t is tuple else [list(row) for row in rows]
        if t is dict and _has_parts(a):
            rows = zip(*[self._column(b, mask, n) for b in a.values()], strict=True)
            return [dict(zip(a, row, strict=True)) for row in rows]
        return [a] * n


def _mask(a: Any) -> int:
    if isinstance(a, Parts):
        return a.mask
    if isinstance(a, (tuple, list)):
        out = 0
        for b in a:
            out |= _mask(b)
        return out
    return _mask(list(a.values())) if isinstance(a, Mapping) else 0


def _has_parts(a: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return any(map(_has_parts, a))
    return isinstance(a, Parts) or (isinstance(a, dict) and any(map(_has_parts, a.values())))


def _join(mask: int, outs: list[Any]) -> Any:
    """Results of each coordinate, as one result of values."""
    first = outs[0]
    if isinstance(first, Tensor):
        return Parts(mask, outs)
    if isinstance(first, (tuple, list)):
        columns = [_join(mask, list(column)) for column in zip(*outs, strict=True)]
        return columns if isinstance(first, list) else tuple(columns)
    return first


def _parts(x: Value) -> tuple[int, list[Tensor]]:
    return (x.mask, x.tensors) if type(x) is Parts else (0, [x])


def _wrap(mask: int, tensors: list[Tensor]) -> Value:
    return Parts(mask, tensors) if mask else tensors[0]


def _shape(x: Value) -> torch.Size:
    return x.tensors[0].shape if type(x) is Parts else x.shape


def _own(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
