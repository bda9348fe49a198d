"""Triton kernels on rows sorted by expert (see `grouped`). Imports triton: load it only where there is a GPU.

The host does not know how many rows an expert has. So a product launches as many tiles as there can be, each finds its
expert by counting (the rows after all experts are one more, which writes zeros), and tiles too many leave at once.
"""

# mypy: allow-untyped-defs, disable-error-code="union-attr"
from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Tiles = dict[str, Any]
CONFIGS: tuple[Tiles, ...] = (
    dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3),
    dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=4),
    dict(BLOCK_M=256, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
    dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=4, num_stages=4),
    dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3),
)
"""Tile sizes for 16-bit numbers on Hopper that `benchmarks.gpu_moe` compares."""


@triton.jit
def _place(ends_ptr, tile, rows, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a tile: its expert (E: rows of none, E + 1: no tile), its first row, and where the expert's rows end."""
    e = tl.arange(0, BLOCK_E)
    end = tl.load(ends_ptr + e, mask=e < E, other=0)
    end = tl.where(e < E, end, rows)
    start = tl.load(ends_ptr + e - 1, mask=(e > 0) & (e <= E), other=0)
    tiles = tl.where(e <= E, (end - start + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= tile) & (e <= E)).to(tl.int32), 0)
    mine = e == expert
    first_tile = tl.sum(tl.where(mine, last - tiles, 0), 0)
    first_row = tl.sum(tl.where(mine, start, 0), 0) + (tile - first_tile) * BLOCK_M
    return expert, first_row, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _matmul(
    x_ptr, w_ptr, out_ptr, ends_ptr, rows, D, F, stride_x, stride_e, stride_d, stride_f, second, tiles_m,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """WIDE: columns of a second matrix, `second` elements behind the first, follow those of the first. DEEP: the
    product of the second half of x's columns with it is added."""
    pid = tl.program_id(0)
    tiles_f = tl.cdiv(F, BLOCK_N)
    tiles_n = tiles_f * 2 if WIDE else tiles_f
    group = pid // (GROUP * tiles_n)  # GROUP tiles of rows go through all columns together, to meet in the cache
    height = min(tiles_m - group * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    tile, column = group * GROUP + inside % height, inside // height
    expert, first, end = _place(ends_ptr, tile, rows, E, BLOCK_E, BLOCK_M)
    if expert <= E:
        side = column // tiles_f if WIDE else 0
        m = first + tl.arange(0, BLOCK_M)
        n = (column - side * tiles_f) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if expert < E:
            k = tl.arange(0, BLOCK_K)
            mine = tl.minimum(m, rows - 1).to(tl.int64)  # what lies beyond is read, and not written
            x = x_ptr + mine[:, None] * stride_x + k[None, :]
            w = w_ptr + expert.to(tl.int64) * stride_e + k[:, None] * stride_d + n[None, :] * stride_f
            if WIDE:
                w += side.to(tl.int64) * second
            steps = tl.cdiv(D, BLOCK_K)
            for step in range(steps * 2 if DEEP else steps):
                half = step // steps if DEEP else 0
                start = (step - half * steps) * BLOCK_K
                at_x, at_w = start, start * stride_d
                if DEEP:
                    at_x = half * D + start
                    at_w = half.to(tl.int64) * second + start * stride_d
                if EVEN:
                    a = tl.load(x + at_x)
                    b = tl.load(w + at_w)
                else:
                    a = tl.load(x + at_x, mask=(k < D - start)[None, :], other=0.0)
                    b = tl.load(w + at_w, mask=(k < D - start)[:, None] & (n < F)[None, :], other=0.0)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
        width = F * 2 if WIDE else F
        out = out_ptr + m.to(tl.int64)[:, None] * width + side * F + n[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < F)[None, :])


@triton.jit
def _matmul_dw(
    x_ptr, y_ptr, out_ptr, ends_ptr, D, F, stride_x, stride_y,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    tile, expert = tl.program_id(0), tl.program_id(1)
    tiles_f = tl.cdiv(F, BLOCK_N)
    d = (tile // tiles_f) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = (tile % tiles_f) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    k = tl.arange(0, BLOCK_K)
    row = (start + k).to(tl.int64)[:, None]
    x = x_ptr + row * stride_x + d[None, :]
    y = y_ptr + row * stride_y + f[None, :]
    for first in range(start, end, BLOCK_K):
        real = (k < end - first)[:, None]
        if EVEN:
            a = tl.load(x, mask=real, other=0.0)
            b = tl.load(y, mask=real, other=0.0)
        else:
            a = tl.load(x, mask=real & (d < D)[None, :], other=0.0)
            b = tl.load(y, mask=real & (f < F)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
        x += BLOCK_K * stride_x
        y += BLOCK_K * stride_y
    out = out_ptr + expert.to(tl.int64) * D * F + d.to(tl.int64)[:, None] * F + f[None, :]
    mask = (d < D)[:, None] & (f < F)[None, :]
    if ADD:
        acc += tl.load(out, mask=mask, other=0.0).to(tl.float32)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _zero_tail(out_ptr, end_ptr, rows, F, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    end = tl.load(end_ptr)
    for first in range(end + tl.program_id(0) * BLOCK_M, rows, tl.num_programs(0) * BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        for start in range(0, F, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            at = out_ptr + m.to(tl.int64)[:, None] * F + n[None, :]
            tl.store(
                at, tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty), mask=(m < rows)[:, None] & (n < F)[None, :]
            )


@triton.jit
def _zero_empty(out_ptr, ends_ptr, size, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    if start == tl.load(ends_ptr + expert):
        step = tl.num_programs(1).to(tl.int64) * BLOCK
        first = tl.program_id(1).to(tl.int64) * BLOCK
        for begin in range(first, size, step):
            at = begin + tl.arange(0, BLOCK)
            zeros = tl.zeros((BLOCK,), out_ptr.dtype.element_ty)
            tl.store(out_ptr + expert.to(tl.int64) * size + at, zeros, mask=at < size)


def on(x: Tensor) -> Any:
    """The device that kernels on x are launched on."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def _tiles(x: Tensor, outer: int) -> Tiles:
    """Tile sizes: those of a product on Hopper for 16-bit numbers, small ones for float32, which is not for speed."""
    if x.dtype == torch.float32:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=2)
    return dict(CONFIGS[0] if outer >= 256 else CONFIGS[4])


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def matmul(
    x: Tensor, w: Tensor, ends: Tensor, transposed: bool, second: Tensor | None = None, tiles: Tiles | None = None
) -> Tensor:
    """x[rows of e] @ w[e], or @ w[e]ᵀ; rows of no expert are 0. Sums are in float32.

    second  of w's shape and strides: the result is [x w, x second], or, transposed, x's first half of columns times
            wᵀ plus its second half times secondᵀ
    """
    other = second if second is None or not transposed else second.transpose(1, 2)
    w = w.transpose(1, 2) if transposed else w
    rows, (experts, inner, outer) = x.shape[0], w.shape
    wide, deep = other is not None and not transposed, other is not None and transposed
    out = x.new_empty(rows, outer * 2 if wide else outer)
    if not out.numel():
        return out
    tiles = _tiles(x, outer) if tiles is None else tiles
    tiles_m = triton.cdiv(rows, tiles["BLOCK_M"]) + experts + 1
    grid = (tiles_m * triton.cdiv(outer, tiles["BLOCK_N"]) * (2 if wide else 1),)
    behind = 0 if other is None else (other.data_ptr() - w.data_ptr()) // w.element_size()
    with on(x):
        _matmul[grid](
            x, w, out, ends, rows, inner, outer, x.stride(0), *w.stride(), behind, tiles_m,
            E=experts, BLOCK_E=triton.next_power_of_2(experts + 1), GROUP=8, PRECISION=_precision(x), WIDE=wide,
            DEEP=deep, EVEN=inner % tiles["BLOCK_K"] == 0 and outer % tiles["BLOCK_N"] == 0, **tiles,
        )  # fmt: skip
    return out


def matmul_dw(
    x: Tensor, y: Tensor, ends: Tensor, dtype: torch.dtype | None = None, tiles: Tiles | None = None
) -> Tensor:
    """x[rows of e]ᵀ @ y[rows of e] for every expert; 0 for one without rows. Sums are in float32."""
    out = x.new_empty(ends.shape[0], x.shape[1], y.shape[1], dtype=x.dtype if dtype is None else dtype)
    matmul_dw_into(out, x, y, ends, False, tiles)
    return out


def matmul_dw_into(out: Tensor, x: Tensor, y: Tensor, ends: Tensor, add: bool, tiles: Tiles | None = None) -> None:
    """The same into given memory, or added to what is there."""
    inner, outer = x.shape[1], y.shape[1]
    if not out.numel():
        return
    tiles = _tiles(x, outer) if tiles is None else tiles
    grid = (triton.cdiv(inner, tiles["BLOCK_M"]) * triton.cdiv(outer, tiles["BLOCK_N"]), ends.shape[0])
    with on(x):
        _matmul_dw[grid](
            x, y, out, ends, inner, outer, x.stride(0), y.stride(0), PRECISION=_precision(x), ADD=add,
            EVEN=inner % tiles["BLOCK_M"] == 0 and outer % tiles["BLOCK_N"] == 0, **tiles,
        )  # fmt: skip


def zero_tail_(out: Tensor, ends: Tensor) -> Tensor:
    """Write 0 into the rows of no expert."""
    rows, columns = out.shape
    if out.numel():
        with on(out):
            _zero_tail[(min(128, triton.cdiv(rows, 32)),)](out, ends[-1:], rows, columns, BLOCK_M=32, BLOCK_N=256)
    return out


def zero_empty_(out: Tensor, ends: Tensor) -> Tensor:
    """Write 0 into the matrices of experts without rows."""
    if out.numel():
        with on(out):
            _zero_empty[(ends.shape[0], 16)](out, ends, out[0].numel(), BLOCK=1024)
    return out
