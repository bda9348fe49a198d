"""Loops of local Programs: what each step is given, what is collected, and what goes on meanwhile.

Where collectives can be begun, a scan's body runs in pieces (see `pieces`). `ahead` of the next step is begun before
this one computes, and `behind` of this step is waited for when the next has been launched:

    ahead(0)
    for each step i:   wait ahead(i);  begin ahead(i+1);  main(i);  wait behind(i-1);  begin behind(i)
    wait behind(last)

ahead(0) may be begun before the loop (`head_start`), and in place of the last step's ahead come collectives that stand
behind the loop but need nothing of it (`riding`). So at most two layers' parameters are whole at once, and two layers'
gradients unreduced. All memory is allocated and
freed in the order of the launching stream; what a collective reads is held until it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from fmeg.program.ir import Node, Program, Value
from fmeg.sharding.buffers import Stack, Sum, Total
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward
from fmeg.sharding.offload import Offloaded
from fmeg.sharding.pieces import Pieces, pieces

if TYPE_CHECKING:
    from fmeg.sharding.execute import Executable

Step = Callable[[list[Any]], None]
Waiting = Callable[[], list[Any]]


class _Body:
    """A scan's body, whole or in pieces. `early`, `late` as in `pieces`; `direct`: results that may be written into
    memory given at the end of the inputs, or with `adds` added to it."""

    def __init__(
        self,
        ex: Executable,
        body: Program,
        early: range,
        late: range,
        direct: Sequence[int] = (),
        adds: bool = False,
    ) -> None:
        whole = Pieces(None, (), body, None, ())
        cut = _once(ex, body, lambda: pieces(body, early, late)) if ex.overlap else whole
        self.takes, self.gives, self.n_out = cut.takes, cut.gives, len(body.outputs)
        self.memory = [o for o in direct if o not in cut.gives]
        self.main = ex.body(cut.main, writes=self.memory, adds=adds)
        self.ahead = ex.body(cut.ahead, later=True) if cut.ahead else None
        self.left = [] if adds else [o for o in direct if o in cut.gives]
        behind = [cut.gives.index(o) for o in self.left]
        self.behind = ex.body(cut.behind, writes=behind, later=True) if cut.behind else None

    def begin(self, inputs: Callable[[int], Any]) -> Waiting:
        """`inputs`: those of the body by number, for what runs ahead."""
        return self.ahead.start([inputs(i) for i in self.takes]) if self.ahead else list

    def run(self, inputs: list[Any], fetched: list[Any], memory: Mapping[int, Any]) -> tuple[list[Any], list[Any]]:
        """The body's results, None where those behind it give them; and what these need."""
        inputs += [*fetched, *(memory[o] for o in self.memory)]
        fetched.clear()
        got = self.main.run(inputs)
        return got[: self.n_out], got[self.n_out :]


class _Behind:
    """Runs what is behind each step's body, and hands on its results when the next step has been launched."""

    def __init__(self, body: _Body, collect: Callable[[int, list[Any]], None]) -> None:
        self.body, self.collect = body, collect
        self.open: tuple[int, Waiting] | None = None

    def step(self, i: int, handed: list[Any], memory: Mapping[int, Any]) -> None:
        self.finish()
        if self.body.behind:
            self.open = i, self.body.behind.start([*handed, *(memory[o] for o in self.body.left)])

    def finish(self) -> None:
        if self.open is not None:
            i, waiting = self.open
            self.open = None
            self.collect(i, waiting())


def _once(ex: Executable, body: Program, make: Callable[[], Pieces]) -> Pieces:
    """The pieces of a body, made once for all that share bodies."""
    key = -id(body)
    if key not in ex.bodies:
        ex.bodies[key] = make()
    return ex.bodies[key]


def _body(ex: Executable, node: Node) -> _Body:
    op, n = node.op, len(node.op.body.inputs)
    n_c = op.n_carry
    if isinstance(op, LocalScan):
        return _Body(ex, op.body, range(n_c, n), range(n_c, n_c + op.n_ys))
    first, n_out = n_c + op.n_ys + op.n_residuals, len(op.body.outputs)
    direct = range(n_c, n_c + op.n_ct_xs) if ex.mode != "eager" and ex.backend.plain else range(0)
    return _Body(ex, op.body, range(first, n), range(n_c, n_out), direct, op.adds)


