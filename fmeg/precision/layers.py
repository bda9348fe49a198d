"""Layers of a stack apart, so that a scan can become several: `SPLIT_LAYERS` and its transpose, `JOIN_LAYERS`.

Unlike torch's split and cat, they leave a parameter where it rests: each scan brings its own layers into use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fmeg.program.ir import Node, TensorType
from fmeg.sharding.value import Placement


@dataclass(eq=False)
class SplitLayers:
    """args: (x, sizes). The parts of x along dimension 0."""

    name: str = "split_layers"

    def __call__(self, x: torch.Tensor, sizes: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
        return torch.split(x, list(sizes))

    def backward(self, rec: Any, node: Node, inputs: list, cts: list, wanted: list[bool]) -> list:
        parts = [torch.zeros(v.shape, dtype=v.dtype) if c is None else c for c, v in zip(cts, node.outs, strict=True)]
        whole = rec.emit(JOIN_LAYERS, (list(rec.to_values(parts)),), {}, (TensorType.of(inputs[0]),))[0]
        return [rec.bind(rec.fake_like(whole.type), whole)]

    def partition(self, part: Any, node: Node) -> None:
        p = part.placed(node.args[0])
        home = Placement(((), *p.home.dims[1:]), p.home.pending)
        local = part.get(p, home, "layers are split")
        outs = part.emit(self, (local, node.args[1]), {}, [(v.type, home) for v in node.outs])
        for v, o in zip(node.outs, outs, strict=True):
            part.env[id(v)] = replace(p, type=v.type, home=home, copies={home: o}, make=None)


@dataclass(eq=False)
class JoinLayers:
    """args: ([parts],). The parts, one after the other along dimension 0."""

    name: str = "join_layers"

    def __call__(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    def backward(self, rec: Any, node: Node, inputs: list, cts: list, wanted: list[bool]) -> list:
        sizes = tuple(v.shape[0] for v in node.args[0])
        values = rec.emit(SPLIT_LAYERS, (rec.value(cts[0]), sizes), {}, [v.type for v in node.args[0]])
        return [rec.bind(rec.fake_like(v.type), v) for v in values]

    def partition(self, part: Any, node: Node) -> None:
        placed = [part.placed(v) for v in node.args[0]]
        home = placed[0].home
        for p in placed[1:]:
            home = _common(home, p.home)
        home = Placement(((), *home.dims[1:]), home.pending)
        locals_ = [part.get(p, home, "gradient") for p in placed]
        out = node.outs[0]
        part.define(out, home, part.emit(self, (locals_,), {}, [(out.type, home)])[0])


def _common(a: Placement, b: Placement) -> Placement:
    """Where two placements agree; a sum that is pending in both stays pending."""
    if a == b:
        return a
    dims = tuple(x if x == y else () for x, y in zip(a.dims, b.dims, strict=True))
    return Placement(dims, a.pending & b.pending)


SPLIT_LAYERS, JOIN_LAYERS = SplitLayers(), JoinLayers()
