"""Muon: momentum whose matrices are orthogonalised."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import tree
from fmeg.optim.adamw import adamw
from fmeg.optim.base import Optimizer, Rate, add_decay, at, cast_like, counter, scale, widen, zeros_like
from fmeg.optim.masks import partition
from fmeg.optim.matrix import as_matrices, in_stack, matrix_of
from fmeg.optim.newton_schulz import QUINTIC, Coefficients, newton_schulz
from fmeg.optim.rules import Rule, everywhere, resolve


class MuonState(NamedTuple):
    """step: steps done; mu: momentum."""

    step: Int[Tensor, ""]
    mu: Any


_SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms": lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)),
    "original": lambda rows, cols: math.sqrt(max(1.0, cols / rows)),
}


def stacked_matrices(path: str, leaf: Tensor) -> str | None:
    """Muon's default rule: leaves in stacks of layers with two dimensions after the stacked one are matrices, vectors
    are not.

    Everything outside (embedding, head, last norm) is left to the other optimizer.

    >>> stacked_matrices("dense_layers.w1", torch.ones(2, 4, 8)), stacked_matrices("embed", torch.ones(16, 4))
    ('layers (rows) (cols)', None)
    """
    if not in_stack(path) or leaf.ndim < 3:
        return None
    if leaf.ndim > 3:
        raise ValueError(
            f"muon: parameter {path!r} has shape {tuple(leaf.shape)}, and only you know which of its dimensions are "
            "rows and which are columns. Give matrix=matrices(logical axes), or a tree or function of specifications "
            "such as 'layers (embed) (heads head_dim)'"
        )
    return "layers (rows) (cols)"


def muon(
    learning_rate: Rate,
    matrix: Rule = stacked_matrices,
    others: Optimizer | None = None,
    b1: float = 0.95,
    nesterov: bool = True,
    weight_decay: Rate = 0.1,
    mask: Rule = everywhere,
    scaling: str = "match_rms",
    coefficients: Coefficients = QUINTIC,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    mu_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Muon for matrices, another optimizer for the rest. For each matrix of r rows (inputs) and c columns (outputs):

        m ← b1 m + (1 - b1) g
        o = newton_schulz(m)             or with `nesterov`   newton_schulz(b1 m + (1 - b1) g)
        u = -η (s o + λ p)               s = 0.2 √max(r, c)  ("match_rms")   or   √max(1, c / r)  ("original")

    matrix        rule of specifications (`fmeg.optim.matrix`), such as `matrices(logical axes)`; parameters without one
                  (None), and vectors, go to `others`
    others        None: adamw(learning_rate, b2=0.95, weight_decay=weight_decay, mask=mask)
    scaling       "match_rms" gives updates the size of AdamW's, so learning rate and weight decay carry over
    coefficients  one (a, b, c) a Newton-Schulz step
    dtype         of that iteration, such as bfloat16; None: float32 or wider
    mu_dtype      of the momentum; None: the parameter's own

    The state is {"muon": MuonState, "others": …}. Whole matrices are orthogonalised, whatever the layout.
    References: Jordan et al., https://kellerjordan.github.io/posts/muon; Liu et al., "Muon is scalable for LLM
    training", https://arxiv.org/abs/2502.16982 (0.2 √max, weight decay). As `torch.optim.Muon`, whose weights are
    (out, in).

    >>> params = {"layers": {"w": torch.ones(2, 4, 8), "norm": torch.ones(2, 4)}, "embed": torch.ones(16, 4)}
    >>> opt = muon(0.01)
    >>> updates, state = opt.update(params, opt.init(params), params)
    >>> tree.paths(state)
    ['muon.step', 'muon.mu.layers.w', 'others.step', 'others.mu.embed', 'others.mu.layers.norm',
     'others.nu.embed', 'others.nu.layers.norm']
    """
    if scaling not in _SCALES:
        raise ValueError(f"muon: `scaling` should be one of {', '.join(_SCALES)}, given {scaling!r}")

    matrix_at = matrix_of(matrix, "muon")

    def label(path: str, leaf: Tensor) -> str:
        m = matrix_at(path, leaf)
        return "muon" if m is not None and m.is_matrix else "others"

    def orthogonal(path: str, d: Tensor) -> Tensor:
        m = matrix_at(path, d)
        stack, back = as_matrices(d if dtype is None else d.to(dtype), m)
        factor = _SCALES[scaling](*m.shape(tuple(d.shape)))
        return factor * back(newton_schulz(stack, coefficients, eps)).to(d.dtype)

    def init(params: Any) -> MuonState:
        if not tree.leaves(params):
            raise ValueError(
                "muon: no parameter is a matrix by the rule `matrix`; the default rule looks below `layers`. "
                "Give matrix=matrices(logical axes), or a tree or function of specifications"
            )
        return MuonState(counter(params), zeros_like(params, mu_dtype))

    def update(grads: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        average = lambda m, g: b1 * widen(m) + (1 - b1) * widen(g)
        mu = tree.map(average, state.mu, grads)
        direction = tree.map(average, mu, grads) if nesterov else mu
        direction = tree.map_with_path(orthogonal, direction)
        lr, decay = at(learning_rate, state.step), at(weight_decay, state.step)
        step = add_decay(direction, params, decay, resolve(mask, grads, "muon"), "muon")
        return scale(step, -lr), MuonState(state.step + 1, cast_like(mu, state.mu))

    rest = adamw(learning_rate, b2=0.95, weight_decay=weight_decay, mask=mask) if others is None else others
    return partition({"muon": Optimizer(init, update), "others": rest}, label)
