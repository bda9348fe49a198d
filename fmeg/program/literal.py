"""Small tensors written into a program, as `torch.tensor(1.0)` makes them: the node `constant(Literal(tensor))`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class Literal:
    """A tensor as an argument of a node. Two literals are equal if they are one.

    >>> constant(Literal(torch.tensor(1.5)))
    tensor(1.5000)
    """

    tensor: torch.Tensor


class _Constant:
    name = "constant"

    def __call__(self, literal: Literal) -> torch.Tensor:
        return literal.tensor


constant: Callable[[Literal], torch.Tensor] = _Constant()
