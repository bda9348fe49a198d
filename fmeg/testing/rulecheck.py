"""Checks a sharding rule against the operation it is for, by enumeration.

Every way to use mesh axes that the rule allows is tried on a small virtual mesh: each axis shards a factor, or is one
over which operands are pending sums. Operands are cut accordingly, the rule's local code runs on every rank, results
are put together as the rule's factors say, and compared with the operation on one device. No partitioner is involved:
the module is an independent reading of what a `Rule` means.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from fmeg.mesh import Mesh
from fmeg.mesh.backend import Backend
from fmeg.ops.collectives import axis_index
from fmeg.program.ir import Node, TensorType, Value, map_values, op_name
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Dims, Rule
from fmeg.program.trace import record_flat
from fmeg.sharding.execute import Executable
from fmeg.sharding.rules import rule_for

Axes = tuple[str, ...]
MESHES = ({"x": 2}, {"x": 2, "y": 2})


@dataclass(frozen=True)
class Assignment:
    """What each mesh axis does.

    sharded     factor -> its axes, major first
    pending     axis -> the operands, by index, that are sums over it
    """

    sharded: dict[str, Axes]
    pending: dict[str, frozenset[int]]

    def __str__(self) -> str:
        words = [f"{f}@{','.join(axes)}" for f, axes in self.sharded.items()]
        words += [f"P:{a} of operands {sorted(ops)}" for a, ops in self.pending.items()]
        return "; ".join(words) or "whole"


@dataclass(frozen=True)
class _Info:
    """`Local` for one assignment; offsets are traced."""

    rule: Rule
    assignment: Assignment
    mesh: dict[str, int]

    def axes(self, factor: str) -> Axes:
        return self.assignment.sharded.get(factor, ())

    def parts(self, factor: str) -> int:
        return prod(self.mesh[a] for a in self.axes(factor))

    def size(self, factor: str) -> int:
        return self.rule.sizes[factor] // self.parts(factor)

    def offset(self, factor: str) -> Any:
        return axis_index(self.axes(factor)) * self.size(factor) if self.axes(factor) else 0

    def option(self, name: str, default: Any = None) -> Any:
        return default


def make_node(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], zeros: Sequence[int] = ()
) -> tuple[Node, list[Tensor], Any]:
    """A node with one distinct value for each tensor argument, the tensors, and the operation's results on them.

    zeros: operands, by index, that count as all zeros by construction.
    """
    tensors: list[Tensor] = []

    def value(x: Any) -> Any:
        if isinstance(x, Tensor):
            tensors.append(x)
            t = TensorType.of(x)
            made = Node(torch.ops.aten.zeros.default, (list(t.shape),), {}) if len(tensors) - 1 in zeros else None
            return Value(t, made)
        if isinstance(x, (tuple, list)):
            return type(x)(value(y) for y in x)
        return x

    node = Node(op, tuple(value(a) for a in args), {k: value(v) for k, v in kwargs.items()}, source="rulecheck")
    results = _run(op)(*args, **kwargs)
    everything = results if isinstance(results, (tuple, list)) else (results,)
    kept = [i for i, r in enumerate(everything) if isinstance(r, Tensor)]
    if len(kept) < len(everything):
        node.tags["results"] = tuple(kept)
    node.outs = tuple(Value(TensorType.of(everything[i]), node, n) for n, i in enumerate(kept))
    return node, tensors, [everything[i] for i in kept]


def _run(op: Any) -> Callable[..., Any]:
    return op.reference if isinstance(op, Primitive) else op


def validate(node: Node, rule: Rule) -> None:
    """Raise AssertionError unless the rule's factors fit the node's shapes."""
    operands = node.operands()
    assert len(rule.ins) == len(operands), f"{len(rule.ins)} operands in the rule, {len(operands)} in the node"
    assert len(rule.outs) == len(node.outs), f"{len(rule.outs)} results in the rule, {len(node.outs)} in the node"
    for dims, v in [*zip(rule.ins, operands, strict=True), *zip(rule.outs, node.outs, strict=True)]:
        shape = tuple(prod(rule.sizes[f] for f in d) for d in dims)
        assert shape == v.shape, f"the rule says {dims}, of shape {shape}, where the node has {v.shape}"
        flat = [f for d in dims for f in d]
        assert len(set(flat)) == len(flat), f"a factor twice in {dims}"
    assert rule.whole <= set(rule.sizes), f"unknown whole factors {rule.whole - set(rule.sizes)}"
    assert all(0 <= i < len(operands) for i in rule.linear), f"linear {rule.linear} of {len(operands)} operands"


def assignments(rule: Rule, mesh: dict[str, int]) -> Iterator[Assignment]:
    """Every use of all the mesh's axes, of equal sizes, that the rule allows, up to exchanging axes."""
    choices: list[Any] = [f for f in rule.sizes if f not in rule.whole]
    if rule.linear:
        choices += [frozenset(rule.linear)] if rule.joint else [frozenset({i}) for i in sorted(rule.linear)]
    for chosen in itertools.combinations_with_replacement(choices, len(mesh)):
        sharded: dict[str, Axes] = {}
        pending = {}
        for axis, choice in zip(mesh, chosen, strict=True):
            if isinstance(choice, str):
                sharded[choice] = (*sharded.get(choice, ()), axis)
            else:
                pending[axis] = choice
        one = Assignment(sharded, pending)
        info = _Info(rule, one, mesh)
        if all(rule.sizes[f] % info.parts(f) == 0 for f in sharded) and all(
            _contiguous(info, d) for dims in (*rule.ins, *rule.outs) for d in dims
        ):
            yield one


