"""Products that are added to another tensor: the kernel that multiplies begins from it, and a pass over memory is
saved.

Gradients that reach a value by several products (through q, k and v) are summed as they are made, and a block's result
is added to the residual stream by its last product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.lower.rewrite import in_order, uses, with_nodes
from fmeg.ops.contract import product_plus
from fmeg.ops.einsum import einsum_matrices, einsum_p
from fmeg.program.ir import Node, Program, Value
from fmeg.program.primitive import Primitive

HALF = (torch.bfloat16, torch.float16)


def _reference(equation: str, x: Tensor, y: Tensor, c: Tensor, free: bool) -> Tensor:
    """c + the product; `free`: the result may lie where c lay."""
    shape = einsum_matrices(equation, x.shape, y.shape)
    assert shape is not None
    return product_plus(shape, c, x, y, free)


def _flops(node: Node) -> int:
    assert einsum_p.flops is not None
    return einsum_p.flops(Node(einsum_p, node.args[:3], {}))


einsum_add_p = Primitive("einsum_add", _reference, flops=_flops)


def add_products(program: Program) -> Program:
    """Sums of a product in bf16, that nothing else reads, and a tensor of its type, made before it."""
    used = uses(program)
    maker = {id(o): n for n in program.nodes for o in n.outs}
    place = {id(n): i for i, n in enumerate(program.nodes)}
    swapped: dict[int, Node] = {}
    dropped: set[int] = set()
    for n in program.nodes:
        if n.op is not torch.ops.aten.add.Tensor or n.kwargs or not all(isinstance(a, Value) for a in n.args):
            continue
        pair = sorted(n.args, key=lambda v: place.get(id(maker.get(id(v))), -1), reverse=True)
        for mine, other in (pair, pair[::-1]):
            product = maker.get(id(mine))
            if product is None or id(product) in dropped or not _fits(product, mine, other, used[id(mine)], n):
                continue
            args: tuple[Any, ...] = (*product.args, other)
            before = maker.get(id(other))
            before = swapped.get(id(before), before)
            free = before is not None and before.op in (einsum_p, einsum_add_p) and used[id(other)] == [n]
            swapped[id(n)] = Node(
                einsum_add_p, args, {"free": free}, n.outs, product.source, product.phase, product.tags
            )
            dropped.add(id(product))
            break
    ordered = in_order([swapped.get(id(n), n) for n in program.nodes if id(n) not in dropped])
    assert ordered is not None
    return with_nodes(program, ordered)


def _fits(product: Node, mine: Value, other: Value, readers: list[Node | None], add: Node) -> bool:
    if product.op is not einsum_p or product.kwargs or len(product.args) != 3 or mine.dtype not in HALF:
        return False
    if readers != [add] or other is mine or other.type != mine.type:
        return False
    return einsum_matrices(product.args[0], *(v.shape for v in product.operands())) is not None
