"""One microbatch is no loop: its body stands in the step, where its reductions can be begun early."""

from __future__ import annotations

from functools import partial

import torch

from fmeg.lower.rewrite import with_nodes, with_operands
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.sharding.local import LocalAccumulate

_select = torch.ops.aten.select.int


def _given(inside: dict[int, Value], v: Value) -> Value:
    return inside.get(id(v), v)


def inline(program: Program) -> Program:
    """Accumulation over one microbatch replaced by its body."""
    nodes: list[Node] = []
    new: dict[int, Value] = {}

    def current(v: Value) -> Value:
        return new.get(id(v), v)

    for old in program.nodes:
        n = with_operands(old, current)
        if not isinstance(n.op, LocalAccumulate) or n.op.steps != 1:
            nodes.append(n)
            continue
        inside: dict[int, Value] = {}
        for x, v, batched in zip(n.args, n.op.body.inputs, n.op.batched, strict=True):
            if batched:
                cut = Node(_select, (x, 0, 0), {}, source=n.source, phase=n.phase)
                cut.outs = (Value(TensorType(x.shape[1:], x.dtype), cut, placement=v.placement),)
                nodes.append(cut)
                x = cut.outs[0]
            inside[id(v)] = x
        given = partial(_given, inside)
        nodes += [with_operands(m, given) for m in n.op.body.nodes]
        results = map_values(given, list(n.op.body.outputs))
        new.update((id(o), r) for o, r in zip(n.outs, results, strict=True))
    return with_nodes(program, nodes, map_values(current, list(program.outputs)))
