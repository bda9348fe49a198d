"""Triton kernels that make rows sorted by expert and add them up again (see fmeg.ops.pack). Imports triton: load it
only where there is a GPU.

Each reads every row once, adds in float32, and writes its result once.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmeg.kernels._triton_grouped import on

BLOCK = 1024


@triton.jit
def _pack(
    x_ptr, order_ptr, total_ptr, out_ptr, slots, rows, D,
    K: tl.constexpr, HAS_TOTAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    limit = slots
    if HAS_TOTAL:
        limit = min(slots, tl.load(total_ptr).to(tl.int32))
    there = row < limit
    token = (tl.load(order_ptr + row, mask=there, other=0) // K)[:, None]
    row = row.to(tl.int64)[:, None]
    for start in range(0, D, BLOCK):
        column = (start + tl.arange(0, BLOCK))[None, :]
        value = tl.load(x_ptr + token * D + column, mask=there[:, None] & (column < D), other=0.0)
        tl.store(out_ptr + row * D + column, value, mask=(row < rows) & (column < D))


@triton.jit
def _weigh(
    rows_ptr, inverse_ptr, total_ptr, weights_ptr, out_ptr, rows, D,
    K: tl.constexpr, HAS_TOTAL: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < D
    limit = rows
    if HAS_TOTAL:
        limit = min(rows, tl.load(total_ptr).to(tl.int32))
    acc = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(inverse_ptr + token * K + j)
        value = tl.load(rows_ptr + row * D + column, mask=real & (row < limit), other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + token * K + j).to(tl.float32)
        acc += value
    tl.store(out_ptr + token * D + column, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _weigh_bwd(
    ct_ptr, rows_ptr, order_ptr, total_ptr, weights_ptr, drows_ptr, dweights_ptr, slots, out_rows, D,
    K: tl.constexpr, HAS_TOTAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    limit = min(slots, out_rows)
    if HAS_TOTAL:
        limit = min(limit, tl.load(total_ptr).to(tl.int32))
    acc = tl.zeros((BLOCK,), tl.float32)
    if row < limit:
        slot = tl.load(order_ptr + row)
        weight = tl.load(weights_ptr + slot).to(tl.float32)
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)
            real = column < D
            ct = tl.load(ct_ptr + slot // K * D + column, mask=real, other=0.0).to(tl.float32)
            acc += ct * tl.load(rows_ptr + row * D + column, mask=real, other=0.0).to(tl.float32)
            tl.store(drows_ptr + row * D + column, (weight * ct).to(drows_ptr.dtype.element_ty), mask=real)
    elif row < out_rows:
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(drows_ptr + row * D + column, acc.to(drows_ptr.dtype.element_ty), mask=column < D)
    if row < slots:
        tl.store(dweights_ptr + tl.load(order_ptr + row), tl.sum(acc, 0).to(dweights_ptr.dtype.element_ty))


def pack(x: Tensor, order: Tensor, total: Tensor | None, k: int, rows: int | None) -> Tensor:
    """out[i] = x[order[i] // k] for i < total, else 0."""
    d, rows = x.shape[1], order.shape[0] if rows is None else rows
    x, out = x.contiguous(), x.new_empty(rows, d)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(d))
        each = max(1, 2 * BLOCK // block)
        with on(x):
            _pack[(triton.cdiv(rows, each),)](
                x, order, total, out, order.shape[0], rows, d,
                K=k, HAS_TOTAL=total is not None, ROWS=each, BLOCK=block,
            )  # fmt: skip
    return out


def weigh(rows: Tensor, inverse: Tensor, total: Tensor | None, weights: Tensor | None, k: int) -> Tensor:
    """out[t] = Σ_j weights[t, j] rows[inverse[t·k + j]]; without weights they are 1."""
    tokens, d = inverse.shape[0] // k, rows.shape[1]
    rows, out = rows.contiguous(), rows.new_empty(tokens, d)
    w = None if weights is None else weights.contiguous()
    if out.numel():
        with on(rows):
            _weigh[(tokens, triton.cdiv(d, BLOCK))](
                rows, inverse, total, w, out, rows.shape[0], d,
                K=k, HAS_TOTAL=total is not None, WEIGHTED=w is not None, BLOCK=min(BLOCK, triton.next_power_of_2(d)),
            )  # fmt: skip
    return out


def weigh_bwd(
    ct: Tensor, rows: Tensor, order: Tensor, total: Tensor | None, weights: Tensor, out_rows: int | None
) -> tuple[Tensor, Tensor]:
    """Cotangents of the rows, packed, `out_rows` of them (None: as many as there are), and of the weights."""
    d, k = ct.shape[1], weights.shape[1]
    out_rows = rows.shape[0] if out_rows is None else out_rows
    ct, rows, weights = ct.contiguous(), rows.contiguous(), weights.contiguous()
    every = order.shape[0] == weights.numel()  # else slots that `order` leaves out have no row
    drows, dweights = rows.new_empty(out_rows, d), torch.empty_like(weights) if every else torch.zeros_like(weights)
    programs = max(out_rows, order.shape[0])
    if programs:
        with on(rows):
            _weigh_bwd[(programs,)](
                ct, rows, order, total, weights, drows, dweights, order.shape[0], out_rows, d,
                K=k, HAS_TOTAL=total is not None, BLOCK=min(BLOCK, triton.next_power_of_2(max(d, 1))),
            )  # fmt: skip
    return drows, dweights
