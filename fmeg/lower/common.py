"""Equal operations on equal operands are one, where no loop lies between them.

Forward and backward passes of what surrounds a scan stand side by side in a step: what the backward pass would do again
is still there, behind a collective too. Across a loop a value would be held for its whole run, so there it is made
again.
"""

from __future__ import annotations

from typing import Any

from fmeg.lower.rewrite import with_nodes, with_operands
from fmeg.program.ir import Node, Program, Value, map_values
from fmeg.program.structured import loop_of


def share(program: Program) -> Program:
    """The Program with operations that are repeated, no loop between, merged into their first."""
    same: dict[int, Value] = {}
    seen: dict[Any, Node] = {}
    nodes: list[Node] = []

    def first(v: Value) -> Value:
        return same.get(id(v), v)

    for old in program.nodes:
        n = with_operands(old, first)
        if loop_of(n) is not None or hasattr(n.op, "build"):
            seen = {}
            nodes.append(n)
            continue
        key = (n.op, _key((n.args, n.kwargs)))
        twin = seen.setdefault(key, n)
        if twin is n:
            nodes.append(n)
        else:
            same.update((id(v), u) for v, u in zip(n.outs, twin.outs, strict=True))
    return with_nodes(program, nodes, map_values(first, program.outputs))


def _key(x: Any) -> Any:
    """Nested arguments as something to compare: values by identity, numbers by type and bits."""
    if isinstance(x, Value):
        return ("value", id(x))
    if isinstance(x, (tuple, list)):
        return (type(x), *map(_key, x))
    if isinstance(x, dict):
        return (dict, *((k, _key(v)) for k, v in x.items()))
    if type(x).__hash__ is None:
        return ("object", id(x))
    return (type(x), x.hex() if isinstance(x, float) else x)
