# mypy: ignore-errors
"""Triton programs that make FP8 operands. Imports triton: load it only where there is a GPU (see `fp8`).

A value is one of: a tensor (PLAIN), a norm of it (NORM: x, weight, 1/rms of each row), silu(gate) · up (GATED), or the
two cotangents of that (GATED_BWD: gate, up, cotangent). It is rounded to the type of its operands before it is
quantised, as if it had been written.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fmeg.kernels._triton_math import four, rounded, sigmoid

PLAIN, NORM, GATED, GATED_BWD = (tl.constexpr(i) for i in range(4))


@triton.jit
def _bits(v):
    """|v| as integers in the same order; NaN is above all."""
    return v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _larger(a, b):
    """The larger absolute value, or NaN."""
    return tl.maximum(tl.abs(a), tl.abs(b), propagate_nan=tl.PropagateNan.ALL)


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
            first = rounded(first, tl.bfloat16)
        second = first
    elif KIND == NORM:
        v = first * tl.load(z + row)
        if y is not None:
            v = v * tl.load(y + col).to(tl.float32)
        first = rounded(v, kind)
        second = first
    else:
        b = tl.load(y + at, mask=live, other=0.0).to(tl.float32)
        s = sigmoid(first)
        if KIND == GATED:
            first = rounded(first * s * b, kind)
            second = first
        else:
            c = tl.load(z + at, mask=live, other=0.0).to(tl.float32)
            held = first * s
            second = rounded(c * held, kind)
            first = rounded(c * b * (s + held - held * s), kind)
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
    …, the next on its way while one is summed."""
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    top = tl.zeros([BLOCK], tl.int32)
    weight = 1.0
    if w is not None:
        weight = tl.load(w + cols, mask=cols < width, other=0.0).to(tl.float32)
    after = tl.load(x + pid.to(tl.int64) * width + cols, mask=(cols < width) & (pid < rows), other=0.0)
    for i in range(EACH):
        row = pid + i * programs
        h = after.to(tl.float32)
        later = row + programs
        after = tl.load(x + later.to(tl.int64) * width + cols, mask=(cols < width) & (later < rows), other=0.0)
        r = tl.rsqrt(tl.sum(h * h, 0) / width + eps)
        tl.store(inverse + row, r, mask=row < rows)
        bits = _bits(rounded(h * r * weight, x.dtype.element_ty))
        top = tl.maximum(top, tl.where(row < rows, bits, 0))
    _note(out, tl.max(top, 0))


