"""Contractions by named dimensions: the one matmul of the library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import prod
from string import ascii_letters

import torch
from torch import Tensor

from fmeg.ops._eager import Eager
from fmeg.ops.contract import Matrices, matrices, product
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule

Names = tuple[str, ...]


@lru_cache(maxsize=4096)
def parse_equation(equation: str) -> tuple[tuple[Names, ...], Names]:
    """Split an equation into the operands' names and the result's.

    >>> parse_equation("b s d, d f -> b s f")
    ((('b', 's', 'd'), ('d', 'f')), ('b', 's', 'f'))
    """
    if equation.count("->") != 1:
        raise ValueError(f"einsum: {equation!r} must have one '->', as in 'b s d, d f -> b s f'")
    left, right = equation.split("->")
    ins = tuple(tuple(term.split()) for term in left.split(","))
    out = tuple(right.split())
    known = {n for names in ins for n in names}
    for names in (*ins, out):
        for n in names:
            if not n.isidentifier():
                raise ValueError(
                    f"einsum: {equation!r} has {n!r} where a dimension's name is expected; separate names by spaces"
                )
            if names.count(n) > 1:
                raise ValueError(f"einsum: {equation!r} names {n!r} twice in one term; take the diagonal first")
    for n in out:
        if n not in known:
            raise ValueError(f"einsum: {equation!r} has {n!r} in the result, which no operand has")
    if len(known) > len(ascii_letters):
        raise ValueError(f"einsum: {equation!r} has {len(known)} dimensions, at most {len(ascii_letters)} are possible")
    return ins, out


def format_equation(ins: tuple[Names, ...], out: Names) -> str:
    """The inverse of `parse_equation`."""
    return ", ".join(" ".join(n) for n in ins) + " -> " + " ".join(out)


@lru_cache(maxsize=4096)
def _letters(equation: str) -> str:
    ins, out = parse_equation(equation)
    letter = dict(zip(dict.fromkeys(n for names in ins for n in names), ascii_letters, strict=False))
    return ",".join("".join(map(letter.__getitem__, n)) for n in ins) + "->" + "".join(map(letter.__getitem__, out))


@lru_cache(maxsize=4096)
def _sizes(equation: str, *shapes: tuple[int, ...]) -> Mapping[str, int]:
    """The size of each name; checks ranks and agreement."""
    ins, _ = parse_equation(equation)
    if len(ins) != len(shapes):
        raise ValueError(f"einsum: {equation!r} has {len(ins)} operands, given {len(shapes)}")
    sizes: dict[str, int] = {}
    for i, (names, shape) in enumerate(zip(ins, shapes, strict=True)):
        if len(names) != len(shape):
            raise ValueError(
                f"einsum: operand {i} of {equation!r} must have dimensions '{' '.join(names)}', "
                f"given shape {tuple(shape)}"
            )
        for n, size in zip(names, shape, strict=True):
            if sizes.setdefault(n, size) != size:
                raise ValueError(
                    f"einsum: {n!r} of {equation!r} is {sizes[n]} in an earlier operand, "
                    f"but {size} in operand {i} of shape {tuple(shape)}"
                )
    return sizes


@lru_cache(maxsize=4096)
def _contraction(equation: str, dtype: torch.dtype | None, *shapes: tuple[int, ...]) -> Callable[..., Tensor]:
    """What computes the equation for operands of these shapes; `dtype`: of the result, if not that of the operands."""
    ins, out = parse_equation(equation)
    made = product(ins[0], ins[1], out, shapes[0], shapes[1], dtype) if len(ins) == 2 else None
    if made is not None:
        return made
    plain = partial(torch.einsum, _letters(equation))
    return plain if dtype is None else lambda *operands: plain(*(x.to(dtype) for x in operands))


def _plain(equation: str, *operands: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return _contraction(equation, dtype, *[x.shape for x in operands])(*operands)


@lru_cache(maxsize=4096)
def einsum_matrices(equation: str, *shapes: tuple[int, ...]) -> Matrices | None:
    """A contraction of two operands of these shapes as one product of matrices (see `contract.matrices`)."""
    ins, out = parse_equation(equation)
    return matrices(ins[0], ins[1], out, shapes[0], shapes[1]) if len(ins) == 2 else None


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, ...]:
    equation, *operands = args
    return tuple(_cotangent(equation, operands, cts[0], i) for i in range(len(operands)))


@lru_cache(maxsize=4096)
def _transposed(equation: str, i: int) -> tuple[str, tuple[int, ...]]:
    """The equation of operand i's cotangent, the result in its place, and the dimensions that no other term has."""
    ins, out = parse_equation(equation)
    terms = (*ins[:i], out, *ins[i + 1 :])
    present = {n for names in terms for n in names}
    names = tuple(n for n in ins[i] if n in present)
    return format_equation(terms, names), tuple(d for d, n in enumerate(ins[i]) if n not in present)


