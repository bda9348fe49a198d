"""Tensors in float32 as sums of bf16 ones."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fmeg::split", mutates_args=())
def split(x: Tensor, parts: list[int], dim: int) -> Tensor:
    """The asked parts of x = part 0 + part 1 + part 2 + …, each the rest rounded to bf16, stacked along a new `dim`.

    An operation of its own, since compilers take two casts in a row for none.

    >>> split(torch.tensor([1.0 + 2**-10]), [0, 1, 2], 0).flatten().tolist()
    [1.0, 0.0009765625, 0.0]
    """
    made, rest = [], x
    for _ in range(max(parts) + 1):
        made.append(rest.bfloat16())
        rest = rest - made[-1].float()
    return torch.stack([made[i] for i in parts], dim)


@split.register_fake
def _(x: Tensor, parts: list[int], dim: int) -> Tensor:
    shape = [*x.shape[:dim], len(parts), *x.shape[dim:]]
    return x.new_empty(shape, dtype=torch.bfloat16)
