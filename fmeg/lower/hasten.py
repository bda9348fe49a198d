"""Reductions of gradients that are complete before a loop are begun before it, so that it hides them."""

from __future__ import annotations

from fmeg.lower.rewrite import parts, with_nodes
from fmeg.ops.collectives import ALL_REDUCE, REDUCE_SCATTER
from fmeg.program.ir import Node, Program
from fmeg.program.structured import loop_of


def hasten(program: Program) -> Program:
    """Reductions behind a loop whose operands were made before it stand right after the last operand's maker."""
    place = {id(o): i for i, n in enumerate(program.nodes) for o in n.outs}
    loops = [i for i, n in enumerate(program.nodes) if loop_of(n) is not None]
    at: dict[int, list[Node]] = {}
    for i, n in enumerate(program.nodes):
        stay = [n]
        if n.op in (ALL_REDUCE, REDUCE_SCATTER):
            made = [(part, max(place.get(id(v), -1) for v in part.operands())) for part in parts(n)]
            early = [(part, k) for part, k in made if k >= 0 and any(k < loop < i for loop in loops)]
            for part, k in early:
                at[k].append(part)
            stay = [n] if not early else [part for part, k in made if (part, k) not in early]
        at[i] = stay
    return with_nodes(program, [n for i in range(len(program.nodes)) for n in at[i]])
