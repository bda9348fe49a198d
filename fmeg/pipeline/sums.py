"""Sums over the layers of a stack, made inside the scan that runs them.

`(w**2).sum()` of stacked parameters, or the sum or mean of what a scan stacks, needs every stage's layers at once. As
one more carry to which each layer adds its own part, it comes out behind the last layer:

    Σ_l f(w)[l]   =   c_L   with   c_0 = 0,   c_l = c_{l-1} + f(w[l-1])      f elementwise
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Mapping, Sequence
from math import prod
from typing import Any

import torch

from fmeg.pipeline.places import dependencies, in_rows
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.program.passes import ancestors, dce
from fmeg.program.structured import Scan

aten = torch.ops.aten
_SUMS = {aten.sum.default, aten.sum.dim_IntList}
_MEANS = {aten.mean.default, aten.mean.dim}


def sums_into_scans(
    program: Program, scans: Sequence[Node], given: Mapping[int, frozenset[str]], order: dict[int, int]
) -> Program:
    """The same function; sums and means over dimension 0 of stacks of layers, and of what scans stack, are carries.

    Only where the stack is scanned, or stacked, by one of `scans` and goes through elementwise operations alone; others
    stay as they are. `order` is extended by the new nodes, each with the place of the one it replaces.
    """
    growing = {id(s): _Growing(program, s, given) for s in scans}
    sums: dict[int, list[Node]] = {}
    swap: dict[int, Value] = {}
    for n in program.nodes:
        dims = _summed(n)
        made = next((m for g in growing.values() if (m := g.add(n, dims, sums)) is not None), None) if dims else None
        if made is not None:
            swap[id(n.outs[0])], sums[id(n)] = made
    if not sums:
        return program
    nodes: list[Node] = []
    for n in program.nodes:
        grown = growing.get(id(n))
        if id(n) in sums:
            new = sums[id(n)]
        elif grown is not None and grown.results:
            new = grown.finish(swap)
        else:
            new = [_copy(n, swap)]
        for node in new:
            order.setdefault(id(node), order[id(n)])
        nodes += new
    outputs = tuple(map_values(lambda v: swap.get(id(v), v), list(program.outputs)))
    return dce(Program(program.inputs, _sorted(nodes), outputs, program.names, program.name))


def _copy(n: Node, swap: dict[int, Value]) -> Node:
    if not any(id(v) in swap for v in n.operands()):
        return n
    args, kwargs = map_values(lambda v: swap.get(id(v), v), (n.args, n.kwargs))
    node = Node(n.op, args, kwargs, (), n.source, n.phase, n.tags)
    node.outs = tuple(Value(o.type, node, i) for i, o in enumerate(n.outs))
    swap.update({id(o): c for o, c in zip(n.outs, node.outs, strict=True)})
    return node


def _new(op: Any, args: tuple, kwargs: dict, t: TensorType, like: Node) -> tuple[Value, Node]:
    node = Node(op, args, kwargs, (), like.source, like.phase, like.tags)
    node.outs = (Value(t, node),)
    return node.outs[0], node


def _summed(n: Node) -> list[int] | None:
    """The dimensions that a node sums over, if dimension 0 is one of them."""
    if n.op not in _SUMS | _MEANS or not n.args[0].ndim:
        return None
    ndim = n.args[0].ndim
    dims = list(n.args[1]) if len(n.args) > 1 and n.args[1] else list(range(ndim))
    dims = sorted(d % ndim for d in dims)
    keep = n.args[2] if len(n.args) > 2 else n.kwargs.get("keepdim", False)
    return None if keep or 0 not in dims else dims


def _sorted(nodes: Sequence[Node]) -> list[Node]:
    """In an order in which values are made before they are used; as they stand where that is so."""
    place = {id(n): i for i, n in enumerate(nodes)}
    users: dict[int, list[int]] = {}
    waits = [0] * len(nodes)
    for i, n in enumerate(nodes):
        for maker in {place[id(v.node)] for v in n.operands() if v.node is not None}:
            users.setdefault(maker, []).append(i)
            waits[i] += 1
    ready = [i for i, w in enumerate(waits) if not w]
    out = []
    while ready:
        i = heapq.heappop(ready)
        out.append(nodes[i])
        for j in users.get(i, ()):
            waits[j] -= 1
            if not waits[j]:
                heapq.heappush(ready, j)
    return out


class _Growing:
    """A scan and the sums that it is to carry."""

    def __init__(self, program: Program, scan: Node, given: Mapping[int, frozenset[str]]) -> None:
        op: Scan = scan.op
        self.scan, self.op = scan, op
        first = op.n_carry
        deps = dependencies(program.nodes, given)
        stacks = [(v, i) for i, v in enumerate(scan.args[first : first + op.n_xs], first) if deps[id(v)] == {"p"}]
        self.program, self.slices = program, {id(v): op.body.inputs[i] for v, i in stacks}
        self.roots = _inputs_of([v for v, _ in stacks], op.length)
        self.roots = {i: v for i, v in self.roots.items() if given[i] == {"p"}}
        ys = zip(scan.outs[first:], op.body.outputs[first:], strict=True)
        self.slices.update({id(o): inner for o, inner in ys if isinstance(inner, Value)})
        self.needed = {id(n) for n in ancestors(program, list(scan.outs))}
        self.behind = {id(o) for o in scan.outs}
        for n in program.nodes:
            if any(id(v) in self.behind for v in n.operands()):
                self.behind.update(id(o) for o in n.outs)
        self.xs: list[tuple[Value, Value]] = []  # new ones, and what they are in the body
        self.consts: dict[int, tuple[Value, Value]] = {}
        self.nodes: list[Node] = []
        self.starts: list[Value] = []
        self.zeros: list[Node] = []
        self.inner: list[tuple[Value, Value]] = []  # of each sum: what the body is given, what it returns
        self.results: list[Value] = []

    def add(self, n: Node, dims: Sequence[int], known: Container[int]) -> tuple[Value, list[Node]] | None:
        """Carry the sum that a node makes: its value, and the nodes behind the scan that make it; None if it cannot.

        known   ids of the nodes whose sums are carried already: no row may be made of those
        """
        v: Value = n.args[0]
        if id(n) in self.needed or not self._can(v) or any(id(m) in known for m in ancestors(self.program, [v])):
            return None
        result = n.outs[0].type
        low = result.dtype in (torch.bfloat16, torch.float16)
        dtype = torch.float32 if low else result.dtype
        part = self._slice(v)
        rest = [d - 1 for d in dims if d]
        kwargs = {"dtype": dtype} if part.dtype != dtype else {}
        total = TensorType(result.shape, dtype)
        if rest:
            part = self._inside(aten.sum.dim_IntList, (part, rest), kwargs, total, n)
        elif kwargs:
            part = self._inside(aten._to_copy.default, (part,), kwargs, total, n)
        given = Value(total, name="sum")
        self.inner.append((given, self._inside(aten.add.Tensor, (given, part), {}, total, n)))
        start, zeros = _new(aten.zeros.default, (list(total.shape),), {"dtype": dtype}, total, n)
        self.starts.append(start)
        self.zeros.append(zeros)
        out = Value(total)
        self.results.append(out)
        behind = []
        if n.op in _MEANS:
            out, node = _new(aten.div.Tensor, (out, prod(v.shape[d] for d in dims)), {}, total, n)
            behind.append(node)
        if low:
            out, node = _new(aten._to_copy.default, (out,), {"dtype": result.dtype}, result, n)
            behind.append(node)
        return out, behind

    def finish(self, swap: dict[int, Value]) -> list[Node]:
        """The nodes that take the scan's place."""
        op, scan = self.op, self.scan
        n_c, n_fixed = op.n_carry, op.n_carry + op.n_xs
        body, args = op.body, [swap.get(id(v), v) for v in scan.args]
        new_xs = [inner for _, inner in self.xs]
        new_consts = [inner for _, inner in self.consts.values()]
        inputs = (*body.inputs[:n_c], *(g for g, _ in self.inner), *body.inputs[n_c:n_fixed], *new_xs)
        outputs = (*body.outputs[:n_c], *(out for _, out in self.inner), *body.outputs[n_c:])
        grown = Program(
            (*inputs, *body.inputs[n_fixed:], *new_consts), [*body.nodes, *self.nodes], outputs, name=body.name
        )
        outside = [swap.get(id(v), v) for v, _ in (*self.xs, *self.consts.values())]
        args = [*args[:n_c], *self.starts, *args[n_c:n_fixed], *outside[: len(new_xs)], *args[n_fixed:]]
        args += outside[len(new_xs) :]
        node = Node(
            Scan(grown, op.length, n_c + len(self.inner), op.n_xs + len(new_xs)),
            tuple(args),
            {},
            (),
            scan.source,
            scan.phase,
            scan.tags,
        )
        own = [Value(o.type) for o in scan.outs]
        node.outs = (*own[:n_c], *self.results, *own[n_c:])
        for i, o in enumerate(node.outs):
            o.node, o.index = node, i
        swap.update({id(o): c for o, c in zip(scan.outs, own, strict=True)})
        return [*self.zeros, node]

    def _can(self, v: Value) -> bool:
        """Whether a row of a value can be computed in the body."""
        if id(v) in self.slices or id(v) in self.roots:
            return True
        n = v.node
        stacks = self._stacks(n, v) if n is not None and v.ndim else []
        if n is None or not stacks or not in_rows(n, stacks):
            return False
        rest = [u for u in n.operands() if all(u is not w for w in stacks)]
        ready = all(u.ndim < v.ndim and id(u) not in self.behind for u in rest)
        return ready and all(self._can(u) for u in stacks)

    def _stacks(self, n: Node, v: Value) -> list[Value]:
        return [u for u in n.operands() if u.ndim == v.ndim and u.shape[0] == self.op.length == v.shape[0]]

    def _slice(self, v: Value) -> Value:
        if id(v) in self.slices:
            return self.slices[id(v)]
        n = v.node
        if n is None:
            inner = Value(TensorType(v.shape[1:], v.dtype), name=v.name)
            self.xs.append((v, inner))
        else:
            stacks = {id(u) for u in self._stacks(n, v)}
            row = lambda u: self._slice(u) if id(u) in stacks else self._const(u)
            args, kwargs = map_values(row, (n.args, n.kwargs))
            inner = self._inside(n.op, args, kwargs, TensorType(v.shape[1:], v.dtype), n)
        self.slices[id(v)] = inner
        return inner

    def _const(self, v: Value) -> Value:
        return self.consts.setdefault(id(v), (v, Value(v.type, name=v.name)))[1]

    def _inside(self, op: Any, args: tuple, kwargs: dict, t: TensorType, like: Node) -> Value:
        value, node = _new(op, args, kwargs, t, like)
        self.nodes.append(node)
        return value


def _inputs_of(values: Sequence[Value], length: int) -> dict[int, Value]:
    """The inputs with a row a layer that values are made of, row by row."""
    found: dict[int, Value] = {}
    todo = list(values)
    while todo:
        v = todo.pop()
        if v.node is None:
            found[id(v)] = v
            continue
        stacks = [u for u in v.node.operands() if u.ndim == v.ndim and u.shape[:1] == (length,)]
        if stacks and in_rows(v.node, stacks):
            todo += stacks
    return found
