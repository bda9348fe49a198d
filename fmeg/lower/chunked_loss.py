"""A linear layer, its cross entropy and their gradients in chunks of rows: logits never exist in full.

A step computes, from activations x, weights w, targets t and the cotangent c of each row's loss,

    logits = x w,   loss = cross_entropy(logits, t),   d = cross_entropy_bwd(logits, t, c),   dx = d w,   dw = x d

c does not depend on the loss (it is mask / count), so all five can run for one chunk of rows after the other, and a
chunk's logits are dropped before the next one's are made. dw is summed over chunks in float32 (float64 for float64).

Where the vocabulary is sharded, the loss of a chunk is what each rank knows of its own classes, two all-reduces of a
few numbers a row, and the loss from their results (see fmeg.ops.cross_entropy): two collectives a chunk.

Source of the idea: Hsu et al. 2024, arXiv:2410.10989, §3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmeg.lower.rewrite import in_order, uses, with_nodes
from fmeg.ops.collectives import ALL_REDUCE
from fmeg.ops.contract import product_into
from fmeg.ops.cross_entropy import (
    cross_entropy_bwd_p,
    cross_entropy_join_p,
    cross_entropy_p,
    cross_entropy_part_p,
    gradient_of_part,
    loss_and_gradient,
)
from fmeg.ops.einsum import einsum_matrices, einsum_p, parse_equation
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.program.structured import Loop
from fmeg.sharding.buffers import Stack, Sum
from fmeg.sharding.execute import Executable, Mode


@dataclass(eq=False)
class ChunkedLoss:
    """args (x, w, t, c), and the class that the rank's shard begins at, if there are shards; results (loss, dx, dw).

    `body`: a chunk of x, w, of t, of c, the class -> its loss and dx, its part of dw. Its nodes are the linear layer,
    those of the loss, the gradient, dx, dw. Rows are the first `rows` dimensions of x.
    """

    body: Program
    chunks: int
    rows: int
    name: str = "chunked_loss"

    def loop(self) -> Loop:
        return Loop(self.body, self.chunks, "rows", stacked=2, summed=1)

    def build(self, backend: Any, mode: Mode) -> Callable[[Sequence[Any]], list[Any]]:
        return self._direct(backend) if backend.plain else self._general(backend)

    def _direct(self, backend: Any) -> Callable[[Sequence[Any]], list[Any]]:
        """On one tensor a value: logits, their gradient and the sum of dw each in one memory for all chunks."""
        linear, *nodes, gradient, to_x, to_w = self.body.nodes
        w_type = self.body.outputs[2].type
        evaluate = _of_whole_rows(*nodes) if len(nodes) == 1 else _of_shards(nodes, gradient, backend)
        order = [i for i, v in enumerate(to_w.operands()) if v is self.body.inputs[0]]
        shape = einsum_matrices(to_w.args[0], *(v.shape for v in to_w.operands()))
        run = einsum_p.run()

        def chunk(i: int, x: Tensor, w: Tensor, rest: Sequence[Tensor], loss: Tensor, dx: Tensor, dw: Tensor) -> None:
            loss[i], d = evaluate(run(linear.args[0], x, w), *rest)
            dx[i] = run(to_x.args[0], *((d, w) if to_x.operands()[0] is not linear.operands()[1] else (w, d)))
            pair = (x, d) if order == [0] else (d, x)
            if shape is not None:
                product_into(shape, dw, *pair, i > 0)
            elif i:
                dw.add_(run(to_w.args[0], *pair, **to_w.kwargs))
            else:
                dw.copy_(run(to_w.args[0], *pair, **to_w.kwargs))

        def loss_and_gradients(args: Sequence[Any]) -> list[Any]:
            x, w, t, c, *first = args
            xs, ts, cs = (_chunks(v, self.chunks, self.rows) for v in (x, t, c))
            losses = x.new_empty((self.chunks, *ts[0].shape), dtype=self.body.outputs[0].dtype)
            dx = x.new_empty((self.chunks, *xs[0].shape))
            dw = w.new_empty(w_type.shape, dtype=w_type.dtype)
            for i in range(self.chunks):
                chunk(i, xs[i], w, (ts[i], cs[i], *first), losses, dx, dw)
            return [*(_joined(v, _lead(x, self.rows), self.rows) for v in (losses, dx)), dw]

        return loss_and_gradients

    def _general(self, b: Any) -> Callable[[Sequence[Any]], list[Any]]:
        """On several ranks in one process."""
        body, op = Executable(self.body, b), self

        def loss_and_gradients(args: Sequence[Any]) -> list[Any]:
            x, w, t, c, *first = args
            lead = b.call(_lead, (x, op.rows))
            xs, ts, cs = (b.call(_chunks, (v, op.chunks, op.rows)) for v in (x, t, c))
            loss, dx, dw = Stack(b, op.chunks), Stack(b, op.chunks), Sum(b)
            for i in range(op.chunks):
                got = body.run([xs[i], w, ts[i], cs[i], *first])
                loss.put(i, got[0])
                dx.put(i, got[1])
                dw.add(got[2])
            return [*(b.call(_joined, (v.result(), lead, op.rows)) for v in (loss, dx)), dw.result()]

        return loss_and_gradients


def _of_whole_rows(loss: Node) -> Callable[..., tuple[Tensor, Tensor]]:
    """(logits, t, c) -> a chunk's loss and the gradient of its logits, which are given up."""
    options = loss.kwargs
    return lambda logits, t, c: loss_and_gradient(logits, t, c, **options)


