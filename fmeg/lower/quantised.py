"""FP8 operands in fewer passes over memory.

pairs       a value that products read both as it lies and transposed is quantised once, into both; of what waits for
            the backward pass, the one that it reads waits
parameters  the whole stack is quantised before the scan, from the parameters themselves
producers   norms and gated activations are quantised as they are made (see `fmeg.precision.pairs`)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmeg.lower.hoist import slices_of
from fmeg.lower.rewrite import in_order, uses, with_operands
from fmeg.ops.activations import swiglu_bwd_p, swiglu_p
from fmeg.ops.einsum import format_equation, parse_equation
from fmeg.ops.rms_norm import rms_norm_p
from fmeg.ops.shard import name_p
from fmeg.precision.delayed import known_p
from fmeg.precision.formats import amax_p, quantize_p
from fmeg.precision.pairs import largest_p, pair_p
from fmeg.precision.scaled import as_matmul, scaled_einsum_p
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.sharding.local import LocalScan, LocalScanBackward

aten = torch.ops.aten
MADE = {rms_norm_p: "rms_norm", swiglu_p: "swiglu", swiglu_bwd_p: "swiglu_bwd"}
PURE = {amax_p, quantize_p, known_p, name_p, rms_norm_p, swiglu_p, swiglu_bwd_p, aten._to_copy.default}


@dataclass
class Body:
    """A Program while it is rewritten."""

    inputs: list[Value]
    nodes: list[Node]
    outputs: list[Any]

    @classmethod
    def of(cls, program: Program) -> Body:
        return cls(list(program.inputs), list(program.nodes), list(program.outputs))

    def program(self, like: Program) -> Program:
        """It, without operations that nothing needs, in order."""
        while True:
            used = self.used()
            live = [n for n in self.nodes if n.op not in PURE or any(id(o) in used for o in n.outs)]
            if len(live) == len(self.nodes):
                break
            self.nodes = live
        ordered = in_order(self.nodes)
        assert ordered is not None
        names = like.names if len(self.inputs) == len(like.inputs) else ()
        return Program(tuple(self.inputs), ordered, tuple(self.outputs), names, like.name)

    def used(self) -> dict[int, list[Node | None]]:
        return uses(Program(tuple(self.inputs), self.nodes, tuple(self.outputs), (), ""))

    def maker(self) -> dict[int, Node]:
        return {id(o): n for n in self.nodes for o in n.outs}

    def exchange(self, old: Iterable[Node], new: Sequence[Node]) -> None:
        """New nodes in the place of the first of the old ones."""
        gone = {id(n) for n in old}
        first = next(i for i, n in enumerate(self.nodes) if id(n) in gone)
        rest = [n for n in self.nodes[first:] if id(n) not in gone]
        self.nodes = [*self.nodes[:first], *new, *rest]

    def substitute(self, swap: dict[int, Value]) -> None:
        def new(v: Value) -> Value:
            return swap.get(id(v), v)

        self.nodes = [with_operands(n, new) if any(id(v) in swap for v in n.operands()) else n for n in self.nodes]
        self.outputs = map_values(new, self.outputs)

    def feed(self, q: Value, t: Value, rows: int) -> None:
        """Products that read `q` transposed read `t`."""
        self.nodes = [_fed(n, q, t, rows) for n in self.nodes]


def quantise_stacks(program: Program) -> Program:
    """Scans with their backward passes: parameters before them, and of what waits what is read."""
    whole = Body.of(program)
    for n in list(whole.nodes):
        if isinstance(n.op, LocalScanBackward) and isinstance(n.args[2], Value):
            forward = whole.maker().get(id(n.args[2]))
            if forward is not None and isinstance(forward.op, LocalScan) and forward.op.keeps:
                _Scans(whole, forward, n).rewrite()
    return whole.program(program)


def quantise_once(program: Program) -> Program:
    """Values of one body in both orders at once, and as they are made."""
    whole = Body.of(program)
    _pairs(whole)
    _producers(whole)
    return whole.program(program)


# -- operands as products read them
# -------------------------------------------------------------------------------------
def _turned(node: Node, i: int) -> int | None:
    """How many of its leading dimensions a product contracts of operand i, where it reads it transposed."""
    names, mm = parse_equation(node.args[0])[0][i], as_matmul(node.args[0])
    if mm is None or mm.batch:
        return None
    rows = tuple(n for n in names if n not in mm.contracted)
    turned = rows and (*mm.contracted, *rows) == names
    return len(mm.contracted) if turned else None


def _turns(readers: Iterable[Node | None], q: Value) -> list[int | None]:
    """`_turned` for each use of a quantised value."""
    out: list[int | None] = []
    for n in readers:
        if n is None or n.op is not scaled_einsum_p:
            out.append(None)
        else:
            out += [_turned(n, i) for i in (0, 1) if n.args[1 + 2 * i] is q]
    return out


def _rows(turns: Sequence[int | None]) -> int | None:
    """The one split of its dimensions at which a value is transposed, if there is one."""
    found = {k for k in turns if k is not None}
    return found.pop() if len(found) == 1 else None


def _fed(node: Node, q: Value, t: Value, rows: int) -> Node:
    if node.op is not scaled_einsum_p or all(v is not q for v in node.operands()):
        return node
    args = list(node.args)
    ins, out = parse_equation(node.args[0])
    names = list(ins)
    for i in (0, 1):
        if args[1 + 2 * i] is q and _turned(node, i) == rows:
            args[1 + 2 * i] = t
            names[i] = (*names[i][rows:], *names[i][:rows])
    args[0] = format_equation(tuple(names), out)
    return Node(node.op, tuple(args), node.kwargs, node.outs, node.source, node.phase, node.tags)


def _quantises(n: Node) -> bool:
    """Whether it has one scale a tensor, and an element of the hardware's."""
    return (
        n.op is quantize_p
        and n.args[2] is None
        and not any(n.args[3])
        and n.args[4].element in ("e4m3", "e5m2")
        and n.args[4].scale != "nested"
    )


