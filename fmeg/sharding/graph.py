"""A step recorded as one CUDA graph: launched by one call, so that the processor is never waited for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Any]], list[Any]]
EAGER_CALLS = 2  # first calls that compile and allocate what lasts


class Graph:
    """`run`, a function of tensors whose work does not depend on their values, replayed from its third call on.

    into     results, by number, that `run` writes into an input, by number: those inputs are expected where they lay
             before, all others are copied to where the graph reads them
    Results that are not written into inputs are copied out of the graph's memory. Those that are stay with whoever
    holds them: where other inputs come instead, a result that is still held moves elsewhere first.
    """

    def __init__(self, run: Run, into: Mapping[int, int]) -> None:
        self.run, self.into = run, dict(into)
        self.calls = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.held: dict[int, weakref.ref[Tensor]] = {}  # results in inputs, by the number of the input

    def __call__(self, values: list[Any]) -> list[Any]:
        self.calls += 1
        if not self.inputs:
            ours = set(self.into.values())
            self.inputs = [_copy(x) if isinstance(x, Tensor) and i not in ours else x for i, x in enumerate(values)]
        for i, (x, kept) in enumerate(zip(values, self.inputs, strict=True)):
            if isinstance(kept, Tensor) and x.data_ptr() != kept.data_ptr():
                result = self.held[i]() if i in self.held else None
                if result is not None:
                    result.data = result.clone()
                kept.copy_(x)
        values.clear()
        if self.calls <= EAGER_CALLS:
            return self._copied(self.run(list(self.inputs)))
        if self.graph is None:
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self.run(list(self.inputs))
        self.graph.replay()
        return self._copied(self.outputs)

    def _copied(self, outs: list[Any]) -> list[Any]:
        given = [
            x.detach() if i in self.into else x.clone() if isinstance(x, Tensor) else x for i, x in enumerate(outs)
        ]
        self.held = {i: weakref.ref(given[o]) for o, i in self.into.items()}
        return given


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