@triton.jit
def _scale(amax, at, FACTOR: tl.constexpr, TINY: tl.constexpr, POWER: tl.constexpr):
    a = tl.load(amax + at)
    s = tl.where(a < TINY, 1.0, a * FACTOR)
    if POWER:
        up = ((s.to(tl.int32, bitcast=True) + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        s = tl.where(s == s, up, s)
    return s


@triton.jit
def _row(x, y, z, base, quarter, j: tl.constexpr, col, rows, columns, KIND: tl.constexpr, ROUND: tl.constexpr):
    """Row j of each four, as `_values` says."""
    row = quarter * 4 + j
    live = (row < rows) & (col < columns)
    at = base + row.to(tl.int64) * columns + col
    return _values(x, y, z, at, tl.minimum(row, rows - 1), tl.minimum(col, columns - 1), live, KIND, ROUND)


@triton.jit
def _store(v, word, q, t, base, quarter, j: tl.constexpr, col, rows, columns, WORDS: tl.constexpr):
    """Row j of each four as it lies; without WORDS byte j of `word`, there and in the transpose."""
    row = quarter * 4 + j
    live = (row < rows) & (col < columns)
    at = base + row.to(tl.int64) * columns + col
    if WORDS:
        tl.store(q + at, v.to(q.dtype.element_ty), mask=live)
    else:
        byte = (word >> (8 * j)).to(tl.uint8)
        tl.store(q.to(tl.pointer_type(tl.uint8), bitcast=True) + at, byte, mask=live)
        at = base + col.to(tl.int64) * rows + row
        tl.store(t.to(tl.pointer_type(tl.uint8), bitcast=True) + at, byte, mask=live)


@triton.jit
def _four(
    a, b, c, d, s, q, t, seen, base, quarter, col, rows, columns, quarters,
    SEEN: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Four rows of each column, quantised, and their transpose. The conversion saturates and keeps NaN."""
    if SEEN:
        top = _bits(_larger(_larger(a, b), _larger(c, d)))
        tl.store(seen, tl.max(tl.max(top, 1), 0))
    inverse = tl.div_rn(1.0, s)
    a *= inverse
    b *= inverse
    c *= inverse
    d *= inverse
    word = four(a, b, c, d, q.dtype.element_ty)
    _store(a, word, q, t, base, quarter, 0, col, rows, columns, WORDS)
    _store(b, word, q, t, base, quarter, 1, col, rows, columns, WORDS)
    _store(c, word, q, t, base, quarter, 2, col, rows, columns, WORDS)
    _store(d, word, q, t, base, quarter, 3, col, rows, columns, WORDS)
    if WORDS:
        live = (quarter < quarters) & (col < columns)
        at = tl.trans(col).to(tl.int64) * quarters + tl.trans(quarter)
        words = t.to(tl.pointer_type(tl.int32), bitcast=True) + base // 4
        tl.store(words + at, tl.trans(word), mask=tl.trans(live))


@triton.jit
def pair(
    x, y, z, amax1, amax2, q1, t1, s1, q2, t2, s2, seen, rows, columns, quarters,
    KIND: tl.constexpr, ROUND: tl.constexpr, FACTOR: tl.constexpr, TINY: tl.constexpr,
    POWER: tl.constexpr, SEEN: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of "rows columns", quantised, and its transpose; program (tile, layer). seen[value + layer, tile]: the
    bits of the tile's largest absolute value.

    A thread holds four rows of a column, so that the transpose moves between threads in words, not bytes. WORDS: whole
    words of both orders are stored: rows are 4 quarters, columns a multiple of 16.
    """
    layer = tl.program_id(1)
    base = layer.to(tl.int64) * rows * columns
    across = tl.cdiv(columns, COLUMNS)
    quarter = (tl.program_id(0) // across * (ROWS // 4) + tl.arange(0, ROWS // 4))[:, None]
    col = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    a, e = _row(x, y, z, base, quarter, 0, col, rows, columns, KIND, ROUND)
    b, f = _row(x, y, z, base, quarter, 1, col, rows, columns, KIND, ROUND)
    c, g = _row(x, y, z, base, quarter, 2, col, rows, columns, KIND, ROUND)
    d, h = _row(x, y, z, base, quarter, 3, col, rows, columns, KIND, ROUND)
    first = tl.program_id(0) == 0
    here = seen
    if SEEN:
        here = seen + layer * tl.num_programs(0) + tl.program_id(0)
    s = _scale(amax1, layer, FACTOR, TINY, POWER)
    tl.store(s1 + layer, s, mask=first)
    _four(a, b, c, d, s, q1, t1, here, base, quarter, col, rows, columns, quarters, SEEN, WORDS)
    if KIND == GATED_BWD:
        if SEEN:
            here += tl.num_programs(0)
        s = _scale(amax2, layer, FACTOR, TINY, POWER)
        tl.store(s2 + layer, s, mask=first)
        _four(e, f, g, h, s, q2, t2, here, base, quarter, col, rows, columns, quarters, SEEN, WORDS)


@triton.jit
def most(tops, out, n, BLOCK: tl.constexpr):
    """out[i]: the largest of tops[i, :n]; program (part, i). `out` begins at 0 or below."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i = tl.program_id(1)
    top = tl.load(tops + i.to(tl.int64) * n + at, mask=at < n, other=0)
    tl.atomic_max(out + i, tl.max(top, 0), sem="relaxed")
