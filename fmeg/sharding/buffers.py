"""What a loop collects over its steps: slices of one tensor, or a running sum, in memory that is its own.

Backends let ranks share a tensor, so what `call` runs may not write to its arguments. A buffer is an exception: it was
made rank by rank for the axes over which its steps vary, and nothing else refers to it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Stack:
    """Slices of a tensor along a new dimension 0, each written where it belongs, so that there are never two of all.

    >>> from fmeg.mesh import Mesh
    >>> s = Stack(Mesh().backend(), 2)
    >>> s.put(1, torch.ones(2)), s.put(0, torch.zeros(2))
    (None, None)
    >>> s.result().tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """

    def __init__(self, backend: Any, length: int) -> None:
        self.backend, self.length = backend, length
        self.buffer: Any = None

    def put(self, i: int, value: Any) -> None:
        """Slice i."""
        b = self.backend
        if self.buffer is None:
            self.buffer = b.call(_empty, (value, self.length))
        elif b.varies(value) | b.varies(self.buffer) != b.varies(self.buffer):
            self.buffer = b.call(_widened, (value, self.buffer))
        if not (b.plain and value.data_ptr() == self.buffer[i].data_ptr()):  # it may have been made there
            b.call(_write, (self.buffer, value, i))

    def result(self) -> Any:
        return self.buffer


class Total(Stack):
    """A stack to which slices are added, where they were not added already.

    >>> from fmeg.mesh import Mesh
    >>> t = Total(Mesh().backend(), torch.ones(2, 2))
    >>> t.put(1, torch.ones(2))
    >>> t.result().tolist()
    [[1.0, 1.0], [2.0, 2.0]]
    """

    def __init__(self, backend: Any, buffer: Tensor) -> None:
        super().__init__(backend, buffer.shape[0])
        self.buffer = buffer

    def put(self, i: int, value: Any) -> None:
        if value.data_ptr() != self.buffer[i].data_ptr():
            self.buffer[i].add_(value)


class Sum:
    """A running sum, first to last; in place once there is a tensor that only the sum refers to.

    >>> from fmeg.mesh import Mesh
    >>> s = Sum(Mesh().backend())
    >>> [s.add(torch.tensor(x)) for x in (1.0, 2.0, 3.0)]
    [None, None, None]
    >>> s.result()
    tensor(6.)
    """

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.total: Any = None
        self.own = False

    def add(self, value: Any) -> None:
        b = self.backend
        if self.total is None:
            self.total = value
        elif self.own and b.varies(value) | b.varies(self.total) == b.varies(self.total):
            b.call(_add, (self.total, value))
        else:
            self.total, self.own = b.call(torch.add, (self.total, value)), True

    def result(self) -> Any:
        return self.total


def _empty(value: Tensor, length: int) -> Tensor:
    return value.new_empty((length, *value.shape))


def _widened(value: Tensor, buffer: Tensor) -> Tensor:
    return _empty(value, buffer.shape[0]).copy_(buffer)


def _write(buffer: Tensor, value: Tensor, i: int) -> Tensor:
    return buffer.select(0, i).copy_(value)


def _add(total: Tensor, value: Tensor) -> Tensor:
    return total.add_(value)
