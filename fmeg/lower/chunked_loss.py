"""A linear layer, its cross entropy and their gradients in chunks of rows: logits never exist in full.

A step computes, from activations x, weights w, targets t and the cotangent c of each row's loss,

    logits = x w,   loss = cross_entropy(logits, t),   d = cross_entropy_bwd(logits, t, c),   dx = d w,   dw = x d

c does not depend on the loss (it is mask / count), so all five can run for one chunk of rows after the other, and a
chunk's logits are dropped before the next one's are made. dw is summed over chunks in float32 (float64 for float64).

Source of the idea: Hsu et al. 2024, arXiv:2410.10989, §3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from fmeg.lower.rewrite import in_order, uses, with_nodes
from fmeg.ops.contract import product_into
from fmeg.ops.cross_entropy import cross_entropy_bwd_p, cross_entropy_p, loss_and_gradient
from fmeg.ops.einsum import einsum_matrices, einsum_p, parse_equation
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.program.structured import Loop
from fmeg.sharding.buffers import Stack, Sum
from fmeg.sharding.execute import Executable, Mode


@dataclass(eq=False)
class ChunkedLoss:
    """args (x, w, t, c); results (loss, dx, dw). `body`: a chunk of x, w, of t, of c -> its loss and dx, its part of
    dw. Rows are the first `rows` dimensions of x."""

    body: Program
    chunks: int
    rows: int
    name: str = "chunked_loss"

    def loop(self) -> Loop:
        return Loop(self.body, self.chunks, "rows", stacked=2, summed=1)

    def build(self, backend: Any, mode: Mode) -> Callable[[Sequence[Any]], list[Any]]:
        return self._direct() if backend.plain else self._general(backend)

    def _direct(self) -> Callable[[Sequence[Any]], list[Any]]:
        """On one tensor a value: logits, their gradient and the sum of dw each in one memory for all chunks."""
        linear, loss, _, to_x, to_w = self.body.nodes
        w_type = self.body.outputs[2].type
        options = loss.kwargs
        order = [i for i, v in enumerate(to_w.operands()) if v is self.body.inputs[0]]
        shape = einsum_matrices(to_w.args[0], *(v.shape for v in to_w.operands()))
        run = einsum_p.run()

        def chunk(i: int, x: Tensor, w: Tensor, t: Tensor, c: Tensor, losses: Tensor, dx: Tensor, dw: Tensor) -> None:
            logits = run(linear.args[0], x, w)
            losses[i], d = loss_and_gradient(logits, t, c, **options)
            del logits
            dx[i] = run(to_x.args[0], *((d, w) if to_x.operands()[0] is not linear.operands()[1] else (w, d)))
            pair = (x, d) if order == [0] else (d, x)
            if shape is not None:
                product_into(shape, dw, *pair, i > 0)
            elif i:
                dw.add_(run(to_w.args[0], *pair, **to_w.kwargs))
            else:
                dw.copy_(run(to_w.args[0], *pair, **to_w.kwargs))

        def loss_and_gradients(args: Sequence[Any]) -> list[Any]:
            x, w, t, c = args
            xs, ts, cs = (_chunks(v, self.chunks, self.rows) for v in (x, t, c))
            losses = x.new_empty((self.chunks, *ts[0].shape), dtype=self.body.outputs[0].dtype)
            dx = x.new_empty((self.chunks, *xs[0].shape))
            dw = w.new_empty(w_type.shape, dtype=w_type.dtype)
            for i in range(self.chunks):
                chunk(i, xs[i], w, ts[i], cs[i], losses, dx, dw)
            return [*(_joined(v, _lead(x, self.rows), self.rows) for v in (losses, dx)), dw]

        return loss_and_gradients

    def _general(self, b: Any) -> Callable[[Sequence[Any]], list[Any]]:
        """On several ranks in one process."""
        body, op = Executable(self.body, b), self

        def loss_and_gradients(args: Sequence[Any]) -> list[Any]:
            x, w, t, c = args
            lead = b.call(_lead, (x, op.rows))
            xs, ts, cs = (b.call(_chunks, (v, op.chunks, op.rows)) for v in (x, t, c))
            loss, dx, dw = Stack(b, op.chunks), Stack(b, op.chunks), Sum(b)
            for i in range(op.chunks):
                got = body.run([xs[i], w, ts[i], cs[i]])
                loss.put(i, got[0])
                dx.put(i, got[1])
                dw.add(got[2])
            return [*(b.call(_joined, (v.result(), lead, op.rows)) for v in (loss, dx)), dw.result()]

        return loss_and_gradients


def _lead(x: Tensor, rows: int) -> tuple[int, ...]:
    return tuple(x.shape[:rows])


def _chunks(x: Tensor, n: int, rows: int) -> tuple[Tensor, ...]:
    """Parts of equal numbers of rows, each with as many dimensions as x has."""
    ones = (1,) * (rows - 1)
    return x.reshape(n, *ones, -1, *x.shape[rows:]).unbind(0)


def _joined(stack: Tensor, lead: tuple[int, ...], rows: int) -> Tensor:
    return stack.reshape(*lead, *stack.shape[rows + 1 :])


class _Found(NamedTuple):
    """The nodes of one loss."""

    linear: Node
    loss: Node
    gradient: Node
    dx: Node
    dw: Node


def chunked(limit: int, least: int | None = None) -> Callable[[Program], Program]:
    """A pass that computes losses whose logits take more than `limit` bytes in chunks of at most that size.

    From `least` bytes on (default: `limit`) those below are one chunk: the gradient lies where the logits lay.
    """
    least = limit if least is None else min(limit, least)

    def run(program: Program) -> Program:
        for n in program.nodes:
            if n.op is cross_entropy_bwd_p and n.args[0].type.nbytes > least:
                found = _find(program, n)
                new = _replaced(program, found, limit) if found is not None else None
                program = new if new is not None else program
        return program

    return run


def _find(program: Program, gradient: Node) -> _Found | None:
    """The five nodes around a gradient of a cross entropy, if nothing else reads the logits."""
    used, maker = uses(program), {id(o): n for n in program.nodes for o in n.outs}
    logits, targets, lse = gradient.args[:3]
    linear, loss = maker.get(id(logits)), maker.get(id(lse))
    if linear is None or linear.op is not einsum_p or loss is None or loss.op is not cross_entropy_p:
        return None
    if len(gradient.args) != 4 or loss.args[0] is not logits or loss.args[1] is not targets or len(linear.args) != 3:
        return None
    if len(used[id(logits)]) != 2 or used[id(lse)] != [gradient]:
        return None
    equation, x, w = linear.args
    (x_names, w_names), out = parse_equation(equation)
    rows = len(targets.shape)
    if x_names[:rows] != out[:rows] or set(x_names[:rows]) & set(w_names) or len(x_names) != rows + 1:
        return None
    readers = used.get(id(gradient.outs[0]), [])
    if len(readers) != 2 or any(r is None or r.op is not einsum_p for r in readers):
        return None
    dx = next((r for r in readers if r is not None and any(a is w for a in r.operands())), None)
    dw = next((r for r in readers if r is not None and any(a is x for a in r.operands())), None)
    if dx is None or dw is None or dx is dw or dx.outs[0].shape != x.shape or dw.outs[0].shape != w.shape:
        return None
    return _Found(linear, loss, gradient, dx, dw)


def _replaced(program: Program, found: _Found, limit: int) -> Program | None:
    """The Program with one node for the five; None if the cotangent depends on the loss, or if the rows divide into
    far more chunks than are needed only."""
    _, x, w = found.linear.args
    t, c = found.gradient.args[1], found.gradient.args[3]
    rows = len(t.shape)
    total = t.type.numel
    logits = found.linear.outs[0].type.nbytes
    chunks = next((k for k in range(1, total) if total % k == 0 and logits <= k * limit), total)
    if chunks > 8 * -(-logits // limit):
        return None
    body = _body(found, total // chunks, rows)
    outs = (found.loss.outs[0], found.dx.outs[0], found.dw.outs[0])
    if body.outputs[2].type != outs[2].type:
        return None
    node = Node(ChunkedLoss(body, chunks, rows), (x, w, t, c), {}, outs, found.loss.source, "B", {})
    gone = {id(n) for n in found}
    nodes = [node if n is found.gradient else n for n in program.nodes if id(n) not in gone or n is found.gradient]
    ordered = in_order(nodes)
    return with_nodes(program, ordered) if ordered is not None else None


def _body(found: _Found, size: int, rows: int) -> Program:
    """The five nodes at the shapes of a chunk of `size` rows."""
    lead = (*(1,) * (rows - 1), size)
    _, x, w = found.linear.args
    t, c = found.gradient.args[1], found.gradient.args[3]
    new: dict[int, Value] = {}

    def cut(v: Value) -> Value:
        if id(v) not in new:
            new[id(v)] = v if v is w else Value(TensorType((*lead, *v.shape[rows:]), v.dtype))
        return new[id(v)]

    inputs = (cut(x), Value(w.type), cut(t), cut(c))
    new[id(w)] = inputs[1]
    nodes = []
    for n in found:
        args = map_values(cut, n.args)
        node = Node(n.op, args, n.kwargs, source=n.source, phase=n.phase)
        node.outs = tuple(
            Value(o.type if n is found.dw else TensorType((*lead, *o.shape[rows:]), o.dtype), node, i)
            for i, o in enumerate(n.outs)
        )
        new.update((id(o), made) for o, made in zip(n.outs, node.outs, strict=True))
        nodes.append(node)
    outputs = (nodes[1].outs[0], nodes[3].outs[0], nodes[4].outs[0])
    return Program(inputs, nodes, outputs, ("x", "w", "t", "c"), "chunked_loss")
