"""Experts in FP8 in fewer passes over memory.

rows      what the gradient of the matrices reads is turned as it is quantised; of what waits for the backward pass,
          the turned rows wait
sums      of two products, by the second of them
matrices  the whole stack is quantised before the scan, as it lies and transposed, from the parameters themselves
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fmeg.lower.quantised import Body, _Scans
from fmeg.lower.wide import _widened
from fmeg.precision.formats import amax_p, quantize_p
from fmeg.precision.grouped import multiplies_dw, scaled_grouped_add_p, scaled_grouped_dw_p, scaled_grouped_p
from fmeg.precision.pairs import largest_p, pair_p
from fmeg.precision.ragged import rows_quantize_p
from fmeg.precision.turned import turn_rows_p, turned_dw_p, turned_p
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.sharding.local import LocalScan, LocalScanBackward

aten = torch.ops.aten


def widen_experts(program: Program) -> Program:
    """Gradients of matrices whose only reader is a cast to float32 are float32."""
    return _widened(program, _wide)


def _wide(product: Node) -> tuple[tuple, dict] | None:
    if product.op is scaled_grouped_dw_p:
        return (*product.args[:6], torch.float32, *product.args[7:]), {}
    return None


def _node(like: Node, op: Any, args: tuple, outs: Sequence[Value | TensorType]) -> Node:
    node = Node(op, args, {}, (), like.source, like.phase, like.tags)
    node.outs = tuple(o if isinstance(o, Value) else Value(o, node, i) for i, o in enumerate(outs))
    return node


# -- rows -------------------------------------------------------------------------------------------------------------
def turn_rows(program: Program) -> Program:
    """Gradients of matrices read turned rows."""
    body, made = Body.of(program), dict[int, Value]()
    for n in list(body.nodes):
        if n.op is scaled_grouped_dw_p and len(n.operands()) == 5 and multiplies_dw(n.args[5]):
            x, sx, y, sy, ends, grids, dtype = n.args[:7]
            new = [_turn(n, v, ends, made) for v in (x, y) if id(v) not in made]
            args = (made[id(x)], sx, made[id(y)], sy, ends, grids, dtype)
            body.exchange([n], [*new, _node(n, turned_dw_p, args, n.outs)])
    return body.program(program)


def _turn(like: Node, q: Value, ends: Value, made: dict[int, Value]) -> Node:
    (d, width), dtype = turn_rows_p.reference(*_meta(q, ends)).shape, q.dtype
    node = _node(like, turn_rows_p, (q, ends), [TensorType((d, width), dtype)])
    made[id(q)] = node.outs[0]
    return node


def _meta(q: Value, ends: Value) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(q.shape, dtype=q.dtype, device="meta"), torch.empty(ends.shape, dtype=ends.dtype, device="meta")


def turn_ahead(program: Program) -> Program:
    """Rows that wait for the backward pass of a scan are turned in its forward pass."""
    return _scans(program, _Rows)


def quantise_turned(program: Program) -> Program:
    """Rows that are turned once they are quantised are made turned."""
    body = Body.of(program)
    for n in list(body.nodes):
        if n.op is rows_quantize_p:
            readers = body.used().get(id(n.outs[0]), [])
            turns = [m for m in readers if m is not None and m.op is turn_rows_p]
            if len(turns) == 1 and len(n.args) == 6:
                lies = len(readers) > 1
                q, s = n.outs
                outs = [*([q] if lies else []), turns[0].outs[0], s]
                body.exchange([n, turns[0]], [_node(n, turned_p, (*n.args, lies), outs)])
    return body.program(program)


def add_rows(program: Program) -> Program:
    """Sums of two products of one routing, read by nothing else: what the experts' inputs get from gates and ups."""
    body = Body.of(program)
    for n in list(body.nodes):
        if n.op is not aten.add.Tensor or n.kwargs or len(n.args) != 2 or n.args[0] is n.args[1]:
            continue
        maker, used = body.maker(), body.used()
        first, second = (maker.get(id(v)) for v in n.args)
        if first is None or second is None or first.op is not scaled_grouped_p or second.op is not scaled_grouped_p:
            continue
        if first.args[4] is second.args[4] and all(used[id(v)] == [n] for v in n.args):
            body.exchange([n, second], [_node(n, scaled_grouped_add_p, (*second.args, n.args[0]), n.outs)])
    return body.program(program)


# -- scans ------------------------------------------------------------------------------------------------------------
def quantise_matrices(program: Program) -> Program:
    """Matrices that only products in FP8 read are quantised before the scan, all at once."""
    return _scans(program, _Matrices)


def _scans(program: Program, rewriter: type[_Scans]) -> Program:
    whole = Body.of(program)
    for n in list(whole.nodes):
        if isinstance(n.op, LocalScanBackward) and isinstance(n.args[2], Value):
            forward = whole.maker().get(id(n.args[2]))
            if forward is not None and isinstance(forward.op, LocalScan) and forward.op.keeps:
                rewriter(whole, forward, n).rewrite()
    return whole.program(program)


class _Rows(_Scans):
    def rewrite(self) -> None:
        forward_of = {id(s): v for v, s in self.kept}
        made: dict[int, Value] = {}
        for n in [n for n in self.b.nodes if n.op is turn_rows_p]:
            q, ends = (forward_of.get(id(v)) for v in n.args)
            if q is None or ends is None:
                continue
            source = self.f.maker().get(id(q))
            like = source if source is not None else n
            turned = _turn(like, q, ends, made)
            at = next((i for i, m in enumerate(self.f.nodes) if m is source), -1) + 1
            self.f.nodes.insert(at, turned)
            self.b.nodes = [m for m in self.b.nodes if m is not n]
            self.kept.append((turned.outs[0], n.outs[0]))
        if made:
            used = self.b.used()
            self.kept = [k for k in self.kept if id(k[1]) in used]
            self._finish()


