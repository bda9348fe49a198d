"""A product in bf16 that is cast to float32 is summed into float32: one rounding less, and one pass over memory
less."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fmeg.lower.rewrite import uses, with_nodes
from fmeg.ops.einsum import einsum_p
from fmeg.ops.grouped import grouped_matmul_dw_p
from fmeg.precision.scaled import scaled_einsum_p
from fmeg.program.ir import Node, Program

_to_copy = torch.ops.aten._to_copy.default


def widen(program: Program) -> Program:
    """Products whose only reader is a cast to float32 give float32."""
    return _widened(program, _wide)


def widen_quantised(program: Program) -> Program:
    """The same for products of quantised operands."""
    return _widened(program, _wide_quantised)


def _widened(program: Program, wide_of: Callable[[Node], tuple[tuple, dict] | None]) -> Program:
    used = uses(program)
    maker = {id(o): n for n in program.nodes for o in n.outs}
    swapped: dict[int, Node] = {}
    dropped: set[int] = set()
    for n in program.nodes:
        if n.op is not _to_copy or n.kwargs != {"dtype": torch.float32}:
            continue
        product = maker.get(id(n.args[0]))
        if product is None or used[id(n.args[0])] != [n] or n.args[0].dtype not in (torch.bfloat16, torch.float16):
            continue
        wide = wide_of(product)
        if wide is not None:
            args, kwargs = wide
            op, source, phase, tags = product.op, product.source, product.phase, product.tags
            swapped[id(product)] = Node(op, args, kwargs, n.outs, source, phase, tags)
            dropped.add(id(n))
    return with_nodes(program, [swapped.get(id(n), n) for n in program.nodes if id(n) not in dropped])


def _wide(product: Node) -> tuple[tuple, dict] | None:
    """Arguments for a result in float32; None for what is no product of two."""
    if product.op in (einsum_p, grouped_matmul_dw_p) and not product.kwargs and len(product.args) == 3:
        return product.args, {"dtype": torch.float32}
    return None


def _wide_quantised(product: Node) -> tuple[tuple, dict] | None:
    if product.op is scaled_einsum_p:
        return (*product.args[:6], torch.float32, *product.args[7:]), {}
    return None