def _flipped(t: TensorType, rows: int, lead: int = 0) -> TensorType:
    s = t.shape
    return TensorType((*s[:lead], *s[lead + rows :], *s[lead : lead + rows]), t.dtype)


def _node(like: Node, op: Any, args: tuple, outs: Sequence[Value | TensorType]) -> Node:
    node = Node(op, args, {}, (), like.source, like.phase, like.tags)
    node.outs = tuple(o if isinstance(o, Value) else Value(o, node, i) for i, o in enumerate(outs))
    return node


def _pair_up(body: Body, n: Node, rows: int) -> Value:
    """A quantised value's node becomes one that makes it transposed too: that value."""
    v, top, _, _, format = n.args
    q, s = n.outs
    made = _node(
        n, pair_p, ("plain", (v,), None, (top,), format, 0, rows, False, 0.0, None), [q, _flipped(q.type, rows), s]
    )
    body.exchange([n], [made])
    body.feed(q, made.outs[1], rows)
    return made.outs[1]


def _pairs(body: Body) -> None:
    for n in list(body.nodes):
        if _quantises(n):
            rows = _rows(_turns(body.used().get(id(n.outs[0]), []), n.outs[0]))
            if rows is not None:
                _pair_up(body, n, rows)


# -- producers
# ----------------------------------------------------------------------------------------------------------
def _producers(body: Body) -> None:
    """Pairs that are the only readers, with what finds the largest, of a norm or a gated activation."""
    for n in list(body.nodes):
        if n.op is pair_p and n.args[0] == "plain" and not n.args[5] and any(m is n for m in body.nodes):
            _produce(body, n)


