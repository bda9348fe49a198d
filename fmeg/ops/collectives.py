"""Collectives: what local code may ask of the mesh. Used inside `shard_map` and by sharding rules.

Every collective takes a tuple of mesh axes, major first; the group is their product. One node is one collective, on
one or several tensors (`all_reduce` takes a list too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch

from fmeg.program import recorder
from fmeg.program.errors import MeshError, TraceError
from fmeg.program.ir import Node, TensorType

Axes = tuple[str, ...]


@dataclass(eq=False)
class Collective:
    """A collective operation. Node args: (list of tensors, axes, *rest); results: one tensor each."""

    name: str

    def __repr__(self) -> str:
        return f"<collective {self.name}>"

    def backward(self, rec: Any, node: Node, inputs: list, cts: list, wanted: list[bool]) -> list:
        """The transpose of the map from all ranks' inputs to all ranks' results (for local code under `shard_map`)."""
        if self is EXCHANGE_ROWS:
            raise TraceError("exchange_rows has no gradient in local code: use fmeg.ops.dispatch and combine, which do")
        axes, rest = node.args[1], node.args[2:]
        out: list[Any] = []
        for i, (ct, want) in enumerate(zip(cts, wanted, strict=True)):
            out.append(self._transpose(ct, axes, rest, i) if want and ct is not None else None)
        return out

    def _transpose(self, ct: torch.Tensor, axes: Axes, rest: tuple, i: int) -> torch.Tensor:
        if self is ALL_REDUCE:
            if rest[0] != "sum":
                raise TraceError(
                    "all_reduce(op='max') has no gradient; stop it with .detach(), as a softmax does with its maximum"
                )
            return all_reduce(ct, axes)
        if self is ALL_GATHER:
            return reduce_scatter(ct, axes, rest[0][i])
        if self is REDUCE_SCATTER:
            return all_gather(ct, axes, rest[0][i])
        if self is ALL_TO_ALL:
            return all_to_all(ct, axes, rest[1][i], rest[0][i])
        return ppermute(ct, axes, [(dst, src) for src, dst in rest[0]])


ALL_REDUCE = Collective("all_reduce")  # (xs, axes, op)
ALL_GATHER = Collective("all_gather")  # (xs, axes, dims)
REDUCE_SCATTER = Collective("reduce_scatter")  # (xs, axes, dims)
ALL_TO_ALL = Collective("all_to_all")  # (xs, axes, split_dims, concat_dims)
PPERMUTE = Collective("ppermute")  # (xs, axes, perm)
AXIS_INDEX = Collective("axis_index")  # ([], axes)
EXCHANGE_ROWS = Collective("exchange_rows")  # ([x, table], axes, back, rows, width)


def group_size(axes: Axes, sizes: dict[str, int]) -> int:
    """Number of ranks in the group of `axes`."""
    n = 1
    for a in axes:
        n *= sizes[a]
    return n


def result_type(op: Collective, t: TensorType, n: int, rest: tuple[int, ...]) -> TensorType:
    """Local type of a collective's result. rest: the dims of this tensor.

    >>> result_type(ALL_GATHER, TensorType((2, 3), torch.float32), 4, (0,))
    f32[8, 3]
    """
    shape = list(t.shape)
    if op is ALL_GATHER:
        shape[rest[0]] *= n
    elif op is REDUCE_SCATTER:
        shape[rest[0]] = _divide(op, shape[rest[0]], n)
    elif op is ALL_TO_ALL:
        split, concat = rest
        shape[split] = _divide(op, shape[split], n)
        shape[concat] *= n
    elif op is EXCHANGE_ROWS:
        shape[0] = rest[0]
    return TensorType(tuple(shape), t.dtype)


def _divide(op: Collective, size: int, n: int) -> int:
    if size % n:
        raise MeshError(f"{op.name}: a dimension of size {size} does not divide into {n} parts")
    return size // n


def _record(
    op: Collective, xs: Sequence[torch.Tensor], axes: Axes, args: tuple[Any, ...], rests: Sequence[tuple[int, ...]]
) -> list[torch.Tensor]:
    rec = recorder.active()
    if rec is None or rec.mesh_sizes is None:
        raise MeshError(
            f"{op.name} was called outside local code: it has a meaning only inside shard_map or a sharding rule"
        )
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    for a in axes:
        if a not in rec.mesh_sizes:
            raise MeshError(f"{op.name}: the mesh has no axis {a!r}; it has {', '.join(rec.mesh_sizes) or 'none'}")
    n = group_size(axes, rec.mesh_sizes)
    if op is AXIS_INDEX:
        types = [TensorType((), torch.int64)]
    else:
        types = [result_type(op, TensorType.of(x), n, r) for x, r in zip(xs, rests, strict=False)]
    out = rec.emit(op, ([rec.value(x) for x in xs], axes, *args), {}, types)
    return [rec.bind(rec.fake_like(v.type), v) for v in out]


def _dim(x: torch.Tensor, dim: int) -> int:
    return dim % max(x.ndim, 1)


@overload
def all_reduce(x: torch.Tensor, axes: Axes, op: str = "sum") -> torch.Tensor: ...
@overload
def all_reduce(x: Sequence[torch.Tensor], axes: Axes, op: str = "sum") -> list[torch.Tensor]: ...
def all_reduce(
    x: torch.Tensor | Sequence[torch.Tensor], axes: Axes, op: str = "sum"
) -> torch.Tensor | list[torch.Tensor]:
    """Sum (or "max") of x over the ranks of `axes`; every rank gets it. Of several tensors, of each, in one call."""
    if op not in ("sum", "max"):
        raise MeshError(f"all_reduce: op must be 'sum' or 'max', given {op!r}")
    if isinstance(x, torch.Tensor):
        return _record(ALL_REDUCE, [x], axes, (op,), [()])[0]
    return _record(ALL_REDUCE, x, axes, (op,), [()] * len(x)) if x else []


def all_gather(x: torch.Tensor, axes: Axes, dim: int) -> torch.Tensor:
    """The ranks' x concatenated along `dim`, in order of their index."""
    return _record(ALL_GATHER, [x], axes, ((_dim(x, dim),),), [(_dim(x, dim),)])[0]


