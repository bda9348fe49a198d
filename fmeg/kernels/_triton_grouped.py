"""Triton kernels on rows sorted by expert (see `grouped`). Imports triton: load it only where there is a GPU.

The host does not know how many rows an expert has. So a product launches as many tiles as there can be, each finds its
expert by counting (the rows after all experts are one more, which writes zeros), and tiles too many leave at once.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    x_ptr, w_ptr, out_ptr, ends_ptr, rows, D, F, stride_e, stride_d, stride_f, tiles_m,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(F, BLOCK_N)
    group = pid // (GROUP * tiles_n)  # GROUP tiles of rows go through all columns together, to meet in the cache
    height = min(tiles_m - group * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    tile, column = group * GROUP + inside % height, inside // height
    expert, first, end = _place(ends_ptr, tile, rows, E, BLOCK_E, BLOCK_M)
    if expert <= E:
        m = first + tl.arange(0, BLOCK_M)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if expert < E:
            k = tl.arange(0, BLOCK_K)
            x = x_ptr + m.to(tl.int64)[:, None] * D + k[None, :]
            w = w_ptr + expert.to(tl.int64) * stride_e + k[:, None] * stride_d + n[None, :] * stride_f
            for start in range(0, D, BLOCK_K):
                left = D - start
                a = tl.load(x, mask=(m < end)[:, None] & (k < left)[None, :], other=0.0)
                b = tl.load(w, mask=(k < left)[:, None] & (n < F)[None, :], other=0.0)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
                x += BLOCK_K
                w += BLOCK_K * stride_d
        out = out_ptr + m.to(tl.int64)[:, None] * F + n[None, :]
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < end)[:, None] & (n < F)[None, :])


@triton.jit
def _matmul_dw(
    x_ptr, y_ptr, out_ptr, ends_ptr, D, F,
    BLOCK_D: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile, expert = tl.program_id(0), tl.program_id(1)
    tiles_f = tl.cdiv(F, BLOCK_F)
    d = (tile // tiles_f) * BLOCK_D + tl.arange(0, BLOCK_D)
    f = (tile % tiles_f) * BLOCK_F + tl.arange(0, BLOCK_F)
    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    acc = tl.zeros((BLOCK_D, BLOCK_F), dtype=tl.float32)
    for row in range(start, end, BLOCK_K):
        k = row + tl.arange(0, BLOCK_K)
        real = (k < end)[:, None]
        a = tl.load(x_ptr + k.to(tl.int64)[:, None] * D + d[None, :], mask=real & (d < D)[None, :], other=0.0)
        b = tl.load(y_ptr + k.to(tl.int64)[:, None] * F + f[None, :], mask=real & (f < F)[None, :], other=0.0)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
    out = out_ptr + expert.to(tl.int64) * D * F + d.to(tl.int64)[:, None] * F + f[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(d < D)[:, None] & (f < F)[None, :])


@triton.jit
def _zero_tail(out_ptr, end_ptr, rows, F, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    end = tl.load(end_ptr)
    if (tl.program_id(0) + 1) * BLOCK_M > end:
        for start in range(0, F, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            at = out_ptr + m.to(tl.int64)[:, None] * F + n[None, :]
            mask = ((m >= end) & (m < rows))[:, None] & (n < F)[None, :]
            tl.store(at, tl.zeros((BLOCK_M, BLOCK_N), out_ptr.dtype.element_ty), mask=mask)


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


def _tiles(x: Tensor, inner: int) -> dict[str, Any]:
    """Tile sizes: those of a product on Hopper for 16-bit numbers, small ones for float32, which is not for speed."""
    if x.dtype == torch.float32:
        return dict(BLOCK_M=64, BLOCK_N=64, BLOCK_K=32, num_warps=4, num_stages=2)
    return dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64 if inner >= 64 else 32, num_warps=8, num_stages=3)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def matmul(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """x[rows of e] @ w[e], or @ w[e]ᵀ; rows of no expert are 0. Sums are in float32."""
    w = w.transpose(1, 2) if transposed else w
    rows, (experts, inner, outer) = x.shape[0], w.shape
    out = x.new_empty(rows, outer)
    if not out.numel():
        return out
    tiles = _tiles(x, inner)
    tiles_m = triton.cdiv(rows, tiles["BLOCK_M"]) + experts + 1
    grid = (tiles_m * triton.cdiv(outer, tiles["BLOCK_N"]),)
    with torch.cuda.device(x.device):
        _matmul[grid](
            x, w, out, ends, rows, inner, outer, *w.stride(), tiles_m,
            E=experts, BLOCK_E=triton.next_power_of_2(experts + 1), GROUP=8, PRECISION=_precision(x), **tiles,
        )  # fmt: skip
    return out


def matmul_dw(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """x[rows of e]ᵀ @ y[rows of e] for every expert; 0 for one without rows. Sums are in float32."""
    inner, outer = x.shape[1], y.shape[1]
    out = x.new_empty(ends.shape[0], inner, outer)
    if not out.numel():
        return out
    tiles = _tiles(x, 64)
    tiles["BLOCK_D"], tiles["BLOCK_F"] = tiles.pop("BLOCK_M"), tiles.pop("BLOCK_N")
    grid = (triton.cdiv(inner, tiles["BLOCK_D"]) * triton.cdiv(outer, tiles["BLOCK_F"]), ends.shape[0])
    with torch.cuda.device(x.device):
        _matmul_dw[grid](x, y, out, ends, inner, outer, PRECISION=_precision(x), **tiles)
    return out


def zero_tail_(out: Tensor, ends: Tensor) -> Tensor:
    """Write 0 into the rows of no expert."""
    rows, columns = out.shape
    if out.numel():
        with torch.cuda.device(out.device):
            _zero_tail[(triton.cdiv(rows, 32),)](out, ends[-1:], rows, columns, BLOCK_M=32, BLOCK_N=256)
    return out


def zero_empty_(out: Tensor, ends: Tensor) -> Tensor:
    """Write 0 into the matrices of experts without rows."""
    if out.numel():
        with torch.cuda.device(out.device):
            _zero_empty[(ends.shape[0], 16)](out, ends, out[0].numel(), BLOCK=1024)
    return out