def _of_shards(loss: Sequence[Node], gradient: Node, backend: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The same, where the logits are those of this rank's classes."""
    part, *rest = loss
    together = Executable(Program(part.outs, rest, rest[-1].outs, name="chunked_loss"), backend)
    find = cross_entropy_part_p.run()

    def evaluate(logits: Tensor, t: Tensor, c: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        losses, lse = together.run(list(find(logits, t, first, **part.kwargs)))
        return losses, gradient_of_part(logits, t, lse, c, first, **gradient.kwargs)

    return evaluate


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
    loss: tuple[Node, ...]
    gradient: Node
    dx: Node
    dw: Node

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.linear, *self.loss, self.gradient, self.dx, self.dw)


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
    """The nodes around a gradient of a cross entropy, if nothing else reads the logits."""
    used, maker = uses(program), {id(o): n for n in program.nodes for o in n.outs}
    logits, targets = gradient.args[:2]
    linear, loss = maker.get(id(logits)), _loss(gradient, maker, used)
    if linear is None or linear.op is not einsum_p or loss is None or len(linear.args) != 3:
        return None
    if len(used[id(logits)]) != 2:
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


def _loss(gradient: Node, maker: Mapping[int, Node], used: Mapping[int, list[Node | None]]) -> tuple[Node, ...] | None:
    """The nodes from the logits to their log-sum-exp, in order: one, or where the vocabulary is sharded what each rank
    knows, what brings that together, and the loss. None if another reads anything between."""
    logits, targets, lse = gradient.args[:3]
    last = maker.get(id(lse))
    if last is None or used[id(lse)] != [gradient]:
        return None
    if last.op is cross_entropy_p:
        return (last,) if last.args == (logits, targets) and len(gradient.args) == 4 else None
    if last.op is not cross_entropy_join_p:
        return None
    found: dict[int, Node] = {}
    open_ = [last]
    while open_:
        n = open_.pop()
        if id(n) in found:
            continue
        found[id(n)] = n
        if n.op is cross_entropy_part_p:
            continue
        if n is not last and not _by_row(n, targets.shape):
            return None
        before = [maker.get(id(v)) for v in n.operands()]
        if None in before:
            return None
        open_ += [m for m in before if m is not None]
    parts = [n for n in found.values() if n.op is cross_entropy_part_p]
    if len(parts) != 1 or parts[0].args != (logits, targets, *gradient.args[4:]):
        return None
    inside = [n for n in found.values() if n is not last]
    if any(id(r) not in found for n in inside for o in n.outs for r in used.get(id(o), ())):
        return None
    return tuple(in_order([*found.values()]) or ())


def _by_row(node: Node, shape: tuple[int, ...]) -> bool:
    """Whether each of a node's results is of one number a row, and of that row alone."""
    pointwise = isinstance(node.op, torch._ops.OpOverload) and torch.Tag.pointwise in node.op.tags
    return (pointwise or node.op is ALL_REDUCE) and all(o.shape == shape for o in node.outs)


def _replaced(program: Program, found: _Found, limit: int) -> Program | None:
    """The Program with one node for those of the loss; None if the cotangent depends on the loss, or if the rows divide
    into far more chunks than are needed only."""
    _, x, w = found.linear.args
    t, c, *first = (found.gradient.args[i] for i in (1, 3, *range(4, len(found.gradient.args))))
    rows = len(t.shape)
    total = t.type.numel
    logits = found.linear.outs[0].type.nbytes
    chunks = next((k for k in range(1, total) if total % k == 0 and logits <= k * limit), total)
    if chunks > 8 * -(-logits // limit):
        return None
    body = _body(found, total // chunks, rows)
    outs = (found.loss[-1].outs[0], found.dx.outs[0], found.dw.outs[0])
    if body.outputs[2].type != outs[2].type:
        return None
    source = found.loss[-1].source
    node = Node(ChunkedLoss(body, chunks, rows), (x, w, t, c, *first), {}, outs, source, "B", {})
    gone = {id(n) for n in found.nodes}
    nodes = [node if n is found.gradient else n for n in program.nodes if id(n) not in gone or n is found.gradient]
    ordered = in_order(nodes)
    return with_nodes(program, ordered) if ordered is not None else None


def _body(found: _Found, size: int, rows: int) -> Program:
    """The nodes of a loss at the shapes of a chunk of `size` rows. They run as they are written."""
    lead = (*(1,) * (rows - 1), size)
    _, x, w = found.linear.args
    t, c, *first = (found.gradient.args[i] for i in (1, 3, *range(4, len(found.gradient.args))))
    whole = {id(v) for v in (w, *first)}
    new: dict[int, Value] = {}

    def cut(v: Value) -> Value:
        if id(v) not in new:
            shape = v.shape if id(v) in whole else (*lead, *v.shape[rows:])
            new[id(v)] = Value(TensorType(shape, v.dtype))
        return new[id(v)]

    inputs = tuple(cut(v) for v in (x, w, t, c, *first))
    nodes = []
    for n in found.nodes:
        tags = {**n.tags, "opaque": True}
        node = Node(n.op, map_values(cut, n.args), n.kwargs, source=n.source, phase=n.phase, tags=tags)
        node.outs = tuple(
            Value(o.type if n is found.dw else TensorType((*lead, *o.shape[rows:]), o.dtype), node, i)
            for i, o in enumerate(n.outs)
        )
        new.update((id(o), made) for o, made in zip(n.outs, node.outs, strict=True))
        nodes.append(node)
    at = len(found.loss)
    outputs = (nodes[at].outs[0], nodes[-2].outs[0], nodes[-1].outs[0])
    return Program(inputs, nodes, outputs, ("x", "w", "t", "c", "first")[: len(inputs)], "chunked_loss")
