"""Casts of scanned parameters leave the scan's body: the whole stack is cast once, for both directions.

In a body a layer's parameters are cast in the forward pass and again in the backward one, which saves the memory of the
cast stack and costs a pass over the parameters each time.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fmeg.lower.rewrite import uses, with_nodes, with_operands
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.sharding.local import LocalScan, LocalScanBackward

_to_copy = torch.ops.aten._to_copy.default


def hoist_casts(program: Program) -> Program:
    """Stacks that all scans of the Program read only through a cast to one dtype are cast before the first of them."""
    wanted: dict[int, set[torch.dtype | None]] = {}
    for n in program.nodes:
        for v, inner in slices_of(n):
            if readers := uses(n.op.body).get(id(inner)):
                wanted.setdefault(id(v), set()).add(_only_cast(readers))
    found = {i: next(iter(d)) for i, d in wanted.items() if len(d) == 1 and None not in d}
    made: dict[int, Value] = {}
    nodes: list[Node] = []
    for n in program.nodes:
        here = [(v, inner) for v, inner in slices_of(n) if id(v) in found]
        for v, _ in here:
            if id(v) not in made:
                cast = Node(_to_copy, (v,), {"dtype": found[id(v)]}, source=n.source, phase=n.phase)
                cast.outs = (Value(TensorType(v.shape, found[id(v)]), cast),)  # type: ignore[arg-type]
                nodes.append(cast)
                made[id(v)] = cast.outs[0]
        nodes.append(_with_cast(n, {id(v): made[id(v)] for v, _ in here}) if here else n)
    return with_nodes(program, nodes)


def slices_of(node: Node) -> list[tuple[Value, Value]]:
    """The stacks that a scan reads slice by slice, with the body's input for each."""
    op = node.op
    if isinstance(op, LocalScan):
        xs = node.args[op.n_carry : op.n_carry + op.n_xs]
        inner = op.body.inputs[op.n_carry : op.n_carry + op.n_xs]
    elif isinstance(op, LocalScanBackward):
        xs = node.args[3]
        first = op.n_carry + op.n_ys + op.n_residuals
        inner = op.body.inputs[first : first + op.n_xs]
    else:
        return []
    return list(zip(xs, inner, strict=True))


def _only_cast(readers: list[Node | None]) -> torch.dtype | None:
    """The dtype to which every reader casts an input; None if a reader does anything else."""
    dtypes = {
        n.kwargs["dtype"] if n is not None and n.op is _to_copy and set(n.kwargs) == {"dtype"} else None
        for n in readers
    }
    return next(iter(dtypes)) if len(dtypes) == 1 else None


def _with_cast(node: Node, cast: dict[int, Value]) -> Node:
    """The scan with cast stacks, and without the casts in its body."""
    new: dict[int, Value] = {}
    gone: set[int] = set()
    inputs = list(node.op.body.inputs)
    for v, inner in slices_of(node):
        if id(v) in cast:
            fresh = Value(TensorType(inner.shape, cast[id(v)].dtype), name=inner.name)
            inputs[next(i for i, x in enumerate(inputs) if x is inner)] = fresh
            for n in uses(node.op.body).get(id(inner), []):
                if n is not None:
                    gone.add(id(n))
                    new[id(n.outs[0])] = fresh
    nodes = []
    for n in node.op.body.nodes:
        if id(n) in gone:
            continue
        nodes.append(with_operands(n, lambda v: new.get(id(v), v)))
    body = node.op.body
    outputs = tuple(map_values(lambda v: new.get(id(v), v), list(body.outputs)))
    op = replace(node.op, body=Program(tuple(inputs), nodes, outputs, body.names, body.name))
    return Node(op, _with_stacks(node, cast), node.kwargs, node.outs, node.source, node.phase, node.tags)


def _with_stacks(node: Node, cast: dict[int, Value]) -> tuple:
    """The scan's args with cast stacks; what it takes whole as well stays as it is."""
    op, args = node.op, list(node.args)
    if isinstance(op, LocalScanBackward):
        args[3] = type(args[3])(cast.get(id(v), v) for v in args[3])
    else:
        at = slice(op.n_carry, op.n_carry + op.n_xs)
        args[at] = [cast.get(id(v), v) for v in args[at]]
    return tuple(args)
