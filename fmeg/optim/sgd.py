"""Stochastic gradient descent, with momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import tree
from fmeg.optim.base import Optimizer, Rate, add_decay, at, cast_like, counter, scale, widen, zeros_like
from fmeg.optim.rules import Rule, everywhere, resolve


class SGDState(NamedTuple):
    """step: steps done; mu: momentum, None without."""

    step: Int[Tensor, ""]
    mu: Any


def sgd(
    learning_rate: Rate,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: Rate = 0.0,
    mask: Rule = everywhere,
    mu_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Gradient descent with heavy-ball or Nesterov momentum β, and an L2 penalty λ.

        g ← g + λ p
        m ← β m + g
        u = -η m          or with `nesterov`   -η (g + β m)

    mask      rule: which parameters have the penalty; all by default
    mu_dtype  of the momentum; None: the parameter's own

    Reference: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.
    As `torch.optim.SGD` and `optax.sgd`.

    >>> params = {"w": torch.tensor([1.0])}
    >>> opt = sgd(0.5, momentum=0.5)
    >>> updates, state = opt.update(params, opt.init(params))
    >>> opt.update(params, state)[0]
    {'w': tensor([-0.7500])}
    """
    if nesterov and not momentum:
        raise ValueError(f"sgd: nesterov=True needs a momentum above 0, given {momentum}; try momentum=0.9")

    def init(params: Any) -> SGDState:
        return SGDState(counter(params), zeros_like(params, mu_dtype) if momentum else None)

    def update(grads: Any, state: SGDState, params: Any = None) -> tuple[Any, SGDState]:
        lr, penalty = at(learning_rate, state.step), at(weight_decay, state.step)
        direction, mu = add_decay(tree.map(widen, grads), params, penalty, resolve(mask, grads, "sgd"), "sgd"), None
        if momentum:
            wide = tree.map(lambda m, g: momentum * widen(m) + g, state.mu, direction)
            direction = tree.map(lambda m, g: g + momentum * m, wide, direction) if nesterov else wide
            mu = cast_like(wide, state.mu)
        return scale(direction, -lr), SGDState(state.step + 1, mu)

    return Optimizer(init, update)
