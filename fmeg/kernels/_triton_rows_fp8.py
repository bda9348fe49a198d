# mypy: ignore-errors
"""Triton programs on rows sorted by expert in FP8 (see `rows_fp8`). Imports triton: load it only where there is a GPU.

A tile is 128 rows of one expert, the last of each shorter: tile t of an expert's rows is tile t of `_place`. So
*turned* rows, columns before rows, lie in whole tiles, an expert's after another's, with zeros after the last of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fmeg.kernels._triton_grouped import _place
from fmeg.kernels._triton_math import float8

ALL, ROW, EXPERT, RUN = (tl.constexpr(i) for i in range(4))


@triton.jit
def _bits(v):
    """|v| as integers in the same order; NaN is above all."""
    return v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def amax(
    x, ends, out, rows, columns, stride, SHARE: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Bits of the largest absolute values of rows that share a scale, by columns of WIDTH (0: of all): program (tile of
    rows, columns)."""
    tile = tl.program_id(0)
    expert, first, end = _place(ends, tile, rows, E, BLOCK_E, TALL)
    if expert < E:
        row = first + tl.arange(0, TALL)
        top = tl.zeros([TALL, WIDE], tl.int32)
        col = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        for j in range(EACH):
            at = row.to(tl.int64)[:, None] * stride + (col + j * WIDE)[None, :]
            live = (row < end)[:, None] & (col + j * WIDE < columns)[None, :]
            top = tl.maximum(top, _bits(tl.load(x + at, mask=live, other=0.0)))
        if WIDTH == 1:
            m = tl.max(top, 0)
            if SHARE == RUN:
                tl.store(out + tile.to(tl.int64) * columns + col, m, mask=col < columns)
            else:
                tl.atomic_max(out + expert.to(tl.int64) * columns + col, m, mask=col < columns, sem="relaxed")
        else:
            m = tl.max(top, 1)
            if SHARE == ROW:
                groups = tl.cdiv(columns, WIDTH) if WIDTH else 1
                tl.store(out + row.to(tl.int64) * groups + tl.program_id(1), m, mask=row < end)
            else:
                tl.atomic_max(out + (expert if SHARE == EXPERT else 0), tl.max(m, 0), sem="relaxed")