def _contiguous(info: _Info, factors: tuple[str, ...]) -> bool:
    """Whether a merged dimension's shards are contiguous: a minor factor is sharded only when the major ones are 1."""
    return all(info.parts(f) == 1 or all(info.size(g) == 1 for g in factors[:i]) for i, f in enumerate(factors))


def _axes(dims: Dims, one: Assignment) -> tuple[Axes, ...]:
    return tuple(tuple(a for f in d for a in one.sharded.get(f, ())) for d in dims)


def _terms(x: Tensor, n: int, gen: torch.Generator) -> list[Tensor]:
    """`n` tensors that sum to x."""
    if x.dtype.is_floating_point or x.dtype.is_complex:
        parts = [torch.randn(x.shape, generator=gen, dtype=x.dtype) for _ in range(n - 1)]
    else:
        parts = [torch.randint(-9, 9, x.shape, generator=gen, dtype=x.dtype) for _ in range(n - 1)]
    return [*parts, x - sum(parts)]


def _place(backend: Backend, x: Tensor, dims: Dims, pending: Axes, one: Assignment, gen: torch.Generator) -> Any:
    """A global tensor as local ones: cut over the axes of its factors, a term each over the pending axes."""
    mesh, axes = backend.mesh, _axes(dims, one)
    if not pending:
        return backend.scatter(x, axes)
    terms = torch.stack(_terms(x, mesh.axis_size(pending), gen))
    return backend.call(lambda t: t.squeeze(0), [backend.scatter(terms, (pending, *axes))])


def _run_local(
    node: Node, rule: Rule, one: Assignment, mesh: dict[str, int]
) -> Callable[[Backend, list[Any]], list[Any]]:
    """What each rank runs: the operation itself, or the rule's local code, traced on local shapes."""
    info = _Info(rule, one, mesh)
    order = {id(v): i for i, v in enumerate(node.operands())}

    def fill(values: Sequence[Any]) -> Any:
        return map_values(lambda v: values[order[id(v)]], (node.args, node.kwargs))

    if rule.local is None:
        return lambda backend, values: _tensors(backend.call(_run(node.op), *fill(values)), node)
    local = rule.local

    def fn(*tensors: Tensor) -> Any:
        args, kwargs = fill(tensors)
        return local(info, *args, **kwargs)

    shapes = [tuple(prod(info.size(f) for f in d) for d in dims) for dims in rule.ins]
    types = [TensorType(shape, v.dtype) for shape, v in zip(shapes, node.operands(), strict=True)]
    rec, out = record_flat(fn, types, mesh_sizes=mesh)
    program = rec.program(list(out) if isinstance(out, (tuple, list)) else [out])
    return lambda backend, values: Executable(program, backend)(values)


def _tensors(results: Any, node: Node) -> list[Any]:
    """Of all results of the operation, those that the node has."""
    everything = list(results) if isinstance(results, (tuple, list)) else [results]
    return [everything[i] for i in node.tags.get("results", range(len(everything)))]


