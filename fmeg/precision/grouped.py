"""Products of quantised rows sorted by expert: `scaled_grouped` and `scaled_grouped_dw`.

Their meaning is plain torch: multiply by the scales, then each expert's product in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmeg.ops.grouped import grouped_matmul_dw_p, grouped_matmul_p
from fmeg.ops.routing import Routed
from fmeg.precision.formats import Grid, dequantize
from fmeg.precision.ragged import dequantize_rows
from fmeg.program.ir import Node


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


scaled_grouped_p = Routed("scaled_grouped", _reference, flops=_flops, fake=_fake)
scaled_grouped_dw_p = Routed("scaled_grouped_dw", _reference_dw, flops=_flops_dw, fake=_fake_dw)
