"""What the tests of operations share: nodes from tensors, and a gradient rule against autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.ops._eager import Eager
from fmeg.program.ir import Node, TensorType, Value
from fmeg.program.primitive import Primitive

F64 = torch.float64


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    """Standard normal numbers, the same on every call."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1009 * sum(shape)), dtype=F64).to(dtype)


def ints(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def close(a: Tensor, b: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, atol=tol, rtol=tol)


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype.is_floating_point


def astuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def node_of(op: Primitive, *args: Any, **kwargs: Any) -> Node:
    """The node that tracing `op(*args, **kwargs)` would record."""

    def value(x: Any) -> Any:
        return Value(TensorType.of(x)) if isinstance(x, Tensor) else x

    node = Node(op, tuple(map(value, args)), {k: value(v) for k, v in kwargs.items()})
    outs = astuple(op.reference(*args, **kwargs))
    node.outs = tuple(Value(TensorType.of(x), node, i) for i, x in enumerate(outs))
    return node


def check_vjp(op: Primitive, *args: Any, bits: bool = False, **kwargs: Any) -> None:
    """The vjp equals autograd through plain torch to 1e-12 (`bits`: exactly), and the eager gradient exactly.

    Exactly, so that a compiled step on one device has the bits of the eager one.
    """
    leaves = [x.clone().requires_grad_() if is_float(x) else x for x in args]
    plain = op.reference.plain if isinstance(op.reference, Eager) else op.reference
    outs = astuple(plain(*leaves, **kwargs))
    ct = rand(*outs[0].shape, seed=99, dtype=outs[0].dtype)
    floats = [x for x in leaves if is_float(x)]
    expected = iter(torch.autograd.grad(outs[0], floats, ct, allow_unused=True))
    cts = (ct, *[None] * (len(outs) - 1))
    given = op.vjp(args, kwargs, tuple(o.detach() for o in outs), cts)
    eager = astuple(op(*leaves, **kwargs))
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(eager, outs, strict=True)), op
    eager_grads = iter(torch.autograd.grad(eager[0], floats, ct, allow_unused=True))
    operands = [x for x in args if isinstance(x, Tensor)]
    assert len(given) == len(operands)
    for x, g in zip(operands, given, strict=True):
        if not is_float(x):
            assert g is None
            continue
        e = next(expected)
        if isinstance(op.reference, Eager):
            assert torch.equal(g, next(eager_grads))
        assert g.dtype == x.dtype and g.shape == x.shape
        if bits:
            assert torch.equal(g, e), (g - e).abs().max()
        else:
            close(g, e)
