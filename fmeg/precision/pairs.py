"""What products in FP8 read, made in fewer passes: a value quantised as it lies and transposed at once (`pair`), and
the largest value of what a norm or a gated activation gives without writing it (`largest`).

Values by `kind`, from their operands: "plain" (x), "rms_norm" (x, weight or None), "swiglu" (gate, up) and "swiglu_bwd"
(gate, up, cotangent), which are two. Scales are one a tensor, or one for each index of the `lead` first dimensions.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fmeg.kernels import fp8
from fmeg.ops._common import transformed, wide
from fmeg.ops.activations import swiglu_bwd_p, swiglu_p
from fmeg.ops.rms_norm import rms_norm_p
from fmeg.precision.formats import TINY, Format, Grid, amax_p, quantize_p
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive

Operands = tuple[Tensor | None, ...]


def _values(kind: str, xs: Operands, eps: float, dtype: torch.dtype | None) -> tuple[Tensor, ...]:
    if kind == "rms_norm":
        return (rms_norm_p.run()(*xs, eps=eps),)
    if kind == "swiglu":
        return (swiglu_p.run()(*xs),)
    if kind == "swiglu_bwd":
        got = swiglu_bwd_p.run()(*xs)
        return got[0], got[1]
    (x,) = xs
    assert x is not None
    return (x if dtype is None else x.to(dtype),)


def _grid(ndim: int, lead: int) -> Grid:
    return (1,) * lead + (0,) * (ndim - lead)


def _fits(kind: str, xs: Operands, dtype: torch.dtype | None) -> bool:
    x = xs[0]
    assert x is not None
    narrow = kind != "rms_norm" or x.shape[-1] <= fp8.WIDEST
    return narrow and not transformed() and fp8.fits(*xs) and dtype in (None, torch.bfloat16)


def _scale_shape(x: Tensor, lead: int) -> tuple[int, ...]:
    return (*x.shape[:lead], *(1,) * (x.ndim - lead))


def _largest(kind: str, xs: Operands, lead: int, eps: float, dtype: torch.dtype | None) -> Any:
    """The largest absolute value of each value; for a norm also 1/rms of each row, f32[rows], which `pair` takes."""
    x = xs[0]
    assert x is not None
    shape = _scale_shape(x, lead)
    if _fits(kind, xs, dtype):
        if kind == "rms_norm":
            top, inverse = fp8.norm_amax(x, xs[1], eps)
            return top.view(shape), inverse
        y, z = (*xs[1:], None, None)[:2]
        found = fp8.amax(x, y, z, kind, prod(x.shape[:lead]), dtype is not None)
        return tuple(m.view(shape) for m in found.split(1)) if kind == "swiglu_bwd" else found.view(shape)
    tops = [amax_p.run()(v, _grid(v.ndim, lead)) for v in _values(kind, xs, eps, dtype)]
    if kind != "rms_norm":
        return tuple(tops) if len(tops) > 1 else tops[0]
    h = wide(x).reshape(-1, x.shape[-1])
    return tops[0], torch.rsqrt((h * h).mean(-1) + eps).float()


def transposed(q: Tensor, lead: int, rows: int) -> Tensor:
    """The dimensions after the first `lead + rows` of them before those `rows`, contiguous.

    >>> transposed(torch.ones(2, 3, 4, 5), 1, 1).shape
    torch.Size([2, 4, 5, 3])
    """
    order = (*range(lead), *range(lead + rows, q.ndim), *range(lead, lead + rows))
    return q.permute(order).contiguous()


def _pair(
    kind: str, xs: Operands, inverse: Tensor | None, known: tuple[Tensor, ...], format: Format, lead: int, rows: int,
    seen: bool, eps: float, dtype: torch.dtype | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """For each value q, q transposed (see `transposed`) and its scale, from the largest value known of it; then, if
    `seen`, the largest of now of each."""
    x = xs[0]
    assert x is not None
    if not _fits(kind, xs, dtype):
        out: list[Tensor] = []
        values = _values(kind, xs, eps, dtype)
        for v, top in zip(values, known, strict=True):
            q, s = quantize_p.run()(v, top, None, _grid(v.ndim, lead), format)
            out += [q, transposed(q, lead, rows), s]
        return (*out, *(amax_p.run()(v, _grid(v.ndim, lead)) for v in values if seen))
    y, z = (*xs[1:], inverse, None)[:2] if kind == "rms_norm" else (*xs[1:], None, None)[:2]
    head, ahead, behind = x.shape[:lead], x.shape[lead : lead + rows], x.shape[lead + rows :]
    tops = [t.reshape(-1) for t in known]
    got = fp8.pair(
        x, y, z, tops[0], tops[1] if len(tops) > 1 else None, kind, prod(head), prod(ahead), dtype is not None,
        format.dtype, format.largest, TINY, format.scale == "power", seen,
    )  # fmt: skip
    shapes = ((*head, *ahead, *behind), (*head, *behind, *ahead), _scale_shape(x, lead))
    out = [t.view(shapes[i % 3]) for i, t in enumerate(got[: 3 * len(known)])]
    if seen:
        out += [t.view(shapes[2]) for t in (got[-1].split(1) if len(known) == 2 else (got[-1],))]
    return tuple(out)


def _flops(node: Node) -> int:
    return 2 * node.operands()[0].type.numel


largest_p: Any = Primitive("largest", _largest, flops=_flops)
pair_p: Any = Primitive("quantize_pair", _pair, flops=_flops)
