"""Dropout whose mask depends on a key and the element's global index, never on the mesh."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from fmeg.ops._common import check_float


def dropout(x: Float[Tensor, "*shape"], rate: float, key: Int[Tensor, "2"]) -> Float[Tensor, "*shape"]:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate)."""
    check_float("dropout", x=x)
    raise NotImplementedError
