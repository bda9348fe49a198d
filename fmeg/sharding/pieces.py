"""The body of a loop in three pieces, so that what it sends and receives can go on while its neighbours compute.

ahead     what depends on this step's slices and on constants alone and ends in collectives: the gathers of a layer's
          parameters. It may run while the step before computes.
main      everything else
behind    reductions that only what is stacked or summed needs, and what follows them: a layer's gradients. It may run
          while the next step computes.

The pieces in this order are the body, node by node: no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from fmeg.program.ir import Node, Program, Value
from fmeg.program.structured import loop_of

_AHEAD = (ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER)
_BEHIND = (ALL_REDUCE, REDUCE_SCATTER)


@dataclass(frozen=True)
class Pieces:
    """takes   inputs of the body, by number, that `ahead` is given
    main       inputs: the body's, then the results of `ahead`; results: the body's, None where `behind` gives them,
               then what `behind` is given
    gives      results of the body, by number, that `behind` gives
    """

    ahead: Program | None
    takes: tuple[int, ...]
    main: Program
    behind: Program | None
    gives: tuple[int, ...]


def pieces(body: Program, early: Iterable[int], late: Iterable[int]) -> Pieces:
    """`early`: inputs, by number, that are there before the step. `late`: results that the next step does not need."""
    early, late = tuple(early), set(late)
    ahead = _ahead(body.nodes, [body.inputs[i] for i in early])
    behind = _behind(body, late, {id(n) for n in ahead})
    apart = {id(n) for n in (*ahead, *behind)}
    middle = [n for n in body.nodes if id(n) not in apart]

    of_behind = {id(o) for n in behind for o in n.outs}
    read = {id(v) for n in (*middle, *behind) for v in n.operands()} | set(map(id, body.outputs))
    fetched = [o for n in ahead for o in n.outs if id(o) in read]
    handed = _needed(behind, of_behind)
    gives = tuple(i for i, o in enumerate(body.outputs) if id(o) in of_behind)
    takes = [i for i in early if id(body.inputs[i]) in {id(v) for n in ahead for v in n.operands()}]
    kept = [None if i in gives else o for i, o in enumerate(body.outputs)]
    return Pieces(
        Program(tuple(body.inputs[i] for i in takes), ahead, tuple(fetched), name=f"{body.name}.ahead")
        if ahead
        else None,
        tuple(takes),
        Program((*body.inputs, *fetched), middle, (*kept, *handed), body.names, body.name),
        Program(tuple(handed), behind, tuple(body.outputs[i] for i in gives), name=f"{body.name}.behind")
        if behind
        else None,
        gives,
    )


def _ahead(nodes: Sequence[Node], given: Iterable[Value]) -> list[Node]:
    """Collectives that depend on what is given alone, with what they need, in order."""
    ready = {id(v) for v in given}
    free: list[Node] = []
    for n in nodes:
        if all(id(v) in ready for v in n.operands()) and loop_of(n) is None and not hasattr(n.op, "build"):
            free.append(n)
            ready.update(id(o) for o in n.outs)
    wanted: set[int] = set()
    kept: list[Node] = []
    for n in reversed(free):
        if n.op in _AHEAD or any(id(o) in wanted for o in n.outs):
            wanted.update(id(v) for v in n.operands())
            kept.append(n)
    return kept[::-1]


def _behind(body: Program, late: set[int], taken: set[int]) -> list[Node]:
    """Reductions that no other result needs, with all that follows them, in order."""
    needed = {id(o) for i, o in enumerate(body.outputs) if i not in late}
    for n in reversed(body.nodes):
        if any(id(o) in needed for o in n.outs):
            needed.update(id(v) for v in n.operands())
    after: set[int] = set()
    found = []
    for n in body.nodes:
        if id(n) in taken or any(id(o) in needed for o in n.outs):
            continue
        if n.op in _BEHIND or any(id(v) in after for v in n.operands()):
            found.append(n)
            after.update(id(o) for o in n.outs)
    return found


def _needed(nodes: Sequence[Node], made: set[int]) -> list[Value]:
    return list({id(v): v for n in nodes for v in n.operands() if id(v) not in made}.values())