def reduce_scatter(x: torch.Tensor, axes: Axes, dim: int) -> torch.Tensor:
    """Sum over the ranks, of which each keeps its part along `dim`."""
    return _record(REDUCE_SCATTER, [x], axes, ((_dim(x, dim),),), [(_dim(x, dim),)])[0]


def all_to_all(x: torch.Tensor, axes: Axes, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Part i along `split_dim` goes to rank i; what arrives is concatenated along `concat_dim`."""
    s, c = _dim(x, split_dim), _dim(x, concat_dim)
    return _record(ALL_TO_ALL, [x], axes, ((s,), (c,)), [(s, c)])[0]


def ppermute(x: torch.Tensor, axes: Axes, perm: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Rank `src` sends x to rank `dst` for each pair; a rank that receives nothing gets zeros."""
    return _record(PPERMUTE, [x], axes, (tuple(map(tuple, perm)),), [()])[0]


def exchange_rows(
    x: torch.Tensor, table: torch.Tensor, axes: Axes, *, back: bool, rows: int, width: int | None = None
) -> torch.Tensor:
    """Send rows to the members of the group, as many to each as `table` says; what arrives lies member after member.

    table  [members, 1 + …] on the host: column 0, the rows that this rank sends to each member; the others add up to
           those that each member sends to it
    back   the other way round: from where rows went to where they came from
    rows   back: there are so many in the result, zeros after those that arrived. Else as many as arrive, which is known
           only then, and `rows` stands for it in the Program; where shapes may not depend on data (vmap), as many as
           can arrive, zeros after those that did
    width  no more than so many go from one rank to another, if that is known; else as many as x has

    Over no axes, the first rows of x: as many as the table says.
    """
    return _record(EXCHANGE_ROWS, [x, table], axes, (back, rows, width), [(rows,)])[0]


def axis_index(axes: Axes) -> torch.Tensor:
    """This rank's index in the group of `axes`: a 0-d int64 tensor."""
    return _record(AXIS_INDEX, [], axes, (), [])[0]
