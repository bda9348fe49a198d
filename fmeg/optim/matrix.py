"""Which dimensions of a parameter are a matrix: `"layers (embed) (heads head_dim)"`.

Names in the first pair of parentheses are the matrix's rows, those in the second its columns; names outside are batch
dimensions, one matrix for each index. One pair only: a vector. Muon orthogonalises such matrices, Adafactor factors
their second moments, and both then treat a stack of layers exactly as they would treat the layers one by one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from fmeg import tree
from fmeg.optim.rules import Function, Rule, function


@dataclass(frozen=True)
class Matrix:
    """The dimensions (by index) that are batch, rows and columns. A vector has no columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    cols: tuple[int, ...]

    @property
    def is_matrix(self) -> bool:
        return bool(self.rows and self.cols)

    @property
    def ndim(self) -> int:
        return len(self.batch) + len(self.rows) + len(self.cols)

    def shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Rows and columns of a leaf of this shape.

        >>> parse_matrix("layers (embed) (heads head_dim)").shape((2, 8, 4, 3))
        (8, 12)
        """
        return math.prod(shape[d] for d in self.rows), math.prod(shape[d] for d in self.cols)


def parse_matrix(spec: str) -> Matrix:
    """Read a specification.

    >>> parse_matrix("layers (heads head_dim) (embed)")
    Matrix(batch=(0,), rows=(1, 2), cols=(3,))
    >>> parse_matrix("layers (embed)").is_matrix
    False
    """
    batch: list[int] = []
    groups: list[tuple[int, ...]] = []
    n = 0
    for inner, single in re.findall(r"\(([^()]*)\)|([^()\s]+)", spec):
        names = [single] if single else inner.split()
        dims = tuple(range(n, n + len(names)))
        n += len(names)
        if single:
            batch += dims
        else:
            groups.append(dims)
    if len(groups) > 2 or not all(groups) or spec.count("(") != len(groups) or spec.count(")") != len(groups):
        raise ValueError(
            f"matrix: {spec!r} should have at most two pairs of parentheses, rows then columns, none empty or nested, "
            "as in 'layers (embed) (heads head_dim)'"
        )
    rows, cols = [*groups, (), ()][:2]
    return Matrix(tuple(batch), rows, cols)


def in_stack(path: str) -> bool:
    """Whether a leaf lies in a stack of layers: below a name that ends in `layers`.

    >>> in_stack("params.dense_layers.w1"), in_stack("embed")
    (True, False)
    """
    return any(name.endswith("layers") for name in path.split("."))


BATCH = ("layers", "dense_layers", "first_layers", "last_layers", "mtp_layers", "experts")
JOIN = ("head_dim", "qk_dim", "nope_dim", "v_dim")


def matrices(
    axes: Any,
    batch: tuple[str, ...] = BATCH,
    join: tuple[str, ...] = JOIN,
    skip: tuple[str, ...] = ("vocab", "positions"),
) -> Any:
    """Matrix specifications from logical axes.

    batch   axes that number matrices
    join    axes that belong to the group of the axis before them
    skip    a leaf with such an axis gets None: embeddings and head, which Muon leaves to another optimizer

    A leaf with more than two groups (a convolution, say) gets None too.

    >>> matrices({"wq": "layers embed heads head_dim", "wo": "layers heads head_dim embed", "norm": "layers embed"})
    {'wq': 'layers (embed) (heads head_dim)', 'wo': 'layers (heads head_dim) (embed)', 'norm': 'layers (embed)'}
    >>> matrices({"w1": "layers experts embed ff", "embed": "vocab embed"})
    {'w1': 'layers experts (embed) (ff)', 'embed': None}
    """

    def spec(text: str) -> str | None:
        names = text.split()
        terms: list[list[str]] = []
        for name in names:
            if name in join and terms and terms[-1][0] not in batch:
                terms[-1].append(name)
            else:
                terms.append([name])
        groups = [t for t in terms if t[0] not in batch]
        if len(groups) > 2 or any(name in skip for name in names):
            return None
        return " ".join(t[0] if t[0] in batch else f"({' '.join(t)})" for t in terms)

    return tree.map(spec, axes)


def as_matrices(
    x: Float[Tensor, "*dims"], m: Matrix
) -> tuple[Float[Tensor, "*batch rows cols"], Callable[[Tensor], Tensor]]:
    """View a leaf as a stack of matrices; also returns the way back.

    >>> import torch
    >>> stack, back = as_matrices(torch.ones(2, 8, 4, 3), parse_matrix("layers (embed) (heads head_dim)"))
    >>> stack.shape, back(stack).shape
    (torch.Size([2, 8, 12]), torch.Size([2, 8, 4, 3]))
    """
    order = (*m.batch, *m.rows, *m.cols)
    inverse = tuple(sorted(range(x.ndim), key=order.__getitem__))
    moved = x.permute(order)
    merged = (*(x.shape[d] for d in m.batch), *m.shape(tuple(x.shape)))

    def back(y: Tensor) -> Tensor:
        return y.reshape(moved.shape).permute(inverse)

    return moved.reshape(merged), back


def matrix_of(rule: Rule, who: str) -> Function:
    """A rule of specifications as a function `(path, leaf) -> Matrix`, None where there is no specification.

    >>> import torch
    >>> read = matrix_of({"w": "layers (embed) (ff)"}, "muon")
    >>> read("w", torch.ones(2, 4, 8)), read("b", torch.ones(3))
    (Matrix(batch=(0,), rows=(1,), cols=(2,)), None)
    """
    spec_of = function(rule, who, optional=True)

    def read(path: str, leaf: Tensor) -> Matrix | None:
        spec = spec_of(path, leaf)
        m = None if spec is None else parse_matrix(spec)
        if m is not None and m.ndim != leaf.ndim:
            raise ValueError(
                f"{who}: matrix {spec!r} names {m.ndim} dimensions, but parameter {path!r} has shape "
                f"{tuple(leaf.shape)}"
            )
        return m

    return read
