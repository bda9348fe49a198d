# mypy: ignore-errors
"""Triton programs that work row by row. Imports triton: load it only where there is a GPU (see `rows`)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cross_entropy(
    logits, targets, ct, loss, z_loss, smoothing, width: tl.constexpr, vocab: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row a program: its loss, and the loss's gradient in place of the logits. Two passes, the second from L2."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * width
    target = tl.load(targets + row)
    picked = tl.load(base + target).to(tl.float32)
    cols = tl.arange(0, BLOCK)
    top = -1e30
    total = 0.0
    plain = 0.0
    for start in range(0, vocab, BLOCK):
        mask = start + cols < vocab
        x = tl.load(base + start + cols, mask=mask, other=-float("inf"), eviction_policy="evict_last").to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        plain += tl.sum(tl.where(mask, x, 0.0), 0)
        top = new
    lse = top + tl.log(total)
    c = tl.load(ct + row)
    value = (1.0 - smoothing) * (lse - picked) + smoothing * (lse - plain / vocab) + z_loss * lse * lse
    tl.store(loss + row, value)
    scale = c * (1.0 + 2.0 * z_loss * lse)
    hit = c * (1.0 - smoothing)
    low = c * smoothing / vocab
    for start in range(0, width, BLOCK):
        here = start + cols
        x = tl.load(base + here, mask=here < vocab, other=-float("inf"), eviction_policy="evict_first").to(tl.float32)
        d = scale * tl.exp(x - lse) - tl.where(here < vocab, low, 0.0) - tl.where(here == target, hit, 0.0)
        tl.store(base + here, d.to(logits.dtype.element_ty), mask=here < width)


@triton.jit
def rms_norm_backward(
    x, w, ct, residual, dx, dw, rows, eps,
    width: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr, WEIGHTED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Every program takes rows pid, pid + programs, …; its part of dw goes to row pid of `dw`."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    part = tl.zeros([BLOCK], dtype=tl.float32)
    if WEIGHTED:
        weight = tl.load(w + cols, mask=mask, other=0.0).to(tl.float32)
    for i in range(EACH):
        row = pid + i * programs
        at = row.to(tl.int64) * width + cols
        live = mask & (row < rows)
        h = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
        g = tl.load(ct + at, mask=live, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(h * h, 0) / width + eps)
        y = h * r
        part += g * y
        if WEIGHTED:
            g = g * weight
        d = r * (g - y * (tl.sum(g * y, 0) / width))
        if ADDED:
            d += tl.load(residual + at, mask=live, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=live)
    if WEIGHTED:
        tl.store(dw + pid * width + cols, part, mask=mask)
