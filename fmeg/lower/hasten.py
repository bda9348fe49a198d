"""Collectives that a loop can hide are begun where it does: reductions of gradients before it, gathers behind it."""

from __future__ import annotations

from fmeg.lower.rewrite import parts, with_nodes
from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from fmeg.program.ir import Node, Program
from fmeg.program.structured import loop_of


def hasten_reductions(program: Program) -> Program:
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


def hasten_gathers(program: Program) -> Program:
    """Gathers behind a loop that need nothing of it stand right behind it, with what they need: a head's weights,
    which the loop's last step hides then (see `fmeg.sharding.groups`)."""
    place = {id(o): i for i, n in enumerate(program.nodes) for o in n.outs}
    loops = [i for i, n in enumerate(program.nodes) if loop_of(n) is not None]
    to: dict[int, list[int]] = {}
    moved: set[int] = set()
    for i, n in enumerate(program.nodes):
        before = max((k for k in loops if k < i), default=-1)
        chain = _needed_since(program, i, before, place) if n.op is ALL_GATHER and before >= 0 else None
        if chain is not None:
            to.setdefault(before, []).extend(k for k in chain if k not in moved)
            moved.update(chain)
    order = [k for i in range(len(program.nodes)) if i not in moved for k in (i, *to.get(i, []))]
    return with_nodes(program, [program.nodes[k] for k in order])


def _needed_since(program: Program, at: int, loop: int, place: dict[int, int]) -> list[int] | None:
    """A node and what it needs that was made after a loop, by number, in order; None if that includes the loop's
    results, another collective, or anything that is a step of its own."""
    found: set[int] = set()
    todo = [at]
    while todo:
        k = todo.pop()
        n = program.nodes[k]
        if k == loop or (k != at and (isinstance(n.op, Collective) or hasattr(n.op, "build"))):
            return None
        found.add(k)
        todo += [j for v in n.operands() if (j := place.get(id(v), -1)) >= loop and j not in found]
    return sorted(found)
