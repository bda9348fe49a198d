"""A product in bf16 that is cast to float32 is summed into float32: one rounding less, and one pass over memory
less."""

from __future__ import annotations

import torch

from fmeg.lower.rewrite import uses, with_nodes
from fmeg.ops.einsum import einsum_p
from fmeg.program.ir import Node, Program

_to_copy = torch.ops.aten._to_copy.default


def widen(program: Program) -> Program:
    """Products whose only reader is a cast to float32 give float32."""
    used = uses(program)
    maker = {id(o): n for n in program.nodes for o in n.outs}
    swapped: dict[int, Node] = {}
    dropped: set[int] = set()
    for n in program.nodes:
        if n.op is not _to_copy or n.kwargs != {"dtype": torch.float32}:
            continue
        product = maker.get(id(n.args[0]))
        if product is None or product.op is not einsum_p or product.kwargs or used[id(n.args[0])] != [n]:
            continue
        if n.args[0].dtype not in (torch.bfloat16, torch.float16) or len(product.args) != 3:
            continue
        kwargs = {"dtype": torch.float32}
        swapped[id(product)] = Node(einsum_p, product.args, kwargs, n.outs, product.source, product.phase, product.tags)
        dropped.add(id(n))
    return with_nodes(program, [swapped.get(id(n), n) for n in program.nodes if id(n) not in dropped])
