"""Products of quantised rows sorted by expert: `scaled_grouped` and `scaled_grouped_dw`.

Their meaning is plain torch: multiply by the scales, then each expert's product in float32. Where the hardware has such
a product, for E4M3 and E5M2 with scales of all rows, an expert's, a row's, or DeepSeek-V3's blocks, a kernel computes
it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fmeg.kernels import rows_fp8
from fmeg.ops._common import transformed
from fmeg.ops.grouped import grouped_matmul_dw_p, grouped_matmul_p
from fmeg.ops.routing import Routed
from fmeg.precision.formats import Grid, dequantize
from fmeg.precision.ragged import dequantize_rows
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _reference(
    x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, ends: Tensor, grids: tuple[Grid, Grid], transposed: bool,
    dtype: torch.dtype, fast: bool = False,
) -> Tensor:  # fmt: skip
    rows = dequantize_rows(x, sx, ends, grids[0], _wide(dtype))
    matrices = dequantize(w, sw, grids[1], _wide(dtype))
    return grouped_matmul_p.run()(rows, matrices, ends, transposed=transposed).to(dtype)


def _reference_dw(
    x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, grids: tuple[Grid, Grid], dtype: torch.dtype,
    places: Tensor | None = None, counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    a, b = (
        dequantize_rows(q, s, ends, g, _wide(dtype), places, counts)
        for q, s, g in zip((x, y), (sx, sy), grids, strict=True)
    )
    return grouped_matmul_dw_p.run()(a, b, ends).to(dtype)


def _fake(
    x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, ends: Tensor, grids: tuple[Grid, Grid], transposed: bool,
    dtype: torch.dtype, fast: bool = False,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], w.shape[1 if transposed else 2], dtype=dtype)


def _fake_dw(
    x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, grids: tuple[Grid, Grid], dtype: torch.dtype,
    places: Tensor | None = None, counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1], dtype=dtype)


def _flops(node: Node) -> int:
    x, _, w = node.operands()[:3]
    return 2 * x.shape[0] * w.shape[1] * w.shape[2]


def _flops_dw(node: Node) -> int:
    x, _, y = node.operands()[:3]
    return 2 * x.shape[0] * x.shape[1] * y.shape[1]


# -- Hopper -----------------------------------------------------------------------------------------------------------
def multiplies_here(x: Tensor, y: Tensor, dtype: torch.dtype) -> bool:
    """Whether this GPU multiplies such elements."""
    fp8 = x.dtype in rows_fp8.FP8 and y.dtype in rows_fp8.FP8 and dtype != torch.float64
    return fp8 and rows_fp8.fits(x) and not transformed() and torch.cuda.get_device_capability(x.device) >= (8, 9)


def multiplies(grids: tuple[Grid, Grid], transposed: bool) -> bool:
    """Whether the kernel takes operands that are scaled so.

    >>> multiplies(((1, 128), (1, 128, 128)), False), multiplies(((-1, 0), (1, 0, 0)), True)
    (True, True)
    >>> multiplies(((1, 32), (1, 32, 1)), False)
    False
    """
    (share, width), (_, d, f) = grids
    deep, wide = (f, d) if transposed else (d, f)
    return rows_fp8.takes((share, width)) and width == deep and width != 1 and wide in (0, 1, rows_fp8.TALL)


def multiplies_dw(grids: tuple[Grid, Grid]) -> bool:
    """Likewise of the gradient of matrices.

    >>> multiplies_dw(((128, 1), (128, 1))), multiplies_dw(((0, 0), (-1, 1))), multiplies_dw(((32, 1), (32, 1)))
    (True, True, False)
    """
    shares = {g[0] for g in grids}
    return (len(shares) == 1 or shares == {0, -1}) and 1 not in shares and all(rows_fp8.takes(g) for g in grids)


def shared_by(grids: tuple[Grid, Grid], scales: tuple[Tensor, Tensor], experts: int) -> tuple[int, Tensor, Tensor]:
    """Which rows share the scales of both operands of such a product, and these: one for all is one for each expert.

    >>> share, a, b = shared_by(((0, 0), (-1, 0)), (torch.ones(1, 1), torch.ones(3, 1)), 3)
    >>> share, a.shape, b.shape
    (-1, torch.Size([3, 1]), torch.Size([3, 1]))
    """
    one, other = (
        s.expand(experts, s.shape[1]) if g[0] == 0 and grids[0][0] != grids[1][0] else s
        for g, s in zip(grids, scales, strict=True)
    )
    return min(grids[0][0], grids[1][0]), one, other


def _default(
    x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, ends: Tensor, grids: tuple[Grid, Grid], transposed: bool,
    dtype: torch.dtype, fast: bool = False, plus: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`plus`: what the product is added to."""
    if not multiplies_here(x, w, dtype) or not multiplies(grids, transposed):
        made = _reference(x, sx, w, sw, ends, grids, transposed, dtype, fast)
        return made if plus is None else plus + made
    widths = list(grids[1])
    if not transposed:
        w, sw, widths = w.transpose(1, 2), sw.transpose(1, 2), [widths[0], widths[2], widths[1]]
    return rows_fp8.product(x, sx, w, sw, ends, list(grids[0]), widths, dtype, fast, plus)


def _default_dw(
    x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, grids: tuple[Grid, Grid], dtype: torch.dtype,
    places: Tensor | None = None, counts: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if places is not None or not multiplies_here(x, y, dtype) or not multiplies_dw(grids):
        return _reference_dw(x, sx, y, sy, ends, grids, dtype, places, counts)
    share, sx, sy = shared_by(grids, (sx, sy), ends.shape[0])
    return rows_fp8.product_dw(rows_fp8.turn(x, ends), sx, rows_fp8.turn(y, ends), sy, ends, share, dtype)


def _into_dw(node: Node) -> Callable[..., None] | None:
    """What writes the gradient in float32 into given memory, where the kernel computes it."""
    grids, dtype = node.args[5:7]
    if dtype is not torch.float32 or len(node.operands()) != 5:
        return None

    def write(result: Tensor, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, add: bool) -> None:
        if multiplies_here(x, y, dtype) and multiplies_dw(grids):
            turned = rows_fp8.turn(x, ends), rows_fp8.turn(y, ends)
            share, sx, sy = shared_by(grids, (sx, sy), ends.shape[0])
            rows_fp8.product_dw_into(result, turned[0], sx, turned[1], sy, ends, share, add)
            return
        made = _reference_dw(x, sx, y, sy, ends, grids, dtype)
        if add:
            result.add_(made)
        else:
            result.copy_(made)

    return write


scaled_grouped_p = Routed("scaled_grouped", _reference, flops=_flops, fake=_fake, lowerings={"default": _default})
scaled_grouped_add_p = Primitive("scaled_grouped_add", _default, flops=_flops)
scaled_grouped_dw_p = Routed(
    "scaled_grouped_dw",
    _reference_dw,
    flops=_flops_dw,
    fake=_fake_dw,
    lowerings={"default": _default_dw, "into": _into_dw},
)
