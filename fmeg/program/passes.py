"""Small rewrites of Programs."""

from __future__ import annotations

from fmeg.program.ir import Program, values_in


def dce(program: Program) -> Program:
    """Drop the nodes on which no output depends; order is kept."""
    live = {id(v) for v in values_in(program.outputs)}
    kept = []
    for node in reversed(program.nodes):
        if any(id(o) in live for o in node.outs):
            kept.append(node)
            live.update(id(v) for v in node.operands())
    program.nodes = kept[::-1]
    return program


def ancestors(program: Program, outputs: list) -> list:
    """The nodes on which the given outputs depend, in order."""
    live = {id(v) for v in values_in(outputs)}
    kept = []
    for node in reversed(program.nodes):
        if any(id(o) in live for o in node.outs):
            kept.append(node)
            live.update(id(v) for v in node.operands())
    return kept[::-1]
