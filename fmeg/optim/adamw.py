"""AdamW: Adam with decoupled weight decay."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import tree
from fmeg.optim.base import Optimizer, Rate, add_decay, at, cast_like, counter, scale, widen, zeros_like
from fmeg.optim.rules import Rule, everywhere, resolve


class AdamWState(NamedTuple):
    """step: steps done; mu: first moments; nu: second moments."""

    step: Int[Tensor, ""]
    mu: Any
    nu: Any


def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: Rate = 0.01,
    mask: Rule = everywhere,
    mu_dtype: torch.dtype | None = None,
    nu_dtype: torch.dtype | None = None,
) -> Optimizer:
    """AdamW.

    At step t = 1, 2, …, with learning rate η(t - 1) and weight decay λ:

        m ← b1 m + (1 - b1) g
        v ← b2 v + (1 - b2) g²
        u = -η ( m / (1 - b1ᵗ) / (√(v / (1 - b2ᵗ)) + eps) + λ p )

    mask                 rule: which parameters decay (`decay_matrices`, `decay_by_axes`); all by default
    mu_dtype, nu_dtype   of the moments; None: the parameter's own. In bfloat16 a second moment with b2 > 0.996 hardly
                         moves (its changes are below half a unit in the last place): give float32 then

    Reference: Loshchilov and Hutter, "Decoupled weight decay regularization", https://arxiv.org/abs/1711.05101.
    As `torch.optim.AdamW` and `optax.adamw`.

    >>> params = {"w": torch.tensor([1.0, -2.0])}
    >>> opt = adamw(0.1, weight_decay=0.0)
    >>> updates, state = opt.update(params, opt.init(params), params)
    >>> updates["w"], state.step
    (tensor([-0.1000,  0.1000]), tensor(1))
    """

    def init(params: Any) -> AdamWState:
        return AdamWState(counter(params), zeros_like(params, mu_dtype), zeros_like(params, nu_dtype))

    def update(grads: Any, state: AdamWState, params: Any = None) -> tuple[Any, AdamWState]:
        t = (state.step + 1).to(torch.float64)
        bias1, bias2 = 1 - b1**t, 1 - b2**t
        mu = tree.map(lambda m, g: b1 * widen(m) + (1 - b1) * widen(g), state.mu, grads)
        nu = tree.map(lambda v, g: b2 * widen(v) + (1 - b2) * widen(g).square(), state.nu, grads)
        direction = tree.map(lambda m, v: (m / bias1 / ((v / bias2).sqrt() + eps)).to(m.dtype), mu, nu)
        lr, decay = at(learning_rate, state.step), at(weight_decay, state.step)
        step = add_decay(direction, params, decay, resolve(mask, grads, "adamw"), "adamw")
        return scale(step, -lr), AdamWState(state.step + 1, cast_like(mu, state.mu), cast_like(nu, state.nu))

    return Optimizer(init, update)
