"""Tensors made from nothing: each rank makes its own block.

`like` operations look at their operand's shape and dtype only: `standalone` makes them operations without operands, so
that no placement of the operand, and no pending sum in it, matters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.rule import Local, Rule
from fmeg.sharding.rules.common import Call, changed, dims_of, factors, local_call, local_shape, node_rule
from fmeg.sharding.rules.pointwise import elementwise
from fmeg.sharding.rules.table import Table, refuse

RULES = Table()
aten = torch.ops.aten

FILLS = {"zeros": 0, "ones": 1, "empty": 0}


@RULES.register(
    "aten.zeros.default", "aten.ones.default", "aten.full.default", "aten.empty.memory_format", "aten.scalar_tensor"
)
def made(node: Node) -> Rule:
    """The same number everywhere: every dimension may be sharded."""
    out = dims_of(node.outs[0].shape)
    local = changed(node.op, size=lambda info: local_shape(info, out)) if node.outs[0].ndim else None
    return node_rule(node, (), (out,), local=local)


@RULES.register("aten.new_zeros", "aten.new_ones", "aten.new_full", "aten.new_empty")
def new(node: Node) -> Rule:
    """A number everywhere, with the operand's dtype: its shape is another."""
    operand, out = dims_of(node.operands()[0].shape, "like"), dims_of(node.outs[0].shape)
    local = changed(node.op, size=lambda info: local_shape(info, out))
    return node_rule(node, (operand,), (out,), resolved=factors(operand), local=local)


@RULES.register("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like")
def like(node: Node) -> Rule:
    """A number everywhere, with the operand's shape."""
    return elementwise(node)


def standalone(node: Node) -> Node:
    """A `like` or `new` operation as `full`, which needs no operand; any other node as it is.

    >>> from fmeg.program.ir import TensorType, Value
    >>> x = Value(TensorType((2, 3), torch.float32))
    >>> node = standalone(Node(aten.ones_like.default, (x,), {}, (Value(x.type),)))
    >>> node.op, node.args
    (<OpOverload(op='aten.full', overload='default')>, ([2, 3], 1))
    """
    word = str(node.op).removeprefix("aten.").partition(".")[0]
    kind = word.removeprefix("new_").removesuffix("_like")
    if kind == word or kind not in (*FILLS, "full") or not isinstance(node.op, torch._ops.OpOverload):
        return node
    t = node.outs[0].type
    fill = FILLS[kind] if kind in FILLS else Call(node)["fill_value"]
    return Node(
        aten.full.default, (list(t.shape), fill), {"dtype": t.dtype}, node.outs, node.source, node.phase, node.tags
    )


@RULES.register("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def arange(node: Node) -> Rule:
    """`start + i step`, i counted globally."""
    out = dims_of(node.outs[0].shape)
    dtype = node.outs[0].dtype

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        if all(info.parts(f) == 1 for f in factors(out)):
            return node.op(**a)
        i = torch.arange(info.size(out[0][0])) + info.offset(out[0][0])
        return (a.get("start", 0) + i * a.get("step", 1)).to(dtype)

    return node_rule(node, (), (out,), local=local_call(node.op, local))


@RULES.register("aten.eye.default", "aten.eye.m")
def eye(node: Node) -> Rule:
    """Ones on the diagonal, by global positions."""
    out = dims_of(node.outs[0].shape)
    dtype = node.outs[0].dtype

    def local(info: Local, *args: Any, **kwargs: Any) -> Tensor:
        if all(info.parts(f) == 1 for f in factors(out)):
            return node.op(*args, **kwargs)
        i, j = (
            torch.arange(n) + (info.offset(d[0]) if d else 0) for n, d in zip(local_shape(info, out), out, strict=True)
        )
        return (i.unsqueeze(-1) == j).to(dtype)

    return node_rule(node, (), (out,), local=local)


@RULES.register(
    "aten.linspace.default",
    "aten.logspace.default",
    "aten.tril_indices",
    "aten.triu_indices",
    "aten.hann_window",
)
def table(node: Node) -> Rule:
    """A small table: every rank has all of it."""
    out = dims_of(node.outs[0].shape)
    return node_rule(node, (), (out,), whole=factors(out))


RANDOM = (
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "normal", "uniform", "bernoulli",
    "multinomial", "exponential", "native_dropout", "rrelu_with_noise",
)  # fmt: skip

RULES.register(*(f"aten.{name}" for name in RANDOM))(
    refuse(
        "it draws from the device's generator, so the result would depend on the mesh; use fmeg.random, or "
        "fmeg.ops.dropout with a key"
    )
)
