"""FP8 operands in as few passes over memory as scaling allows, by Triton on CUDA.

A matrix product on Hopper wants both operands with the contracted dimension contiguous, and the three products of a
linear layer contract different ones: each value is needed as it lies and transposed. `pair` reads it once and writes
both; where the value comes from a norm or a gated activation, it is made on the way and never written in bf16 at all.

Values, by `kind`: "plain" (x), "rms_norm" (x, weight or None, 1/rms of each row), "swiglu" (gate, up) and "swiglu_bwd"
(gate, up, cotangent), which are two. Numbers: as `fmeg.precision.formats.quantize` with one scale a tensor (or one for
each of `layers`), of the value rounded to the type of its operands, a "plain" float32 one to bf16 if `rounded`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fmeg.kernels.rows import _power, _processors

KINDS = ("plain", "rms_norm", "swiglu", "swiglu_bwd")
WIDEST = 16384
TILE, WARPS = 64, {"swiglu": 8, "swiglu_bwd": 8}  # others 4: see benchmarks/RESULTS.md


def _programs() -> Any:
    from fmeg.kernels import _triton_fp8

    return _triton_fp8


def fits(*xs: Tensor | None) -> bool:
    """Whether the kernels take these operands."""
    from fmeg.kernels import rows

    given = [x for x in xs if x is not None]
    return all(rows.fits(x) for x in given)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _values(kind: str) -> int:
    return 2 if kind == "swiglu_bwd" else 1


@torch.library.custom_op("fmeg::fp8_amax", mutates_args=())
def amax(x: Tensor, y: Tensor | None, z: Tensor | None, kind: str, layers: int, rounded: bool) -> Tensor:
    """f32[values · layers]: the largest absolute values. Not of norms (`norm_amax`)."""
    x, y, z = x.contiguous(), _contiguous(y), _contiguous(z)
    out = torch.zeros(_values(kind) * layers, dtype=torch.int32, device=x.device)
    n = x.numel() // layers
    block = 1024 if kind == "plain" else 2048
    blocks = -(-n // block)
    programs = min(blocks, max(1, 16 * _processors(x.device) // layers))
    _programs().amax[(programs, layers)](
        x, y, z, out, n, KIND=KINDS.index(kind), ROUND=rounded, EACH=-(-blocks // programs), BLOCK=block
    )
    return out.view(torch.float32)


@amax.register_fake
def _(x: Tensor, y: Tensor | None, z: Tensor | None, kind: str, layers: int, rounded: bool) -> Tensor:
    return x.new_empty(_values(kind) * layers, dtype=torch.float32)


@torch.library.custom_op("fmeg::fp8_norm_amax", mutates_args=())
def norm_amax(x: Tensor, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """(f32[1], f32[rows]): the largest absolute value of `rms_norm(x, w, eps)`, and 1/rms of each row."""
    x, width = x.contiguous(), x.shape[-1]
    rows = x.numel() // width
    out = torch.zeros(1, dtype=torch.int32, device=x.device)
    inverse = torch.empty(rows, dtype=torch.float32, device=x.device)
    programs = min(rows, 8 * _processors(x.device))
    block = _power(width)
    _programs().norm_amax[(programs,)](
        x, w, inverse, out, rows, eps, width, EACH=-(-rows // programs), BLOCK=block,
        num_warps=max(1, min(16, block // 1024)),
    )  # fmt: skip
    return out.view(torch.float32), inverse


@norm_amax.register_fake
def _(x: Tensor, w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(1, dtype=torch.float32), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)


@torch.library.custom_op("fmeg::fp8_pair", mutates_args=())
def pair(
    x: Tensor, y: Tensor | None, z: Tensor | None, amax1: Tensor, amax2: Tensor | None, kind: str, layers: int,
    rows: int, rounded: bool, dtype: torch.dtype, largest: float, tiny: float, power: bool, seen: bool,
) -> list[Tensor]:  # fmt: skip
    """For each value q [layers, rows, columns], its transpose [layers, columns, rows] and f32[layers] scales; then, if
    `seen`, f32[values · layers], the largest absolute values of now (those given say the scales)."""
    x, y, z = x.contiguous(), _contiguous(y), _contiguous(z)
    amax1, amax2 = amax1.contiguous(), _contiguous(amax2)
    results = _empty(x, kind, layers, rows, dtype, seen)
    columns = x.numel() // layers // rows
    made = results[:3] if _values(kind) == 1 else results[:6]
    tiles = -(-rows // TILE) * -(-columns // TILE)
    tops = torch.empty(_values(kind) * layers, tiles, dtype=torch.int32, device=x.device) if seen else None
    _programs().pair[(tiles, layers)](
        x, y, z, amax1, amax2, *made, *[None] * (6 - len(made)),
        tops, rows, columns, rows // 4,
        KIND=KINDS.index(kind), ROUND=rounded, FACTOR=1.0 / largest, TINY=tiny, POWER=power,
        SEEN=seen, WORDS=rows % 4 == 0 and columns % 16 == 0, ROWS=TILE, COLUMNS=TILE,
        num_warps=WARPS.get(kind, 4),
    )  # fmt: skip
    if tops is not None:
        results[-1].zero_()
        _programs().most[(-(-tiles // 2048), len(tops))](tops, results[-1].view(torch.int32), tiles, BLOCK=2048)
    return results


def _empty(x: Tensor, kind: str, layers: int, rows: int, dtype: torch.dtype, seen: bool) -> list[Tensor]:
    columns = prod(x.shape) // layers // rows
    out = []
    for _ in range(_values(kind)):
        out += [x.new_empty((layers, *shape), dtype=dtype) for shape in ((rows, columns), (columns, rows))]
        out.append(x.new_empty(layers, dtype=torch.float32))
    return [*out, x.new_empty(_values(kind) * layers, dtype=torch.float32)] if seen else out


@pair.register_fake
def _(
    x: Tensor, y: Tensor | None, z: Tensor | None, amax1: Tensor, amax2: Tensor | None, kind: str, layers: int,
    rows: int, rounded: bool, dtype: torch.dtype, largest: float, tiny: float, power: bool, seen: bool,
) -> list[Tensor]:  # fmt: skip
    return _empty(x, kind, layers, rows, dtype, seen)


def _aligned(scale: Tensor) -> Tensor:
    """A scalar where cuBLAS can read it: in CUDA 13 an address that is no multiple of 16 is "not supported"."""
    scale = scale.reshape(())
    return scale if scale.data_ptr() % 16 == 0 else scale.clone()


@torch.library.custom_op("fmeg::scaled_mm", mutates_args=())
def scaled_mm(
    x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, rows: int, columns: int, dtype: torch.dtype, fast: bool
) -> Tensor:
    """(sx x)(sy y)ᵀ, [rows, columns] in `dtype`: x holds "rows k", y "columns k", contiguous; one scale a tensor."""
    a, b = x.reshape(rows, -1), y.reshape(columns, -1)
    return torch._scaled_mm(a, b.t(), _aligned(sx), _aligned(sy), out_dtype=dtype, use_fast_accum=fast)


@scaled_mm.register_fake
def _(x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, rows: int, columns: int, dtype: torch.dtype, fast: bool) -> Tensor:
    return x.new_empty(rows, columns, dtype=dtype)


@torch.library.custom_op("fmeg::scaled_mm_into", mutates_args=("out",))
def scaled_mm_into(out: Tensor, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, rows: int, fast: bool) -> None:
    """As `scaled_mm`, written into `out` in its dtype."""
    a, b = x.reshape(rows, -1), y.reshape(-1, x.numel() // rows)
    torch.ops.aten._scaled_mm.out(
        a, b.t(), _aligned(sx), _aligned(sy), None, None, out.dtype, fast, out=out.view(rows, -1)
    )


@scaled_mm_into.register_fake
def _(out: Tensor, x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, rows: int, fast: bool) -> None:
    return None
