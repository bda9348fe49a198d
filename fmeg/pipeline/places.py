"""Where, between the scans over layers, each forward value is made.

The scans are numbered 1 … K. Gap k lies behind scan k and before the next one; gap 0 is before the first, gap K, where
the results are made, behind the last. A forward value is

    shared   of the batch alone or of parameters alone: made wherever it is needed
    apart    stacked by a scan, or an elementwise function of such, and needed by results alone: one row a layer
    placed   of both, or of a scan: made in one gap, its home

What only results need is placed in the last gap; what is made of shared values alone as late as it can be, next to its
first user (a second embedding in front of a second scan); everything else as soon as its operands are there. A value
that is used in a later gap than its home has to travel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.ops.collectives import ALL_REDUCE, Collective
from fmeg.ops.shard import name_p
from fmeg.program.ir import Node, Value
from fmeg.program.structured import Scan, ScanForward
from fmeg.sharding.local import LocalScan

aten = torch.ops.aten
Deps = frozenset[str]
LAYERS = {"layers": True}
"""Tag of a stage's scans over its layers, forward and backward."""
_SAME = {aten._to_copy.default, aten.detach.default, aten.clone.default, aten.alias.default}


@dataclass
class Places:
    """What `place` finds, by ids of values. `home` is the gap of placed values, `apart` the scan (1 … K) of the others
    that are not shared."""

    home: dict[int, int] = field(default_factory=dict)
    apart: dict[int, int] = field(default_factory=dict)

    def shared(self, v: Value) -> bool:
        return id(v) not in self.home and id(v) not in self.apart


def scan_of(op: Any) -> Scan | LocalScan | None:
    """The scan that an operation runs forward, of a global or a local Program."""
    if isinstance(op, ScanForward):
        return op.pair.scan
    return op if isinstance(op, (Scan, LocalScan)) else None


def keeps_layers_apart(n: Node) -> bool:
    """Whether row i of the results is made of row i of those operands that have as many dimensions."""
    if isinstance(n.op, Collective):
        dims = n.args[2] if len(n.args) > 2 and n.op is not ALL_REDUCE else 0
        return n.op is ALL_REDUCE or all(d != 0 for d in (dims if isinstance(dims, (list, tuple)) else (dims,)))
    pointwise = isinstance(n.op, torch._ops.OpOverload) and torch.Tag.pointwise in n.op.tags
    return pointwise or n.op in _SAME or n.op is name_p


def in_rows(n: Node, stacks: Sequence[Value]) -> bool:
    """Whether a node treats the rows of `stacks`, those of its operands that hold layers, apart."""
    shapes = {v.shape[:1] for v in stacks}
    return (
        keeps_layers_apart(n)
        and len(shapes) == 1
        and all(o.ndim == v.ndim and o.shape[:1] == v.shape[:1] for o in n.outs for v in stacks)
    )


def dependencies(nodes: Sequence[Node], inputs: Mapping[int, Deps]) -> dict[int, Deps]:
    """For each value: "p" if it depends on parameters, "b" if on anything else that is given."""
    deps = dict(inputs)
    for n in nodes:
        found = frozenset().union(*(deps[id(v)] for v in n.operands()))
        deps.update({id(o): found for o in n.outs})
    return deps


def place(
    nodes: Sequence[Node], inputs: Mapping[int, Deps], outputs: Sequence[Any], scans: Sequence[Node]
) -> tuple[Places, dict[int, int]]:
    """Places of the values of forward `nodes`, and of each value the last scan that it depends on (0: none).

    inputs   by ids of values from outside: what they are, "p" or "b"
    outputs  those that are results
    scans    the nodes that run over layers, in order
    """
    number = {id(n): k for k, n in enumerate(scans, 1)}
    deps, depth = dependencies(nodes, inputs), dict.fromkeys(inputs, 0)
    for n in nodes:
        deepest = number.get(id(n), max((depth[id(v)] for v in n.operands()), default=0))
        depth.update({id(o): deepest for o in n.outs})
    fixed = {v for v, d in depth.items() if d > 0 or deps[v] >= {"p", "b"}}
    results = {id(o) for o in outputs}
    apart = _apart(nodes, number, fixed)
    users: dict[int, list[Node]] = {}
    for n in nodes:
        for v in n.operands():
            users.setdefault(id(v), []).append(n)

    placed = [n for n in nodes if id(n) not in number and n.outs and id(n.outs[0]) in fixed - apart.keys()]
    latest: dict[int, int] = {}
    for n in reversed(placed):
        using = [id(c) for o in n.outs for c in users.get(id(o), ())]
        gaps = [number[c] - 1 if c in number else latest.get(c) for c in using]
        gaps += [len(scans) for o in n.outs if id(o) in results]
        if known := [g for g in gaps if g is not None]:
            latest[id(n)] = min(known)
    home = {id(o): k for k, n in enumerate(scans, 1) for o in n.outs if id(o) not in apart}
    for n in placed:
        given = [home[id(v)] for v in n.operands() if id(v) in home]
        soonest = max(given, default=0)
        gap = latest.get(id(n), soonest)
        for_results = gap == len(scans) and depth[id(n.outs[0])] > 0
        if min(given, default=gap) < gap and not for_results:
            gap = soonest
        home.update({id(o): gap for o in n.outs})
    return Places(home, apart), depth


def _apart(nodes: Sequence[Node], number: Mapping[int, int], fixed: set[int]) -> dict[int, int]:
    """Values that have a row a layer and lead, row by row, to results alone; with the number of their scan."""
    whole: set[int] = set()
    while True:
        found: dict[int, int] = {}
        for n in nodes:
            if id(n) in number:
                scan = scan_of(n.op)
                assert scan is not None
                ys = n.outs[scan.n_carry : scan.n_carry + scan.n_ys]
                found.update({id(o): number[id(n)] for o in ys if id(o) not in whole})
                continue
            stacks = [v for v in n.operands() if id(v) in found]
            of = {found[id(v)] for v in stacks}
            if len(of) == 1 and in_rows(n, stacks) and not any(id(v) in fixed - found.keys() for v in n.operands()):
                found.update({id(o): next(iter(of)) for o in n.outs if id(o) not in whole})
        before = len(whole)
        for n in reversed(nodes):
            if id(n) in number or not all(id(o) in found and id(o) not in whole for o in n.outs):
                whole.update(id(v) for v in n.operands() if id(v) in found)
        if len(whole) == before:
            return found
