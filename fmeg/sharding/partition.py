"""From a Program on global shapes to one rank's Program on local shapes, collectives visible.

The partitioner walks the nodes in order. For each it asks the rule how the dimensions relate, lets the policy choose,
brings each operand there (every movement is memoised per value and target), and writes the local node. Structured nodes
partition their bodies with a child partitioner. Nothing here depends on the number of ranks but through sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AXIS_INDEX,
    PPERMUTE,
    REDUCE_SCATTER,
    Collective,
    axis_index,
)
from fmeg.ops.shard import shard_p
from fmeg.program.errors import ShardingError
from fmeg.program.gradient import MIRROR
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.program.literal import constant
from fmeg.program.rule import Dims, Rule
from fmeg.program.trace import record_flat
from fmeg.sharding.policy import OWED, Solver, drop_minor, split_dims
from fmeg.sharding.ragged import check_move, rows_of
from fmeg.sharding.reshard import Move, plan
from fmeg.sharding.rules import rule_for
from fmeg.sharding.rules.creation import standalone
from fmeg.sharding.spec import resolve
from fmeg.sharding.value import Placed, Placement, count, local_size

LOCAL_SLICE = Collective("local_slice")  # ([x], axes, (dim,)): no communication
_KINDS = {
    "all_gather": ALL_GATHER,
    "all_reduce": ALL_REDUCE,
    "all_to_all": ALL_TO_ALL,
    "reduce_scatter": REDUCE_SCATTER,
    "ppermute": PPERMUTE,
    "slice": LOCAL_SLICE,
}


@dataclass(frozen=True)
class Context:
    """What a partition depends on besides the Program: sizes of the mesh axes (those larger than 1), the compute view,
    options."""

    sizes: Mapping[str, int]
    table: Mapping[str, tuple[str, ...]]
    options: Mapping[str, Any]
    strict: bool = False
    all_sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass
class _Info:
    """What a rule's `local` may ask (see fmeg.program.rule.Local); offsets are recorded where they are asked."""

    rule: Rule
    factor_axes: Mapping[str, tuple[str, ...]]
    ctx: Context

    def size(self, factor: str) -> int:
        size = local_size(self.rule.sizes[factor], self.axes(factor), self.ctx.sizes)
        assert size is not None, f"{factor} does not divide over {self.axes(factor)}"
        return size

    def axes(self, factor: str) -> tuple[str, ...]:
        return self.factor_axes.get(factor, ())

    def parts(self, factor: str) -> int:
        return count(self.axes(factor), self.ctx.sizes)

    def offset(self, factor: str) -> Any:
        axes = self.axes(factor)
        return axis_index(axes) * self.size(factor) if axes else 0

    def option(self, name: str, default: Any = None) -> Any:
        return self.ctx.options.get(name, default)


