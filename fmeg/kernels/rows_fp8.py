"""Rows sorted by expert in FP8, by Triton on CUDA: largest values, quantised rows, and products of the hardware.

A matrix product on Hopper wants both operands with the contracted dimension contiguous. So matrices are read as they
lie or turned, and the gradient of the matrices reads rows *turned*: columns before rows, an expert's rows from a
multiple of 128 on, with zeros after its last. How many rows an expert has is never asked by the host.

Shapes and grids as in `fmeg.precision.ragged`; `share` is the grid of rows, `width` that of columns. Scales are shared
by all rows (0), one (1), an expert's (-1) or 128 of an expert's. Each is an operation of torch's under the name
`fmeg::…`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.kernels.rows import _power, available

TALL = 128
"""Rows of a tile, and of a run that shares scales."""
SHARES = {0: 0, 1: 1, -1: 2, TALL: 3}
WIDE = dict(BLOCK_M=TALL, BLOCK_N=256, BLOCK_K=TALL, num_warps=8, num_stages=4)
NARROW = dict(BLOCK_M=TALL, BLOCK_N=128, BLOCK_K=TALL, num_warps=8, num_stages=4)
"""Tiles of products: wider ones spill registers unless sums stay where the hardware has them."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _programs() -> Any:
    from fmeg.kernels import _triton_rows_fp8

    return _triton_rows_fp8


def _on(x: Tensor) -> Any:
    from fmeg.kernels._triton_grouped import on

    return on(x)


