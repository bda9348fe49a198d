"""Residuals that wait for the backward pass in the host's memory.

A layer's leave when it has run and come back one layer ahead: while layer i goes back, those of layer i - 1 are copied.
The last layer's, which are needed first, stay. On one CUDA device a rank copies are to and from pinned memory, on a
stream of their own; elsewhere they are plain copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Offloaded:
    """A stack of steps' residuals, of which those numbered in `host` are not on the device meanwhile.

    >>> from fmeg.mesh import Mesh
    >>> stack = Offloaded(Mesh().backend(), (0,), 2)
    >>> stack.append([torch.ones(2), torch.zeros(2)]), stack.append([torch.ones(2) * 2, torch.zeros(2)])
    (None, None)
    >>> stack.pop()[0], stack.pop()[0]
    (tensor([2., 2.]), tensor([1., 1.]))
    """

    def __init__(self, backend: Any, host: Sequence[int], length: int) -> None:
        self.host, self.length = frozenset(host), length
        cuda = backend.plain and backend.device.type == "cuda"
        self.copies: _Copies = _Streamed(backend.device) if cuda else _Copies(backend)
        self.steps: list[list[Any]] = []
        self.coming: list[Any] | None = None

    def __len__(self) -> int:
        return len(self.steps) + (self.coming is not None)

    def append(self, values: Sequence[Any]) -> None:
        """The residuals of the next step."""
        if len(self.steps) == self.length - 1:
            self.steps.append(list(values))
        else:
            self.steps.append([self.copies.leave(v) if k in self.host else v for k, v in enumerate(values)])

    def pop(self) -> list[Any]:
        """Those of the last step that is left, on the device; the copy of those before them begins."""
        now = self.coming if self.coming is not None else self._begin()
        found = [v.arrive() if isinstance(v, _Away) else v for v in now]
        self.coming = self._begin() if self.steps else None
        return found

    def _begin(self) -> list[Any]:
        values = self.steps.pop()
        for v in values:
            if isinstance(v, _Away):
                v.begin()
        return values


@dataclass
class _Away:
    """A value in the host's memory, then on its way back."""

    copies: _Copies
    value: Any
    device: torch.device

    def begin(self) -> None:
        self.value = self.copies.fetch(self.value, self.device)

    def arrive(self) -> Any:
        self.copies.wait()
        return self.value


class _Copies:
    """Plain copies, rank by rank."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def leave(self, value: Any) -> _Away:
        return _Away(self, self.backend.call(_to_host, (value,)), self.backend.device)

    def fetch(self, value: Any, device: torch.device) -> Any:
        return self.backend.call(_to_device, (value, device))

    def wait(self) -> None:
        """Until the last fetch is done."""


class _Streamed(_Copies):
    """Copies on a stream of their own, one after the other, so that a fetch is behind the copy that it undoes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.fetched: torch.cuda.Event | None = None

    def leave(self, value: Tensor) -> _Away:
        away = torch.empty_like(value, device="cpu", pin_memory=True)
        self._copy(away, value)
        value.record_stream(self.stream)
        return _Away(self, away, value.device)

    def fetch(self, value: Tensor, device: torch.device) -> Tensor:
        back = torch.empty_like(value, device=device)
        self._copy(back, value)
        self.fetched = self.stream.record_event()
        return back

    def wait(self) -> None:
        if self.fetched is not None:
            torch.cuda.current_stream(self.device).wait_event(self.fetched)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)


def _to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda).copy_(x)


def _to_device(x: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(x, device=device).copy_(x)