def head_start(ex: Executable, node: Node) -> tuple[list[Value], Step] | None:
    """What the first step's `ahead` reads, and a step that begins it before the loop; None where there is nothing.
    Until the loop runs, what waits is where its first result will be."""
    op, body = node.op, _body(ex, node)
    if body.ahead is None or not node.outs:
        return None
    if isinstance(op, LocalScan):
        operands, stacks, layer = list(node.args), op.n_carry + op.n_xs, 0
    else:
        operands, stacks, layer = [*node.args[3], *node.args[4]], op.n_xs, op.length - 1
    offset = len(op.body.inputs) - len(operands)
    needs = {k: operands[k - offset] for k in body.takes}
    if not all(isinstance(v, Value) for v in needs.values()):
        return None
    b, slots, out = ex.backend, {k: ex.slots[id(v)] for k, v in needs.items()}, ex.outs(node)[0]

    def begin(env: list[Any]) -> None:
        def value(k: int) -> Any:
            x = env[slots[k]]
            return b.call(torch.select, (x, 0, layer), {}) if k - offset < stacks else x

        env[out] = body.begin(value)

    return list(needs.values()), begin


def _begun(env: list[Any], outs: Sequence[int]) -> Waiting | None:
    """What was begun before the loop, if it was."""
    waiting = env[outs[0]] if outs else None
    if outs:
        env[outs[0]] = None
    return waiting


def scan(ex: Executable, node: Node, dying: set[int], riding: Sequence[Step] = ()) -> Step:
    """`riding`: steps to run in the loop's last."""
    op: LocalScan = node.op
    b, read, outs = ex.backend, ex.reader(node.args, dying), ex.outs(node)
    n_c, n_x, n_y = op.n_carry, op.n_xs, op.n_ys
    body = _body(ex, node)

    def run(env: list[Any]) -> None:
        given = list(read(env))
        carry, consts = given[:n_c], given[n_c + n_x :]
        slices = [b.call(torch.unbind, (x,), {}) for x in given[n_c : n_c + n_x]]
        del given
        ys = [Stack(b, op.length) for _ in range(n_y)]
        handle: Any = Offloaded(b, op.host, op.length) if op.host else []

        def ahead(i: int) -> Waiting:
            return body.begin(lambda k: slices[k - n_c][i] if k < n_c + n_x else consts[k - n_c - n_x])

        def collect(i: int, got: list[Any]) -> None:
            for k, v in zip(body.gives, got, strict=True):
                ys[k - n_c].put(i, v)

        behind, waiting = _Behind(body, collect), _begun(env, outs) or ahead(0)
        for i in range(op.length):
            fetched = waiting()
            waiting = ahead(i + 1) if i + 1 < op.length else _all(riding, env)
            inputs = [*carry, *(s[i] for s in slices), *consts]
            carry.clear()
            got, handed = body.run(inputs, fetched, {})
            carry = got[:n_c]
            for k in range(n_y):
                if n_c + k not in body.gives:
                    ys[k].put(i, got[n_c + k])
            if op.keeps:
                handle.append(got[n_c + n_y :])
            del got
            behind.step(i, handed, {})
        behind.finish()
        store(env, outs, [*carry, *(y.result() for y in ys), *([handle] if op.keeps else [])])

    return run


