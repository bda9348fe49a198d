"""Skipping steps whose gradients are not finite."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import tree
from fmeg.optim.base import Optimizer, counter


class FiniteState(NamedTuple):
    """skipped: steps that were skipped so far; inner: the wrapped optimizer's state."""

    skipped: Int[Tensor, ""]
    inner: Any


def skip_nonfinite(inner: Optimizer) -> Optimizer:
    """Run `inner`, unless a gradient element is infinite or NaN: then zero updates, same inner state, `skipped` + 1.

    Wrap the whole chain, so that clipping sees the same gradients. As `optax.apply_if_finite` without its limit of
    consecutive skips: the count is in the state, for the training loop to look at.

    >>> from fmeg.optim import sgd
    >>> opt = skip_nonfinite(sgd(0.5))
    >>> grads = {"w": torch.tensor([1.0, float("nan")])}
    >>> updates, state = opt.update(grads, opt.init(grads))
    >>> updates["w"], state.skipped, state.inner.step
    (tensor([0., 0.]), tensor(1), tensor(0))
    """

    def init(params: Any) -> FiniteState:
        return FiniteState(counter(params), inner.init(params))

    def update(grads: Any, state: FiniteState, params: Any = None) -> tuple[Any, FiniteState]:
        bad = tree.sum([(~torch.isfinite(g)).sum() for g in tree.leaves(grads)])
        ok = bad == 0
        updates, new = inner.update(grads, state.inner, params)
        updates = tree.map(lambda u: torch.where(ok, u, torch.zeros_like(u)), updates)
        kept = tree.map(lambda a, b: torch.where(ok, a, b), new, state.inner)
        return updates, FiniteState(state.skipped + (~ok).to(torch.int64), kept)

    return Optimizer(init, update)