def _produce(body: Body, n: Node) -> None:
    maker, used = body.maker(), body.used()
    source = _source(n.args[1][0], maker, used)
    made = maker.get(id(source))
    kind = MADE.get(made.op) if made is not None else None
    if made is None or kind is None:
        _note(body, n, maker, used)
        return
    pairs, tops, gone = [], [], [made]
    for o in made.outs:
        found = _readers(o, used)
        p = [m for m in found if m is not None and m.op is pair_p and m.args[0] == "plain"]
        a = [m for m in found if m is not None and m.op is amax_p and not any(m.args[1])]
        between = [m for m in found if m is not None and m.op is name_p]
        if len(p) != 1 or len(a) != 1 or len(found) != 2 + len(between):
            return
        pairs.append(p[0])
        tops.append(a[0])
        gone += between
    format, rows = pairs[0].args[4], pairs[0].args[6]
    later = [_depends(p.args[3][0], t, maker) for p, t in zip(pairs, tops, strict=True)]
    if any(p.args[4] != format or p.args[6] != rows for p in pairs) or len(set(later)) > 1:
        return
    xs = tuple(made.args)
    eps = made.kwargs.get("eps", 0.0)
    seen = not later[0] and kind != "rms_norm"
    inverse = None
    new = []
    if not seen:
        outs: list[Value | TensorType] = [t.outs[0] for t in tops]
        if kind == "rms_norm":
            outs.append(TensorType((xs[0].type.numel // xs[0].shape[-1],), torch.float32))
        new.append(_node(made, largest_p, (kind, xs, 0, eps, None), outs))
        inverse = new[0].outs[1] if kind == "rms_norm" else None
    results = [o for p in pairs for o in p.outs] + ([t.outs[0] for t in tops] if seen else [])
    known = tuple(p.args[3][0] for p in pairs)
    new.append(_node(pairs[0], pair_p, (kind, xs, inverse, known, format, 0, rows, seen, eps, None), results))
    body.exchange([*gone, *pairs, *tops], new)


def _note(body: Body, n: Node, maker: dict[int, Node], used: dict[int, list[Node | None]]) -> None:
    """A pair scaled by what is known from before finds the largest value of now too."""
    x = n.args[1][0]
    tops = [m for m in used[id(x)] if m is not None and m.op is amax_p and not any(m.args[1])]
    if len(tops) == 1 and not _depends(n.args[3][0], tops[0], maker):
        args = (*n.args[:7], True, *n.args[8:])
        body.exchange([n, tops[0]], [_node(n, pair_p, args, [*n.outs, tops[0].outs[0]])])


def _source(v: Value, maker: dict[int, Node], used: dict[int, list[Node | None]]) -> Value:
    """What a value is under the names that it was given."""
    while (n := maker.get(id(v))) is not None and n.op is name_p and len(used[id(n.args[0])]) == 1:
        v = n.args[0]
    return v


def _readers(v: Value, used: dict[int, list[Node | None]]) -> list[Node | None]:
    """Readers of a value, and of it under a name, with the operations that name it."""
    found = used.get(id(v), [])
    if len(found) == 1 and found[0] is not None and found[0].op is name_p:
        return [found[0], *_readers(found[0].outs[0], used)]
    return found


def _depends(v: Value, node: Node, maker: dict[int, Node]) -> bool:
    """Whether a value follows from a node's results."""
    todo, known = [v], set()
    while todo:
        made = maker.get(id(todo.pop()))
        if made is node:
            return True
        if made is not None and id(made) not in known:
            known.add(id(made))
            todo += made.operands()
    return False


# -- scans
# --------------------------------------------------------------------------------------------------------------
class _Scans:
    """A scan and its backward pass, and the Program around them."""

    def __init__(self, around: Body, forward: Node, backward: Node) -> None:
        self.around, self.forward, self.backward = around, forward, backward
        f, b = forward.op, backward.op
        self.f, self.b = Body.of(f.body), Body.of(b.body)
        first = b.n_carry + b.n_ys
        last = first + b.n_residuals
        kept = self.f.outputs[f.n_carry + f.n_ys :]
        self.kept: list[tuple[Value, Value]] = list(zip(kept, self.b.inputs[first:last], strict=True))
        self.xs = [(v, w) for v, w in slices_of(forward)]
        self.ys = [(v, w) for v, w in slices_of(backward)]
        self.parts = (self.f.inputs[: f.n_carry], self.f.inputs[f.n_carry + f.n_xs :])
        self.rest = (self.b.inputs[:first], self.b.inputs[last + b.n_xs :])
        self.before: list[Node] = []

    def rewrite(self) -> None:
        changed = [self._parameter(stack, w) for stack, w in list(self.xs)]
        for n in list(self.f.nodes):
            if _quantises(n):
                changed.append(self._activation(n))
        if any(changed):
            self._finish()

    def _activation(self, n: Node) -> bool:
        q = n.outs[0]
        stand_ins = [s for v, s in self.kept if v is q]
        here = [r for r in self.f.used().get(id(q), []) if r is not None or not stand_ins]
        used = self.b.used()
        there = [t for s in stand_ins for t in _turns(used.get(id(s), []), s)]
        rows = _rows([*_turns(here, q), *there])
        if rows is None:
            return False
        t = _pair_up(self.f, n, rows)
        if there and all(k == rows for k in there):
            for i, (v, s) in enumerate(self.kept):
                if v is q:
                    other = Value(t.type, name=s.name)
                    self.b.feed(s, other, rows)
                    self.kept[i] = (t, other)
        return True

    def _parameter(self, stack: Value, w: Value) -> bool:
        """A slice that is only quantised, by its own largest value or by a known one: the stack is, once."""
        readers = self.f.used().get(id(w), [])
        if not readers or any(n is None or n.op not in (amax_p, quantize_p) for n in readers):
            return False
        lows = [n for n in readers if n is not None and n.op is quantize_p]
        tops = [n for n in readers if n is not None and n.op is amax_p]
        used = self.b.used()
        if len(lows) != 1 or len(tops) > 1 or not _quantises(lows[0]) or any(any(n.args[1]) for n in tops):
            return False
        if any(v is stack and id(inner) in used for v, inner in self.ys):
            return False
        low, top = lows[0], tops[0] if tops else None
        q, s = low.outs
        turns = _turns(self.f.used().get(id(q), []), q)
        turns += [t for v, x in self.kept if v is q for t in _turns(used.get(id(x), []), x)]
        rows = _rows(turns)
        known = self._known(low, top)
        if rows is None or known is None:
            return False
        length = self.forward.op.length
        source, dtype = self._cast_of(stack)
        stacked = lambda v: TensorType((length, *v.shape), v.dtype)
        ndim = len(w.shape)
        one = TensorType((length, *(1,) * ndim), torch.float32)
        seen = top is not None and known is not top.outs[0]
        if top is not None and not seen:
            find = _node(self.forward, largest_p, ("plain", (source,), 1, 0.0, dtype), [one])
            self.before.append(find)
            at = find.outs[0]
        else:
            at = self._known_stack(known, one)
        outs = [stacked(q), _flipped(stacked(q), rows, 1), one, *([one] if seen else [])]
        args = ("plain", (source,), None, (at,), low.args[4], 1, rows, seen, 0.0, dtype)
        made = _node(self.forward, pair_p, args, outs)
        self.before.append(made)
        self.f.nodes = [n for n in self.f.nodes if n is not low and n is not top]
        replaced = [(q, made.outs[0]), (s, made.outs[2])]
        if top is not None:
            replaced.append((top.outs[0], made.outs[3] if seen else at))
        turned = Value(_flipped(q.type, rows))
        for old, stacked_value in replaced:
            self._slice(old, stacked_value, made.outs[1] if old is q else None, turned, rows)
        return True

    def _known(self, low: Node, top: Node | None) -> Value | None:
        """The largest value that a slice is scaled by, if it is its own or a row of a stack of known ones."""
        value = low.args[1]
        if top is not None and value is top.outs[0]:
            return value
        made = self.f.maker().get(id(value))
        known = made is not None and made.op is known_p and any(made.args[0] is w for _, w in self.xs)
        return value if known else None

    def _known_stack(self, value: Value, one: TensorType) -> Value:
        made = self.f.maker()[id(value)]
        stack = next(v for v, w in self.xs if w is made.args[0])
        row = _node(self.forward, aten.select.int, (stack, 1, made.args[1]), [TensorType(one.shape[:1], stack.dtype)])
        view = _node(self.forward, aten.view.default, (row.outs[0], list(one.shape)), [one])
        self.before += [row, view]
        return view.outs[0]

    def _cast_of(self, stack: Value) -> tuple[Value, torch.dtype | None]:
        made = self.around.maker().get(id(stack))
        if made is not None and made.op is aten._to_copy.default and made.kwargs == {"dtype": torch.bfloat16}:
            return made.args[0], torch.bfloat16
        return stack, None

    def _slice(self, old: Value, stack: Value, turned_stack: Value | None, turned: Value, rows: int) -> None:
        """A value made in the body is a slice of a stack made before, forward and backward."""
        fresh = Value(old.type, name=old.name)
        self.xs.append((stack, fresh))
        if turned_stack is not None:
            self.xs.append((turned_stack, turned))
            self.f.feed(old, turned, rows)
        self.f.substitute({id(old): fresh})
        for stand_in in [s for v, s in self.kept if v is old]:
            self.kept = [k for k in self.kept if k[1] is not stand_in]
            again = Value(old.type, name=stand_in.name)
            self.ys.append((stack, again))
            if turned_stack is not None:
                other = Value(turned.type, name=stand_in.name)
                self.ys.append((turned_stack, other))
                self.b.feed(stand_in, other, rows)
            self.b.substitute({id(stand_in): again})

    def _finish(self) -> None:
        f, b = self.forward.op, self.backward.op
        outs = self.f.outputs[: f.n_carry + f.n_ys]
        self.f.outputs = [*outs, *(v for v, _ in self.kept)]
        head, consts = self.parts
        self.xs, program = _pruned(self.f, f.body, self.xs, lambda xs: [*head, *xs, *consts])
        args = self.forward.args
        given = (*args[: f.n_carry], *(v for v, _ in self.xs), *args[f.n_carry + f.n_xs :])
        op: Any = replace(f, body=program, n_xs=len(self.xs))
        self.around.exchange([self.forward], [*self.before, _like(self.forward, op, given)])
        first, last = self.rest
        stand_ins = [s for _, s in self.kept]
        self.ys, program = _pruned(self.b, b.body, self.ys, lambda xs: [*first, *stand_ins, *xs, *last])
        args = self.backward.args
        op = replace(b, body=program, n_residuals=len(self.kept), n_xs=len(self.ys))
        given = (*args[:3], type(args[3])(v for v, _ in self.ys), *args[4:])
        self.around.exchange([self.backward], [_like(self.backward, op, given)])


def _like(n: Node, op: Any, args: tuple) -> Node:
    return Node(op, args, n.kwargs, n.outs, n.source, n.phase, n.tags)


def _pruned(
    body: Body, like: Program, xs: list[tuple[Value, Value]], arrange: Callable[[list[Value]], list[Value]]
) -> tuple[list[tuple[Value, Value]], Program]:
    """The slices that the body reads, and the body with them alone as inputs."""
    body.inputs = arrange([w for _, w in xs])
    body.nodes = body.program(like).nodes
    used = body.used()
    xs = [(v, w) for v, w in xs if id(w) in used]
    body.inputs = arrange([w for _, w in xs])
    return xs, body.program(like)
