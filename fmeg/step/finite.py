"""A loss that is no number ends a run with a sentence, not with a page of nan."""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch

from fmeg import tree
from fmeg.sharding.array import Array

T = TypeVar("T")


def check_finite(metrics: T, step: int | None = None) -> T:
    """`metrics`, if all of their numbers are finite; FloatingPointError otherwise, which names the first by its path.

    For what a step returned: tensors, Arrays and numbers in a pytree. It waits for their values: check every so many
    steps.

    >>> check_finite({"loss": torch.tensor(2.5), "lr": 1e-3})["lr"]
    0.001
    >>> check_finite({"loss": torch.tensor(float("nan"))}, step=7)
    Traceback (most recent call last):
        ...
    FloatingPointError: loss is nan at step 7. Try a lower learning rate or a warmup, optim.clip_by_global_norm, ...
    """
    for path, x in zip(tree.paths(metrics), tree.leaves(metrics), strict=True):
        if (bad := _bad(x)) is not None:
            when = f" at step {step}" if step is not None else ""
            raise FloatingPointError(
                f"{path or 'the value'} is {bad}{when}. Try a lower learning rate or a warmup, "
                "optim.clip_by_global_norm, or optim.skip_nonfinite(optimizer), which skips and counts such steps; "
                "look for log or division of 0 in the loss, and for 16-bit floats that overflow"
            )
    return metrics


def _bad(x: Any) -> str | None:
    """How a value that is not finite reads; None for finite ones."""
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    if isinstance(x, Array):
        x = x.global_value()
    if not (isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())):
        return None
    wrong = x[~torch.isfinite(x)]
    if not wrong.numel():
        return None
    first = str(wrong[0].item())
    return first if x.ndim == 0 else f"not finite in {wrong.numel()} of {x.numel()} elements (the first is {first})"
