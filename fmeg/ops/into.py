"""Products written into memory that is given, or added to what is there: rows of one operand at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from fmeg.ops.einsum import einsum_p, parse_equation

Into = Callable[[Tensor, Tensor, Tensor, bool], None]


@lru_cache(maxsize=4096)
def product_of_rows(equation: str, rows: int, lead: int) -> Into:
    """The function (out, x, y, add) that writes the product of x and y into `out`, or adds it.

    equation    of two operands
    rows        which of them, 0 or 1, the result's first dimensions come from
    lead        `out` may be cut out of a larger tensor along that dimension of it, and x likewise

    One call of `mm` or `bmm` without copies where the result's dimensions are those of the rows' operand, then those of
    the other; else the product is computed apart and copied.

    >>> f = product_of_rows("b s d, d f -> b s f", 0, 1)
    >>> y = torch.zeros(2, 6, 5)
    >>> f(y[:, 2:4], torch.ones(2, 2, 3), torch.ones(3, 5), False)
    >>> y[0, :, 0]
    tensor([0., 0., 3., 3., 0., 0.])
    """
    ins, out = parse_equation(equation)
    a, b = ins[rows], ins[1 - rows]
    contracted = [n for n in a if n in b and n not in out]
    kept, free = ([n for n in out if n in names] for names in (a, b))
    every = len(contracted) + len(kept) == len(a) and len(contracted) + len(free) == len(b)
    if not contracted or not every or list(out) != [*kept, *free]:
        return lambda memory, x, y, add: write(memory, einsum_p.run()(equation, x, y), add)
    of_a, of_b = (
        [names.index(n) for n in order] for names, order in ((a, [*kept, *contracted]), (b, [*contracted, *free]))
    )

    def into(memory: Tensor, x: Tensor, y: Tensor, add: bool) -> None:
        left, right = (x, y) if rows == 0 else (y, x)
        left, right = left.permute(of_a), right.permute(of_b)
        depth, count = prod(left.shape[len(kept) :]), prod(left.shape[:lead])
        left = left.reshape(count, prod(left.shape[lead : len(kept)]), depth)
        right = right.reshape(depth, prod(right.shape[len(contracted) :]))
        result = memory.view(count, left.shape[1], right.shape[1])
        if count == 1 or (left.is_contiguous() and result.is_contiguous()):
            left, result = left.flatten(0, 1), result.view(-1, right.shape[1])
            if add:
                result.addmm_(left, right)
            else:
                torch.mm(left, right, out=result)
            return
        right = right.expand(count, -1, -1)
        if add:
            result.baddbmm_(left, right)
        else:
            torch.bmm(left, right, out=result)

    return into


def write(memory: Tensor, x: Tensor, add: bool) -> None:
    """A tensor into memory, or added to what is there."""
    if add:
        memory.add_(x)
    else:
        memory.copy_(x)