class Partitioner:
    """Partitions one Program; `child`ren share its context."""

    def __init__(self, ctx: Context, name: str = "program") -> None:
        self.ctx, self.name = ctx, name
        self.nodes: list[Node] = []
        self.env: dict[int, Placed] = {}
        self.pairs: dict[int, Any] = {}
        self.phase, self.source = "F", ""
        self.tags: dict[str, Any] = {}

    # -- values -----------------------------------------------------------------------------------------------------
    def placed(self, v: Value) -> Placed:
        return self.env[id(v)]

    def input(self, v: Value, placed: Placed) -> Value:
        """Declare a program input with its placement; returns its local value."""
        local = Value(
            placed.home.local_type(v.type, self.ctx.sizes), name=v.name, placement=placed.home.describe(v.type)
        )
        placed.copies[placed.home] = local
        placed.name = v.name
        self.env[id(v)] = placed
        return local

    def get(self, p: Placed, target: Placement, reason: str) -> Value:
        """The local value of `p` in `target`, moving it there if it is not there yet."""
        if p.ragged is not None:
            check_move(p, target, reason, self.source)
        if target in p.copies:
            return p.copies[target]
        if p.make is not None and not target.pending:
            p.copies[target] = p.make(target)
            return p.copies[target]
        if p.make is not None:
            self.get(p, target.whole(), reason)
        if not p.type.shape and not any(target.pending <= src.pending for src in p.copies):
            return self._scalar_to_pending(p, target, reason)
        itemsize = p.type.dtype.itemsize
        options = []
        for k, (src, _) in enumerate(p.copies.items()):
            if target.pending <= src.pending:
                options.append((*self._plan(src, target, p.type, itemsize), k, src))
        cost, moves, _, src = min(options, key=lambda o: (o[0], o[2]))
        if any(m.kind != "slice" for m in moves) and self.ctx.strict and reason not in OWED:
            self._refuse(p, src, target, moves, reason)
        value = p.copies[src]
        for m in moves:
            if m.to in p.copies:
                value = p.copies[m.to]
                continue
            value = self._move(value, p.type, m, reason)
            p.copies[m.to] = value
        return p.copies[target]

    def _scalar_to_pending(self, p: Placed, target: Placement, reason: str) -> Value:
        """A 0-d value as a pending sum, for free: the first rank of each axis keeps it, the others hold zero."""
        src = max(p.copies, key=lambda c: len(c.pending & target.pending))
        base = self.get(p, Placement((), src.pending & target.pending), reason)
        axes = tuple(a for a in self.ctx.sizes if a in target.pending - src.pending)
        p.copies[target] = self.inline(_keep_first(axes), (base,), {}, [(p.type, target)])[0]
        return p.copies[target]

    def _plan(self, src: Placement, target: Placement, t: TensorType, itemsize: int) -> tuple[float, tuple[Move, ...]]:
        return plan(src, target, t.shape, itemsize, self.ctx.sizes)

    def _move(self, value: Value, t: TensorType, m: Move, reason: str) -> Value:
        op = _KINDS[m.kind]
        rest: tuple[Any, ...]
        if m.kind == "all_reduce":
            rest = ("sum",)
        elif m.kind == "all_to_all":
            rest = ((m.dims[0],), (m.dims[1],))
        elif m.kind == "ppermute":
            rest = (m.perm,)
        else:
            rest = ((m.dims[0],),)
        return self.emit(op, ([value], m.axes, *rest), {}, [(t, m.to)], reason=reason)[0]

    def _refuse(self, p: Placed, src: Placement, target: Placement, moves: Sequence[Move], reason: str) -> None:
        raise ShardingError(
            f"strict: {self.source or 'an operation'} needs "
            f"{', '.join(f'{m.kind} over {m.axes}' for m in moves if m.kind != 'slice')} of "
            f"{p.name or 'a value'} {src.describe(p.type)} -> {target.describe(p.type)}, which nothing asked for "
            f"({reason}). "
            "Annotate the value with shard(x, P(…)) where it should move, or turn strict off"
        )

    def emit(
        self, op: Any, args: tuple, kwargs: dict, outs: Sequence[tuple[TensorType, Placement]], **tags: Any
    ) -> tuple[Value, ...]:
        """Append a local node; `outs` are global types with placements."""
        node = Node(op, args, kwargs, source=self.source, phase=self.phase, tags={**self.tags, **tags})
        node.outs = tuple(
            Value(p.local_type(t, self.ctx.sizes), node, i, placement=p.describe(t)) for i, (t, p) in enumerate(outs)
        )
        self.nodes.append(node)
        return node.outs

    def define(self, v: Value, placement: Placement, local: Value, **fields: Any) -> Placed:
        p = Placed(v.type, placement, {placement: local}, **fields)
        self.env[id(v)] = p
        return p

    # -- nodes ------------------------------------------------------------------------------------------------------
    def run(self, nodes: Sequence[Node]) -> None:
        """Partition nodes in order; they may only use values that are already placed."""
        from fmeg.sharding import structured

        handlers = structured.HANDLERS
        for node in nodes:
            self.phase, self.source = node.phase, node.source
            self.tags = {k: v for k, v in node.tags.items() if k in ("remat", "accumulate", "results")}
            handler = handlers.get(type(node.op))
            if handler is not None:
                handler(self, node)
            elif hasattr(node.op, "partition"):
                node.op.partition(self, node)
            elif node.op is shard_p:
                self._shard(node)
            elif node.op is MIRROR:
                self._mirror(node)
            elif node.op is constant:
                local = self.emit(
                    constant, node.args, {}, [(node.outs[0].type, Placement.replicated(node.outs[0].ndim))]
                )
                self.define(node.outs[0], Placement.replicated(node.outs[0].ndim), local[0])
            else:
                self._ruled(node)

    def _shard(self, node: Node) -> None:
        p = self.placed(node.args[0])
        dims = resolve(node.args[1], self.ctx.table, self.ctx.sizes, f"shard at {node.source}")
        target = Placement(dims)
        self._divides(p.type, target, node)
        local = self.get(p, target, "shard")
        self.define(node.outs[0], target, local, ragged=p.ragged)

    def _divides(self, t: TensorType, target: Placement, node: Node) -> None:
        for d, (n, axes) in enumerate(zip(t.shape, target.dims, strict=True)):
            if local_size(n, axes, self.ctx.sizes) is None:
                sizes = ", ".join(f"{a}={self.ctx.sizes[a]}" for a in axes)
                raise ShardingError(
                    f"shard at {node.source}: dimension {d} of {t} is to be split over {axes} ({sizes}: "
                    f"{count(axes, self.ctx.sizes)} parts), which does "
                    f"not divide {n}. The spec is {tuple(node.args[1])}; change the mesh or the layout, or pad the "
                    "dimension by an amount that does not depend on the layout"
                )

    def _mirror(self, node: Node) -> None:
        """A cotangent takes its primal's placement; sums that this does not shard stay pending."""
        c = self.placed(node.args[0])
        primal = self.placed(node.tags["primal"])
        target = c.home if primal.derived else self._mirror_target(c.home, primal.home, c.type)
        local = self.get(c, target, "mirror")
        p = self.define(node.outs[0], target, local, ragged=c.ragged)
        p.copies = c.copies  # the cotangent of a sum is that of each term: what one moves is there for the others
        p.name = f"cotangent of {primal.name}" if primal.name else ""

    def _mirror_target(self, c: Placement, primal: Placement, t: TensorType) -> Placement:
        used = {a for d in primal.dims for a in d}
        dims: list[tuple[str, ...]] = []
        for have, want in zip(c.dims, primal.dims, strict=True):
            extra = tuple(a for a in have if a not in used)
            keep = have[: len(want)] == want or not extra
            dims.append((*want, *extra) if keep and self._divisible(t, len(dims), (*want, *extra)) else want)
        return Placement(tuple(dims), c.pending - used)

    def _divisible(self, t: TensorType, d: int, axes: tuple[str, ...]) -> bool:
        return local_size(t.shape[d], axes, self.ctx.sizes) is not None

    def _whole(self, node: Node) -> None:
        """On one device every value is whole, and no rule is asked for."""
        args, kwargs = map_values(
            lambda v: self.get(self.placed(v), Placement.replicated(v.ndim), "border"), (node.args, node.kwargs)
        )
        placements = [Placement.replicated(v.ndim) for v in node.outs]
        tags = {"reason": "shard_map"} if isinstance(node.op, Collective) else {}
        outs = self.emit(
            node.op, args, kwargs, [(v.type, p) for v, p in zip(node.outs, placements, strict=True)], **tags
        )
        for v, p, local in zip(node.outs, placements, outs, strict=True):
            self.define(v, p, local)

    def _ruled(self, node: Node) -> None:
        node = standalone(node)
        if not self.ctx.sizes:
            return self._whole(node)
        rule = rule_for(node)
        operands = [self.placed(v) for v in node.operands()]
        at_rest = bool(operands) and operands[0].use is not None and self._stays_at_rest(rule, operands[0])
        if at_rest:
            operands = [_resting(p) for p in operands]
        hints = [self._hint(node, i) for i in range(len(node.outs))]
        solver = Solver(rule, operands, hints, self.ctx.sizes, node.phase == "B")
        sol = solver.solve()
        homes = sol.outs
        if rule.exchange is not None and self.ctx.options.get(rule.exchange[0]) == rule.exchange[1]:
            sol = solver.exchanged(rule.exchange[2])
        originals = [self.placed(v) for v in node.operands()]
        if self._is_lazy(rule, originals):
            return self._lazy(node, rule, originals)
        ragged, rows = rows_of(node, rule, originals)
        if ragged is not None:
            self.tags = {**self.tags, "opaque": True}
        locals_ = [
            self._operand(p, q, t, r) for p, q, t, r in zip(originals, operands, sol.targets, sol.reasons, strict=True)
        ]
        outs = self._local(node, rule, sol.axes, locals_, sol.outs)
        weight = bool(operands) and all(p.weight for p in originals)
        for v, placement, local in zip(node.outs, sol.outs, outs, strict=True):
            same = at_rest or (len(originals) == 1 and _elementwise(rule))
            fields: dict[str, Any] = {"in_use": originals[0].in_use, "derived": at_rest} if same else {}
            if at_rest:
                use = self._used_as(rule, originals[0], rule.outs[v.index])
                fields |= {"use": use, "in_use": use}
            guest = bool(rule.prefer) or any(p.guest for p in originals)
            reduced = _reduced(placement, originals)
            made = ragged if (rows,) in rule.outs[v.index] else None
            p = self.define(v, placement, local, weight=weight, reduced=reduced, guest=guest, ragged=made, **fields)
            if v.node is not None and v.index in rule.give_back and homes[v.index] != placement:
                self.get(p, homes[v.index], "rule")
                p.home = homes[v.index]

    def _stays_at_rest(self, rule: Rule, p: Placed) -> bool:
        """Whether a parameter need not be brought into use: for what is elementwise on it alone (a cast), and what its
        rule allows, if the rule can be sharded as the parameter is."""
        if not rule.at_rest:
            return len(rule.ins) == 1 and _elementwise(rule)
        assert p.use is not None
        for dims in (p.home.dims, p.use.dims):
            claimed = split_dims(rule.ins[0], dims, rule.sizes, self.ctx.sizes)
            if {a for axes in claimed.values() for a in axes} != {a for d in dims for a in d}:
                return False
        return True

    def _used_as(self, rule: Rule, p: Placed, out: Dims) -> Placement:
        """Where a result is used that is made of a parameter at rest: as the parameter is."""
        assert p.use is not None
        return Placement(_dims_of(out, split_dims(rule.ins[0], p.use.dims, rule.sizes, self.ctx.sizes)))

    def _operand(self, p: Placed, asked: Placed, target: Placement, reason: str) -> Value:
        if p.use is not None and asked.use is not None and p.home != target and p.use != p.home:
            self.get(p, p.use, "parameter")
        return self.get(p, target, reason or "slice")

    def _hint(self, node: Node, i: int) -> Placement | None:
        primal = node.tags.get("hints", {}).get(i)
        if primal is None or node.phase != "B":
            return None
        p = self.placed(primal)
        return p.use if p.use is not None else p.home

    def _is_lazy(self, rule: Rule, operands: Sequence[Placed]) -> bool:
        """Made on demand: creation, draws from a key, and elementwise operations on such values alone."""
        inner = {f for dims in rule.ins for d in dims for f in d} - set(rule.whole)
        outer = {f for dims in rule.outs for d in dims for f in d}
        if not inner & outer:
            return bool(outer - set(rule.whole)) or not operands
        lazy = all(p.make is not None and not p.copies for p in operands)
        return lazy and inner <= outer and not rule.whole

    def _lazy(self, node: Node, rule: Rule, operands: Sequence[Placed]) -> None:
        """A value that nothing placed is made where, and at the size at which, it is wanted."""
        source, tags = self.source, self.tags
        for i, v in enumerate(node.outs):

            def make(target: Placement, i: int = i, t: TensorType = v.type) -> Value:
                before = self.source, self.tags
                self.source, self.tags = source, tags
                axes = split_dims(rule.outs[i], target.dims, rule.sizes, self.ctx.sizes)
                for f in drop_minor(axes, (*rule.ins, *rule.outs), rule.sizes, self.ctx.sizes):
                    del axes[f]
                made = [Placement(_dims_of(out, axes)) for out in rule.outs]
                args = [
                    self.get(p, Placement(_dims_of(d, axes)), "border") for p, d in zip(operands, rule.ins, strict=True)
                ]
                local = self._local(node, rule, axes, args, made)[i]
                self.source, self.tags = before
                if made[i] != target.whole():
                    temp = Placed(t, made[i], {made[i]: local})
                    return self.get(temp, target.whole(), "border")
                return local

            self.env[id(v)] = Placed(v.type, Placement.replicated(v.ndim), {}, make=make)

    def _local(
        self,
        node: Node,
        rule: Rule,
        axes: Mapping[str, tuple[str, ...]],
        locals_: Sequence[Value],
        outs: Sequence[Placement],
    ) -> Sequence[Value]:
        """Write the node at local shapes: the operation itself, or the rule's `local` function traced inline."""
        types = [(v.type, p) for v, p in zip(node.outs, outs, strict=True)]
        it = iter(locals_)
        args, kwargs = map_values(lambda _: next(it), (node.args, node.kwargs))
        local = rule.local
        if local is None or not any(axes.values()):
            return self.emit(node.op, args, kwargs, types)
        return self.inline(lambda *a, **k: local(_Info(rule, axes, self.ctx), *a, **k), args, kwargs, types)

    def inline(
        self, fn: Callable[..., Any], args: tuple, kwargs: dict, outs: Sequence[tuple[TensorType, Placement]]
    ) -> list[Value]:
        """Trace `fn` at local shapes and append its nodes; results must have the local types that `outs` say."""
        final = self.trace_in(fn, args, kwargs)
        for v, (t, p) in zip(final, outs, strict=True):
            expected = p.local_type(t, self.ctx.sizes)
            if v.type != expected:
                raise AssertionError(
                    f"sharding rule of a node at {self.source}: its local function gives {v.type}, expected {expected}"
                )
            v.placement = v.placement or p.describe(t)
        return final

    def trace_in(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> list[Value]:
        """Trace `fn` at local shapes, append its nodes, and return its results."""
        values: list[Value] = []

        def note(v: Value) -> int:
            values.append(v)
            return len(values) - 1

        template = map_values(lambda v: _Slot(note(v)), (args, kwargs))

        def flat(*fakes: torch.Tensor) -> Any:
            a, k = _fill(template, fakes)
            return fn(*a, **k)

        rec, out = record_flat(flat, [v.type for v in values], name=self.name, mesh_sizes=dict(self.ctx.all_sizes))
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        program = rec.program(results)
        swap = {id(i): v for i, v in zip(program.inputs, values, strict=True)}
        tags = {k: v for k, v in self.tags.items() if k != "results"}
        for n in program.nodes:
            n.args, n.kwargs = map_values(lambda v: swap.get(id(v), v), (n.args, n.kwargs))
            n.source, n.phase = self.source, self.phase
            n.tags = {
                **tags,
                **n.tags,
                **({"reason": "rule"} if isinstance(n.op, Collective) and n.op is not AXIS_INDEX else {}),
            }
            self.nodes.append(n)
        return [swap.get(id(v), v) for v in program.outputs]

    # -- the result -------------------------------------------------------------------------------------------------
    def finish(self, inputs: Sequence[Value], outputs: Sequence[Any], names: Sequence[str] = ()) -> Program:
        """The local Program; nodes without use are dropped."""
        from fmeg.program.passes import dce

        return dce(Program(tuple(inputs), self.nodes, tuple(outputs), tuple(names), self.name))


@dataclass(frozen=True)
class _Slot:
    index: int


def _fill(template: Any, fakes: Sequence[Any]) -> Any:
    if isinstance(template, _Slot):
        return fakes[template.index]
    if isinstance(template, (tuple, list)):
        return type(template)(_fill(t, fakes) for t in template)
    if isinstance(template, dict):
        return {k: _fill(v, fakes) for k, v in template.items()}
    return template


def _elementwise(rule: Rule) -> bool:
    return len(rule.ins) == 1 and len(rule.outs) == 1 and rule.ins[0] == rule.outs[0] and not rule.whole


def _keep_first(axes: tuple[str, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: torch.where(axis_index(axes) == 0, x, torch.zeros_like(x))


def _reduced(out: Placement, operands: Sequence[Placed]) -> bool:
    """Does a result's pending sum come from reductions that the program wrote?"""
    summing = [p for p in operands if p.home.pending]
    if not summing:
        return bool(out.pending) and len(operands) == 1
    return all(p.reduced for p in summing) and out.pending <= frozenset().union(*(p.home.pending for p in summing))


def _resting(p: Placed) -> Placed:
    """The parameter seen at rest: an elementwise operation on it alone (a cast) does not move it."""
    return Placed(p.type, p.home, p.copies, p.in_use, None, p.opt, p.weight, p.make, p.name)


def _dims_of(dims: Any, axes: Mapping[str, tuple[str, ...]]) -> Any:
    return tuple(tuple(a for f in factors for a in axes.get(f, ())) for factors in dims)
