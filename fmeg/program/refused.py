"""What no program can hold: operations by which Python asks for a tensor's value, hidden randomness, shapes that depend
on data."""

from __future__ import annotations

from typing import Any

import torch

from fmeg.program.errors import TraceError
from fmeg.program.lines import user_line

aten = torch.ops.aten


def refuse(name: str, func: Any, args: tuple, kwargs: dict) -> None:
    """Raise TraceError if the program `name` cannot hold this call; the message says what to use instead."""
    if func is aten._local_scalar_dense.default or func is aten.is_nonzero.default:
        raise TraceError(
            f"{name}: Python needs the value of a tensor at {user_line()} (an `if`, `while`, `int()`, `.item()` or "
            "`bool()` on a traced tensor). A traced function's path may not depend on data: use torch.where, or pass a "
            "Python number as a static argument"
        )
    if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
        raise TraceError(
            f"{name}: {func} draws from torch's global generator at {user_line()}; results would depend on the mesh. "
            "Use fmeg.random (normal, uniform, bernoulli with a key) or fmeg.ops.dropout"
        )
    if torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_numbers(func, args):
        raise TraceError(
            f"{name}: the result shape of {func} depends on data, at {user_line()}; use a masked form (torch.where) "
            "instead"
        )


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Does it draw? Attention kernels are marked random, but draw only with dropout."""
    for i, a in enumerate(func._schema.arguments):
        if a.name == "dropout_p":
            return bool(kwargs.get(a.name, args[i] if i < len(args) else a.default_value))
    return True


def _indexes_by_numbers(func: Any, args: tuple) -> bool:
    """`x[ids]` has a shape that is known; `x[mask]` has not."""
    return func is aten.index.Tensor and all(t is None or t.dtype not in (torch.bool, torch.uint8) for t in args[1])
