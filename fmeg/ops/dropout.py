"""Dropout whose mask depends on a key and the element's global index, never on the mesh."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg import random
from fmeg.ops._common import check_float, elements, row_names
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule, rule


def _reference(x: Tensor, key: Tensor, *offset: Any, rate: float, shape: tuple[int, ...]) -> Tensor:
    """`x` is the block that begins at `offset` (one number a dimension, default 0) of a tensor of `shape`."""
    where = {"block": tuple(x.shape)} if offset else {}
    keep = random._bernoulli.reference(key, *offset, shape=shape, dtype=torch.bool, p=1 - rate, **where)
    return torch.where(keep, x / (1 - rate), 0.0)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, None]:
    """Linear, and its own transpose: the mask is drawn again."""
    return dropout_p(cts[0], args[1], **kwargs), None


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    factors = row_names(len(shapes[0])).split()

    def local(info: Local, x: Tensor, key: Tensor, **kwargs: Any) -> Tensor:
        sharded = any(info.parts(f) > 1 for f in factors)
        return dropout_p(x, key, *(info.offset(f) for f in factors if sharded), **kwargs)

    dims = " ".join(factors)
    whole = frozenset({"word"})
    return rule(f"{dims}, word -> {dims}", shapes, whole=whole, linear=frozenset({0}), local=local)


dropout_p = Primitive("dropout", _reference, vjp=_vjp, rule=_rule, flops=lambda n: 2 * elements(n), cheap=True)


def dropout(x: Float[Tensor, "*shape"], rate: float, key: Int[Tensor, "2"]) -> Float[Tensor, "*shape"]:
    """Zero each element with probability `rate` and scale the others by 1 / (1 - rate).

    key     of `fmeg.random`. Element i of the mask depends on the key and the global index i alone, so every layout
            drops the same elements. Fold a name and a layer's number into the key for each use.

    Evaluation does not call it. Raises ValueError unless 0 ≤ rate < 1. Source: Srivastava et al. 2014, JMLR 15.

    >>> dropout(torch.ones(8), 0.5, random.key(0)).unique()
    tensor([0., 2.])
    """
    check_float("dropout", x=x)
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout: rate must be in [0, 1), given {rate}")
    random._check_key("dropout", key)
    if rate == 0.0:
        return x
    return dropout_p(x, key, rate=float(rate), shape=tuple(x.shape))
