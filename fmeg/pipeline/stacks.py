"""Which scans of a microbatch's body run over layers, and which stacked parameters belong to which of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.places import in_rows, place, scan_of
from fmeg.program.ir import Node, Program, Value


@dataclass(frozen=True)
class Stacks:
    """The scans over layers of a body, in order, and what has a row a layer of one of them.

    scans    forward nodes
    of       by index of each input that is a stack of layers, the number of its scan, from 0
    outputs  by index of each output that is one (gradients of stacks, and what scans stack), the number of its scan
    """

    scans: tuple[Node, ...]
    of: Mapping[int, int]
    outputs: Mapping[int, int]

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many layers each scan has."""
        return tuple(length_of(n) for n in self.scans)

    @property
    def staged(self) -> dict[int, int]:
        """Of `of`, the inputs that are stored by stage: a stack of one layer is not, since nothing can be cut."""
        return {i: k for i, k in self.of.items() if self.lengths[k] > 1}

    @property
    def stacked(self) -> dict[int, int]:
        """Of `outputs`, those that are stored by stage."""
        return {i: k for i, k in self.outputs.items() if self.lengths[k] > 1}


def length_of(scan: Node) -> int:
    op = scan_of(scan.op)
    assert op is not None
    return op.length


def xs_of(scan: Node) -> Sequence[Value]:
    op = scan_of(scan.op)
    assert op is not None
    return scan.args[op.n_carry : op.n_carry + op.n_xs]


def find_stacks(body: Program, layered: Sequence[int], owners: Mapping[int, int]) -> Stacks:
    """The stacks of a joint body.

    layered  inputs with the logical axis `layers` in front
    owners   by index of each output that is a gradient, the input that it is of
    ScheduleError if no scan runs over any of them, or two scans run over one.
    """
    forward = [n for n in body.nodes if n.phase == "F"]
    made: dict[int, frozenset[int]] = {id(body.inputs[i]): frozenset({i}) for i in layered}  # of which stacks, by rows
    scans: list[Node] = []
    of: dict[int, int] = {}
    for n in forward:
        if scan_of(n.op) is None:
            stacks = [v for v in n.operands() if id(v) in made]
            if stacks and in_rows(n, stacks):
                made.update({id(o): frozenset().union(*(made[id(v)] for v in stacks)) for o in n.outs})
            continue
        used = frozenset().union(*(made.get(id(v), frozenset()) for v in xs_of(n)))
        for i in sorted(used):
            if i in of:
                raise ScheduleError(
                    f"pipeline: {body.inputs[i].name or f'input {i}'} is scanned at {scans[of[i]].source} and again at "
                    f"{n.source}; a layer lives on one stage: give each scan a stack of its own"
                )
            of[i] = len(scans)
        if used:
            scans.append(n)
    if not scans:
        raise ScheduleError(
            "pipeline: the loss function must have a scan over the layers: none of its scans runs over a parameter "
            "whose first logical axis is `layers`"
        )
    lengths = [length_of(n) for n in scans]
    for i in layered:
        if i not in of:
            size = body.inputs[i].shape[0]
            if lengths.count(size) != 1:
                raise ScheduleError(
                    f"pipeline: {body.inputs[i].name or f'input {i}'} has the logical axis `layers`, of size {size}, "
                    "in "
                    f"front, but no scan over layers uses it, and those have {', '.join(map(str, lengths))}; name the "
                    "axis otherwise"
                )
            of[i] = lengths.index(size)
    kinds = {id(v): frozenset("p" if i in of or i in owners.values() else "b") for i, v in enumerate(body.inputs)}
    sums = [o for i, o in enumerate(body.outputs) if i not in owners]
    apart = place(forward, kinds, sums, scans)[0].apart
    outputs = {i: of[k] for i, k in owners.items() if k in of}
    outputs.update({i: apart[id(o)] - 1 for i, o in enumerate(sums) if id(o) in apart})
    return Stacks(tuple(scans), of, outputs)


def rows_of(nodes: Iterable[Node], stacks: Mapping[int, int]) -> dict[int, int]:
    """By ids: values with a row a layer of the scan of that number, given those of the inputs."""
    rows = dict(stacks)
    for n in nodes:
        mine: list[Any] = [v for v in n.operands() if id(v) in rows]
        if mine and scan_of(n.op) is None and in_rows(n, mine) and len({rows[id(v)] for v in mine}) == 1:
            rows.update({id(o): rows[id(mine[0])] for o in n.outs})
    return rows
