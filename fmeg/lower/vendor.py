"""Another library's kernels in place of our own, where its kernels compute what a primitive means.

    jit(step, lowering="te")

The Program's nodes keep their primitives' rules; only what runs them changes, and only where the operands fit: else
the primitive's own code runs, as without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fmeg.kernels import te
from fmeg.lower.rewrite import everywhere, with_nodes
from fmeg.ops._common import transformed, wide
from fmeg.ops.einsum import einsum_matrices, parse_equation
from fmeg.program.ir import Node, Program
from fmeg.program.primitive import Primitive

Lowering = Callable[..., Any]  # (own, *args, **kwargs), `own` being what runs without it

LOWERINGS = ("te", "fp8")


def check_lowering(who: str, lowering: str | None) -> None:
    """ValueError unless it is None or known; ImportError if its library is missing."""
    if lowering is not None and lowering not in LOWERINGS:
        raise ValueError(f"{who}: lowering must be None or one of {', '.join(LOWERINGS)}, given {lowering!r}")
    if lowering == "te" and not te.available():
        raise ImportError(f'{who}: lowering="te" needs TransformerEngine; pip install "fmeg[te]"')


def vendor_kernels(program: Program, lowering: str | None) -> Program:
    """The Program on the kernels that `lowering` names; itself if they are not another library's."""
    return lowered_by(program, TE) if lowering == "te" else program


def lowered_by(program: Program, table: Mapping[str, Lowering]) -> Program:
    """The Program with the primitives in `table`, by name, run by its functions, in the bodies of loops too.

    >>> from fmeg import ops
    >>> from fmeg.program.trace import trace
    >>> p = trace(lambda x: ops.rms_norm(x), torch.ones(2, 3)).program
    >>> q = lowered_by(p, {"rms_norm": lambda own, x, w, eps: own(x, w, eps) + 1})
    >>> q.nodes[0].op.run()(torch.ones(1), None, eps=0.0)
    tensor([2.])
    """

    def change(program: Program) -> Program:
        return with_nodes(program, [_changed(n, table) for n in program.nodes])

    return everywhere(change, program)


def _changed(n: Node, table: Mapping[str, Lowering]) -> Node:
    if not isinstance(n.op, Primitive) or n.op.name not in table:
        return n
    op = replace(n.op, lowerings={**n.op.lowerings, "default": partial(table[n.op.name], n.op.run())})
    return Node(op, n.args, n.kwargs, n.outs, n.source, n.phase, n.tags)


def _fits(*tensors: Tensor) -> bool:
    return not transformed() and all(t.is_cuda and t.dtype in te.HALF and t.numel() > 0 for t in tensors)


def _attention_fits(q: Tensor, k: Tensor, v: Tensor, masks: tuple, causal: bool) -> bool:
    """Without packed segments, and causal only in squares."""
    plain = all(m is None for m in masks) and (not causal or q.shape[1] == k.shape[1])
    return plain and _fits(q, k, v) and all(n % 8 == 0 and n <= 128 for n in (q.shape[3], v.shape[3]))


def _attention(
    own: Lowering, q: Tensor, k: Tensor, v: Tensor, *masks: Any, causal: bool, window: int | None, scale: float
) -> Any:
    if not _attention_fits(q, k, v, masks, causal):
        return own(q, k, v, *masks, causal=causal, window=window, scale=scale)
    return te.attention(q, k, v, causal, window or 0, scale)


def _attention_bwd(
    own: Lowering, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, *masks: Any,
    causal: bool, window: int | None, scale: float,
) -> Any:  # fmt: skip
    if not _attention_fits(q, k, v, masks, causal):
        return own(q, k, v, o, lse, do, *masks, causal=causal, window=window, scale=scale)
    return te.attention_backward(q, k, v, o, lse, do, causal, window or 0, scale)


def _rms_norm(own: Lowering, x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    if w is None or w.dtype != x.dtype or not _fits(x, w):
        return own(x, w, eps=eps)
    return te.rms_norm(x, w, eps)


def _rms_norm_bwd(own: Lowering, x: Tensor, w: Tensor | None, ct: Tensor, eps: float) -> Any:
    if w is None or not (x.dtype == w.dtype == ct.dtype) or not _fits(x, w, ct):
        return own(x, w, ct, eps=eps)
    return te.rms_norm_backward(x, w, ct, torch.rsqrt(wide(x).square().mean(-1) + eps))


def _einsum(own: Lowering, equation: str, *operands: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    m = einsum_matrices(equation, *(x.shape for x in operands)) if dtype is None and _fits(*operands) else None
    if m is None:
        return own(equation, *operands, dtype=dtype)
    return te.product(*m.operands(*operands)).view(_result_shape(equation, *operands))


def _result_shape(equation: str, *operands: Tensor) -> list[int]:
    """Sizes of the result's dimensions."""
    ins, out = parse_equation(equation)
    sizes = {n: size for names, x in zip(ins, operands, strict=True) for n, size in zip(names, x.shape, strict=True)}
    return [sizes[n] for n in out]


def _grouped(own: Lowering, x: Tensor, w: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    return te.grouped_matmul(x, w, ends, transposed) if _fits(x, w) else own(x, w, ends, transposed=transposed)


def _grouped_dw(own: Lowering, x: Tensor, y: Tensor, ends: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if dtype not in (None, x.dtype) or not _fits(x, y):
        return own(x, y, ends, dtype)
    return te.grouped_matmul_dw(x, y, ends)


TE: Mapping[str, Lowering] = {
    "attention": _attention,
    "attention_bwd": _attention_bwd,
    "rms_norm": _rms_norm,
    "rms_norm_bwd": _rms_norm_bwd,
    "einsum": _einsum,
    "grouped_matmul": _grouped,
    "grouped_matmul_dw": _grouped_dw,
}
