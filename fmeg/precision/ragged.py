"""Rows sorted by expert in low precision: which of them share a scale, `rows_amax` and `rows_quantize`.

A grid is (rows, columns). Columns as in `fmeg.precision.formats`. Of rows: 1, each has scales of its own; 0, all share
them; `EXPERT`, those of one expert do; n, runs of n of an expert's rows do: the last run of an expert may be shorter,
and none goes on into the next one's, as if each expert's rows were padded to a multiple of n.

Rows of no expert (from ends[-1] on) may hold anything. They are in no largest value; what is made of them means
nothing.

On a mesh an expert's rows may lie on several ranks, or in another order than that of their tokens. Runs are then of
*places* among all of the expert's rows, which are given (`places`, with how many rows each expert has in all,
`counts`), so that they do not depend on the layout.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fmeg.kernels import rows_fp8
from fmeg.ops._common import transformed, wide
from fmeg.ops.grouped import expert_of_rows
from fmeg.ops.routing import Routed
from fmeg.precision.formats import Format, Grid, blocked, round_e2m1, scales, spread
from fmeg.program.ir import Node

EXPERT = -1


def groups(rows: int, experts: int, share: int) -> int:
    """How many groups of rows that share a scale there can be.

    >>> groups(10, 2, 1), groups(10, 2, 0), groups(10, 2, EXPERT), groups(10, 2, 4)
    (10, 1, 2, 4)
    """
    if share > 1:
        return (rows + experts * (share - 1)) // share
    return {1: rows, 0: 1, EXPERT: experts}[share]


def group_of_rows(
    ends: Int[Tensor, "e"],
    rows: int,
    share: int,
    places: Int[Tensor, "rows"] | None = None,
    counts: Int[Tensor, "e"] | None = None,
) -> tuple[Int[Tensor, "rows"], Tensor]:
    """(the group of each row that shares a scale, whether the row is some expert's); 0 for the others.

    >>> of, real = group_of_rows(torch.tensor([3, 5], dtype=torch.int32), 6, 2)
    >>> of.tolist(), real.tolist()
    ([0, 0, 1, 2, 2, 0], [True, True, True, True, True, False])
    """
    expert = expert_of_rows(ends, rows)
    real = expert < ends.shape[0]
    mine = expert.clamp(max=ends.shape[0] - 1)
    at = torch.arange(rows, device=ends.device)
    if share > 1:
        starts = torch.cat([ends.new_zeros(1), ends[:-1]]).long()
        sizes = ends.long() - starts if counts is None else counts.long()
        at = at - starts.index_select(0, mine) if places is None else places.long()
        runs = (sizes + (share - 1)) // share
        of = (runs.cumsum(0) - runs).index_select(0, mine) + at // share
    else:
        of = {1: at, 0: torch.zeros_like(at), EXPERT: mine}[share]
    return torch.where(real, of, 0), real


def _amax(
    x: Tensor, ends: Tensor, grid: Grid, places: Tensor | None = None, counts: Tensor | None = None,
    room: int | None = None,
) -> Tensor:  # fmt: skip
    """`room`: for how many groups, where that does not follow from the number of rows."""
    share, columns = grid
    of, real = group_of_rows(ends, x.shape[0], share, places, counts)
    y, shared = blocked(x.detach(), (1, columns))
    top = torch.linalg.vector_norm(y, torch.inf, shared) if shared else y.abs()
    top = torch.where(real[:, None], top.reshape(x.shape[0], x.shape[1] // columns if columns else 1).float(), 0.0)
    if share == 1:
        return top
    n = groups(x.shape[0], ends.shape[0], share) if room is None else room
    return top.new_zeros(n, top.shape[1]).scatter_reduce(0, of[:, None].expand(top.shape), top, "amax")


def _quantize(
    x: Tensor, amax: Tensor, top: Tensor | None, ends: Tensor, grid: Grid, format: Format,
    places: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    share, columns = grid
    s = scales(amax, format, top)
    inverse = torch.reciprocal(s)
    if share != 1:
        inverse = inverse.index_select(0, group_of_rows(ends, x.shape[0], share, places, counts)[0])
    v = wide(x) * spread(inverse, (1, columns), tuple(x.shape)).to(wide(x).dtype)
    v = v.clamp(-format.largest, format.largest)
    if format.element == "e2m1":
        v = round_e2m1(v)
    return v.to(format.dtype), s


def fused(x: Tensor, grid: Grid, places: Tensor | None) -> bool:
    """Whether a kernel does it: on CUDA, for the hardware's grids, of rows whose places are those in memory."""
    return rows_fp8.fits(x) and rows_fp8.takes(grid) and places is None and not transformed()


def _amax_default(
    x: Tensor, ends: Tensor, grid: Grid, places: Tensor | None = None, counts: Tensor | None = None,
    room: int | None = None,
) -> Tensor:  # fmt: skip
    if fused(x, grid, places):
        return rows_fp8.amax(x, ends, *grid)
    return _amax(x, ends, grid, places, counts, room)


def _quantize_default(
    x: Tensor, amax: Tensor, top: Tensor | None, ends: Tensor, grid: Grid, format: Format,
    places: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not fused(x, grid, places) or format.element == "e2m1":
        return _quantize(x, amax, top, ends, grid, format, places, counts)
    s = scales(amax, format, top)
    q = rows_fp8.quantize(x, torch.reciprocal(s), ends, *grid, format.dtype, format.largest, True, False)
    return q[0], s


def dequantize_rows(
    q: Shaped[Tensor, "rows d"],
    scale: Float[Tensor, "groups columns"],
    ends: Int[Tensor, "e"],
    grid: Grid,
    dtype: torch.dtype,
    places: Int[Tensor, "rows"] | None = None,
    counts: Int[Tensor, "e"] | None = None,
) -> Float[Tensor, "rows d"]:
    """q · scale in `dtype`; 0 for rows of no expert.

    >>> q, ends = torch.tensor([[2.0], [3.0], [7.0]]).to(torch.float8_e4m3fn), torch.tensor([1, 2], dtype=torch.int32)
    >>> dequantize_rows(q, torch.tensor([[0.5], [2.0]]), ends, (EXPERT, 0), torch.float32).tolist()
    [[1.0], [6.0], [0.0]]
    """
    share, columns = grid
    of, real = group_of_rows(ends, q.shape[0], share, places, counts)
    s = scale if share == 1 else scale.index_select(0, of)
    return torch.where(real[:, None], q.to(dtype) * spread(s, (1, columns), tuple(q.shape)).to(dtype), 0.0)


def _amax_fake(
    x: Tensor, ends: Tensor, grid: Grid, places: Tensor | None = None, counts: Tensor | None = None,
    room: int | None = None,
) -> Tensor:  # fmt: skip
    share, columns = grid
    n = groups(x.shape[0], ends.shape[0], share) if room is None else room
    return x.new_empty(n, x.shape[1] // columns if columns else 1, dtype=torch.float32)


def _quantize_fake(
    x: Tensor, amax: Tensor, top: Tensor | None, ends: Tensor, grid: Grid, format: Format,
    places: Tensor | None = None, counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return x.new_empty(x.shape, dtype=format.dtype), torch.empty_like(amax)


def _flops(node: Node) -> int:
    return node.operands()[0].type.numel


rows_amax_p = Routed("rows_amax", _amax, flops=_flops, fake=_amax_fake, lowerings={"default": _amax_default})
rows_quantize_p = Routed(
    "rows_quantize", _quantize, flops=_flops, fake=_quantize_fake, lowerings={"default": _quantize_default}
)
