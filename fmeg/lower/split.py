"""Products in float32 by tensor cores: a float32 number is a sum of three bf16 ones.

    x w        x in bf16, w in float32:  x w₁ + x w₂ + x w₃, summed in float32: exact but for these sums, which tensor
               cores cut off (2e-6 of the result over 2048 terms on Hopper, where float32's own product loses 4e-7)
    g w        both in float32, for a result in bf16:  g₁ w₁ + g₁ w₂ + g₂ w₁, to 16 bits before the one rounding

A router computes its logits and their gradients in float32 from activations in bf16: no copy of these in float32 is
made, and each product is one of matrices in bf16. Source of the idea: Henry et al. 2019, arXiv:1904.06376.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.kernels.split import split
from fmeg.lower.rewrite import uses, with_nodes
from fmeg.ops._common import transformed
from fmeg.ops.einsum import einsum_p, format_equation, parse_equation
from fmeg.program.ir import Node, Program, Value, values_in
from fmeg.program.primitive import Primitive

_to_copy = torch.ops.aten._to_copy.default
PART = "part_"


def product_by_parts(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """The float32 product of a tensor in bf16 and one in float32, which may be either."""
    (a, b), out = parse_equation(equation)
    first = x.dtype == torch.float32
    names = a if first else b
    at = next(i for i, n in enumerate(names) if n in out)
    wide = (*names[:at], PART, *names[at:])
    to = out.index(names[at])
    parts = split(x if first else y, [0, 1, 2], at)
    ins, operands = ((wide, b), (parts, y)) if first else ((a, wide), (x, parts))
    made = einsum_p.run()(format_equation(ins, (*out[:to], PART, *out[to:])), *operands, dtype=torch.float32)
    return made.sum(to)


def rounded_product_by_parts(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """The product of two tensors in float32, in bf16."""
    (a, b), out = parse_equation(equation)
    ins, operands = [], []
    for names, t, parts in ((a, x, [0, 0, 1]), (b, y, [0, 1, 0])):
        at = next(i for i, n in enumerate(names) if n not in out)
        ins.append((*names[:at], PART, *names[at:]))
        operands.append(split(t, parts, at))
    return einsum_p.run()(format_equation(tuple(ins), out), *operands)


def _exact(equation: str, x: Tensor, y: Tensor) -> Tensor:
    if x.is_cuda and not transformed():
        return product_by_parts(equation, x, y)
    return einsum_p.run()(equation, x.float(), y.float())


def _rounded(equation: str, x: Tensor, y: Tensor) -> Tensor:
    if x.is_cuda and not transformed():
        return rounded_product_by_parts(equation, x, y)
    return einsum_p.run()(equation, x, y).bfloat16()


def _flops(node: Node) -> int:
    assert einsum_p.flops is not None
    return 3 * einsum_p.flops(Node(einsum_p, node.args, {}))


split_product_p = Primitive("split_product", _exact, flops=_flops)
split_product_rounded_p = Primitive("split_product_rounded", _rounded, flops=_flops)


def split_products(program: Program) -> Program:
    """Products in float32 of which an operand was, or whose result only becomes, bf16."""
    maker = {id(o): n for n in program.nodes for o in n.outs}
    used = uses(program)
    swapped: dict[int, Node] = {}
    dropped: set[int] = set()
    for n in program.nodes:
        if n.op is not einsum_p or n.kwargs or len(n.args) != 3 or not _is_product(n):
            continue
        equation, *operands = n.args
        sources = [_narrow(maker.get(id(v))) for v in operands]
        readers = used.get(id(n.outs[0]), [])
        reader = readers[0] if len(readers) == 1 else None
        like = (n.source, n.phase, n.tags)
        if sum(s is not None for s in sources) == 1:
            args: tuple[Any, ...] = tuple(v if s is None else s for s, v in zip(sources, operands, strict=True))
            swapped[id(n)] = Node(split_product_p, (equation, *args), {}, n.outs, *like)
        elif reader is not None and reader.op is _to_copy and reader.kwargs == {"dtype": torch.bfloat16}:
            swapped[id(n)] = Node(split_product_rounded_p, n.args, {}, reader.outs, *like)
            dropped.add(id(reader))
    nodes = [swapped.get(id(n), n) for n in program.nodes if id(n) not in dropped]
    still = {id(v) for n in nodes for v in n.operands()} | {id(v) for v in values_in(program.outputs)}
    return with_nodes(program, [n for n in nodes if _narrow(n) is None or id(n.outs[0]) in still])


def _narrow(cast: Node | None) -> Value | None:
    """What a cast from bf16 to float32 casts."""
    if cast is None or cast.op is not _to_copy or cast.kwargs != {"dtype": torch.float32}:
        return None
    v = cast.args[0]
    return v if v.dtype == torch.bfloat16 else None


def _is_product(n: Node) -> bool:
    """Of matrices in float32: something is contracted, nothing is kept of both, each has something of its own."""
    (a, b), out = parse_equation(n.args[0])
    if n.outs[0].dtype != torch.float32 or any(v.dtype != torch.float32 for v in n.operands()):
        return False
    both = [x for x in a if x in b]
    return (
        bool(both)
        and not any(x in out for x in both)
        and {*a, *b} - {*both} == {*out}
        and a != b
        and all(any(x in out for x in names) for names in (a, b))
    )