def _addable(x: Tensor) -> Tensor:
    """Small floats, which cannot be added, as float32."""
    return x.float() if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _assemble(mesh: Mesh, locals_: list[Tensor], dims: Dims, pending: set[str], one: Assignment) -> Tensor:
    """The global tensor of local ones; replicas must agree."""
    axes = _axes(dims, one)
    shape = [n * mesh.axis_size(a) for n, a in zip(locals_[0].shape, axes, strict=True)]
    out = torch.zeros(shape, dtype=locals_[0].dtype)
    assert not (pending and out.dtype == torch.bool), "a pending sum of bools"
    placed = {a for names in axes for a in names} | pending
    for rank, x in enumerate(locals_):
        at = mesh.coordinates(rank)
        twin = mesh.rank({a: at[a] if a in placed else 0 for a in mesh.axes})
        if twin != rank:
            torch.testing.assert_close(x, locals_[twin], rtol=0, atol=0, equal_nan=True)
            continue
        where = []
        for n, names in zip(x.shape, axes, strict=True):
            i = 0
            for a in names:
                i = i * mesh.sizes[a] + at[a]
            where.append(slice(i * n, (i + 1) * n))
        out[tuple(where)] += x
    return out


def check_rule(
    op: Any,
    *args: Any,
    zeros: Sequence[int] = (),
    rule: Callable[[Node], Rule] = rule_for,
    backends: Sequence[str] = ("loop", "vmap"),
    tolerance: float = 1e-10,
    **kwargs: Any,
) -> int:
    """Check the rule of `op` on these arguments by every assignment on meshes of 2 and 2 x 2; return how many.

    op          an aten OpOverload or a Primitive
    args        its arguments; give floats as float64. `kwargs` too, but for the names below
    zeros       operands, by index, that are all zeros by construction (the rule may then ask less)
    rule        node -> Rule, by default the registered one
    backends    which virtual meshes run the local code: the first always, the others a rule's own code on a mesh of 2
    tolerance   absolute and relative, on float64

    Raises AssertionError that names the operation, the assignment and the mesh.

    >>> x, y = torch.ones(4, 2).double(), torch.ones(2).double()
    >>> check_rule(torch.ops.aten.add.Tensor, x, y)
    8
    """
    node, tensors, expected = make_node(op, args, kwargs, zeros)
    found = rule(node)
    validate(node, found)
    bools = {i for i, x in enumerate(tensors) if x.dtype == torch.bool}  # never pending sums
    found = replace(found, linear=found.linear - bools)
    count = 0
    for sizes in MESHES:
        for one in assignments(found, sizes):
            try:
                run = _run_local(node, found, one, sizes)
                for backend in backends if len(sizes) == 1 and found.local else backends[:1]:
                    _compare(_mesh(backend, *sizes.items()), run, found, one, tensors, expected, tolerance)
            except Exception as e:
                raise AssertionError(f"the rule of {op_name(op)} fails for {one} on {sizes}: {e}") from e
            count += 1
    return count


@cache
def _mesh(backend: str, *sizes: tuple[str, int]) -> Mesh:
    return Mesh(sizes, backend=backend)


def _compare(
    mesh: Mesh,
    run: Callable[[Backend, list[Any]], list[Any]],
    rule: Rule,
    one: Assignment,
    tensors: list[Tensor],
    expected: list[Tensor],
    tolerance: float,
) -> None:
    gen = torch.Generator().manual_seed(0)
    backend = mesh.backend()
    placed = []
    for i, (x, dims) in enumerate(zip(tensors, rule.ins, strict=True)):
        pending = tuple(a for a, ops in one.pending.items() if i in ops)
        placed.append(_place(backend, x, dims, pending, one, gen))
    results = run(backend, placed)
    assert len(results) == len(expected), f"{len(results)} local results, expected {len(expected)}"
    seen = {f for dims in rule.ins for d in dims for f in d}
    for result, dims, want in zip(results, rule.outs, expected, strict=True):
        missing = seen - {f for d in dims for f in d} - rule.resolved
        sums = set(one.pending) | {a for f in missing for a in one.sharded.get(f, ())}
        got = _assemble(mesh, [_addable(x) for x in backend.local(result)], dims, sums, one)
        torch.testing.assert_close(got, _addable(want), rtol=tolerance, atol=tolerance, equal_nan=True)