def fits(x: Tensor) -> bool:
    """Whether a kernel takes rows like these: on CUDA, up to float32."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and available()


def takes(grid: tuple[int, ...]) -> bool:
    """Whether the kernels scale rows so.

    >>> takes((1, 128)), takes((128, 1)), takes((-1, 0)), takes((1, 32)), takes((4, 1))
    (True, True, True, False, False)
    """
    share, width = grid
    wide = {1: (0, TALL), 0: (0,), -1: (0, 1), TALL: (0, 1)}
    return width in wide.get(share, ())


def turned_width(rows: int, experts: int) -> int:
    """Elements of a column of turned rows: room for every expert's last tile.

    >>> turned_width(300, 2)
    512
    """
    return (rows + experts * (TALL - 1)) // TALL * TALL


def _experts(ends: Tensor) -> dict[str, int]:
    return dict(E=ends.shape[0], BLOCK_E=_power(ends.shape[0] + 1))


def _count(rows: int, experts: int) -> int:
    return turned_width(rows, experts) // TALL


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


@torch.library.custom_op("fmeg::rows_fp8_amax", mutates_args=())
def amax(x: Tensor, ends: Tensor, share: int, width: int) -> Tensor:
    """As `fmeg.precision.ragged.rows_amax_p`; of rows of no expert 0."""
    x, (n, d), experts = _rows(x), x.shape, ends.shape[0]
    groups = {0: 1, 1: n, -1: experts}.get(share, _count(n, experts))
    out = torch.zeros(groups, d // width if width else 1, dtype=torch.int32, device=x.device)
    tiles = _count(n, experts)
    wide = min(64 if width != TALL else TALL, _power(d))
    each = 1 if width else -(-d // wide)
    with _on(x):
        if tiles and d:
            _programs().amax[(tiles, 1 if not width else -(-d // wide))](
                x, ends, out, n, d, x.stride(0), SHARE=SHARES[share], WIDTH=width, EACH=each, TALL=TALL, WIDE=wide,
                num_warps=8, **_experts(ends),
            )  # fmt: skip
    return out.view(torch.float32)


@amax.register_fake
def _(x: Tensor, ends: Tensor, share: int, width: int) -> Tensor:
    (n, d), experts = x.shape, ends.shape[0]
    groups = {0: 1, 1: n, -1: experts}.get(share, _count(n, experts))
    return x.new_empty(groups, d // width if width else 1, dtype=torch.float32)


@torch.library.custom_op("fmeg::rows_fp8_quantize", mutates_args=())
def quantize(
    x: Tensor, inverse: Tensor, ends: Tensor, share: int, width: int, dtype: torch.dtype, largest: float, lies: bool,
    turned: bool,
) -> list[Tensor]:  # fmt: skip
    """x · inverse in `dtype`: as it lies, and turned, each if asked for; `inverse`: of the scales. Rows of no expert
    are
    not written."""
    x, (n, d), experts = _rows(x), x.shape, ends.shape[0]
    out = _empty(x, ends, dtype, lies, turned)
    wide = min(64, _power(d))
    with _on(x):
        if n and d:
            _programs().quantize[(_count(n, experts), -(-d // wide))](
                x, inverse.contiguous(), ends, out[0] if lies else None, out[-1] if turned else None, n, d,
                x.stride(0), turned_width(n, experts), largest, SHARE=SHARES[share], WIDTH=width, TALL=TALL, WIDE=wide,
                num_warps=8, **_experts(ends),
            )  # fmt: skip
    return out


def _empty(x: Tensor, ends: Tensor, dtype: torch.dtype, lies: bool, turned: bool) -> list[Tensor]:
    (n, d), width = x.shape, turned_width(x.shape[0], ends.shape[0])
    return [x.new_empty(shape, dtype=dtype) for shape, asked in (((n, d), lies), ((d, width), turned)) if asked]


@quantize.register_fake
def _(
    x: Tensor, inverse: Tensor, ends: Tensor, share: int, width: int, dtype: torch.dtype, largest: float, lies: bool,
    turned: bool,
) -> list[Tensor]:  # fmt: skip
    return _empty(x, ends, dtype, lies, turned)


@torch.library.custom_op("fmeg::rows_fp8_turn", mutates_args=())
def turn(q: Tensor, ends: Tensor) -> Tensor:
    """Rows turned."""
    q, (n, d), experts = _rows(q), q.shape, ends.shape[0]
    out = q.new_empty(d, turned_width(n, experts))
    wide = min(64, _power(d))
    with _on(q):
        if n and d:
            _programs().turn[(_count(n, experts), -(-d // wide))](
                q.view(torch.uint8), ends, out.view(torch.uint8), n, d, q.stride(0), out.shape[1], TALL=TALL,
                WIDE=wide, num_warps=8, **_experts(ends),
            )  # fmt: skip
    return out


@turn.register_fake
def _(q: Tensor, ends: Tensor) -> Tensor:
    return q.new_empty(q.shape[1], turned_width(q.shape[0], ends.shape[0]))


@torch.library.custom_op("fmeg::rows_fp8_product", mutates_args=())
def product(
    x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, ends: Tensor, grid: list[int], widths: list[int], dtype: torch.dtype,
    fast: bool, plus: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(sx x)[rows of e] · ((sw w)[e])ᵀ: x "n k", w "e m k"; of rows of no expert 0. Added to `plus` "n m", if given.

    grid    of x: share and width, 0 or 128
    widths  of w: 0 or 1 for experts, then how many of m and of k share a scale (0: all), k as x does
    """
    x, (n, k), (experts, m, _) = _rows(x), x.shape, w.shape
    w = w if w.stride(2) == 1 else w.contiguous()
    out = x.new_empty(n, m, dtype=dtype)
    if not out.numel():
        return out
    tiles = dict(WIDE if fast and m >= 256 and not grid[1] else NARROW)
    tiles_m = -(-n // TALL) + experts + 1
    of_e, of_m, of_k = (s if size > 1 else 0 for s, size in zip(sw.stride(), sw.shape, strict=True))
    with _on(x):
        _programs().product[(tiles_m * -(-m // tiles["BLOCK_N"]),)](
            x, sx.contiguous(), w, sw, None if plus is None else plus.contiguous(), out, ends, n, k, m, x.stride(0),
            w.stride(0), w.stride(1), sx.shape[1], of_e, of_m, of_k, tiles_m, SHARE=SHARES[grid[0]],
            N_WIDTH=widths[1], BLOCKED=bool(grid[1]), FAST=fast, GROUP=8, EVEN=k % tiles["BLOCK_K"] == 0,
            **_experts(ends), **tiles,
        )  # fmt: skip
    return out


@product.register_fake
def _(
    x: Tensor, sx: Tensor, w: Tensor, sw: Tensor, ends: Tensor, grid: list[int], widths: list[int], dtype: torch.dtype,
    fast: bool, plus: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], w.shape[1], dtype=dtype)


def _product_dw(out: Tensor, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, share: int, add: bool) -> None:
    experts, d, f = out.shape
    if not out.numel():
        return
    tiles = dict(NARROW)
    with _on(x):
        _programs().product_dw[(-(-d // tiles["BLOCK_M"]) * -(-f // tiles["BLOCK_N"]), experts)](
            x, sx.contiguous(), y, sy.contiguous(), out, ends, d, f, x.shape[1], SHARE=SHARES[share],
            X_COLUMNS=sx.shape[1] > 1, Y_COLUMNS=sy.shape[1] > 1, ADD=add, **_experts(ends), **tiles,
        )  # fmt: skip


@torch.library.custom_op("fmeg::rows_fp8_product_dw", mutates_args=())
def product_dw(x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    """The gradient of each expert's matrix, (sx x)(sy y)ᵀ over its rows, of turned x "d width" and y "f width"."""
    out = x.new_empty(ends.shape[0], x.shape[0], y.shape[0], dtype=dtype)
    _product_dw(out, x, sx, y, sy, ends, share, False)
    return out


@product_dw.register_fake
def _(x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, share: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[0], y.shape[0], dtype=dtype)


@torch.library.custom_op("fmeg::rows_fp8_product_dw_into", mutates_args=("out",))
def product_dw_into(
    out: Tensor, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, share: int, add: bool
) -> None:
    """The same into `out`, contiguous, or added to what is there."""
    _product_dw(out, x, sx, y, sy, ends, share, add)


@product_dw_into.register_fake
def _(out: Tensor, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, ends: Tensor, share: int, add: bool) -> None:
    return None
