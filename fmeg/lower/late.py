"""What is made of inputs alone is made where it is first used, not where the program wrote it.

A model casts its head before its layers run; here the cast moves behind them, so that it is not held meanwhile.
"""

from __future__ import annotations

from fmeg.lower.rewrite import uses, with_nodes
from fmeg.ops.collectives import Collective
from fmeg.program.ir import Node, Program
from fmeg.program.structured import loop_of


def delay(program: Program) -> Program:
    """Operations all of whose operands are inputs stand right before their first reader."""
    given = {id(v) for v in program.inputs}
    place = {id(n): i for i, n in enumerate(program.nodes)}
    used = uses(program)
    moved: dict[int, list[Node]] = {}
    for n in program.nodes:
        operands = n.operands()
        if not operands or loop_of(n) is not None or isinstance(n.op, Collective) or hasattr(n.op, "build"):
            continue
        readers = [r for o in n.outs for r in used.get(id(o), [])]
        if all(id(v) in given for v in operands) and readers and None not in readers:
            first = min(place[id(r)] for r in readers if r is not None)
            moved.setdefault(first, []).append(n)
    gone = {id(n) for group in moved.values() for n in group}
    nodes: list[Node] = []
    for i, n in enumerate(program.nodes):
        nodes += moved.get(i, [])
        if id(n) not in gone:
            nodes.append(n)
    return with_nodes(program, nodes)
