"""Triton kernels of a router and of the experts' activation (see `experts`). Imports triton: load it only where there
is a GPU."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fmeg.kernels._triton_grouped import on

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def _top_k(x_ptr, out_ptr, rows, n, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Integers in the order of the numbers; k times the largest, and of equal ones the first. NaN is above all."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    live = (row < rows)[:, None] & (column < n)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * n + column, mask=live, other=0.0).to(tl.float32)
    x = tl.where(x == 0.0, 0.0, x)
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(x != x, 0x7FFFFFFF, key)
    key = tl.where(live, key, LOWEST)
    for j in tl.static_range(K):
        top = tl.max(key, 1)
        index = tl.min(tl.where(key == top[:, None], column, BLOCK), 1)
        tl.store(out_ptr + row.to(tl.int64) * K + j, index.to(tl.int64), mask=row < rows)
        key = tl.where(column == index[:, None], LOWEST, key)


@triton.jit
def _histogram(ids_ptr, counts_ptr, slots, blocks, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr):
    """counts[e, block]: slots of expert e in a block of them; E is the number of experts, one more for none."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + slot, mask=slot < slots, other=BLOCK_E).to(tl.int32)
    e = tl.arange(0, BLOCK_E)
    hot = (ids[:, None] == e[None, :]).to(tl.int32)
    tl.store(counts_ptr + e * blocks + block, tl.sum(hot, 0), mask=e < E)


@triton.jit
def _place_slots(
    ids_ptr, counts_ptr, until_ptr, order_ptr, inverse_ptr, totals_ptr, slots, blocks,
    E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`until`: the running sum of `counts`, expert by expert. A slot's row: those before its block, then its rank."""
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + slot, mask=slot < slots, other=BLOCK_E).to(tl.int32)
    e = tl.arange(0, BLOCK_E)
    at = e * blocks + block
    before = tl.load(until_ptr + at, mask=e < E, other=0) - tl.load(counts_ptr + at, mask=e < E, other=0)
    hot = (ids[:, None] == e[None, :]).to(tl.int32)
    row = tl.sum(hot * (tl.cumsum(hot, 0) - 1 + before[None, :]), 1).to(tl.int64)
    tl.store(order_ptr + row, slot.to(tl.int64), mask=slot < slots)
    tl.store(inverse_ptr + slot, row, mask=slot < slots)
    if block == 0:
        last = tl.load(until_ptr + (e + 1) * blocks - 1, mask=e < E, other=0)
        first = tl.load(until_ptr + e * blocks - 1, mask=(e > 0) & (e < E), other=0)
        tl.store(totals_ptr + e, (last - first).to(tl.int64), mask=e < E)


@triton.jit
def _gated(
    gate_ptr, up_ptr, weights_ptr, out_ptr, rows, F, stride_g, stride_u,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < F)[None, :]
    gate = tl.load(gate_ptr + row[:, None] * stride_g + column[None, :], mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row[:, None] * stride_u + column[None, :], mask=mask, other=0.0).to(tl.float32)
    h = gate / (1.0 + tl.exp(-gate)) * up
    if WEIGHTED:
        h *= tl.load(weights_ptr + row, mask=row < rows, other=0.0).to(tl.float32)[:, None]
    tl.store(out_ptr + row[:, None] * F + column[None, :], h.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _gated_bwd(
    gate_ptr, up_ptr, weights_ptr, ct_ptr, out_ptr, dpair_ptr, dweights_ptr, rows, F, stride_g, stride_u,
    WEIGHTED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = row < rows
    dw = tl.zeros((ROWS,), tl.float32)
    w = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        w = tl.load(weights_ptr + row, mask=live, other=0.0).to(tl.float32)
    for first in range(0, F, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (column < F)[None, :]
        gate = tl.load(gate_ptr + row[:, None] * stride_g + column[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row[:, None] * stride_u + column[None, :], mask=mask, other=0.0).to(tl.float32)
        ct = tl.load(ct_ptr + row[:, None] * F + column[None, :], mask=mask, other=0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        act = gate * s
        dw += tl.sum(ct * act * up, 1)
        ct *= w[:, None]
        out = out_ptr + row[:, None] * F + column[None, :]
        tl.store(out, (act * up * w[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
        to = dpair_ptr + row[:, None] * (2 * F) + column[None, :]
        tl.store(to, (ct * up * s * (1.0 + gate * (1.0 - s))).to(dpair_ptr.dtype.element_ty), mask=mask)
        tl.store(to + F, (ct * act).to(dpair_ptr.dtype.element_ty), mask=mask)
    if WEIGHTED:
        tl.store(dweights_ptr + row, dw, mask=live)


def top_k(x: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, the first of equal ones first."""
    n = x.shape[-1]
    x = x.contiguous()
    rows = x.numel() // n
    out = torch.empty((*x.shape[:-1], k), dtype=torch.int64, device=x.device)
    block = triton.next_power_of_2(n)
    each = max(1, min(16, 4096 // block))
    with on(x):
        _top_k[(triton.cdiv(rows, each),)](x, out, rows, n, K=k, ROWS=each, BLOCK=block)
    return out


def sort_slots(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, its inverse, slots of each expert), stable; an id of `experts` stands for no expert."""
    slots, block_e = ids.shape[0], triton.next_power_of_2(experts + 1)
    block = max(16, min(128, 16384 // block_e))
    blocks = max(1, triton.cdiv(slots, block))
    counts = torch.empty((experts + 1) * blocks, dtype=torch.int32, device=ids.device)
    order, inverse = torch.empty_like(ids), torch.empty_like(ids)
    totals = torch.empty(experts + 1, dtype=torch.int64, device=ids.device)
    sizes = dict(E=experts + 1, BLOCK_E=block_e, BLOCK=block)
    with on(ids):
        _histogram[(blocks,)](ids, counts, slots, blocks, **sizes)
        until = counts.cumsum(0, dtype=torch.int32)
        _place_slots[(blocks,)](ids, counts, until, order, inverse, totals, slots, blocks, **sizes)
    return order, inverse, totals[:experts]


def _tile(f: int) -> dict[str, int]:
    block = min(256, triton.next_power_of_2(f))
    return dict(ROWS=max(1, 2048 // block // 2), BLOCK=block)


def gated(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    """silu(gate) · up (· weights of the rows)."""
    rows, f = gate.shape
    out = gate.new_empty(rows, f)
    if out.numel():
        tile = _tile(f)
        with on(gate):
            _gated[(triton.cdiv(rows, tile["ROWS"]), triton.cdiv(f, tile["BLOCK"]))](
                gate, up, weights, out, rows, f, gate.stride(0), up.stride(0), WEIGHTED=weights is not None, **tile
            )
    return out


def gated_bwd(gate: Tensor, up: Tensor, weights: Tensor | None, ct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) · up · weights, cotangents of gate and up beside one another, that of the weights)."""
    rows, f = gate.shape
    out, dpair = gate.new_empty(rows, f), gate.new_empty(rows, 2 * f)
    dweights = torch.empty((rows, 1) if weights is not None else (0,), dtype=torch.float32, device=gate.device)
    if out.numel():
        tile = _tile(f)
        with on(gate):
            _gated_bwd[(triton.cdiv(rows, tile["ROWS"]),)](
                gate, up, weights, ct, out, dpair, dweights, rows, f, gate.stride(0), up.stride(0),
                WEIGHTED=weights is not None, **tile,
            )  # fmt: skip
    return out, dpair, dweights