@triton.jit
def quantize(
    x, inverse, ends, q, turned, rows, columns, stride, width, largest, SHARE: tl.constexpr, WIDTH: tl.constexpr,
    E: tl.constexpr, BLOCK_E: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows times the inverse of their scales in FP8; and turned, `width` elements a column: program (tile, columns)."""
    tile = tl.program_id(0)
    expert, first, end = _place(ends, tile, rows, E, BLOCK_E, TALL)
    if expert < E:
        row = first + tl.arange(0, TALL)
        col = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        live = (row < end)[:, None] & (col < columns)[None, :]
        v = tl.load(x + row.to(tl.int64)[:, None] * stride + col[None, :], mask=live, other=0.0).to(tl.float32)
        of_row = row * 0
        if SHARE == ROW:
            of_row = tl.minimum(row, rows - 1)
        if SHARE == EXPERT:
            of_row += expert
        if SHARE == RUN:
            of_row += tile
        if WIDTH == 0:
            s = tl.load(inverse + of_row)[:, None]
        else:
            at = (
                of_row.to(tl.int64)[:, None] * tl.cdiv(columns, WIDTH)
                + (tl.minimum(col, columns - 1) // WIDTH)[None, :]
            )
            s = tl.load(inverse + at)
        low = tl.clamp(v * s, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
        low = tl.where(live, low, 0.0)
        low = float8(low, q.dtype.element_ty if q is not None else turned.dtype.element_ty)
        if q is not None:
            at = row.to(tl.int64)[:, None] * columns + col[None, :]
            tl.store(q.to(tl.pointer_type(tl.uint8), bitcast=True) + at, low, mask=live)
        if turned is not None:
            at = col.to(tl.int64)[:, None] * width + (tile * TALL + tl.arange(0, TALL))[None, :]
            t = turned.to(tl.pointer_type(tl.uint8), bitcast=True)
            tl.store(t + at, tl.trans(low), mask=(col < columns)[:, None])


@triton.jit
def turn(
    q, ends, turned, rows, columns, stride, width, E: tl.constexpr, BLOCK_E: tl.constexpr, TALL: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Bytes of rows turned."""
    tile = tl.program_id(0)
    expert, first, end = _place(ends, tile, rows, E, BLOCK_E, TALL)
    if expert < E:
        row = first + tl.arange(0, TALL)
        col = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        live = (row < end)[:, None] & (col < columns)[None, :]
        v = tl.load(q + row.to(tl.int64)[:, None] * stride + col[None, :], mask=live, other=0)
        at = col.to(tl.int64)[:, None] * width + (tile * TALL + tl.arange(0, TALL))[None, :]
        tl.store(turned + at, tl.trans(v), mask=(col < columns)[:, None])


@triton.jit
def product(
    x, sx, w, sw, plus, out, ends, rows, K, N, stride_x, stride_e, stride_n, sx_k, sw_e, sw_n, sw_k, tiles_m,
    SHARE: tl.constexpr, N_WIDTH: tl.constexpr, BLOCKED: tl.constexpr, FAST: tl.constexpr, E: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """x[rows of e] · w[e]ᵀ, both with k innermost, times their scales: per row, expert or all; per run of N_WIDTH
    outputs; BLOCKED: and per BLOCK_K of k. Then added to `plus`, if there is one. Sums are float32, of BLOCK_K products
    at a time unless FAST."""
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP * tiles_n)
    height = min(tiles_m - group * GROUP, GROUP)
    inside = pid % (GROUP * tiles_n)
    tile, column = group * GROUP + inside % height, inside // height
    expert, first, end = _place(ends, tile, rows, E, BLOCK_E, BLOCK_M)
    if expert <= E:
        m = first + tl.arange(0, BLOCK_M)
        n = column * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        if expert < E:
            k = tl.arange(0, BLOCK_K)
            mine = tl.minimum(m, rows - 1).to(tl.int64)  # what lies beyond is read, and not written
            held = tl.minimum(n, N - 1)
            a_at = x + mine[:, None] * stride_x + k[None, :]
            b_at = w + expert.to(tl.int64) * stride_e + held.to(tl.int64)[None, :] * stride_n + k[:, None]
            of_row = mine * 0
            if SHARE == ROW:
                of_row = mine
            if SHARE == EXPERT:
                of_row += expert
            sa_at = sx + of_row * sx_k
            sb_at = sw + expert.to(tl.int64) * sw_e
            sb_at = sb_at + ((held // N_WIDTH).to(tl.int64) * sw_n if N_WIDTH else held * 0)
            for step in range(tl.cdiv(K, BLOCK_K)):
                start = step * BLOCK_K
                if EVEN:
                    a = tl.load(a_at + start)
                    b = tl.load(b_at + start)
                else:
                    a = tl.load(a_at + start, mask=(k < K - start)[None, :], other=0.0)
                    b = tl.load(b_at + start, mask=(k < K - start)[:, None], other=0.0)
                if BLOCKED:
                    sa = tl.load(sa_at + step)
                    sb = tl.load(sb_at + step * sw_k)
                    acc += tl.dot(a, b) * sa[:, None] * sb[None, :]
                elif FAST:
                    acc = tl.dot(a, b, acc)
                else:
                    acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
            if not BLOCKED:
                acc = acc * tl.load(sa_at)[:, None] * tl.load(sb_at)[None, :]
        at = m.to(tl.int64)[:, None] * N + n[None, :]
        mask = (m < end)[:, None] & (n < N)[None, :]
        if plus is not None:
            acc += tl.load(plus + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def product_dw(
    x, sx, y, sy, out, ends, D, F, width, SHARE: tl.constexpr, X_COLUMNS: tl.constexpr, Y_COLUMNS: tl.constexpr,
    ADD: tl.constexpr, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """x[columns, rows of e] · y[columns, rows of e]ᵀ of turned rows, times their scales: of an expert, a tile or all;
    COLUMNS: of each column its own. Sums as in `product`, never fast."""
    tile, expert = tl.program_id(0), tl.program_id(1)
    tiles_f = tl.cdiv(F, BLOCK_N)
    d = (tile // tiles_f) * BLOCK_M + tl.arange(0, BLOCK_M)
    f = (tile % tiles_f) * BLOCK_N + tl.arange(0, BLOCK_N)
    e = tl.arange(0, BLOCK_E)
    sizes = tl.load(ends + e, mask=e < E, other=0) - tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
    tiles = tl.where(e < E, (sizes + BLOCK_K - 1) // BLOCK_K, 0)
    first = tl.sum(tl.where(e < expert, tiles, 0), 0)
    steps = tl.sum(tl.where(e == expert, tiles, 0), 0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    k = tl.arange(0, BLOCK_K)
    mine, other = tl.minimum(d, D - 1), tl.minimum(f, F - 1)
    a_at = x + mine.to(tl.int64)[:, None] * width + first * BLOCK_K + k[None, :]
    b_at = y + other.to(tl.int64)[None, :] * width + first * BLOCK_K + k[:, None]
    start = expert * 0
    if SHARE == EXPERT:
        start = expert
    if SHARE == RUN:
        start = first
    sa_at = sx + (start.to(tl.int64) * D + mine if X_COLUMNS else start + mine * 0)
    sb_at = sy + (start.to(tl.int64) * F + other if Y_COLUMNS else start + other * 0)
    for step in range(steps):
        a = tl.load(a_at + step * BLOCK_K)
        b = tl.load(b_at + step * BLOCK_K)
        if SHARE == RUN:
            sa = tl.load(sa_at + step * (D if X_COLUMNS else 1))
            sb = tl.load(sb_at + step * (F if Y_COLUMNS else 1))
            acc += tl.dot(a, b) * sa[:, None] * sb[None, :]
        else:
            acc = tl.dot(a, b, acc, max_num_imprecise_acc=BLOCK_K)
    if SHARE != RUN:
        acc = acc * tl.load(sa_at)[:, None] * tl.load(sb_at)[None, :]
    at = out + expert.to(tl.int64) * D * F + d.to(tl.int64)[:, None] * F + f[None, :]
    mask = (d < D)[:, None] & (f < F)[None, :]
    if ADD:
        acc += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
