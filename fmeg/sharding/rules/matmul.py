"""Products of matrices: a sharded contracted dimension gives a pending sum; linear in each factor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule, parse_dims
from fmeg.sharding.rules.common import local_call, node_rule, once
from fmeg.sharding.rules.table import Table

RULES = Table()

PRODUCTS = {
    "aten.mm": "m k, k n -> m n",
    "aten.bmm": "b m k, b k n -> b m n",
    "aten.mv": "m k, k -> m",
    "aten.dot": "k, k ->",
    "aten.vdot": "k, k ->",
}

# the first operand broadcasts to the result and is added once
SUMS = {
    "aten.addmm": "m k, k n -> m n",
    "aten.baddbmm": "b m k, b k n -> b m n",
    "aten.addbmm": "b m k, b k n -> m n",
    "aten.addmv": "m k, k -> m",
    "aten.addr": "m, n -> m n",
}


def _terms(text: str) -> tuple[list[Dims], Dims]:
    left, right = text.split("->")
    return [parse_dims(t) for t in left.split(",")], parse_dims(right)


def _unit(dims: Dims, shape: tuple[int, ...]) -> Dims:
    """No factor where the size is 1: such a dimension may be broadcast against."""
    return tuple(() if n == 1 else d for d, n in zip(dims, shape, strict=True))


@RULES.register(*PRODUCTS)
def product(node: Node) -> Rule:
    """`A B`."""
    ins, out = _terms(PRODUCTS[str(node.op).rpartition(".")[0]])
    operands = node.operands()
    dims = tuple(_unit(d, v.shape) for d, v in zip(ins, operands, strict=True))
    return node_rule(node, dims, (_unit(out, node.outs[0].shape),), linear=frozenset({0, 1}))


@RULES.register(*SUMS)
def product_sum(node: Node) -> Rule:
    """`beta C + alpha A B`: C is added on the first shard of a contracted dimension only."""
    ins, out = _terms(SUMS[str(node.op).rpartition(".")[0]])
    operands = node.operands()
    shape = node.outs[0].shape
    out = _unit(out, shape)
    first = operands[0].shape
    bias = tuple(d if n != 1 else () for d, n in zip(out[len(out) - len(first) :], first, strict=True))
    dims = tuple(_unit(d, v.shape) for d, v in zip(ins, operands[1:], strict=True))
    contracted = sorted({f for term in dims for d in term for f in d} - {f for d in out for f in d})

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        return node.op(**(a | {"self": once(info, a["self"], contracted)}))

    return node_rule(node, (bias, *dims), (out,), local=local_call(node.op, local))
