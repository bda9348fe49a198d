# mypy: ignore-errors
"""Triton programs that work row by row. Imports triton: load it only where there is a GPU (see `rows`)."""

from __future__ import annotations

import triton
import triton.language as tl

from fmeg.kernels._triton_math import exp2


@triton.jit
def _seen(
    base, start, cols, BLOCK: tl.constexpr, vocab, MASKED: tl.constexpr, SMOOTH: tl.constexpr, top, total, plain,
    width=0, PADDED: tl.constexpr = False,
):  # fmt: skip
    """Running maximum, Σ 2^(x - maximum) and Σ x of every lane over four more blocks, with x in bits (times log2 e).

    MASKED: columns from `vocab` on do not count; PADDED: those up to `width` may be read all the same, which a GPU does
    many at a time where it knows the number.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    a = _logits(base, start + cols, vocab, MASKED, width, PADDED)
    b = _logits(base, start + BLOCK + cols, vocab, MASKED, width, PADDED)
    c = _logits(base, start + 2 * BLOCK + cols, vocab, MASKED, width, PADDED)
    d = _logits(base, start + 3 * BLOCK + cols, vocab, MASKED, width, PADDED)
    if SMOOTH:
        plain += _counted(a, start + cols, vocab) + _counted(b, start + BLOCK + cols, vocab)
        plain += _counted(c, start + 2 * BLOCK + cols, vocab) + _counted(d, start + 3 * BLOCK + cols, vocab)
    a *= LOG2E
    b *= LOG2E
    c *= LOG2E
    d *= LOG2E
    new = tl.maximum(top, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
    total = total * exp2(top - new) + (exp2(a - new) + exp2(b - new) + (exp2(c - new) + exp2(d - new)))
    return new, total, plain


@triton.jit
def _logits(base, at, vocab, MASKED: tl.constexpr, width, PADDED: tl.constexpr):
    if PADDED:
        x = tl.load(base + at, mask=at < width, other=0.0, eviction_policy="evict_last").to(tl.float32)
        x = tl.where(at < vocab, x, -float("inf"))
    elif MASKED:
        x = tl.load(base + at, mask=at < vocab, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
    else:
        x = tl.load(base + at, eviction_policy="evict_last").to(tl.float32)
    return x


@triton.jit
def _counted(x, at, vocab):
    return tl.where(at < vocab, x, 0.0)


@triton.jit
def cross_entropy(
    logits, targets, ct, loss, z_loss, smoothing,
    width: tl.constexpr, vocab: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """One row a program: its loss, and the loss's gradient in place of the logits, in two passes.

    Lanes keep sums of their own, so that the first pass never waits for its neighbours; whole blocks are not masked.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * width
    target = tl.load(targets + row)
    picked = tl.load(base + target).to(tl.float32)
    cols = tl.arange(0, BLOCK)
    FULL: tl.constexpr = vocab // (4 * BLOCK) * (4 * BLOCK)
    top = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    for start in range(0, FULL, 4 * BLOCK):
        top, total, plain = _seen(base, start, cols, BLOCK, vocab, False, SMOOTH, top, total, plain)
    if FULL < vocab:
        top, total, plain = _seen(base, FULL, cols, BLOCK, vocab, True, SMOOTH, top, total, plain)
    most = tl.max(top, 0)
    bits = most + tl.log2(tl.sum(total * exp2(top - most), 0))
    lse = bits / LOG2E
    value = (1.0 - smoothing) * (lse - picked) + z_loss * lse * lse
    if SMOOTH:
        value += smoothing * (lse - tl.sum(plain, 0) / vocab)
    tl.store(loss + row, value)
    c = tl.load(ct + row)
    scale = c * (1.0 + 2.0 * z_loss * lse)
    low = c * smoothing / vocab
    WHOLE: tl.constexpr = vocab // BLOCK * BLOCK
    for start in range(0, WHOLE, BLOCK):
        at = base + start + cols
        x = tl.load(at, eviction_policy="evict_first").to(tl.float32)
        tl.store(at, (scale * exp2(x * LOG2E - bits) - low).to(logits.dtype.element_ty))
    for start in range(WHOLE, width, BLOCK):
        at = base + start + cols
        here = start + cols < vocab
        x = tl.load(at, mask=here, other=-float("inf")).to(tl.float32)
        d = tl.where(here, scale * exp2(x * LOG2E - bits) - low, 0.0)
        tl.store(at, d.to(logits.dtype.element_ty), mask=start + cols < width)
    tl.debug_barrier()
    hit = scale * exp2(picked * LOG2E - bits) - low - c * (1.0 - smoothing)
    tl.store(base + target, hit.to(logits.dtype.element_ty))


