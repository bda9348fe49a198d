# mypy: ignore-errors
"""Arithmetic in as few instructions as the hardware has for it. Imports triton: load it only where there is a GPU.

What Triton emits for `exp2`, a division and a conversion to bf16 keeps denormals and converts one number at a time:
kernels that make FP8 operands waited for those instructions, not for memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def exp2(x):
    """2^x, float32; denormal results are 0."""
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), float32."""
    below = 1.0 + exp2(x * -1.4426950408889634)
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], tl.float32, is_pure=True, pack=1)


@triton.jit
def rounded(x, kind: tl.constexpr):
    """float32 rounded to what `kind` holds; bf16 two at a time."""
    if kind == tl.bfloat16:
        near = tl.inline_asm_elementwise(
            """{
            .reg .b32 both, low, high;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 low, both, 16;
            and.b32 high, both, 0xffff0000;
            mov.b32 $0, low;
            mov.b32 $1, high;
            }""",
            "=f,=f,f,f", [x], tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        near = x.to(kind).to(tl.float32)
    return near


@triton.jit
def float8(x, kind: tl.constexpr):
    """float32 numbers as bytes of float8 `kind`, four of a thread at a time; saturating, NaN kept. See `four`."""
    if kind == tl.float8e5:
        low = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [x], tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        tl.static_assert(kind == tl.float8e4nv)
        low = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [x], tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
    return low


@triton.jit
def four(a, b, c, d, kind: tl.constexpr):
    """Four float32 numbers as bytes of float8 `kind` in one word, the first lowest; saturating, NaN kept.

    Where single bytes are wanted, take them from here: of those by Triton's conversion ptxas 12.8 loses some.
    """
    if kind == tl.float8e5:
        word = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [a, b, c, d], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        tl.static_assert(kind == tl.float8e4nv)
        word = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }""",
            "=r,f,f,f,f", [a, b, c, d], tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return word
