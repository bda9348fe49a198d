"""Parameters kept in bfloat16 without losing small updates: by the other half of their bits, or by chance.

An update is often below half a unit in the last of bfloat16's 8 bits, and rounding to nearest then never takes a step.
Both wrappers here do an optimizer's arithmetic on float32 parameters and store bfloat16:

    split_master           the state keeps the 16 bits that bfloat16 lacks: together exactly the float32 parameter
    stochastic_rounding    up or down at random, in proportion to the distance: right on average, nothing more to store

They are the outermost optimizer, but for `skip_nonfinite`, `masked` and `partition`. Leaves that are not bfloat16 get
the inner optimizer's updates unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import BFloat16, Float, Float32, Float64, Int, Int16, Int32
from torch import Tensor

from fmeg import random, tree
from fmeg.optim.base import Optimizer, counter

_HIGH = -(2**16)  # the high half of an int32's bits
_NAN = 0x7FC00000


class SplitState(NamedTuple):
    """low: the parameters' low halves, int16 (None for those that are not bfloat16); inner: the optimizer's state."""

    low: Any
    inner: Any


class RoundingState(NamedTuple):
    """step: steps done; key: of the random bits; inner: the wrapped optimizer's state."""

    step: Int[Tensor, ""]
    key: random.Key
    inner: Any


def to_halves(params: Any) -> tuple[Any, Any]:
    """float32 leaves as (bfloat16 leaves, int16 leaves); other leaves as they are, and None.

    The high half is the nearest bfloat16 (of two, the one away from zero), the low half the signed rest of the bits.

    >>> high, low = to_halves({"w": torch.tensor([1.0, 1.001])})
    >>> high["w"], low["w"], from_halves(high, low)["w"]
    (tensor([1., 1.], dtype=torch.bfloat16), tensor([   0, 8389], dtype=torch.int16), tensor([1.0000, 1.0010]))
    """
    pairs = tree.map(lambda p: _halves(p) if p.dtype == torch.float32 else (p, None), params)
    at = lambda i: tree.map(lambda p, pair: pair[i], params, pairs)
    return tree.map(lambda p, x: x.to(torch.bfloat16) if p.dtype == torch.float32 else x, params, at(0)), at(1)


def from_halves(params: Any, low: Any) -> Any:
    """The float32 parameters that bfloat16 ones and their low halves are; leaves without a low half as they are.

    >>> from_halves({"w": torch.ones(1, dtype=torch.bfloat16)}, {"w": torch.tensor([1], dtype=torch.int16)})["w"] - 1
    tensor([1.1921e-07])
    """
    return tree.map(lambda p, r: p if r is None else _joined(p, r), params, low)


def split_master(inner: Optimizer) -> Optimizer:
    """`inner` on float32 parameters that are stored as bfloat16 ones and, in the state, the 16 bits that these lack.

        master = bits(p) · 2¹⁶ + low        p' , low' = halves(master + u)

    Equal to float32 parameters bit for bit (but for the sign of numbers below 1e-40), in a third less memory than a
    bfloat16 copy beside them: what the model sees is the nearest bfloat16. Moments are float32 by default. The state
    begins with low halves of zero; to begin from float32 parameters, use `to_halves` and replace `low`. Updates are
    float64, so that adding them gives exactly the new bfloat16 value. ValueError if `params` is None.

    >>> from fmeg.optim import apply_updates, sgd
    >>> opt, params = split_master(sgd(1.0)), {"w": torch.ones(1, dtype=torch.bfloat16)}
    >>> state = opt.init(params)
    >>> for _ in range(8):                        # eight steps of which bfloat16 alone would take none
    ...     updates, state = opt.update({"w": torch.full((1,), -1e-3)}, state, params)
    ...     params = apply_updates(params, updates)
    >>> params["w"], from_halves(params, state.low)["w"]
    (tensor([1.0078], dtype=torch.bfloat16), tensor([1.0080]))
    """

    def init(params: Any) -> SplitState:
        low = tree.map(lambda p: torch.zeros_like(p, dtype=torch.int16) if _narrow(p) else None, params)
        return SplitState(low, inner.init(from_halves(params, low)))

    def update(grads: Any, state: SplitState, params: Any = None) -> tuple[Any, SplitState]:
        _need("split_master", params)
        masters = from_halves(params, state.low)
        updates, new = inner.update(grads, state.inner, masters)
        pairs = tree.map(lambda p, m, u: _halves((m + u).float()) if _narrow(p) else None, params, masters, updates)
        updates = tree.map(lambda p, u, pair: u if pair is None else _difference(pair[0], p), params, updates, pairs)
        low = tree.map(lambda p, pair: None if pair is None else pair[1], params, pairs)
        return updates, SplitState(low, new)

    return Optimizer(init, update)


