"""The executor protocol: what a mesh can do with one tensor a rank.

A *value* is a backend's own representation of one tensor on every rank, all of one shape and dtype: a local tensor on a
real mesh, a list or a stack of them on a virtual one. Every backend also takes a plain tensor for a value: the same
tensor on every rank. Backends agree on the meaning of every method; they differ in speed and in the order of sums.

`axes` is always a tuple of mesh axes, major first. They form groups: ranks that differ on those axes only. The index of
a rank in its group is the mixed radix of its coordinates on `axes`, in the order given (not the mesh's order). Axes of
size 1, and no axes, give groups of one, on which every collective is the identity.

Order of sums. The loop backend, and real processes on CPU (Gloo), add group members in ascending index, left to right:
they agree bit for bit. The vmap backend and NCCL add in an order of their own.

Layout. Collectives over more than one rank give contiguous tensors, and `scatter` those that it cuts, on every backend,
so that operations that follow see the same strides everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fmeg.mesh.mesh import Mesh

Value = Any
Axes = tuple[str, ...]
Dims = tuple[Axes, ...]
Source = Tensor | Callable[[tuple[slice, ...]], Tensor]

NO_KWARGS: Mapping[str, Any] = MappingProxyType({})


class Backend(Protocol):
    """What runs a local Program. Collectives are variadic: a list of values, one call, one collective a dtype."""

    name: str
    mesh: Mesh
    ranks: tuple[int, ...]
    """The ranks that this process runs: all of a virtual mesh, one of a real mesh."""
    plain: bool
    """Whether a value is the local tensor itself, and `call` no more than a call."""

    @property
    def device(self) -> torch.device:
        """Where values live by default."""
        ...

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = NO_KWARGS) -> Any:
        """Run `fn` on every rank's local tensors.

        `args` and `kwargs` are nested tuples, lists and dicts with values in them. The result is nested as fn's is:
        tensors become values; anything else must be the same on every rank and is passed through. `fn` must be the same
        function of its arguments on every rank, and must not write to them: ranks may share a tensor.
        """
        ...

    def varies(self, value: Value) -> int:
        """The mesh axes over which a value may differ between the ranks of this process, as bits; 0 where it runs
        one."""
        ...

    def all_reduce(self, xs: Sequence[Value], axes: Axes, op: str = "sum") -> list[Value]:
        """Sum ("sum") or maximum ("max") over each group. On bool, the sum is `or`."""
        ...

    def all_gather(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        """Concatenate the group's tensors along `dims[i]`, in group order."""
        ...

    def reduce_scatter(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        """Sum over the group, then keep this member's block of `dims[i]`, which the group size must divide."""
        ...

    def all_to_all(
        self, xs: Sequence[Value], axes: Axes, split_dims: Sequence[int], concat_dims: Sequence[int]
    ) -> list[Value]:
        """Cut along `split_dims[i]`, send block j to member j, concatenate what arrives along `concat_dims[i]`."""
        ...

    def ppermute(self, x: Value, axes: Axes, perm: Sequence[tuple[int, int]]) -> Value:
        """Send x from member src to member dst for each (src, dst); members that receive nothing get zeros."""
        ...

    def exchange_rows(
        self, x: Value, table: Value, axes: Axes, back: bool, rows: int, width: int | None = None
    ) -> Value:
        """Rows of x, unequal numbers of them, to the members and from them (see `fmeg.ops.collectives`)."""
        ...

    def axis_index(self, axes: Axes) -> Value:
        """Index of each rank in its group: 0-d int64. Not to be written to."""
        ...

    def scatter(self, source: Source, dims: Dims, shape: Sequence[int] | None = None) -> Value:
        """Place a global tensor: dimension d is cut into contiguous blocks over the axes `dims[d]`, major first.

        `source` is the tensor, or a function from a tuple of slices to that block (then `shape` is the global shape),
        which is asked once for every distinct block that this process holds. A tensor that is cut nowhere is not
        copied, unless it moves to another device.
        """
        ...

    def gather(self, value: Value, dims: Dims) -> Tensor:
        """The global tensor: the inverse of `scatter`. Replicas are trusted to be equal: one is taken.

        On a real mesh every process must call it.
        """
        ...

    def local(self, value: Value) -> list[Tensor]:
        """The local tensor of each rank in `ranks`. They may share memory."""
        ...

    def from_local(self, tensors: Sequence[Tensor], dims: Dims) -> Value:
        """The value whose local tensors are given, one for each rank in `ranks`: the inverse of `local`.

        Ranks that hold the same block by `dims` are trusted to be given equal tensors.
        """
        ...

    def prepare(self, axes: Axes) -> None:
        """Create what collectives over `axes` need (process groups). Otherwise done at the first collective over them.

        Creation involves every process of the world, in one order. Programs that are the same on every rank need not
        call this; where ranks run different programs, call it beforehand, for every tuple of axes.
        """
        ...
