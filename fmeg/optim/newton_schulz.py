"""Newton-Schulz iteration: the orthogonal factor of a matrix by products alone."""

from __future__ import annotations

import math
from typing import Any

from jaxtyping import Float
from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule

Coefficients = tuple[tuple[float, float, float], ...]

QUINTIC: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
"""Jordan's five equal steps: steep at 0, so that singular values above about 0.01 end between 0.68 and 1.14."""


def newton_schulz(
    x: Float[Tensor, "*l m n"], coefficients: Coefficients = QUINTIC, eps: float = 1e-7
) -> Float[Tensor, "*l m n"]:
    """Bring the singular values of each matrix near 1 and keep its singular vectors: U S Vᵀ → about U Vᵀ.

        X ← X / (‖X‖ + eps)                       Frobenius norm
        X ← a X + (b A + c A²) X,   A = X Xᵀ       once for each (a, b, c) of `coefficients`

    A matrix with more rows than columns is transposed first, which changes nothing but the cost: 4 m² n + 2 m³
    operations a step for m ≤ n. Computed in x's dtype. On a mesh whole matrices are needed: the axes that shard m or n
    go to the first l dimension if it divides, and are gathered otherwise, so the result is that of one device.

    Reference: Jordan et al., "Muon", https://kellerjordan.github.io/posts/muon, after Bernstein and Newhouse,
    "Old optimizer, new norm", https://arxiv.org/abs/2409.20325.

    >>> import torch
    >>> x = torch.diag(torch.tensor([5.0, 1.0, 0.2]))
    >>> torch.linalg.svdvals(newton_schulz(x)).sub(1).abs().max() < 0.35
    tensor(True)
    """
    if x.ndim < 2:
        raise ValueError(f"newton_schulz: `x` should have at least two dimensions, given shape {tuple(x.shape)}")
    return _primitive(x, coefficients=tuple(map(tuple, coefficients)), eps=eps)


def _reference(x: Tensor, *, coefficients: Coefficients, eps: float) -> Tensor:
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x
    y = y / (y.square().sum((-2, -1), keepdim=True).sqrt() + eps)
    for a, b, c in coefficients:
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.mT if tall else y


def _rule(node: Node) -> Rule:
    shape = node.args[0].shape
    batch = [f"l{i}" for i in range(len(shape) - 2)]
    dims = " ".join([*batch, "m", "n"])
    prefer = {"m": batch[0], "n": batch[0]} if batch else {}
    return rule(f"{dims} -> {dims}", [shape], whole=frozenset({"m", "n"}), prefer=prefer, declared=True)


def _flops(node: Node) -> int:
    *batch, m, n = node.args[0].shape
    m, n = min(m, n), max(m, n)
    steps: Any = node.kwargs["coefficients"]
    return math.prod(batch) * len(steps) * (4 * m * m * n + 2 * m**3)


_primitive = Primitive("newton_schulz", _reference, rule=_rule, flops=_flops)
