"""The product of two tensors by named dimensions, as one matrix product (or one batch of them).

Every contraction of the library comes down to this: views where strides allow, `mm` or `bmm`, a view of the result. It
gives what `torch.einsum` gives, at half the overhead, and the gradient of a product is a product of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fmeg.kernels.rows import as_matrices, mm_add, mm_into

HALF = (torch.bfloat16, torch.float16)
Names = tuple[str, ...]
Shape = tuple[int, ...]
Product = Callable[[Tensor, Tensor], Tensor]


def product(
    a: Names, b: Names, out: Names, shape_a: Shape, shape_b: Shape, dtype: torch.dtype | None = None
) -> Product | None:
    """The function that contracts tensors of these dimensions and shapes; None if it is no matrix product.

    That is, if nothing is contracted, or a dimension of one operand alone is summed. Operands become [batch, m, k] and
    [batch, k, n]; they change places when that lets the result lie in memory as it is asked for. `dtype`: of sums and
    result, if wider than the operands'.

    >>> f = product(("b", "s", "d"), ("d", "f"), ("b", "s", "f"), (2, 3, 4), (4, 5))
    >>> f(torch.ones(2, 3, 4), torch.ones(4, 5)).shape
    torch.Size([2, 3, 5])
    """
    contracted = [x for x in a if x in b and x not in out]
    if not contracted or any(x not in out and x not in contracted for x in (*a, *b)):
        return None
    sizes = dict(zip((*a, *b), (*shape_a, *shape_b), strict=True))
    batch = [x for x in out if x in a and x in b]
    first = next((x for x in out if x not in batch), None)
    swap = first is not None and first in b
    if swap:
        a, b = b, a
    m, n = ([x for x in names if x in out and x not in batch] for names in (a, b))
    rows, depth, columns = (prod(sizes[x] for x in names) for names in (m, contracted, n))
    head = (prod(sizes[x] for x in batch),) if batch else ()
    left = _arranged(a, [*batch, *m, *contracted], (*head, rows, depth), len(m) == len(contracted) == 1 >= len(batch))
    right = _arranged(
        b, [*batch, *contracted, *n], (*head, depth, columns), len(contracted) == len(n) == 1 >= len(batch)
    )
    made = tuple(sizes[x] for x in (*batch, *m, *n))
    finish = _finished(tuple(out), [*batch, *m, *n], made, len(m) == len(n) == 1 >= len(batch))
    matmul: Product = torch.bmm if batch else torch.mm
    if dtype is not None:
        matmul = partial(_wide, matmul, dtype)

    if swap:
        return lambda x, y: finish(matmul(left(y), right(x)))
    return lambda x, y: finish(matmul(left(x), right(y)))


class Matrices(NamedTuple):
    """A product as one of matrices "rows k" and "k columns", or their transposes, in the order `swap` says.

    `a` and `b` bring the operands, so taken, into an order in which they are matrices without moving."""

    swap: bool
    rows: int
    columns: int
    a: Callable[[Tensor], Tensor]
    b: Callable[[Tensor], Tensor]
    transposed: list[bool]

    def operands(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int, int, list[bool]]:
        """What the kernels take."""
        x, y = (y, x) if self.swap else (x, y)
        return self.a(x), self.b(y), self.rows, self.columns, self.transposed

    def plain(self, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
        """The product by `mm`, summed in `dtype`."""
        return _wide(torch.mm, dtype, *as_matrices(*self.operands(x, y)))


def matrices(a: Names, b: Names, out: Names, shape_a: Shape, shape_b: Shape) -> Matrices | None:
    """How a contraction is one product of matrices whose result lies as the contraction's; None if it is not.

    >>> m = matrices(("s", "d"), ("s", "f"), ("d", "f"), (3, 2), (3, 5))
    >>> m.rows, m.columns, m.transposed
    (2, 5, [True, False])
    """
    contracted = [x for x in a if x in b and x not in out]
    m, n = ([x for x in names if x in out] for names in (a, b))
    if product(a, b, out, shape_a, shape_b) is None or any(x in b for x in m):
        return None
    swap = out[:1] == tuple(n[:1])
    if swap:
        a, b, m, n, shape_a, shape_b = b, a, n, m, shape_b, shape_a
    if list(out) != [*m, *n]:
        return None
    sizes = dict(zip((*a, *b), (*shape_a, *shape_b), strict=True))
    rows, columns = (prod(sizes[x] for x in names) for names in (m, n))
    left, ta = _ordered(a, m, contracted)
    right, tb = _ordered(b, contracted, n)
    return Matrices(swap, rows, columns, left, right, [ta, tb])


def _ordered(have: Names, first: list[str], second: list[str]) -> tuple[Callable[[Tensor], Tensor], bool]:
    """A tensor with its dimensions in the order "first second", or, untouched, in the order "second first" (True)."""
    if have == (*second, *first):
        return _same, True
    order = _order([*first, *second], have)
    return _same if order is None else lambda x: x.permute(order), False


def product_into(m: Matrices, result: Tensor, x: Tensor, y: Tensor, add: bool) -> None:
    """Write the product into given memory, or add it to what is there, summed in the result's dtype.

    >>> total = torch.ones(2, 5)
    >>> m = matrices(("s", "d"), ("s", "f"), ("d", "f"), (3, 2), (3, 5))
    >>> product_into(m, total, torch.ones(3, 2), torch.ones(3, 5), True)
    >>> total[0, 0]
    tensor(4.)
    """
    if result.device.type == "cuda" and x.dtype in HALF and result.dtype == torch.float32:
        mm_into(result, *m.operands(x, y), add)
        return
    made = m.plain(x, y, result.dtype).view(result.shape)
    if add:
        result.add_(made)
    else:
        result.copy_(made)


def product_plus(m: Matrices, c: Tensor, x: Tensor, y: Tensor, free: bool) -> Tensor:
    """c plus the product, rounded once on CUDA; c has the result's shape, and its memory is the result's if `free`.

    >>> m = matrices(("s", "d"), ("s", "f"), ("d", "f"), (3, 2), (3, 5))
    >>> product_plus(m, torch.ones(2, 5), torch.ones(3, 2), torch.ones(3, 5), False)[0, 0]
    tensor(4.)
    """
    if c.device.type == "cuda" and c.dtype in HALF:
        total = c if free and c.is_contiguous() else c.clone(memory_format=torch.contiguous_format)
        mm_add(total, *m.operands(x, y))
        return total
    return c + m.plain(x, y, c.dtype).view(c.shape)


def _wide(matmul: Callable[..., Tensor], dtype: torch.dtype, x: Tensor, y: Tensor) -> Tensor:
    """Summed and returned in `dtype`: by the kernel itself on CUDA."""
    if x.device.type == "cuda" and x.dtype in HALF:
        return matmul(x, y, out_dtype=dtype)
    return matmul(x.to(dtype), y.to(dtype))


def _order(wanted: list[str], have: Names) -> tuple[int, ...] | None:
    order = tuple(have.index(x) for x in wanted)
    return None if order == tuple(range(len(order))) else order


def _arranged(have: Names, wanted: list[str], shape: Shape, is_matrix: bool) -> Callable[[Tensor], Tensor]:
    """Dimensions in the wanted order, then merged."""
    order = _order(wanted, have)
    if order is None:
        return _same if is_matrix else lambda x: x.reshape(shape)
    return (lambda x: x.permute(order)) if is_matrix else (lambda x: x.permute(order).reshape(shape))


def _finished(out: Names, made: list[str], shape: Shape, is_matrix: bool) -> Callable[[Tensor], Tensor]:
    """Merged dimensions taken apart, then in the order of the result."""
    order = _order(list(out), tuple(made))
    if order is None:
        return _same if is_matrix else lambda x: x.view(shape)
    return (lambda x: x.permute(order)) if is_matrix else (lambda x: x.view(shape).permute(order))


def _same(x: Tensor) -> Tensor:
    return x
