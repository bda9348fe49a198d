"""Adafactor: second moments kept as a row and a column."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg import tree
from fmeg.optim.base import Optimizer, Rate, add_decay, at, cast_like, counter, scale, widen, zeros_like
from fmeg.optim.matrix import Matrix, in_stack, matrix_of
from fmeg.optim.rules import Rule, everywhere, resolve


class AdafactorState(NamedTuple):
    """step: steps done; v_row, v_col: factored second moments, whose averaged dimensions have size 1; v: those of
    parameters that are not factored; mu: momentum. None for a parameter without such a moment; mu is None without b1.
    """

    step: Int[Tensor, ""]
    v_row: Any
    v_col: Any
    v: Any
    mu: Any


def adafactor(
    learning_rate: Rate,
    decay_rate: float = 0.8,
    clip: float | None = 1.0,
    relative: bool = True,
    b1: float | None = None,
    weight_decay: Rate = 0.0,
    mask: Rule = everywhere,
    matrix: Rule | None = None,
    min_dim: int = 128,
    eps: float = 1e-30,
    min_scale: float = 1e-3,
    v_dtype: torch.dtype | None = None,
    mu_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Adafactor. At step t = 1, 2, …, with b2 = 1 - t^(-decay_rate), for each matrix:

        R ← b2 R + (1 - b2) mean over columns of (g² + eps)
        C ← b2 C + (1 - b2) mean over rows of (g² + eps)
        d = g / √(R C / mean R)
        d ← d / max(1, RMS(d) / clip) · max(min_scale, RMS(p))
        u = -η (d + λ p)

    A leaf that is no matrix, or has fewer than min_dim rows or columns, keeps V ← b2 V + (1 - b2) (g² + eps), and
    d = g / √V.

    clip      None: no clipping;  relative: False leaves out RMS(p), η is then absolute
    b1        momentum, m ← b1 m + (1 - b1) d; None: none
    matrix    rule of specifications (`fmeg.optim.matrix`). Where it has none, and by default: the last two dimensions
              are rows and columns, and a first one is batch if the path contains `layers`. RMS is taken over all but
              batch dimensions, so that stacked layers are treated as each would be alone
    v_dtype, mu_dtype   of the moments; None: the parameter's own

    Reference: Shazeer and Stern, "Adafactor", https://arxiv.org/abs/1804.04235. The authors' relative step sizes are
    the schedule `lambda count: (count + 1).rsqrt().clamp(max=1e-2)`. As `optax.adafactor`, but that weight
    decay is times η.

    >>> params = {"w": torch.ones(256, 512), "b": torch.ones(512)}
    >>> opt = adafactor(0.01)
    >>> state = opt.init(params)
    >>> tree.map(lambda x: tuple(x.shape), state)
    AdafactorState(step=(), v_row={'w': (256, 1), 'b': None}, v_col={'w': (1, 512), 'b': None},
                   v={'w': None, 'b': (512,)}, mu=None)
    >>> updates, state = opt.update(params, state, params)
    >>> updates["b"][:2]
    tensor([-0.0100, -0.0100])
    """

    given = matrix_of({} if matrix is None else matrix, "adafactor")

    def factors(params: Any) -> Any:
        return tree.map_with_path(lambda path, p: given(path, p) or _last_two(path, p), params)

    def factored(p: Tensor, m: Matrix) -> bool:
        return m.is_matrix and min(m.shape(tuple(p.shape))) >= min_dim

    def init(params: Any) -> AdafactorState:
        fs = factors(params)
        row = lambda p, m: _zeros(p, m.cols, v_dtype) if factored(p, m) else None
        col = lambda p, m: _zeros(p, m.rows, v_dtype) if factored(p, m) else None
        full = lambda p, m: None if factored(p, m) else _zeros(p, (), v_dtype)
        mu = None if b1 is None else zeros_like(params, mu_dtype)
        rows, cols, rest = (tree.map(f, params, fs) for f in (row, col, full))
        return AdafactorState(counter(params), rows, cols, rest, mu)

    def update(grads: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        if relative and params is None:
            raise ValueError("adafactor: `params` is None, but relative=True needs it; pass it to update")
        b2 = 1 - (state.step + 1).to(torch.float64) ** -decay_rate
        fs = factors(grads)

        def moment(old: Tensor | None, g: Tensor, dims: tuple[int, ...]) -> Tensor | None:
            if old is None:
                return None
            new = _mean(widen(g).square() + eps, dims)
            return (b2 * widen(old) + (1 - b2) * new).to(new.dtype)

        def direction(g: Tensor, m: Matrix, row: Tensor | None, col: Tensor | None, v: Tensor | None, p: Any) -> Tensor:
            if row is not None and col is not None:
                d = widen(g) * (row / _mean(row, m.rows)).rsqrt() * col.rsqrt()
            else:
                assert v is not None
                d = widen(g) * v.rsqrt()
            dims = tuple(i for i in range(g.ndim) if i not in m.batch)
            if clip is not None:
                d = d / (_rms(d, dims) / clip).clamp(min=1.0)
            return d * _rms(widen(p), dims).clamp(min=min_scale) if relative else d

        rows = tree.map(lambda g, m, old: moment(old, g, m.cols), grads, fs, state.v_row)
        cols = tree.map(lambda g, m, old: moment(old, g, m.rows), grads, fs, state.v_col)
        full = tree.map(lambda g, old: moment(old, g, ()), grads, state.v)
        step = tree.map(direction, grads, fs, rows, cols, full, params if relative else grads)
        mu = None
        if b1 is not None:
            step = tree.map(lambda m, d: b1 * widen(m) + (1 - b1) * d, state.mu, step)
            mu = cast_like(step, state.mu)
        lr, decay = at(learning_rate, state.step), at(weight_decay, state.step)
        step = add_decay(step, params, decay, resolve(mask, grads, "adafactor"), "adafactor")
        rows, cols, full = cast_like((rows, cols, full), (state.v_row, state.v_col, state.v))
        return scale(step, -lr), AdafactorState(state.step + 1, rows, cols, full, mu)

    return Optimizer(init, update)


def _last_two(path: str, p: Tensor) -> Matrix:
    batch = (0,) if p.ndim and in_stack(path) else ()
    if p.ndim - len(batch) < 2:
        return Matrix(batch, tuple(range(len(batch), p.ndim)), ())
    return Matrix(batch, (p.ndim - 2,), (p.ndim - 1,))


def _zeros(p: Tensor, dims: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    shape = [1 if i in dims else n for i, n in enumerate(p.shape)]
    return torch.zeros(shape, dtype=dtype or p.dtype, device=p.device)


def _mean(x: Float[Tensor, "*dims"], dims: tuple[int, ...]) -> Float[Tensor, "*kept"]:
    return x.sum(dims, keepdim=True) * (1 / math.prod(x.shape[i] for i in dims)) if dims else x


def _rms(x: Float[Tensor, "*dims"], dims: tuple[int, ...]) -> Float[Tensor, "*kept"]:
    return _mean(x.square(), dims).sqrt()
