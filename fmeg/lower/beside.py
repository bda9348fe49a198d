"""Gathers with the products that read them, and products with the reduction that they are for, as one operation each.

    all_gather(x) w1, all_gather(x) w2, …     ->  gathered_products(x, w1, w2, …)
    reduce_scatter(a b + c d + …)             ->  product_scattered(a, b, c, d, …)

where the dimension that is gathered, or scattered, is one that the products keep. Products of FP8 operands stay as they
are. They mean the operations that they replace, in that order, and so run where nothing can go on beside. On GPUs of
one host each member's part is multiplied while others travel (see `fmeg.mesh.beside`).

Source of the idea: Wang et al. 2023, ASPLOS, "Overlap Communication with Dependent Computation via Decomposition".
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from fmeg.lower.added import einsum_add_p
from fmeg.lower.rewrite import Known, depends, everywhere, in_order, uses, with_nodes
from fmeg.mesh.beside import Peers, gathered, scattered
from fmeg.ops.collectives import ALL_GATHER, REDUCE_SCATTER
from fmeg.ops.einsum import einsum_p, parse_equation
from fmeg.ops.into import product_of_rows, write
from fmeg.program.cost import node_flops
from fmeg.program.ir import Node, Program, Value, map_values
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable, Mode

_add = torch.ops.aten.add.Tensor
Run = Callable[[Sequence[Any]], Any]


@dataclass(eq=False)
class Beside:
    """body    what it means: inputs are the node's args, in order
    axes       the mesh axes of its collective
    dim        the dimension of the collective's operand that is gathered or scattered
    """

    body: Program
    axes: tuple[str, ...]
    dim: int

    movable = True  # among other nodes, as any that computes

    def flops(self, node: Node) -> int:
        return sum(map(node_flops, self.body.nodes))

    def build(self, backend: Any, mode: Mode) -> Run:
        peers = backend.peers(self.axes) if hasattr(backend, "peers") else None
        return Executable(self.body, backend, mode=mode) if peers is None else self.through(peers)

    def through(self, peers: Peers) -> Run:
        raise NotImplementedError


@dataclass(eq=False)
class GatheredProducts(Beside):
    """args (x, *others); results: all x along `dim`, if `whole`; and the product with each of `others`."""

    whole: bool = False
    name: str = "gathered_products"

    def through(self, peers: Peers) -> Run:
        x, gather, whole = self.body.inputs[0], self.body.nodes[0], self.whole
        length = x.shape[self.dim]
        peers.reserve(x.type.nbytes)
        number = {id(v): i for i, v in enumerate(self.body.inputs)}
        plans = []
        for n in self.body.nodes[1:]:
            ins, out = parse_equation(n.args[0])
            rows = next(i for i, v in enumerate(n.args[1:]) if v is gather.outs[0])
            at = out.index(ins[rows][self.dim])
            plans.append((number[id(n.args[2 - rows])], at, rows, product_of_rows(n.args[0], rows, at), n.outs[0].type))

        def run(args: Sequence[Any]) -> list[Any]:
            mine = args[0]
            results = [torch.empty(t.shape, dtype=t.dtype, device=mine.device) for *_, t in plans]

            def use(member: int, part: Tensor) -> None:
                for y, (i, at, rows, into, _) in zip(results, plans, strict=True):
                    a, b = (args[i], part) if rows else (part, args[i])
                    into(y.narrow(at, member * length, length), a, b, False)

            all_of_it = gathered(peers, mine, self.dim, use, whole)
            return [all_of_it, *results] if whole else results

        return run


@dataclass(eq=False)
class ProductScattered(Beside):
    """args: what the products and the sum of them read; result: this member's part along `dim` of the sum over the
    members.

    terms    of the sum, in order: (equation, number of an arg, number of another), or ("", number of an arg)
    """

    terms: tuple[tuple[Any, ...], ...] = ()
    name: str = "product_scattered"

    def through(self, peers: Peers) -> Run:
        t = self.body.outputs[0].type
        length = t.shape[self.dim]
        peers.reserve((peers.size - 1) * t.nbytes)
        plans = [self._plan(*term) for term in self.terms]

        def run(args: Sequence[Any]) -> list[Any]:
            def produce(member: int, memory: Tensor) -> None:
                for k, (numbers, dims, into) in enumerate(plans):
                    cut = [
                        args[i] if d is None else args[i].narrow(d, member * length, length)
                        for i, d in zip(numbers, dims, strict=True)
                    ]
                    into(memory, *cut, k > 0)

            return [scattered(peers, t.shape, t.dtype, args[0].device, produce)]

        return run

    def _plan(self, equation: str, *numbers: int) -> tuple[Sequence[int], list[int | None], Callable[..., None]]:
        """Which args, along which dimension each is cut, and what writes or adds the term of those."""
        if not equation:
            return numbers, [self.dim], write
        ins, out = parse_equation(equation)
        name = out[self.dim]
        dims = [names.index(name) if name in names else None for names in ins]
        return numbers, dims, product_of_rows(equation, 0 if dims[0] is not None else 1, self.dim)


def beside(program: Program, axes: Collection[str], known: Known | None = None) -> Program:
    """The Program with both operations wherever a collective along these mesh axes alone is read by products, or reads
    them. `known`: see `everywhere`."""
    return everywhere(partial(_rewritten, axes=axes), program, known) if axes else program


def hidden(program: Program) -> set[str]:
    """The mesh axes along which something goes on beside products."""
    found: set[str] = set()
    for n, _, _ in walk(program):
        if isinstance(n.op, Beside):
            found |= set(n.op.axes)
        elif axes := getattr(n.op, "beside", ()):
            found |= hidden(beside(n.op.body, axes))
    return found


def _rewritten(program: Program, axes: Collection[str]) -> Program:
    program = _reductions(_gathers(program, axes), axes)
    return with_nodes(program, [_told(n, axes) if hasattr(n.op, "beside") else n for n in program.nodes])


def _told(n: Node, axes: Collection[str]) -> Node:
    """An operation that is cut up, and rewrites what it is cut into."""
    return Node(replace(n.op, beside=tuple(axes)), n.args, n.kwargs, n.outs, n.source, n.phase, n.tags)


def _moves(n: Node, op: object, axes: Collection[str]) -> bool:
    if n.op is not op or len(n.outs) > 1:
        return False
    along = set(n.args[1])
    return bool(along) and along <= set(axes) and prod(n.outs[0].shape) > 0


def _gathers(program: Program, axes: Collection[str]) -> Program:
    for n in program.nodes:
        if _moves(n, ALL_GATHER, axes):
            program = _with_products(program, n)
    return program


def _with_products(program: Program, gather: Node) -> Program:
    used, maker = uses(program), {id(o): n for n in program.nodes for o in n.outs}
    whole, dim = gather.outs[0], gather.args[2][0]
    readers = used.get(id(whole), [])
    products = [
        n
        for n in readers
        if n is not None
        and n.op is einsum_p
        and len(n.args) == 3
        and not n.kwargs
        and _keeps(n, whole, dim)
        and not any(v is not whole and depends(v, gather, maker) for v in n.operands())
    ]
    if not products:
        return program
    left = len(products) < len(readers)
    x = gather.args[0][0]
    args = list({id(v): v for v in (x, *(v for n in products for v in n.operands() if v is not whole))}.values())
    results = [*([whole] if left else []), *(n.outs[0] for n in products)]
    body = _body([gather, *products], args, results, GatheredProducts.name)
    op = GatheredProducts(body, gather.args[1], dim, left)
    made = Node(op, tuple(args), {}, tuple(results), gather.source, gather.phase, gather.tags)
    gone = {id(n) for n in products}
    ordered = in_order([made if n is gather else n for n in program.nodes if id(n) not in gone])
    assert ordered is not None
    return with_nodes(program, ordered)


def _keeps(n: Node, v: Value, dim: int) -> bool:
    """Whether a product of two keeps a dimension of an operand as it is, and the other operand has none of that
    name."""
    (ins, out), operands = parse_equation(n.args[0]), n.operands()
    if sum(a is v for a in operands) != 1:
        return False
    i = 0 if operands[0] is v else 1
    name = ins[i][dim]
    return name in out and name not in ins[1 - i]


def _reductions(program: Program, axes: Collection[str]) -> Program:
    for n in program.nodes:
        if _moves(n, REDUCE_SCATTER, axes):
            program = _with_sum(program, n)
    return program


def _with_sum(program: Program, reduction: Node) -> Program:
    used, maker = uses(program), {id(o): n for n in program.nodes for o in n.outs}
    dim, inside = reduction.args[2][0], []
    found: list[tuple[str, list[Value]]] = []

    def collect(v: Value) -> None:
        n = maker.get(id(v))
        if n is not None and len(used[id(v)]) == 1:
            if n.op is einsum_p and len(n.args) == 3 and not n.kwargs:
                inside.append(n)
                found.append((n.args[0], n.operands()))
                return
            if n.op is einsum_add_p:
                collect(n.args[3])
                inside.append(n)
                found.append((n.args[0], list(n.args[1:3])))
                return
            if n.op is _add and not n.kwargs and all(isinstance(a, Value) and a.type == v.type for a in n.args):
                for a in n.args:
                    collect(a)
                inside.append(n)
                return
        found.append(("", [v]))

    collect(reduction.args[0][0])
    if all(not equation for equation, _ in found):
        return program
    args = list({id(v): v for _, values in found for v in values}.values())
    number = {id(v): i for i, v in enumerate(args)}
    terms = tuple((equation, *(number[id(v)] for v in values)) for equation, values in found)
    ids = {id(n) for n in inside}
    ordered = [n for n in program.nodes if id(n) in ids]
    body = _body([*ordered, reduction], args, reduction.outs, ProductScattered.name)
    op = ProductScattered(body, reduction.args[1], dim, terms)
    made = Node(op, tuple(args), {}, reduction.outs, reduction.source, reduction.phase, reduction.tags)
    return with_nodes(program, [made if n is reduction else n for n in program.nodes if id(n) not in ids])


def _body(nodes: Sequence[Node], given: Sequence[Value], results: Sequence[Value], name: str) -> Program:
    """The nodes as a Program of their own, on values of its own."""
    inputs = tuple(Value(v.type, name=v.name, placement=v.placement) for v in given)
    new = {id(v): u for v, u in zip(given, inputs, strict=True)}
    made = []
    for n in nodes:
        node = Node(n.op, map_values(lambda v: new[id(v)], n.args), n.kwargs, (), n.source, n.phase, n.tags)
        node.outs = tuple(Value(o.type, node, i, o.name, o.placement) for i, o in enumerate(n.outs))
        new.update((id(o), u) for o, u in zip(n.outs, node.outs, strict=True))
        made.append(node)
    return Program(inputs, made, tuple(new[id(v)] for v in results), name=name)
