"""A small tree of parameters like a model's, and its gradients."""

from __future__ import annotations

from typing import Any

import torch

from fmeg import tree

STEPS = 6


def make_params(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Stacked matrices and vectors, an embedding, a bias and a scalar; the head is scaled to be far from the others."""
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    return {
        "layers": {"w": normal(3, 4, 5), "norm": normal(3, 4)},
        "embed": normal(7, 4),
        "bias": normal(5),
        "head": 1e-4 * normal(4, 6),
        "temperature": normal(),
    }


def make_grads(params: Any, step: int) -> Any:
    """Noise plus the parameter itself, so that an error in one step shows in all that follow."""
    g = torch.Generator().manual_seed(100 + step)
    return tree.map(lambda p: (torch.randn(p.shape, generator=g, dtype=torch.float64) + p).to(p.dtype), params)
