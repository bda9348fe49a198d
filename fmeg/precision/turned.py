"""Rows sorted by expert turned, columns before rows, as the gradient of their experts' matrices reads them.

Each expert's rows begin at a multiple of 128 and end with zeros up to the next: what contracts them asks no host how
many there are. An 8-bit product of the hardware wants what it contracts contiguous in both operands.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from fmeg.kernels import rows_fp8
from fmeg.kernels.rows_fp8 import TALL, turned_width
from fmeg.ops._common import transformed
from fmeg.precision.formats import Format, Grid
from fmeg.precision.grouped import multiplies_dw, multiplies_here, scaled_grouped_dw_p, shared_by
from fmeg.precision.ragged import fused, group_of_rows, rows_quantize_p, scales
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive


def columns_of_rows(ends: Int[Tensor, "e"], rows: int) -> tuple[Int[Tensor, "rows"], Tensor]:
    """(where each row lies when turned, whether it is an expert's).

    >>> columns_of_rows(torch.tensor([2, 3]), 4)[0].tolist()
    [0, 1, 128, 0]
    """
    tile, real = group_of_rows(ends, rows, TALL)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]]).long()
    expert, _ = group_of_rows(ends, rows, -1)
    at = tile * TALL + (torch.arange(rows, device=ends.device) - starts.index_select(0, expert)) % TALL
    return torch.where(real, at, 0), real


def turn(q: Shaped[Tensor, "rows d"], ends: Int[Tensor, "e"]) -> Shaped[Tensor, "d width"]:
    """Quantised rows turned.

    >>> turn(torch.tensor([[1], [2], [7]], dtype=torch.uint8), torch.tensor([1, 2]))[0, [0, 1, 128]].tolist()
    [1, 0, 2]
    """
    if rows_fp8.fits(q) and not transformed():
        return rows_fp8.turn(q, ends)
    at, real = columns_of_rows(ends, q.shape[0])
    width = turned_width(q.shape[0], ends.shape[0])
    low = torch.where(real[:, None], q.view(torch.uint8), 0)
    out = low.new_zeros(width + 1, q.shape[1]).index_copy(0, torch.where(real, at, width), low)
    return out[:width].t().contiguous().view(q.dtype)


def _turned(
    x: Tensor, amax: Tensor, top: Tensor | None, ends: Tensor, grid: Grid, format: Format, lies: bool
) -> tuple[Tensor, ...]:
    """Rows quantised: as they lie if `lies`, turned, and their scales."""
    if fused(x, grid, None) and format.element != "e2m1":
        s = scales(amax, format, top)
        out = rows_fp8.quantize(x, torch.reciprocal(s), ends, *grid, format.dtype, format.largest, lies, True)
        return *out, s
    q, s = rows_quantize_p.run()(x, amax, top, ends, grid, format)
    return (q, turn(q, ends), s) if lies else (turn(q, ends), s)


def _product(
    x: Shaped[Tensor, "d width"], sx: Float[Tensor, "groups columns"], y: Shaped[Tensor, "f width"],
    sy: Float[Tensor, "groups columns"], ends: Int[Tensor, "e"], grids: tuple[Grid, Grid], dtype: torch.dtype,
) -> Float[Tensor, "e d f"]:  # fmt: skip
    """As `scaled_grouped_dw`: elsewhere than on the hardware, with the zeros between experts as rows of theirs."""
    if multiplies_here(x, y, dtype) and multiplies_dw(grids):
        share, sx, sy = shared_by(grids, (sx, sy), ends.shape[0])
        return rows_fp8.product_dw(x, sx, y, sy, ends, share, dtype)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    padded = ((sizes + (TALL - 1)) // TALL * TALL).cumsum(0).to(ends.dtype)
    return scaled_grouped_dw_p.run()(x.t(), sx, y.t(), sy, padded, grids, dtype)


def _into(node: Node) -> Callable[..., None] | None:
    """What writes a gradient in float32 into given memory."""
    grids, dtype = node.args[5:]
    if dtype is not torch.float32:
        return None

    def write(result: Tensor, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, add: bool) -> None:
        if multiplies_here(x, y, dtype) and multiplies_dw(grids):
            share, sx, sy = shared_by(grids, (sx, sy), ends.shape[0])
            rows_fp8.product_dw_into(result, x, sx, y, sy, ends, share, add)
            return
        made = _product(x, sx, y, sy, ends, grids, dtype)
        if add:
            result.add_(made)
        else:
            result.copy_(made)

    return write


def _flops(node: Node) -> int:
    x, _, y = node.operands()[:3]
    return 2 * x.shape[0] * x.shape[1] * y.shape[0]


turn_rows_p = Primitive("turn_rows", turn, flops=lambda n: 0)
turned_p = Primitive("rows_quantize_turned", _turned, flops=lambda n: n.operands()[0].type.numel)
turned_dw_p = Primitive("scaled_turned_dw", _product, flops=_flops, lowerings={"into": _into})
