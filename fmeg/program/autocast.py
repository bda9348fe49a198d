"""`torch.autocast` and traces: what casts when a program is traced, and what never does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from fmeg.program.errors import TraceError
from fmeg.program.lines import user_line

DEVICES = ("cpu", "cuda")


def states() -> tuple[torch.dtype | None, ...]:
    """For each of DEVICES the dtype that autocast casts to, None where it is off.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     states()
    (torch.bfloat16, None)
    """
    return tuple(torch.get_autocast_dtype(d) if torch.is_autocast_enabled(d) else None for d in DEVICES)


@contextmanager
def off() -> Iterator[None]:
    """Without autocast: for what replays or runs recorded operations, whose casts are recorded beside them.

    >>> with torch.autocast("cpu", dtype=torch.bfloat16), off():
    ...     states()
    (None, None)
    """
    with ExitStack() as modes:
        for device, dtype in zip(DEVICES, states(), strict=True):
            if dtype is not None:
                modes.enter_context(torch.autocast(device, enabled=False))
        yield


def refuse_primitive(where: str, name: str) -> None:
    """Raise TraceError if a primitive is to be recorded under autocast: it runs later, where that is off."""
    for device, dtype in zip(DEVICES, states(), strict=True):
        if dtype is not None:
            raise TraceError(
                f"{where}: {name} under torch.autocast({device!r}); it computes in the dtypes of what it is given, "
                "whoever calls it, and autocast casts torch's own operations alone. Cast before it, as the models' "
                "compute_dtype does, or give value_and_grad a precision="
            )


def refuse_cuda(where: str) -> None:
    """Raise TraceError under `torch.autocast("cuda")`: tensors of a trace lie on no GPU, so nothing would be cast."""
    if torch.is_autocast_enabled("cuda"):
        raise TraceError(
            f"{where}: torch.autocast('cuda') at {user_line()} would cast nothing in a trace, which knows no device. "
            "Cast in the function, as the models' compute_dtype does, or give value_and_grad a precision="
        )
