"""Peak memory of a Program by the life of its values.

A value lives from the node that makes it to the last that uses it; a view lives in the memory of what it is a view of.
Inputs belong to the caller, so they live throughout, as outputs do once they are made. A loop runs its body in the
memory above what lives around it, and holds in step k

    carried    one set of the carries, from the first step's results on
    stacked    a slice of each for every step that has run
    kept       residuals: a set for every step of the forward loop; the backward loop drops a step's set after using it
    summed     one running sum of each

A stack is counted once (as if steps wrote into it), and so is a running sum (as if it was added to in place).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.program.gradient import MIRROR
from fmeg.program.ir import Node, Program, values_in
from fmeg.program.structured import Loop, SplitRows, loop_of

aten = torch.ops.aten
_SAME = ("shard", "name")  # primitives that return their operand


def is_view(node: Node) -> bool:
    """Whether the results share the memory of the first operand."""
    op = node.op
    if isinstance(op, torch._ops.OpOverload):
        returns = op._schema.returns
        return op is aten._unsafe_view.default or any(r.alias_info and not r.alias_info.is_write for r in returns)
    return op is MIRROR or isinstance(op, SplitRows) or getattr(op, "name", "") in _SAME


def storages(program: Program) -> dict[int, tuple[int, int]]:
    """For each value by id, which storage it lies in (a number), and the bytes of that; a view lies in its operand's.

    >>> from fmeg.program.trace import trace
    >>> p = trace(lambda x: (x + 1).view(6), torch.zeros(2, 3)).program
    >>> found = storages(p)
    >>> [found[id(v)][1] for v in (*p.inputs, *p.outputs)]
    [24, 24]
    """
    found = {id(v): (id(v), v.type.nbytes) for v in program.inputs}
    for node in program.nodes:
        view = is_view(node)
        for o in node.outs:
            found[id(o)] = found[id(node.operands()[0])] if view else (id(o), o.type.nbytes)
    return found


@dataclass
class _Body:
    """One Program's memory above its inputs: `peak`, and bytes of each value's storage by `size`."""

    program: Program
    peak: int = 0
    root: dict[int, int] = field(default_factory=dict)  # value -> its storage
    size: dict[int, int] = field(default_factory=dict)  # storage -> bytes

    def held(self, values: Any) -> int:
        """Bytes of the storages of `values` that this body made."""
        return sum(self.size.get(r, 0) for r in {self.root[id(v)] for v in values_in(values)})


def peak_bytes(program: Program) -> int:
    """Most bytes that live at once.

    >>> from fmeg.program.trace import trace
    >>> t = trace(lambda x: ((x + 1) * 2).view(6).sum(), torch.zeros(2, 3))      # x, and two of its size
    >>> peak_bytes(t.program) // 4
    18
    """
    return sum(v.type.nbytes for v in program.inputs) + _measure(program).peak


def _measure(program: Program) -> _Body:
    body = _Body(program)
    for v in program.inputs:
        body.root[id(v)] = id(v)
    last = _last_uses(program, body)
    live = 0
    handles: dict[int, int] = {}  # what forward loops keep: by the value that stands for it, else by their pair
    for i, node in enumerate(program.nodes):
        loop = loop_of(node)
        made = sum(body.size[body.root[id(o)]] for o in node.outs if body.root[id(o)] == id(o))
        during = freed = held = 0
        if loop is not None:
            inner = _measure(loop.body)
            given = handles.pop(id(loop.pair), 0) if loop.residuals[1] > loop.residuals[0] else 0
            freed, held = given, given + sum(handles.get(id(v), 0) for v in node.operands())
            during = _running(inner, loop, held // loop.times)
            kept = loop.times * _kept(inner, loop)
            if len(node.outs) > loop.carried + loop.stacked + loop.summed:
                handle = node.outs[-1]
                made += kept - body.size[id(handle)]
                body.size[id(handle)] = handles[id(handle)] = kept
            elif kept:
                handles[id(loop.pair)] = kept
                made += kept
        body.peak = max(body.peak, live + made - held, live + during)
        live += made - freed - sum(body.size[r] for r in last.get(i, ()))
    return body


def _last_uses(program: Program, body: _Body) -> dict[int, list[int]]:
    """Storages by the node after which nothing needs them; fills in the roots and sizes."""
    last: dict[int, int] = {}
    for i, node in enumerate(program.nodes):
        view = is_view(node)
        for o in node.outs:
            root = body.root[id(node.operands()[0])] if view else id(o)
            body.root[id(o)] = root
            if not view:
                body.size[root] = o.type.nbytes
        for v in (*node.operands(), *node.outs):
            last[body.root[id(v)]] = i
    kept = {body.root[id(v)] for v in values_in(program.outputs)}
    out: dict[int, list[int]] = {}
    for root, i in last.items():
        if root in body.size and root not in kept:
            out.setdefault(i, []).append(root)
    return out


def _parts(loop: Loop) -> list[tuple[Any, ...]]:
    out, at = [], 0
    for n in (loop.carried, loop.stacked, loop.kept, loop.summed):
        out.append(loop.body.outputs[at : at + n])
        at += n
    return out


def _kept(inner: _Body, loop: Loop) -> int:
    """Bytes of one step's residuals: storages of the body, and carries that came in."""
    kept = [v for i, v in enumerate(_parts(loop)[2]) if i not in loop.host]
    carries = {id(v): v.type.nbytes for v in loop.body.inputs[: loop.carried]}
    return inner.held(kept) + sum(carries[r] for r in {inner.root[id(v)] for v in values_in(kept)} if r in carries)


def _running(inner: _Body, loop: Loop, dropped: int) -> int:
    """Most bytes while the loop runs, above what lives around it; `dropped`: residuals that die with a step."""
    carried, stacked, _, summed = (sum(v.type.nbytes for v in values_in(part)) for part in _parts(loop))
    grows = stacked + _kept(inner, loop) - dropped
    steps = {0, min(1, loop.times - 1), loop.times - 1}
    return max(inner.peak + k * grows + (carried + summed if k else 0) for k in steps)
