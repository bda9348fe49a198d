"""Clipping by the norm of all gradients together."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from fmeg import tree
from fmeg.optim.base import Optimizer, widen


def global_norm(values: Any) -> Float[Tensor, ""]:
    """√ Σ x² over every element of every leaf, in float32 or wider.

    Each leaf gives one 0-d sum and the sums are added before the root, so on a mesh they can be reduced together.

    >>> import torch
    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([[4.0]])})
    tensor(5.)
    """
    return tree.sum([widen(x).square().sum() for x in tree.leaves(values)]).sqrt()


def clip_by_global_norm(max_norm: float, eps: float = 1e-6) -> Optimizer:
    """Scale all gradients by `min(1, max_norm / (global_norm + eps))`; the state is empty.

    Reference: Pascanu et al., "On the difficulty of training recurrent neural networks", https://arxiv.org/abs/1211.5063.
    As `torch.nn.utils.clip_grad_norm_`, with its eps. To clip parts of a model by their own norms, use `partition`.

    >>> import torch
    >>> clip_by_global_norm(1.0).update({"w": torch.tensor([3.0, 4.0])}, ())[0]
    {'w': tensor([0.6000, 0.8000])}
    """

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = (max_norm / (global_norm(grads) + eps)).clamp(max=1.0)
        return tree.map(lambda g: (widen(g) * factor).to(g.dtype), grads), state

    return Optimizer(lambda params: (), update)
