"""Schedules: functions of the number of steps done, for learning rates and weight decay.

A schedule takes a 0-d tensor, the number of steps done before this one, and gives a 0-d float64 tensor. For plots and
tables these also take a Python number, or a tensor of any shape, elementwise. `steps` counts the whole schedule,
warm-up included; after it the last value stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

Count = Tensor | int | float
Curve = Callable[[Count], Float[Tensor, "*dims"]]


def _steps(count: Count) -> Float[Tensor, "*dims"]:
    return torch.as_tensor(count).to(torch.float64)


def _positive(who: str, name: str, value: float) -> None:
    if value <= 0:
        raise ValueError(f"{who}: `{name}` should be above 0, given {value}")


def constant(value: float, warmup: int = 0) -> Curve:
    """Always `value`, after a linear warm-up from 0.

    >>> constant(0.5, warmup=4)(torch.tensor([0, 1, 4, 9]))
    tensor([0.0000, 0.1250, 0.5000, 0.5000], dtype=torch.float64)
    """
    return with_warmup(lambda count: torch.full_like(_steps(count), value), warmup)


def linear(peak: float, steps: int, end: float = 0.0, warmup: int = 0) -> Curve:
    """From `peak` to `end` in a straight line, after a linear warm-up from 0.

        end + (peak - end) (1 - x),   x = (t - warmup) / (steps - warmup) in [0, 1]

    >>> linear(1.0, 4)(torch.tensor([0, 1, 4, 9]))
    tensor([1.0000, 0.7500, 0.0000, 0.0000], dtype=torch.float64)
    """
    return _decay("linear", _SHAPES["linear"], peak, steps, end, warmup)


def cosine(peak: float, steps: int, end: float = 0.0, warmup: int = 0) -> Curve:
    """From `peak` to `end` along half a cosine, after a linear warm-up from 0.

        end + (peak - end) (1 + cos πx) / 2,   x = (t - warmup) / (steps - warmup) in [0, 1]

    Reference: Loshchilov and Hutter, "SGDR", https://arxiv.org/abs/1608.03983.

    >>> cosine(1.0, 6, end=0.1, warmup=2)(torch.tensor([0, 1, 2, 4, 6, 9]))
    tensor([0.0000, 0.5000, 1.0000, 0.5500, 0.1000, 0.1000], dtype=torch.float64)
    """
    return _decay("cosine", _SHAPES["cosine"], peak, steps, end, warmup)


def inverse_sqrt(peak: float, warmup: int) -> Curve:
    """Linear warm-up from 0 to `peak`, then `peak √(warmup / t)`, for ever.

    Reference: Vaswani et al., "Attention is all you need", https://arxiv.org/abs/1706.03762, section 5.3.

    >>> inverse_sqrt(1.0, warmup=4)(torch.tensor([0, 2, 4, 16]))
    tensor([0.0000, 0.5000, 1.0000, 0.5000], dtype=torch.float64)
    """
    _positive("inverse_sqrt", "warmup", warmup)
    return with_warmup(lambda count: peak * (warmup / (_steps(count).clamp(min=0) + warmup)).sqrt(), warmup)


_SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: 0.5 * (1 + torch.cos(math.pi * x)),
    "sqrt": lambda x: 1 - x.sqrt(),
    "exponential": lambda x: 2 * 0.5**x - 1,
}


def wsd(peak: float, steps: int, decay: int, end: float = 0.0, warmup: int = 0, shape: str = "linear") -> Curve:
    """Warm-up, stable, decay: linear from 0, constant at `peak`, and to `end` over the last `decay` steps.

        end + (peak - end) f(x),   x = (t - (steps - decay)) / decay in [0, 1]
        f = 1 - x  (linear),  (1 + cos πx) / 2  (cosine),  1 - √x  (sqrt),  2 · 2⁻ˣ - 1  (exponential)

    References: Hu et al., "MiniCPM", https://arxiv.org/abs/2404.06395; Hägele et al., "Scaling laws and compute-optimal
    training beyond fixed training durations", https://arxiv.org/abs/2405.18392 (1 - √x).

    >>> wsd(1.0, 10, decay=4, warmup=2)(torch.tensor([1, 2, 6, 8, 10]))
    tensor([0.5000, 1.0000, 1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    if shape not in _SHAPES:
        raise ValueError(f"wsd: `shape` should be one of {', '.join(_SHAPES)}, given {shape!r}")
    if warmup + decay > steps:
        raise ValueError(f"wsd: warmup + decay should be at most steps, given {warmup} + {decay} > {steps}")
    return join([constant(peak, warmup), _decay("wsd", _SHAPES[shape], peak, decay, end, 0)], [steps - decay])


def with_warmup(schedule: Curve, warmup: int, start: float = 0.0) -> Curve:
    """A straight line from `start` to the schedule's first value over `warmup` steps, then the schedule from 0.

    >>> with_warmup(linear(1.0, 2), 2, start=0.5)(torch.tensor([0, 1, 2, 3, 4]))
    tensor([0.5000, 0.7500, 1.0000, 0.5000, 0.0000], dtype=torch.float64)
    """
    if warmup == 0:
        return schedule
    _positive("with_warmup", "warmup", warmup)

    def ramp(count: Count) -> Tensor:
        t = _steps(count)
        return start + (schedule(torch.zeros_like(t)) - start) * (t / warmup)

    return join([ramp, schedule], [warmup])


def join(schedules: Sequence[Curve], boundaries: Sequence[int]) -> Curve:
    """One schedule after the other: the i-th begins, from its own step 0, at the i-th boundary (the first at 0).

    >>> join([constant(1.0), linear(2.0, 2)], [3])(torch.tensor([0, 2, 3, 4, 5]))
    tensor([1., 1., 2., 1., 0.], dtype=torch.float64)
    """
    if len(schedules) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
        raise ValueError(
            f"join: {len(schedules)} schedules need {len(schedules) - 1} ascending boundaries, given {list(boundaries)}"
        )

    def schedule(count: Count) -> Tensor:
        t = _steps(count)
        out = schedules[0](t)
        for begin, following in zip(boundaries, schedules[1:], strict=True):
            out = torch.where(t < begin, out, following(t - begin))
        return out

    return schedule


def _decay(who: str, shape: Callable[[Tensor], Tensor], peak: float, steps: int, end: float, warmup: int) -> Curve:
    _positive(who, "steps - warmup" if warmup else "steps", steps - warmup)
    length = steps - warmup

    def schedule(count: Count) -> Tensor:
        return end + (peak - end) * shape((_steps(count) / length).clamp(0, 1))

    return with_warmup(schedule, warmup)
