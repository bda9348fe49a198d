"""Lion: the sign of an interpolated momentum."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import tree
from fmeg.optim.base import Optimizer, Rate, add_decay, at, cast_like, counter, scale, widen, zeros_like
from fmeg.optim.rules import Rule, everywhere, resolve


class LionState(NamedTuple):
    """step: steps done; mu: momentum."""

    step: Int[Tensor, ""]
    mu: Any


def lion(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: Rate = 0.001,
    mask: Rule = everywhere,
    mu_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Lion, with decoupled weight decay λ.

        u = -η ( sign(b1 m + (1 - b1) g) + λ p )
        m ← b2 m + (1 - b2) g

    mask      rule: which parameters decay; all by default
    mu_dtype  of the momentum; None: the parameter's own

    Its steps are larger than AdamW's: the authors advise a learning rate 3 to 10 times smaller, λ larger by as much.
    Reference: Chen et al., "Symbolic discovery of optimization algorithms", https://arxiv.org/abs/2302.06675.
    As `optax.lion`.

    >>> params = {"w": torch.tensor([3.0, -4.0])}
    >>> opt = lion(0.5, weight_decay=0.0)
    >>> opt.update(params, opt.init(params))[0]
    {'w': tensor([-0.5000,  0.5000])}
    """

    def init(params: Any) -> LionState:
        return LionState(counter(params), zeros_like(params, mu_dtype))

    def update(grads: Any, state: LionState, params: Any = None) -> tuple[Any, LionState]:
        direction = tree.map(lambda m, g: torch.sign(b1 * widen(m) + (1 - b1) * widen(g)), state.mu, grads)
        mu = tree.map(lambda m, g: b2 * widen(m) + (1 - b2) * widen(g), state.mu, grads)
        lr, decay = at(learning_rate, state.step), at(weight_decay, state.step)
        step = add_decay(direction, params, decay, resolve(mask, grads, "lion"), "lion")
        return scale(step, -lr), LionState(state.step + 1, cast_like(mu, state.mu))

    return Optimizer(init, update)
