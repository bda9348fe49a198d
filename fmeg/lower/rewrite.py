"""What the passes share: nodes with other operands, and bodies of loops rewritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fmeg.ops.collectives import ALL_REDUCE
from fmeg.program.ir import Node, Program, Value, map_values, values_in
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward

Pass = Callable[[Program], Program]
Known = dict[int, tuple[Program, Program]]  # by id, a Program and what became of it


def with_operands(node: Node, new: Callable[[Value], Value]) -> Node:
    """The node with other operands; its results are the same values."""
    args, kwargs = map_values(new, (node.args, node.kwargs))
    return Node(node.op, args, kwargs, node.outs, node.source, node.phase, node.tags)


def with_nodes(program: Program, nodes: list[Node], outputs: Sequence[Any] | None = None) -> Program:
    """The Program with other nodes (and outputs)."""
    outs = program.outputs if outputs is None else tuple(outputs)
    return Program(program.inputs, nodes, outs, program.names, program.name)


def everywhere(fn: Pass, program: Program, known: Known | None = None) -> Program:
    """`fn` on the Program and on the bodies of its loops, innermost first. `known`: bodies that are rewritten already,
    for Programs that share them."""
    known = {} if known is None else known
    nodes = []
    for n in program.nodes:
        if isinstance(n.op, (LocalScan, LocalScanBackward, LocalAccumulate)):
            body = n.op.body
            if id(body) not in known:
                known[id(body)] = body, everywhere(fn, body, known)
            op = replace(n.op, body=known[id(body)][1])
            nodes.append(Node(op, n.args, n.kwargs, n.outs, n.source, n.phase, n.tags))
        else:
            nodes.append(n)
    return fn(with_nodes(program, nodes))


def uses(program: Program) -> dict[int, list[Node | None]]:
    """By value id, the nodes that read it, once an operand; None stands for the Program's results."""
    found: dict[int, list[Node | None]] = {}
    for n in program.nodes:
        for v in n.operands():
            found.setdefault(id(v), []).append(n)
    for v in values_in(program.outputs):
        found.setdefault(id(v), []).append(None)
    return found


def depends(v: Value, on: Node, maker: Mapping[int, Node]) -> bool:
    """Whether a value needs a node's results. `maker`: of values by id, the node that makes each."""
    seen: set[int] = set()
    open_ = [v]
    while open_:
        n = maker.get(id(open_.pop()))
        if n is on:
            return True
        if n is not None and id(n) not in seen:
            seen.add(id(n))
            open_ += n.operands()
    return False


def in_order(nodes: Sequence[Node]) -> list[Node] | None:
    """The nodes so that each comes after those it needs, else in the given order; None if they form a cycle."""
    maker = {id(o): n for n in nodes for o in n.outs}
    done: set[int] = set()
    open_: set[int] = set()
    out: list[Node] = []
    for root in nodes:
        stack = [(root, False)]
        while stack:
            n, entered = stack.pop()
            if entered:
                open_.discard(id(n))
                done.add(id(n))
                out.append(n)
                continue
            if id(n) in done:
                continue
            if id(n) in open_:
                return None
            open_.add(id(n))
            stack.append((n, True))
            for v in reversed(n.operands()):
                before = maker.get(id(v))
                if before is not None and id(before) not in done:
                    if id(before) in open_:
                        return None
                    stack.append((before, False))
    return out


def parts(node: Node) -> list[Node]:
    """A reduction of several values as one of each."""
    if len(node.outs) == 1:
        return [node]
    found = []
    for k, (x, out) in enumerate(zip(node.args[0], node.outs, strict=True)):
        rest = node.args[2:] if node.op is ALL_REDUCE else ((node.args[2][k],),)
        found.append(Node(node.op, ([x], node.args[1], *rest), {}, (out,), node.source, node.phase, node.tags))
    return found
