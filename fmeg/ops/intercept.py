"""Plain torch calls as primitives, while a program is traced.

`F.scaled_dot_product_attention`, `F.cross_entropy`, `F.layer_norm`, `F.rms_norm`, `F.embedding`, `F.linear`, `@` and
`torch.einsum` mean what some primitive means, but decompose into operations that hide it: a linear layer on "b s d"
first merges b and s, after which s cannot be sharded alone. `Intercept` turns them into the primitive exactly where the
two agree, and lets every other call through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from fmeg.ops._common import wide
from fmeg.ops.attention import attention
from fmeg.ops.cross_entropy import cross_entropy
from fmeg.ops.einsum import einsum
from fmeg.ops.embedding import embedding
from fmeg.ops.layer_norm import layer_norm
from fmeg.ops.rms_norm import rms_norm
from fmeg.program import autocast, recorder
from fmeg.program.errors import TraceError
from fmeg.program.lines import user_line


class Intercept(TorchFunctionMode):
    """Inside, torch functions that a primitive covers become that primitive.

    It acts only while a recorder writes, outside `torch.func` transforms, and on tensors that need no gradient.

    >>> from fmeg.program.trace import trace
    >>> program = trace(lambda x, w: F.linear(x, w), torch.ones(2, 3, 4), torch.ones(5, 4)).program
    >>> [node.opname for node in program.nodes]
    ['einsum']
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (rec := recorder.active()) is not None:
            autocast.refuse_cuda(rec.name)
        mapped = _MAPPED.get(func)
        if mapped is not None and _acts(args, kwargs):
            out = mapped(*args, **kwargs)
            if out is not NotImplemented:
                return out
        return func(*args, **kwargs)


def _acts(args: tuple, kwargs: dict) -> bool:
    if recorder.active() is None or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if any(autocast.states()):  # which casts operations, not primitives
        return False
    if not torch.is_grad_enabled():
        return True
    return not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs)))