@triton.jit
def cross_entropy_part(
    logits, targets, offset, top, sumexp, picked, total, vocab,
    width: tl.constexpr, BLOCK: tl.constexpr, SMOOTH: tl.constexpr,
):  # fmt: skip
    """One row a program: what these columns, which begin at class `offset`, know of it, in one pass as above."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * width
    first = tl.load(offset)
    real = tl.minimum(tl.maximum(vocab - first, 0), width).to(tl.int32)
    target = tl.load(targets + row) - first
    here = (target >= 0) & (target < width)
    cols = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], -1e30, tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    plain = tl.zeros([BLOCK], tl.float32)
    full = real // (4 * BLOCK) * (4 * BLOCK)
    for start in range(0, full, 4 * BLOCK):
        most, sums, plain = _seen(base, start, cols, BLOCK, real, False, SMOOTH, most, sums, plain)
    if full < real:
        most, sums, plain = _seen(base, full, cols, BLOCK, real, True, SMOOTH, most, sums, plain, width, True)
    best = tl.max(most, 0)
    tl.store(top + row, tl.where(best > -1e30, best / LOG2E, -float("inf")))
    tl.store(sumexp + row, tl.sum(sums * exp2(most - best), 0))
    tl.store(picked + row, tl.load(base + target, mask=here, other=0.0).to(tl.float32))
    if SMOOTH:
        tl.store(total + row, tl.sum(plain, 0))


@triton.jit
def cross_entropy_gradient(
    logits, targets, lse, ct, offset, z_loss, smoothing, vocab, width: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: the loss's gradient in place of the logits, of which the first is that of class `offset`."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * width
    first = tl.load(offset)
    real = tl.minimum(tl.maximum(vocab - first, 0), width).to(tl.int32)
    target = (tl.load(targets + row) - first).to(tl.int32)
    total = tl.load(lse + row)
    bits = total * LOG2E
    c = tl.load(ct + row)
    scale = c * (1.0 + 2.0 * z_loss * total)
    low = c * smoothing / vocab
    high = low + c * (1.0 - smoothing)
    cols = tl.arange(0, BLOCK)
    whole = real // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        at = start + cols
        x = tl.load(base + at, eviction_policy="evict_first").to(tl.float32)
        d = scale * exp2(x * LOG2E - bits) - tl.where(at == target, high, low)
        tl.store(base + at, d.to(logits.dtype.element_ty))
    for start in range(whole, width, BLOCK):
        at = start + cols
        x = tl.load(base + at, mask=at < width, other=0.0).to(tl.float32)
        d = scale * exp2(x * LOG2E - bits) - tl.where(at == target, high, low)
        tl.store(base + at, tl.where(at < real, d, 0.0).to(logits.dtype.element_ty), mask=at < width)


@triton.jit
def rope(
    x, table, out, rows, table_rows, heads, stride_row, stride_head, sign,
    HALF: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One row of all heads a program: pairs (i, i + HALF) turned by (cos, sign · sin) of the row's position."""
    row = tl.program_id(0)
    i = tl.arange(0, PAIRS)[None, :]
    h = tl.arange(0, HEADS)[:, None]
    mask = (h < heads) & (i < HALF)
    angle = table + (row % table_rows) * (2 * HALF) + 2 * i
    cos = tl.load(angle, mask=i < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle + 1, mask=i < HALF, other=0.0).to(tl.float32) * sign
    at = x + row.to(tl.int64) * stride_row + h * stride_head + i
    x1 = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    x2 = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    to = out + (row.to(tl.int64) * heads + h) * (2 * HALF) + i
    tl.store(to, (x1 * cos - x2 * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (x2 * cos + x1 * sin).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add(a, b, c, d):
    return a + c, b + d


@triton.jit
def rms_norm_backward(
    x, w, ct, ct2, ct3, residual, dx, dw, rows, eps,
    width: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Every program takes rows pid, pid + programs, …; its part of dw goes to row pid of `dw`. The next row is on its
    way while one is computed, and both of a row's sums are one reduction."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    part = tl.zeros([BLOCK], dtype=tl.float32)
    if WEIGHTED:
        weight = tl.load(w + cols, mask=mask, other=0.0)
    at = pid.to(tl.int64) * width + cols
    live = mask & (pid < rows)
    next_h = tl.load(x + at, mask=live, other=0.0)
    next_g = tl.load(ct + at, mask=live, other=0.0)
    for i in range(EACH):
        row = pid + i * programs
        at = row.to(tl.int64) * width + cols
        live = mask & (row < rows)
        h = next_h.to(tl.float32)
        g = next_g.to(tl.float32)
        if ct2 is not None:
            g += tl.load(ct2 + at, mask=live, other=0.0).to(tl.float32)
        if ct3 is not None:
            g += tl.load(ct3 + at, mask=live, other=0.0).to(tl.float32)
        after = at + programs.to(tl.int64) * width
        more = mask & (row + programs < rows)
        next_h = tl.load(x + after, mask=more, other=0.0)
        next_g = tl.load(ct + after, mask=more, other=0.0)
        weighted = g
        if WEIGHTED:
            weighted = g * weight.to(tl.float32)
        squares, products = tl.reduce((h * h, weighted * h), 0, _add)
        r = tl.rsqrt(squares / width + eps)
        y = h * r
        part += g * y
        d = r * (weighted - y * (products * r / width))
        if ADDED:
            d += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=live)
    if WEIGHTED:
        tl.store(dw + pid * width + cols, part, mask=mask)
