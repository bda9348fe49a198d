# mypy: ignore-errors
"""Triton programs that make FP8 operands. Imports triton: load it only where there is a GPU (see `fp8`).

A value is one of: a tensor (PLAIN), a norm of it (NORM: x, weight, 1/rms of each row), silu(gate) · up (GATED), or the
two cotangents of that (GATED_BWD: gate, up, cotangent). It is rounded to the type of its operands before it is
quantised, as if it had been written.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN, NORM, GATED, GATED_BWD = (tl.constexpr(i) for i in range(4))


@triton.jit
def _bits(v):
    """|v| as integers in the same order; NaN is above all."""
    return v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _note(at, top):
    """The larger of what is noted and `top`, bits; an atomic operation only where it may be new."""
    tl.atomic_max(at, top, mask=top > tl.load(at, volatile=True), sem="relaxed")


@triton.jit
def _values(x, y, z, at, row, col, live, KIND: tl.constexpr, ROUND: tl.constexpr):
    """The two values (the same twice where there is one) at offsets, float32."""
    kind: tl.constexpr = x.dtype.element_ty
    first = tl.load(x + at, mask=live, other=0.0).to(tl.float32)
    second = first
    if KIND == PLAIN:
        if ROUND:
            first = first.to(tl.bfloat16).to(tl.float32)
        second = first
    elif KIND == NORM:
        v = first * tl.load(z + row)
        if y is not None:
            v = v * tl.load(y + col).to(tl.float32)
        first = v.to(kind).to(tl.float32)
        second = first
    else:
        b = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
        s = tl.sigmoid(first)
        if KIND == GATED:
            first = (first * s * b).to(kind).to(tl.float32)
            second = first
        else:
            c = tl.load(z + at, mask=live, other=0.0).to(tl.float32)
            second = (c * first * s).to(kind).to(tl.float32)
            first = (c * b * s * (1.0 + first * (1.0 - s))).to(kind).to(tl.float32)
    return first, second


@triton.jit
def amax(x, y, z, out, n, KIND: tl.constexpr, ROUND: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """out[layer, value]: the bits of the largest absolute value, of `n` elements a layer; program (i, layer)."""
    layer = tl.program_id(1)
    base = layer.to(tl.int64) * n
    lanes = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    other = tl.zeros([BLOCK], tl.int32)
    for j in range(EACH):
        i = (tl.program_id(0) + j * tl.num_programs(0)) * BLOCK + lanes
        a, b = _values(x, y, z, base + i, i, i, i < n, KIND, ROUND)
        top = tl.maximum(top, _bits(a))
        if KIND == GATED_BWD:
            other = tl.maximum(other, _bits(b))
    if KIND == GATED_BWD:
        _note(out, tl.max(top, 0))
        _note(out + 1, tl.max(other, 0))
    else:
        _note(out + layer, tl.max(top, 0))


@triton.jit
def norm_amax(x, w, inverse, out, rows, eps, width, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """1/rms of each row, and the bits of the norm's largest absolute value; a program takes rows pid, pid + programs,
    …"""
    pid = tl.program_id(0)
    cols = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    for i in range(EACH):
        row = pid + i * tl.num_programs(0)
        live = (cols < width) & (row < rows)
        h = tl.load(x + row.to(tl.int64) * width + cols, mask=live, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(h * h, 0) / width + eps)
        tl.store(inverse + row, r, mask=row < rows)
        v = h * r
        if w is not None:
            v = v * tl.load(w + cols, mask=cols < width, other=0.0).to(tl.float32)
        top = tl.maximum(top, tl.where(live, _bits(v.to(x.dtype.element_ty)), 0))
    _note(out, tl.max(top, 0))


@triton.jit
def _scale(amax, at, FACTOR: tl.constexpr, TINY: tl.constexpr, POWER: tl.constexpr):
    a = tl.load(amax + at)
    s = tl.where(a < TINY, 1.0, a * FACTOR)
    if POWER:
        s = ((s.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return s


@triton.jit
def _store(v, s, q, t, base, row, col, live, rows, columns, LARGEST: tl.constexpr):
    v = v * tl.div_rn(1.0, s)
    v = tl.minimum(
        tl.maximum(v, -LARGEST, propagate_nan=tl.PropagateNan.ALL), LARGEST, propagate_nan=tl.PropagateNan.ALL
    )
    low = v.to(q.dtype.element_ty)
    tl.store(q + base + row.to(tl.int64) * columns + col, low, mask=live)
    tl.store(t + base + tl.trans(col).to(tl.int64) * rows + tl.trans(row), tl.trans(low), mask=tl.trans(live))


@triton.jit
def pair(
    x, y, z, amax1, amax2, q1, t1, s1, q2, t2, s2, seen, rows, columns,
    KIND: tl.constexpr, ROUND: tl.constexpr, FACTOR: tl.constexpr, LARGEST: tl.constexpr, TINY: tl.constexpr,
    POWER: tl.constexpr, SEEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of "rows columns", quantised, and its transpose; program (tile, layer). seen[value + layer, tile]: the
    bits of the tile's largest absolute value."""
    layer = tl.program_id(1)
    base = layer.to(tl.int64) * rows * columns
    across = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS))[:, None]
    col = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    live = (row < rows) & (col < columns)
    at = base + row.to(tl.int64) * columns + col
    a, b = _values(x, y, z, at, tl.minimum(row, rows - 1), tl.minimum(col, columns - 1), live, KIND, ROUND)
    if SEEN:
        here = seen + layer * tl.num_programs(0) + tl.program_id(0)
        tl.store(here, tl.max(tl.max(_bits(a), 1), 0))
        if KIND == GATED_BWD:
            tl.store(here + tl.num_programs(0), tl.max(tl.max(_bits(b), 1), 0))
    first = tl.program_id(0) == 0
    s = _scale(amax1, layer, FACTOR, TINY, POWER)
    _store(a, s, q1, t1, base, row, col, live, rows, columns, LARGEST)
    tl.store(s1 + layer, s, mask=first)
    if KIND == GATED_BWD:
        s = _scale(amax2, layer, FACTOR, TINY, POWER)
        _store(b, s, q2, t2, base, row, col, live, rows, columns, LARGEST)
        tl.store(s2 + layer, s, mask=first)
