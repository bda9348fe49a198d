"""What runs a compute node on local tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmeg.program.gradient import MIRROR
from fmeg.program.ir import Node
from fmeg.program.literal import Literal, constant
from fmeg.program.primitive import Primitive

aten = torch.ops.aten


def _builtins() -> dict[Any, Callable[..., Any]]:
    """aten operations by torch's own Python function of the same signature, which costs half as much to call."""
    names = """
        abs.default add.Tensor addmm.default all.default all.dim amax.default amin.default any.default any.dim
        argmax.default baddbmm.default bitwise_and.Tensor bitwise_not.default bitwise_or.Tensor bmm.default cat.default
        clamp.default clone.default cos.default cumsum.default div.Tensor eq.Scalar eq.Tensor erf.default exp.default
        flip.default gather.default ge.Scalar ge.Tensor gt.Scalar gt.Tensor index_select.default isfinite.default
        isinf.default isnan.default le.Scalar le.Tensor log.default log1p.default logical_and.default
        logical_not.default logical_or.default logsumexp.default lt.Scalar lt.Tensor masked_fill.Scalar maximum.default
        mean.default mean.dim minimum.default mm.default mul.Tensor ne.Scalar ne.Tensor neg.default permute.default
        pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor reciprocal.default relu.default round.default rsqrt.default
        rsub.Scalar select.int sigmoid.default sign.default sin.default sqrt.default squeeze.dim stack.default
        sub.Tensor sum.default sum.dim_IntList t.default tanh.default transpose.int tril.default triu.default
        unsqueeze.default where.self zeros_like.default ones_like.default
    """
    table: dict[Any, Callable[..., Any]] = {}
    for name in names.split():
        packet, overload = name.split(".")
        table[getattr(getattr(aten, packet), overload)] = getattr(torch, packet)
    table[aten.expand.default] = Tensor.expand
    table[aten.view.default] = table[aten._unsafe_view.default] = table[aten.reshape.default] = torch.reshape
    return table


_BUILTINS = _builtins()


def lowering(node: Node, device: torch.device) -> Callable[..., Any]:
    """The callable that runs a compute node on local tensors, given the node's args and kwargs."""
    op = node.op
    if op is constant:
        return lambda literal: literal.tensor.to(device) if isinstance(literal, Literal) else literal
    if op is MIRROR:
        return op
    if isinstance(op, Primitive):
        return op.run()
    if op in _BUILTINS:
        return _BUILTINS[op]
    if isinstance(op, torch._ops.OpOverload) and not node.operands() and _takes_device(op):
        return lambda *args, **kwargs: op(*args, **{**kwargs, "device": device})
    return op


def _takes_device(op: torch._ops.OpOverload) -> bool:
    return any(a.name == "device" for a in op._schema.arguments)


def returns_sequence(node: Node) -> bool:
    """True when the operation returns a tuple or list even of one tensor."""
    if isinstance(node.op, torch._ops.OpOverload):
        returns = node.op._schema.returns
        return len(returns) != 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)
    return len(node.outs) > 1