class _Matrices(_Scans):
    def rewrite(self) -> None:
        changed = [self._matrices(stack, w) for stack, w in list(self.xs)]
        if any(changed):
            self._finish()

    def _matrices(self, stack: Value, w: Value) -> bool:
        """A slice [experts, …] that is only quantised, by its own largest values or a known one, and so read."""
        readers = self.f.used().get(id(w), [])
        lows = [n for n in readers if n is not None and n.op is quantize_p]
        tops = [n for n in readers if n is not None and n.op is amax_p]
        if len(readers) != len(lows) + len(tops) or len(lows) != 1 or len(tops) > 1:
            return False
        low, top = lows[0], tops[0] if tops else None
        grid, format = low.args[3:5]
        if grid not in ((1, 0, 0), (0, 0, 0)) or low.args[2] is not None or format.element == "e2m1":
            return False
        if top is not None and top.args[1] != grid:
            return False
        if any(v is stack and id(inner) in self.b.used() for v, inner in self.ys):
            return False
        q, s = low.outs
        stand_ins = [i for v, i in self.kept if v is q]
        all_readers = [*self.f.used().get(id(q), []), *(n for i in stand_ins for n in self.b.used().get(id(i), []))]
        products = [n for n in all_readers if n is not None and n.op is scaled_grouped_p]
        mine = {id(v) for v in (q, *stand_ins)}
        if len(products) + len(stand_ins) != len(all_readers) or any(id(n.args[2]) not in mine for n in products):
            return False
        known = self._known(low, top)
        if known is None:
            return False
        self._before(stack, low, top, known)
        return True

    def _before(self, stack: Value, low: Node, top: Node | None, known: Value) -> None:
        length, (q, s) = self.forward.op.length, low.outs
        grid, format = low.args[3:5]
        experts, d, f = q.shape
        source, dtype = self._cast_of(stack)
        like = self.forward
        each = TensorType((length, experts, 1, 1), torch.float32)
        of_scale = TensorType((length, *s.shape), torch.float32)
        seen = top is not None and known is not top.outs[0]
        if seen or top is None:
            at = self._known_stack(known, TensorType((length, 1, 1, 1), torch.float32))
            if experts > 1:
                self.before.append(_node(like, aten.expand.default, (at, list(each.shape)), [each]))
                at = self.before[-1].outs[0]
        else:
            at = self._add(like, largest_p, ("plain", (source,), 2, 0.0, dtype), [each])[0]
            if grid[0] == 0:
                at = self._over_experts(like, at, of_scale)
                at = self._add(like, aten.expand.default, (at, list(each.shape)), [each])[0]
        outs = [
            TensorType((length, *q.shape), q.dtype), TensorType((length, experts, f, d), q.dtype), each,
            *([each] if seen else []),
        ]  # fmt: skip
        args = ("plain", (source,), None, (at,), format, 2, 1, seen, 0.0, dtype)
        stacked, turned, scale, *now = self._add(like, pair_p, args, outs)
        self.f.nodes = [n for n in self.f.nodes if n is not low and n is not top]
        if grid[0] == 0:
            scale = self._over_experts(like, scale, of_scale)
        if top is not None and (seen or id(top.outs[0]) in self._needed()):
            tops = now[0] if seen else at
            self._exchange(top.outs[0], self._over_experts(like, tops, of_scale) if grid[0] == 0 else tops, None)
        self._exchange(q, stacked, turned)
        self._exchange(s, scale, None)

    def _add(self, like: Node, op: Any, args: tuple, outs: Sequence[TensorType]) -> tuple[Value, ...]:
        self.before.append(_node(like, op, args, outs))
        return self.before[-1].outs

    def _over_experts(self, like: Node, x: Value, one: TensorType) -> Value:
        return self._add(like, aten.amax.default, (x, [1], True), [one])[0]

    def _needed(self) -> dict[int, list[Node | None]]:
        kept: dict[int, list[Node | None]] = {id(v): [None] for v, _ in self.kept}
        return self.f.used() | kept

    def _exchange(self, old: Value, stack: Value, turned: Value | None) -> None:
        """A value made in the body is a slice of a stack made before, forward and backward; products that contract what
        does not lie innermost read the slice of `turned`."""
        for body, xs, value in ((self.f, self.xs, old), *((self.b, self.ys, i) for v, i in self.kept if v is old)):
            fresh = Value(old.type, name=value.name)
            xs.append((stack, fresh))
            if turned is not None:
                other = Value(TensorType(turned.shape[1:], turned.dtype), name=value.name)
                xs.append((turned, other))
                body.nodes = [_read(n, value, other) for n in body.nodes]
            body.substitute({id(value): fresh})
        self.kept = [k for k in self.kept if k[0] is not old]


def _read(n: Node, q: Value, turned: Value) -> Node:
    if n.op is not scaled_grouped_p or n.args[2] is not q or n.args[6]:
        return n
    args = (*n.args[:2], turned, *n.args[3:6], True, *n.args[7:])
    return Node(n.op, args, n.kwargs, n.outs, n.source, n.phase, n.tags)