def scan_backward(ex: Executable, node: Node, dying: set[int], riding: Sequence[Step] = ()) -> Step:
    """Likewise."""
    op: LocalScanBackward = node.op
    b, read, outs = ex.backend, ex.reader(node.args, dying), ex.outs(node)
    n_c, n_x, n_out = op.n_carry, op.n_ct_xs, len(op.body.outputs)
    first = n_c + op.n_ys + op.n_residuals
    body = _body(ex, node)

    def run(env: list[Any]) -> None:
        ct_carries, ct_ys, handle, xs, consts, *given = read(env)
        cts = list(ct_carries)
        del ct_carries
        y_slices = [b.call(torch.unbind, (y,), {}) for y in ct_ys]
        x_slices = [b.call(torch.unbind, (x,), {}) for x in xs]
        stacks = [Stack(b, op.length) for _ in range(n_x)]
        if given:
            stacks = [Stack(b, op.length) if x is None else Total(b, x) for x in given[0]]
            given.clear()
        written = [*body.memory, *body.left]
        for o in (o for o in written if stacks[o - n_c].buffer is None):
            t = op.body.outputs[o].type
            stacks[o - n_c].buffer = torch.empty((op.length, *t.shape), dtype=t.dtype, device=b.device)
        sums = [Sum(b) for _ in range(n_out - n_c - n_x)]

        def ahead(i: int) -> Waiting:
            n = first + op.n_xs
            return body.begin(lambda k: x_slices[k - first][i] if k < n else consts[k - n])

        def put(i: int, k: int, v: Any) -> None:
            if k < n_c + n_x:
                stacks[k - n_c].put(i, v)
            else:
                sums[k - n_c - n_x].add(v)

        def collect(i: int, got: list[Any]) -> None:
            for k, v in zip(body.gives, got, strict=True):
                put(i, k, v)

        behind, waiting = _Behind(body, collect), _begun(env, outs) or ahead(op.length - 1)
        for i in reversed(range(op.length)):
            fetched = waiting()
            waiting = ahead(i - 1) if i else _all(riding, env)
            inputs = [*cts, *(y[i] for y in y_slices), *handle.pop(), *(x[i] for x in x_slices), *consts]
            cts.clear()
            memory = {o: stacks[o - n_c].buffer[i] for o in written}
            got, handed = body.run(inputs, fetched, memory)
            cts = got[:n_c]
            for k in range(n_c, n_out):
                if k not in body.gives:
                    put(i, k, got[k])
            del got
            behind.step(i, handed, memory)
        behind.finish()
        store(env, outs, [*cts, *(s.result() for s in stacks), *(t.result() for t in sums)])

    return run


def accumulate(ex: Executable, node: Node, dying: set[int]) -> Step:
    op: LocalAccumulate = node.op
    b, body, read, outs = ex.backend, ex.body(op.body), ex.reader(node.args, dying), ex.outs(node)
    direct = op.steps > 1 and ex.mode != "eager" and b.plain
    again, totals = _adding(op.body) if direct else (op.body, [])
    rest = ex.body(again) if totals else body

    def run(env: list[Any]) -> None:
        args = read(env)
        split = [
            b.call(torch.unbind, (a,), {}) if batched else None for a, batched in zip(args, op.batched, strict=True)
        ]
        sums = [Sum(b) for _ in outs]
        for j in range(op.steps):
            inputs = [a if s is None else s[j] for a, s in zip(args, split, strict=True)]
            if j and totals:
                got = rest.run([*inputs, *(sums[k].result() for k in totals)])
            else:
                got = body.run(inputs)
            for k, (t, v) in enumerate(zip(sums, got, strict=True)):
                if not (j and k in totals):
                    t.add(v)
            del got
        store(env, outs, [t.result() for t in sums])

    return run


def _adding(body: Program) -> tuple[Program, list[int]]:
    """A microbatch's body that adds stacked gradients to those of earlier ones, which are further inputs; the results
    for which it does so: those that a backward scan alone makes."""
    made = {id(o): (n, i) for n in body.nodes if isinstance(n.op, LocalScanBackward) for i, o in enumerate(n.outs)}
    used = {id(v) for n in body.nodes for v in n.operands()}
    results = [id(v) for v in body.outputs]
    totals: list[int] = []
    accs: dict[int, list[Value | None]] = {}
    for k, v in enumerate(body.outputs):
        n, i = made.get(id(v), (None, 0))
        if n is None or id(v) in used or results.count(id(v)) > 1 or not 0 <= i - n.op.n_carry < n.op.n_ct_xs:
            continue
        accs.setdefault(id(n), [None] * n.op.n_ct_xs)[i - n.op.n_carry] = Value(v.type)
        totals.append(k)
    more = [x for k in totals if (x := _given(accs, *made[id(body.outputs[k])])) is not None]
    nodes = [
        Node(replace(n.op, adds=True), (*n.args, accs[id(n)]), n.kwargs, n.outs, n.source, n.phase, n.tags)
        if id(n) in accs
        else n
        for n in body.nodes
    ]
    return replace(body, inputs=(*body.inputs, *more), nodes=nodes), totals


def _given(accs: Mapping[int, list[Value | None]], n: Node, i: int) -> Value | None:
    return accs[id(n)][i - n.op.n_carry]


def _all(steps: Sequence[Step], env: list[Any]) -> Waiting:
    for step in steps:
        step(env)
    return list


def store(env: list[Any], slots: Sequence[int], values: Sequence[Any]) -> None:
    """Results into their slots; they may be fewer."""
    for slot, value in zip(slots, values, strict=False):
        env[slot] = value