def _cotangent(equation: str, operands: Sequence[Tensor], ct: Tensor, i: int) -> Tensor:
    """A dimension that no other term has was summed alone, so is repeated."""
    transposed, alone = _transposed(equation, i)
    ct_i = einsum_p(transposed, *operands[:i], ct, *operands[i + 1 :])
    if not alone:
        return ct_i
    for dim in alone:
        ct_i = ct_i.unsqueeze(dim)
    return ct_i.expand(operands[i].shape)


def _rule(node: Node) -> Rule:
    equation = node.args[0]
    ins, out = parse_equation(equation)
    shapes = [v.shape for v in node.operands()]
    dims = tuple(tuple((n,) for n in names) for names in ins)
    sizes = dict(_sizes(equation, *shapes))
    return Rule(dims, (tuple((n,) for n in out),), sizes, linear=frozenset(range(len(shapes))))


def _flops(node: Node) -> int:
    """Two for each multiply-add, contracting from left to right; a lone operand is summed."""
    ins, out = parse_equation(node.args[0])
    sizes = _sizes(node.args[0], *(v.shape for v in node.operands()))
    if len(ins) == 1:
        return prod(sizes[n] for n in ins[0])
    total, left = 0, set(ins[0])
    for i in range(1, len(ins)):
        both = left | set(ins[i])
        total += 2 * prod(sizes[n] for n in both)
        left = both & ({n for names in ins[i + 1 :] for n in names} | set(out))
    return total


def _alone(args: tuple, kwargs: dict, cts: tuple, i: int) -> Tensor:
    equation, *operands = args
    return _cotangent(equation, operands, cts[0], i)


einsum_p = Primitive("einsum", Eager(_plain, _vjp, alone=_alone), vjp=_vjp, rule=_rule, flops=_flops)


def einsum(equation: str, *operands: Tensor) -> Tensor:
    """Multiply tensors and sum over every dimension that the result does not name.

        out[i…] = Σ_{j…} Π_n operand_n[…]

    equation    names separated by spaces, operands by commas: "b s d, d f -> b s f". A name stands for one size
                everywhere; it may not repeat within an operand.
    operands    one floating-point tensor a term, all of one dtype

    Where a summed dimension is sharded, the result is a pending sum over its mesh axes; where a kept one is, so is the
    result. Raises ValueError for an equation that does not parse or does not fit the shapes.

    >>> x, w = torch.ones(2, 3, 4), torch.ones(4, 5)
    >>> einsum("b s d, d f -> b s f", x, w).shape
    torch.Size([2, 3, 5])
    """
    _sizes(equation, *[x.shape for x in operands])
    if any(x.dtype != operands[0].dtype for x in operands):
        raise TypeError(f"einsum: operands of {equation!r} must have one dtype, given {[x.dtype for x in operands]}")
    return einsum_p(equation, *operands)