def stochastic_rounding(inner: Optimizer, seed: int = 0) -> Optimizer:
    """`inner`, with bfloat16 parameters rounded up or down at random, so that the mean is the float32 result.

        p' = ⌊p + u⌋ with probability 1 - f, else ⌈p + u⌉        f = (p + u - ⌊p + u⌋) / (⌈p + u⌉ - ⌊p + u⌋)

    The bits depend on the seed (a key in the state), the step, the parameter's path and the element's global index,
    never on the layout. Give `inner` float32 moments (`mu_dtype`). Updates are float64, so that adding them gives
    exactly the value chosen. ValueError if `params` is None.

    Source: Gupta et al., "Deep learning with limited numerical precision", https://arxiv.org/abs/1502.02551.

    >>> from fmeg.optim import apply_updates, sgd
    >>> params = {"w": torch.ones(10000, dtype=torch.bfloat16)}
    >>> opt = stochastic_rounding(sgd(1.0))
    >>> updates, state = opt.update({"w": torch.full((10000,), -1e-3)}, opt.init(params), params)
    >>> new = apply_updates(params, updates)["w"].float()
    >>> new.unique(), bool((new.mean() - 1.001).abs() < 1e-4)
    (tensor([1.0000, 1.0078]), True)
    """

    def init(params: Any) -> RoundingState:
        step = counter(params)
        return RoundingState(step, random.key(seed, step.device), inner.init(params))

    def update(grads: Any, state: RoundingState, params: Any = None) -> tuple[Any, RoundingState]:
        _need("stochastic_rounding", params)
        updates, new = inner.update(grads, state.inner, params)
        now = random.fold_in(state.key, state.step)

        def rounded(path: str, p: Tensor, u: Tensor) -> Tensor:
            if not _narrow(p):
                return u
            new = (p.float() + u).float()
            return _difference(_rounded(new, random.rounding_bits(now, p.shape, path)), p)

        return tree.map_with_path(rounded, params, updates), RoundingState(state.step + 1, state.key, new)

    return Optimizer(init, update)


def _narrow(p: Tensor) -> bool:
    return p.dtype == torch.bfloat16


def _need(who: str, params: Any) -> None:
    if params is None:
        raise ValueError(
            f"{who}: `params` is None, but it decides how they are rounded; call update(grads, state, params)"
        )


# All is done on the bits: a compiler may keep more than bfloat16 holds of what is cast there and back.
def _bits(x: Float[Tensor, "*d"]) -> Int32[Tensor, "*d"]:
    return x.float().view(torch.int32)


def _high(bits: Int32[Tensor, "*d"], x: Float32[Tensor, "*d"]) -> Int32[Tensor, "*d"]:
    """The high half of the bits, of a NaN wherever x is one."""
    return torch.where(x.isnan(), _NAN, bits & _HIGH)


def _halves(x: Float32[Tensor, "*d"]) -> tuple[Float32[Tensor, "*d"], Int16[Tensor, "*d"]]:
    """(the nearest bfloat16, in float32; the rest of the bits)."""
    bits = _bits(x)
    high = _high(bits + 2**15, x)
    return high.view(torch.float32), (bits - high).to(torch.int16)


def _joined(p: BFloat16[Tensor, "*d"], low: Int16[Tensor, "*d"]) -> Float32[Tensor, "*d"]:
    return (_bits(p) + low).view(torch.float32)


def _rounded(x: Float32[Tensor, "*d"], noise: Int32[Tensor, "*d"]) -> Float32[Tensor, "*d"]:
    """The bfloat16 below or above in magnitude, in float32: whether the noise, 0 <= n < 2¹⁶, carries into the high
    half."""
    return _high(_bits(x) + noise, x).view(torch.float32)


def _difference(new: Float32[Tensor, "*d"], old: BFloat16[Tensor, "*d"]) -> Float64[Tensor, "*d"]:
    """What must be added to get from one bfloat16 to another, exactly."""
    return new.double() - old.double()
