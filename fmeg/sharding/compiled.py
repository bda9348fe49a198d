"""Runs of compute nodes compiled by Inductor: one fused function a run, made at its first call, once for all layers.

The run is generated as Python first (see `segment`), traced at the shapes and strides of its first call, and compiled
with static shapes; at other strides (a carry that its loop's body transposes) again. Inductor keeps what it compiled on
disk (`TORCHINDUCTOR_CACHE_DIR`).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fmeg.program.ir import Node
from fmeg.sharding.segment import Run, as_function

Slots = Mapping[int, int]


class Inductor:
    """A function from a list of tensors to a tuple of tensors, compiled when it is first called, and for other strides
    when they first come.

    >>> f = Inductor(lambda values: (values[0] + values[1] * 2,), "example")
    >>> f([torch.ones(3), torch.ones(3)])
    (tensor([3., 3., 3.]),)
    """

    def __init__(self, fn: Run, name: str) -> None:
        self.fn, self.name = fn, name
        self.compiled: dict[tuple[tuple[int, ...], ...], Callable[..., Any]] = {}

    def __call__(self, values: Sequence[torch.Tensor]) -> Any:
        values = [x.resolve_neg() if x.is_neg() else x for x in _distinct(values)]  # it reads memory as it is
        strides = tuple([x.stride() for x in values])
        known = self.compiled.get(strides)
        if known is not None:
            return known(*values)
        known = self.compiled[strides] = _compile(self.fn, values)
        try:
            return known(*values)
        except torch._dynamo.exc.Unsupported as error:  # raised on the way out, it hides what went wrong
            raise RuntimeError(f"{self.name}: compiled, it failed when it first ran") from error.__context__ or error


def _distinct(values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The values, each a tensor of its own: tracing would take two that are the same now to be so at every call."""
    if len({id(x) for x in values}) == len(values):
        return values
    seen: set[int] = set()
    return [x.detach() if id(x) in seen or seen.add(id(x)) else x for x in values]  # type: ignore[func-returns-value]


def _compile(fn: Run, values: Sequence[torch.Tensor]) -> Callable[..., Any]:
    def flat(*xs: torch.Tensor) -> Any:
        return fn(list(xs))

    graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*values)
    return torch.compile(graph, fullgraph=True, dynamic=False)


def in_place(
    nodes: Sequence[Node],
    slots: Slots,
    dying: set[int],
    device: torch.device,
    name: str,
    into: Mapping[int, int],
    add: bool,
    lying: Container[int],
) -> Run:
    """As `segment.in_place`, compiled: a function on the environment itself. `into`, `add` and `lying` as in
    `as_function`."""
    needed = {slots[id(v)] for n in nodes for v in n.outs} - dying
    chunk = as_function(nodes, slots, needed, device, name, reuse=False, into=into, add=add, lying=lying)
    run = Inductor(chunk.fn, name)
    gone = tuple(s for s in chunk.ins if s in dying)

    def step(env: list[Any]) -> None:
        values = [env[s] for s in chunk.ins]
        for s in gone:
            env[s] = None
        for s, v in zip(chunk.outs, run(values), strict=True):
            env[s] = v

    return step
