"""Triton kernels of attention under any mask that `fmeg.ops.attention` has. Imports triton: load it only where there is
a GPU (see `masked`).

All tensors are contiguous, "b s h e" and so on; a program has one block of queries or keys of one head. Blocks that
order, window or segments rule out are not visited: `first` and `last` say which blocks can meet by their segments.
Softmax runs online in base 2. Nothing is summed by atomic operations, so results do not differ from run to run.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FAR: tl.constexpr = tl.constexpr(2**29)


@triton.jit
def _tile(ptr, row, rows, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix of WIDTH columns, zeros beyond both ends."""
    col = tl.arange(0, PADDED)[None, :]
    return tl.load(
        ptr + row.to(tl.int64)[:, None] * stride + col, mask=(row[:, None] < rows) & (col < WIDTH), other=0.0
    )


@triton.jit
def _put(ptr, row, rows, stride, value, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    col = tl.arange(0, PADDED)[None, :]
    at = ptr + (row[:, None] * stride + col)
    tl.store(at, value.to(ptr.dtype.element_ty), mask=(row[:, None] < rows) & (col < WIDTH))


@triton.jit
def _within(shift, window):
    """As `masked.within`, in int32."""
    near = tl.minimum(tl.maximum(shift, -FAR), FAR).to(tl.int32)
    return near, near - tl.minimum(tl.maximum(shift - window, -FAR), FAR).to(tl.int32)


@triton.jit
def _seen(i, j, S, T, shift, window, seg_q, seg_k, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr):
    """Whether query i (a row) sees key j (a column)."""
    see = (i < S) & (j < T)
    if CAUSAL:
        see = see & (j <= i + shift)
    if WINDOW:
        see = see & (j > i + shift - window)
    if SEGMENTS:
        see = see & (seg_q == seg_k)
    return see


@triton.jit
def _keys(
    m0, T, shift, window, first, last, block,
    BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """The blocks of keys, from and to, that a block of queries at m0 may see."""
    lo = 0
    hi = tl.cdiv(T, BN)
    if CAUSAL:
        end = m0 + BM + shift
        hi = tl.minimum(hi, tl.where(end <= 0, 0, (end + BN - 1) // BN))
    if WINDOW:
        lo = tl.maximum(m0 + shift - window + 1, 0) // BN
    if SEGMENTS:
        lo = tl.maximum(lo, tl.load(first + block))
        hi = tl.minimum(hi, tl.load(last + block))
    return lo, hi


@triton.jit
def forward(
    q, k, v, o, lse, seg_q, seg_k, first, last, shift_at, shift, window, scale, S, T, H, GROUP,
    E: tl.constexpr, F: tl.constexpr, EP: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    m0 = (tl.program_id(0) % blocks) * BM
    batch = (tl.program_id(0) // blocks // H).to(tl.int64)
    head = tl.program_id(0) // blocks % H
    kv_heads = H // GROUP
    if shift_at is not None:
        shift, window = _within(tl.load(shift_at).to(tl.int64), window)
    rows = m0 + tl.arange(0, BM)
    query = _tile(q + (batch * S * H + head) * E, rows, S, H * E, E, EP)
    k += (batch * T * kv_heads + head // GROUP) * E
    v += (batch * T * kv_heads + head // GROUP) * F
    block = batch * blocks + m0 // BM
    lo, hi = _keys(m0, T, shift, window, first, last, block, BM, BN, CAUSAL, WINDOW, SEGMENTS)
    mine = rows
    if SEGMENTS:
        mine = tl.load(seg_q + batch * S + rows, mask=rows < S, other=0)
    top = tl.full([BM], -float("inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, FP], tl.float32)
    for n in range(lo, hi):
        cols = n * BN + tl.arange(0, BN)
        x = tl.dot(query, tl.trans(_tile(k, cols, T, kv_heads * E, E, EP)), input_precision=PRECISION)
        theirs = cols
        if SEGMENTS:
            theirs = tl.load(seg_k + batch * T + cols, mask=cols < T, other=0)
        see = _seen(
            rows[:, None], cols[None, :], S, T, shift, window, mine[:, None], theirs[None, :], CAUSAL, WINDOW, SEGMENTS
        )
        x = tl.where(see, x * (scale * LOG2E), -float("inf"))
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        p = tl.exp2(x - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(p, 1)
        value = _tile(v, cols, T, kv_heads * F, F, FP)
        acc = tl.dot(p.to(value.dtype), value, acc * fade[:, None], input_precision=PRECISION)
        top = higher
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    _put(o + (batch * S * H + head) * F, rows, S, H * F, acc, F, FP)
    log = tl.where(some, (top + tl.log2(tl.where(some, total, 1.0))) * LN2, -float("inf"))
    tl.store(lse + (batch * S + rows) * H + head, log, mask=rows < S)


@triton.jit
def delta(o, do, out, rows, F: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr):
    """out[i] = Σ_f o[i, f] do[i, f]."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    a = _tile(o, row, rows, F, F, FP).to(tl.float32)
    tl.store(out + row, tl.sum(a * _tile(do, row, rows, F, F, FP).to(tl.float32), 1), mask=row < rows)


@triton.jit
def backward_q(
    q, k, v, do, lse, delta, dq, seg_q, seg_k, first, last, shift_at, shift, window, scale, S, T, H, GROUP,
    E: tl.constexpr, F: tl.constexpr, EP: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, BM)
    m0 = (tl.program_id(0) % blocks) * BM
    batch = (tl.program_id(0) // blocks // H).to(tl.int64)
    head = tl.program_id(0) // blocks % H
    kv_heads = H // GROUP
    if shift_at is not None:
        shift, window = _within(tl.load(shift_at).to(tl.int64), window)
    rows = m0 + tl.arange(0, BM)
    query = _tile(q + (batch * S * H + head) * E, rows, S, H * E, E, EP)
    cotangent = _tile(do + (batch * S * H + head) * F, rows, S, H * F, F, FP)
    at = (batch * S + rows) * H + head
    log = tl.load(lse + at, mask=rows < S, other=0.0)
    log = tl.where(log == -float("inf"), 0.0, log) * LOG2E
    d = tl.load(delta + at, mask=rows < S, other=0.0)
    k += (batch * T * kv_heads + head // GROUP) * E
    v += (batch * T * kv_heads + head // GROUP) * F
    block = batch * blocks + m0 // BM
    lo, hi = _keys(m0, T, shift, window, first, last, block, BM, BN, CAUSAL, WINDOW, SEGMENTS)
    mine = rows
    if SEGMENTS:
        mine = tl.load(seg_q + batch * S + rows, mask=rows < S, other=0)
    acc = tl.zeros([BM, EP], tl.float32)
    for n in range(lo, hi):
        cols = n * BN + tl.arange(0, BN)
        key = _tile(k, cols, T, kv_heads * E, E, EP)
        x = tl.dot(query, tl.trans(key), input_precision=PRECISION)
        theirs = cols
        if SEGMENTS:
            theirs = tl.load(seg_k + batch * T + cols, mask=cols < T, other=0)
        see = _seen(
            rows[:, None], cols[None, :], S, T, shift, window, mine[:, None], theirs[None, :], CAUSAL, WINDOW, SEGMENTS
        )
        p = tl.where(see, tl.exp2(x * (scale * LOG2E) - log[:, None]), 0.0)
        dp = tl.dot(cotangent, tl.trans(_tile(v, cols, T, kv_heads * F, F, FP)), input_precision=PRECISION)
        dx = p * (dp - d[:, None])
        acc = tl.dot(dx.to(key.dtype), key, acc, input_precision=PRECISION)
    _put(dq + (batch * S * H + head) * E, rows, S, H * E, acc * scale, E, EP)


@triton.jit
def backward_kv(
    q, k, v, do, lse, delta, dk, dv, seg_q, seg_k, first, last, shift_at, shift, window, scale, S, T, H, GROUP,
    E: tl.constexpr, F: tl.constexpr, EP: tl.constexpr, FP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A block of keys, summed over the query heads that read them."""
    blocks = tl.cdiv(T, BN)
    n0 = (tl.program_id(0) % blocks) * BN
    kv_heads = H // GROUP
    batch = (tl.program_id(0) // blocks // kv_heads).to(tl.int64)
    kv_head = tl.program_id(0) // blocks % kv_heads
    if shift_at is not None:
        shift, window = _within(tl.load(shift_at).to(tl.int64), window)
    cols = n0 + tl.arange(0, BN)
    key = _tile(k + (batch * T * kv_heads + kv_head) * E, cols, T, kv_heads * E, E, EP)
    value = _tile(v + (batch * T * kv_heads + kv_head) * F, cols, T, kv_heads * F, F, FP)
    theirs = cols
    if SEGMENTS:
        theirs = tl.load(seg_k + batch * T + cols, mask=cols < T, other=0)
    lo = 0
    hi = tl.cdiv(S, BM)
    if CAUSAL:
        lo = tl.maximum(n0 - shift, 0) // BM
    if WINDOW:
        end = n0 + BN - 1 + window - shift
        hi = tl.minimum(hi, tl.where(end <= 0, 0, (end + BM - 1) // BM))
    if SEGMENTS:
        block = batch * blocks + n0 // BN
        lo = tl.maximum(lo, tl.load(first + block))
        hi = tl.minimum(hi, tl.load(last + block))
    acc_k = tl.zeros([BN, EP], tl.float32)
    acc_v = tl.zeros([BN, FP], tl.float32)
    for g in range(GROUP):
        head = kv_head * GROUP + g
        for m in range(lo, hi):
            rows = m * BM + tl.arange(0, BM)
            query = _tile(q + (batch * S * H + head) * E, rows, S, H * E, E, EP)
            cotangent = _tile(do + (batch * S * H + head) * F, rows, S, H * F, F, FP)
            at = (batch * S + rows) * H + head
            log = tl.load(lse + at, mask=rows < S, other=0.0)
            log = tl.where(log == -float("inf"), 0.0, log) * LOG2E
            d = tl.load(delta + at, mask=rows < S, other=0.0)
            mine = rows
            if SEGMENTS:
                mine = tl.load(seg_q + batch * S + rows, mask=rows < S, other=0)
            see = _seen(
                rows[None, :], cols[:, None], S, T, shift, window, mine[None, :], theirs[:, None], CAUSAL, WINDOW,
                SEGMENTS,
            )  # fmt: skip
            x = tl.dot(key, tl.trans(query), input_precision=PRECISION)
            p = tl.where(see, tl.exp2(x * (scale * LOG2E) - log[None, :]), 0.0)
            acc_v = tl.dot(p.to(cotangent.dtype), cotangent, acc_v, input_precision=PRECISION)
            dp = tl.dot(value, tl.trans(cotangent), input_precision=PRECISION)
            dx = p * (dp - d[None, :])
            acc_k = tl.dot(dx.to(query.dtype), query, acc_k, input_precision=PRECISION)
    _put(dk + (batch * T * kv_heads + kv_head) * E, cols, T, kv_heads * E, acc_k * scale, E, EP)
    _put(dv + (batch * T * kv_heads + kv_head) * F, cols, T, kv_heads * F, acc_v, F, FP)
