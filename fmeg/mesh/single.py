"""The backend of a mesh of one device: values are plain tensors, collectives are the identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fmeg.mesh import blocks, checks
from fmeg.mesh.backend import NO_KWARGS, Axes, Dims, Source, Value
from fmeg.mesh.index import RankIndex
from fmeg.mesh.mesh import Mesh
from fmeg.mesh.rows import padded, sent_and_received


class SingleBackend:
    """One device: nothing between a Program and torch."""

    name = "single"
    ranks: tuple[int, ...] = (0,)
    plain = True

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.index = RankIndex(mesh)

    @property
    def device(self) -> torch.device:
        return torch.get_default_device()

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = NO_KWARGS) -> Any:
        return fn(*args, **kwargs)

    def varies(self, value: Value) -> int:
        return 0

    def all_reduce(self, xs: Sequence[Value], axes: Axes, op: str = "sum") -> list[Value]:
        checks.reduction(op)
        return self._same(xs, axes)

    def all_gather(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        checks.dimensions("all_gather", dims, [x.shape for x in xs])
        return self._same(xs, axes)

    def reduce_scatter(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        checks.dimensions("reduce_scatter", dims, [x.shape for x in xs])
        return self._same(xs, axes)

    def all_to_all(
        self, xs: Sequence[Value], axes: Axes, split_dims: Sequence[int], concat_dims: Sequence[int]
    ) -> list[Value]:
        checks.dimensions("all_to_all", split_dims, [x.shape for x in xs])
        checks.dimensions("all_to_all", concat_dims, [x.shape for x in xs])
        return self._same(xs, axes)

    def ppermute(self, x: Value, axes: Axes, perm: Sequence[tuple[int, int]]) -> Value:
        self.mesh.axis_size(axes)
        return x if checks.permutation(perm, axes, 1) else torch.zeros_like(x)

    def exchange_rows(
        self, x: Value, table: Value, axes: Axes, back: bool, rows: int, width: int | None = None
    ) -> Value:
        self.mesh.axis_size(axes)
        return padded(x[: sum(sent_and_received(table, back)[0])], rows if back else None)

    def axis_index(self, axes: Axes) -> Value:
        self.mesh.axis_size(axes)
        return torch.zeros((), dtype=torch.int64, device=self.device)

    def scatter(self, source: Source, dims: Dims, shape: Sequence[int] | None = None) -> Value:
        return blocks.reader(self.index, source, dims, shape)(0)

    def gather(self, value: Value, dims: Dims) -> Tensor:
        checks.placement(self.mesh, dims, value.ndim, "gather")
        return value

    def local(self, value: Value) -> list[Tensor]:
        return [value]

    def from_local(self, tensors: Sequence[Tensor], dims: Dims) -> Value:
        blocks.check_local(self.mesh, tensors, dims, self.ranks)
        return tensors[0]

    def prepare(self, axes: Axes) -> None:
        self.mesh.axis_size(axes)

    def _same(self, xs: Sequence[Value], axes: Axes) -> list[Value]:
        self.mesh.axis_size(axes)
        return list(xs)
