"""A reduction of stacked gradients becomes one of each layer's, behind its layer, so that the next layer hides it."""

from __future__ import annotations

from dataclasses import replace

from fmeg.lower.rewrite import parts, uses, with_nodes
from fmeg.ops.collectives import ALL_REDUCE, REDUCE_SCATTER
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.sharding.local import LocalScanBackward

_SUMS = (ALL_REDUCE, REDUCE_SCATTER)


def reduce_layers(program: Program) -> Program:
    """Sums over mesh axes that alone read a backward scan's stacked result move into its body."""
    stacked = {id(o) for n in program.nodes if isinstance(n.op, LocalScanBackward) for o in n.outs}
    program = with_nodes(program, [p for n in program.nodes for p in (parts(n) if _sums(n, stacked) else [n])])
    used = uses(program)
    inside: dict[int, dict[int, Node]] = {}  # scan -> number of the result -> its reduction
    for n in program.nodes:
        if isinstance(n.op, LocalScanBackward):
            for k in range(n.op.n_carry, n.op.n_carry + n.op.n_ct_xs):
                readers = used.get(id(n.outs[k]), [])
                if len(readers) == 1 and readers[0] is not None and _moves(readers[0]):
                    inside.setdefault(id(n), {})[k] = readers[0]
    gone = {id(r) for found in inside.values() for r in found.values()}
    nodes = [_with(n, inside[id(n)]) if id(n) in inside else n for n in program.nodes if id(n) not in gone]
    return with_nodes(program, nodes)


def _sums(n: Node, made: set[int]) -> bool:
    return n.op in _SUMS and any(id(v) in made for v in n.operands())


def _moves(n: Node) -> bool:
    if len(n.outs) != 1:
        return False
    return (n.op is ALL_REDUCE and n.args[2] == "sum") or (n.op is REDUCE_SCATTER and n.args[2][0] > 0)


def _with(scan: Node, found: dict[int, Node]) -> Node:
    """The scan, its body reducing the results by their numbers."""
    body = scan.op.body
    outputs, extra, outs = list(body.outputs), [], list(scan.outs)
    for k, r in found.items():
        rest = (r.args[2],) if r.op is ALL_REDUCE else ((r.args[2][0] - 1,),)
        node = Node(r.op, ([outputs[k]], r.args[1], *rest), {}, source=r.source, phase=r.phase, tags=r.tags)
        out = r.outs[0]
        node.outs = (Value(TensorType(out.shape[1:], out.dtype), node, placement=outputs[k].placement),)
        extra.append(node)
        outputs[k] = node.outs[0]
        outs[k] = out
    op = replace(scan.op, body=Program(body.inputs, [*body.nodes, *extra], tuple(outputs), body.names, body.name))
    return Node(op, scan.args, scan.kwargs, tuple(outs), scan.source, scan.phase, scan.tags)
