"""Several small collectives as one.

In a body, the gathers of its parameters form its prologue: those over the same axes become one node at the start.
Gathers of activations stay where they are used, since there they live for a shorter time. Reductions by which only
results leave form its epilogue: one node an axis at the end.
"""

from __future__ import annotations

from collections.abc import Callable

from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from fmeg.program.ir import Node, Program, Value, map_values, values_in

Key = tuple


def _key(node: Node) -> Key:
    op_arg = node.args[2] if node.op is ALL_REDUCE else None
    return (node.op.name, node.args[1], op_arg, node.operands()[0].type.dtype)


def coalesce(program: Program) -> Program:
    """Merge the gathers of the prologue and the reductions of the epilogue of a body."""
    return together(_prologue(program))


def _early(program: Program) -> set[int]:
    """ids of nodes that depend on inputs through single-operand operations alone (casts, slices)."""
    ready = {id(v) for v in program.inputs}
    early = set()
    for n in program.nodes:
        ops = n.operands()
        if len(ops) == 1 and id(ops[0]) in ready and n.op is not ALL_GATHER and not hasattr(n.op, "body"):
            early.add(id(n))
            ready.update(id(o) for o in n.outs)
    return early


def _prologue(program: Program) -> Program:
    early = _early(program)
    ready = {id(v) for v in program.inputs} | {id(o) for n in program.nodes if id(n) in early for o in n.outs}
    groups: dict[Key, list[Node]] = {}
    for n in program.nodes:
        parameter = n.op is ALL_GATHER and n.tags.get("reason") == "parameter"
        if parameter and len(n.operands()) == 1 and id(n.operands()[0]) in ready:
            groups.setdefault(_key(n), []).append(n)
    merged = {id(n) for g in groups.values() if len(g) > 1 for n in g}
    if not merged:
        return program
    swap: dict[int, Value] = {}
    first = [n for n in program.nodes if id(n) in early]
    gathers = [_merge(g, swap) for g in groups.values() if len(g) > 1]
    rest = [n for n in program.nodes if id(n) not in merged and id(n) not in early]
    return _rename(program, [*first, *gathers, *rest], swap)


def together(program: Program) -> Program:
    """The reductions by which only results leave, one node an axis at the end."""
    groups: dict[Key, list[Node]] = {}
    for n in _leaving(program):
        groups.setdefault(_key(n), []).append(n)
    return _merge_late(program, [g for g in groups.values() if len(g) > 1])


def apart(program: Program) -> Program:
    """The same with a node for each value of such reductions, for those who take a Program to pieces."""
    leaving = {id(n) for n in _leaving(program) if len(n.outs) > 1}
    nodes: list[Node] = []
    for n in program.nodes:
        for k, (x, o) in enumerate(zip(n.operands(), n.outs, strict=True) if id(n) in leaving else ()):
            arg = n.args[2] if n.op is ALL_REDUCE else (n.args[2][k],)
            nodes.append(Node(n.op, ([x], n.args[1], arg), {}, (o,), n.source, n.phase, n.tags))
        if id(n) not in leaving:
            nodes.append(n)
    return Program(program.inputs, nodes, program.outputs, program.names, program.name)


def _leaving(program: Program) -> list[Node]:
    used = {id(v) for n in program.nodes for v in n.operands()}
    results = {id(v) for v in values_in(program.outputs)}
    return [
        n
        for n in program.nodes
        if n.op in (REDUCE_SCATTER, ALL_REDUCE) and all(id(o) in results and id(o) not in used for o in n.outs)
    ]


def _merge_late(program: Program, groups: list[list[Node]]) -> Program:
    if not groups:
        return program
    swap: dict[int, Value] = {}
    merged = {id(n) for g in groups for n in g}
    late = [_merge(g, swap) for g in groups]
    return _rename(program, [*(n for n in program.nodes if id(n) not in merged), *late], swap)


def coalesce_where(program: Program, pick: Callable[[Node], bool]) -> Program:
    """Merge picked collectives of one kind, axes and dtype into one node, where the first user of any stands.

    Members must not depend on one another; a group in which one does is cut there.
    """
    swap: dict[int, Value] = {}
    out: list[Node] = []
    open_: dict[Key, list[Node]] = {}
    held: dict[int, Key] = {}

    def close(key: Key) -> None:
        group = open_.pop(key)
        for n in group:
            for o in n.outs:
                held.pop(id(o), None)
        out.append(group[0] if len(group) == 1 else _merge(group, swap))

    for n in program.nodes:
        for v in n.operands():
            if id(v) in held:
                close(held[id(v)])
        if pick(n):
            key = _key(n)
            open_.setdefault(key, []).append(n)
            held.update({id(o): key for o in n.outs})
        else:
            out.append(n)
    for key in list(open_):
        close(key)
    return _rename(program, out, swap)


def _merge(group: list[Node], swap: dict[int, Value]) -> Node:
    xs = [n.operands()[0] for n in group]
    if group[0].op is ALL_REDUCE:
        rest: tuple = (group[0].args[2],)
    else:
        rest = (tuple(n.args[2][0] for n in group),)
    sources = list(dict.fromkeys(n.source for n in group))
    source = sources[0] if len(sources) == 1 else f"{sources[0]} … ({len(group)} values)"
    reasons = dict.fromkeys(n.tags.get("reason", "") for n in group)
    tags = {**group[0].tags, "reason": " + ".join(reasons), "sources": tuple(sources)}
    node = Node(group[0].op, (xs, group[0].args[1], *rest), {}, source=source, phase=group[0].phase, tags=tags)
    node.outs = tuple(Value(n.outs[0].type, node, i, placement=n.outs[0].placement) for i, n in enumerate(group))
    swap.update({id(n.outs[0]): o for n, o in zip(group, node.outs, strict=True)})
    return node


def _rename(program: Program, nodes: list[Node], swap: dict[int, Value]) -> Program:
    def new(v: Value) -> Value:
        while id(v) in swap:
            v = swap[id(v)]
        return v

    for n in nodes:
        n.args, n.kwargs = map_values(new, (n.args, n.kwargs))
    return Program(program.inputs, nodes, tuple(map_values(new, list(program.outputs))), program.names, program.name)