def _floats(*tensors: Any) -> bool:
    """Whether all are floating-point tensors of one dtype."""
    return all(isinstance(t, Tensor) and t.dtype.is_floating_point and t.dtype == tensors[0].dtype for t in tensors)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """torch's causal order is top-left aligned, that of `attention` bottom-right: they agree for s = t.

    With an explicit mask, or where the orders differ, it is written out, so that no kernel of one device is recorded.
    """
    if dropout_p or not _floats(query, key, value) or {query.ndim, key.ndim, value.ndim} != {4}:
        return NotImplemented
    if (
        len({x.shape[0] for x in (query, key, value)}) > 1
        or key.shape[:3] != value.shape[:3]
        or query.shape[3] != key.shape[3]
    ):
        return NotImplemented
    if query.shape[1] != key.shape[1] and not (enable_gqa and query.shape[1] % key.shape[1] == 0):
        return NotImplemented
    if attn_mask is not None or (is_causal and query.shape[2] != key.shape[2]):
        return (
            NotImplemented if is_causal and attn_mask is not None else _masked_sdpa(query, key, value, attn_mask, scale)
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attention(q, k, v, causal=is_causal, scale=scale).transpose(1, 2)


def _masked_sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """`softmax(scale q kᵀ + mask) v`, a row that sees nothing gives 0; without a mask, causal and top-left aligned."""
    heads = (key.shape[1], query.shape[1] // key.shape[1])
    q, k, v = wide(query).unflatten(1, heads), wide(key), wide(value)
    scores = einsum("b k g s e, b k t e -> b k g s t", q, k).flatten(1, 2) * (
        query.shape[-1] ** -0.5 if scale is None else scale
    )
    if mask is None:
        s, t = scores.shape[-2:]
        mask = torch.arange(t, device=q.device) <= torch.arange(s, device=q.device).unsqueeze(-1)
    scores = torch.where(mask, scores, -torch.inf) if mask.dtype == torch.bool else scores + mask
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    p = torch.where(seen, torch.where(seen, scores, 0.0).softmax(-1), 0.0)
    out = einsum("b k g s t, b k t f -> b k g s f", p.unflatten(1, heads), v)
    return out.flatten(1, 2).to(query.dtype)


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Class numbers as targets, without class weights. Ignored targets are masked, and do not count in the mean."""
    if weight is not None or size_average is not None or reduce is not None or reduction not in ("none", "sum", "mean"):
        return NotImplemented
    if not _floats(input) or target.dtype != torch.int64 or label_smoothing == 1.0:
        return NotImplemented
    logits = input if input.ndim < 3 else input.movedim(1, -1)
    if input.ndim == 0 or logits.shape[:-1] != target.shape:
        return NotImplemented
    counted = target != ignore_index
    loss = cross_entropy(logits, torch.where(counted, target, 0), label_smoothing=label_smoothing)
    loss = torch.where(counted, loss, 0.0)
    if reduction == "sum":
        loss = loss.sum()
    elif reduction == "mean":
        loss = loss.sum() / counted.sum()
    return loss.to(input.dtype)


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    if tuple(normalized_shape) != tuple(input.shape[-1:]) or not _floats(
        input, *(t for t in (weight, bias) if t is not None)
    ):
        return NotImplemented
    return layer_norm(input, weight, bias, eps)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """torch's default eps is that of the dtype it computes in, which changed for 16-bit floats: give one."""
    if tuple(normalized_shape) != tuple(input.shape[-1:]) or not _floats(
        input, *(t for t in (weight,) if t is not None)
    ):
        return NotImplemented
    if eps is None and input.dtype not in (torch.float32, torch.float64):
        return NotImplemented
    return rms_norm(input, weight, torch.finfo(input.dtype).eps if eps is None else eps)


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Any:  # fmt: skip
    if padding_idx is not None or max_norm is not None or scale_grad_by_freq or sparse:
        return NotImplemented
    if not _floats(weight) or weight.ndim != 2 or input.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    return embedding(weight, input)


def _rows(ndim: int) -> str:
    return " ".join(f"b{i}" for i in range(ndim))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """On a matrix, torch's own one operation says all; on more dimensions it would merge them."""
    if input.ndim < 3 or weight.ndim != 2 or input.shape[-1] != weight.shape[1] or not _floats(input, weight):
        return NotImplemented
    rows = _rows(input.ndim - 1)
    out = einsum(f"{rows} d, f d -> {rows} f", input, weight)
    return out if bias is None else out + bias


def _matmul(input: Tensor, other: Tensor) -> Any:
    """Batches of matrices: aligned on the right, of equal sizes or missing."""
    if not _floats(input, other) or min(input.ndim, other.ndim) < 2 or max(input.ndim, other.ndim) < 3:
        return NotImplemented
    n = min(input.ndim, other.ndim) - 2
    a, b = input.shape[:-2], other.shape[:-2]
    if input.shape[-1] != other.shape[-2] or a[len(a) - n :] != b[len(b) - n :]:
        return NotImplemented
    names = [f"b{i}" for i in range(max(len(a), len(b)))]
    left, right = (" ".join(names[len(names) - len(s) :]) for s in (a, b))
    return einsum(f"{left} m k, {right} k n -> {' '.join(names)} m n", input, other)


def _rmatmul(input: Tensor, other: Tensor) -> Any:
    return _matmul(other, input)


def _einsum(equation: Any, *operands: Any) -> Any:
    """Without ellipsis, repeated letters in one operand, or dimensions of size 1 that broadcast."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or "." in equation or not _floats(*operands):
        return NotImplemented
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        out = "".join(sorted(c for c in set(left) - {","} if left.count(c) == 1))
    if len(terms) != len(operands) or any(len(set(t)) != len(t) for t in (*terms, out)):
        return NotImplemented
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        if len(term) != x.ndim or any(sizes.setdefault(c, n) != n for c, n in zip(term, x.shape, strict=True)):
            return NotImplemented
    return einsum(", ".join(" ".join(t) for t in terms) + " -> " + " ".join(out), *operands)


def _numpy(*args: Any, **kwargs: Any) -> Any:
    rec = recorder.active()
    raise TraceError(
        f"{rec.name if rec else 'trace'}: numpy needs the values of a tensor, at {user_line()}; a traced tensor has "
        "none. "
        "Use the torch function, or do it outside of the traced function"
    )


_MAPPED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _sdpa,
    F.cross_entropy: _cross_entropy,
    F.layer_norm: _layer_norm,
    F.rms_norm: _rms_norm,
    F.embedding: _embedding,
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    Tensor.__rmatmul__: _rmatmul,
    torch.einsum: _einsum,
    torch.functional.einsum: _einsum,
    Tensor.numpy: _numpy,
    Tensor.__array__: _numpy,
}
