"""What several operations share: the dtype they compute in, rules by dimension, argument checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.rule import Rule, rule


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype that sums are computed in: float64 stays, everything else is float32.

    >>> wide(torch.ones(2, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return x if x.dtype == torch.float64 else x.float()


def check_float(op: str, **tensors: Tensor | None) -> None:
    """Raise TypeError naming the first argument that is not a floating-point tensor (None passes)."""
    for name, t in tensors.items():
        if t is not None and not (isinstance(t, Tensor) and t.dtype.is_floating_point):
            given = t.dtype if isinstance(t, Tensor) else type(t).__name__
            raise TypeError(f"{op}: {name} must be a floating-point tensor, given {given}")


def check_shape(op: str, name: str, t: Tensor, expected: Sequence[int], why: str) -> None:
    """Raise ValueError unless `t` has the expected shape."""
    if tuple(t.shape) != tuple(expected):
        raise ValueError(f"{op}: {name} must have shape {tuple(expected)} ({why}), given {tuple(t.shape)}")


def row_names(ndim: int) -> str:
    """Factor names of `ndim` independent dimensions: "d0 d1 …"."""
    return " ".join(f"d{i}" for i in range(ndim))


def pointwise_rule(node: Node, outs: int = 1, linear: frozenset[int] = frozenset()) -> Rule:
    """Rule of an operation whose operands and results all have one shape and that looks at each element alone."""
    shapes = [v.shape for v in node.operands()]
    dims = row_names(len(shapes[0]))
    text = ", ".join([dims] * len(shapes)) + " -> " + ", ".join([dims] * outs)
    return rule(text, shapes, linear=linear)


def elements(node: Node) -> int:
    """Number of elements of the first operand."""
    return node.operands()[0].type.numel


def transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is looking."""
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def differentiated(*tensors: Tensor) -> bool:
    """Whether a derivative of a result may be asked for: kernels that have none must then be written out."""
    return transformed() or (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
