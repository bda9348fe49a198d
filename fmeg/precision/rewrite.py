"""After differentiation: tagged products, forward and backward, become products of quantised tensors.

Of y = x·w three products remain, each contracting another dimension: y itself, x's cotangent (of y's cotangent and w)
and w's (of x and y's cotangent). Differentiating first means that each is simply computed in low precision: the cast
has no gradient of its own, which is the straight-through rule. An operand is quantised once for each grid; largest
values are found where it is made, so that those of all parameters of a layer are one reduction on a mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fmeg.ops.einsum import einsum_p, parse_equation
from fmeg.ops.shard import shard_p
from fmeg.precision.delayed import ROLES, collect_p, known_p, seen_p, tap_p
from fmeg.precision.formats import Format, Grid, amax_p, quantize_p
from fmeg.precision.mark import TAG, Use
from fmeg.precision.scaled import as_matmul, scaled_einsum_p
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.primitive import Primitive
from fmeg.program.structured import ScanForward


def lower_precision(joint: Program) -> Program:
    """`joint`, from `differentiate` on a marked Program, with its tagged products rewritten, in bodies of scans too."""
    for n in joint.nodes:
        if isinstance(n.op, ScanForward):
            n.op.pair.joint = lower_precision(n.op.pair.joint)
    if not any(n.op is einsum_p and TAG in n.tags for n in joint.nodes):
        return joint
    out = _Rewriter(joint).run()
    out.check()
    return out


@dataclass
class _Rewriter:
    """`first`: nodes made for inputs; `after`, `before`: nodes made where the node with this id stands."""

    joint: Program
    first: list[Node] = field(default_factory=list)
    after: dict[int, list[Node]] = field(default_factory=dict)
    before: dict[int, list[Node]] = field(default_factory=dict)
    made: dict[tuple, tuple[Value, ...]] = field(default_factory=dict)
    known: dict[str, Value] = field(default_factory=dict)  # by site: largest values of earlier steps
    seen: dict[str, dict[int, Value]] = field(default_factory=dict)  # by site and role: those of this one
    early: set[int] = field(default_factory=set)  # ids of the nodes before the first product
    start: Node | None = None

    def run(self) -> Program:
        nodes = self.joint.nodes
        self.start = next(n for n in nodes if n.op is einsum_p and TAG in n.tags)
        self.early = {id(n) for n in nodes[: nodes.index(self.start)]}
        self.known = {n.args[2]: n.args[1] for n in nodes if n.op is tap_p}
        for n in nodes:
            if n.op is einsum_p and TAG in n.tags:
                self._product(n, n.tags[TAG])
        collected = {id(n) for n in nodes if n.op is seen_p and self._collect(n)}
        out = self._with(self.first)
        for n in nodes:
            if id(n) in collected:
                continue
            out += [*self.before.get(id(n), []), *self._with([n])]
        return Program(self.joint.inputs, out, self.joint.outputs, self.joint.names, self.joint.name)

    def _with(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes, each followed by those that were made for its results."""
        return [m for n in nodes for m in (n, *self._with(self.after.get(id(n), [])))]

    def _product(self, node: Node, use: Use) -> None:
        equation, a, b = node.args
        mm = as_matmul(equation)
        backward = node.phase == "B"
        cotangent = next((i for i, v in enumerate((a, b)) if _is_backward(v)), None) if backward else None
        if mm is None or (backward and cotangent is None):
            return
        if backward and cotangent == use.parameter and not use.recipe.weight_gradient:
            return
        ins, _ = parse_equation(equation)
        sizes = dict(zip((*ins[0], *ins[1]), (*a.shape, *b.shape), strict=True))
        args: list[Value] = []
        grids: list[Grid] = []
        for i, (v, names) in enumerate(zip((a, b), ins, strict=True)):
            of_gradient = i == cotangent
            parameter = i == use.parameter and not of_gradient
            grids.append(use.recipe.grid(names, sizes, mm, parameter))
            format = use.recipe.gradient if of_gradient else use.recipe.forward
            early = parameter and not backward and (v.node is None or id(v.node) in self.early)
            near = self.start if early and self.start is not None else node
            if use.recipe.delayed:
                role = 2 if of_gradient else int(i == use.parameter)
                args += self._delayed(v, role, format, node, use.site)
            else:
                args += self._quantized(v, grids[-1], format, node, near)
        node.op = scaled_einsum_p
        node.args, node.kwargs = (equation, *args, tuple(grids), node.outs[0].dtype, not backward), {}

    def _quantized(self, v: Value, grid: Grid, format: Format, user: Node, at: Node) -> tuple[Value, ...]:
        """q and scale of a value, made right before the node `at`, or, if that is far away, right after `amax`.

        A layer's parameters are made at its first product, so that on a mesh they are gathered together."""
        key = (id(v), grid, format)
        if key in self.made:
            return self.made[key]
        moved = _moved(v, grid)
        if moved is not None:
            q, s = self._quantized(moved.args[0], grid, format, user, at)
            near = self._place(q, at)
            spec = moved.args[1]
            of_scale = tuple(e if g == 1 else None for e, g in zip(spec, grid, strict=True))
            placed = [self._emit(shard_p, (x, e), (x.type,), v, user, near)[0] for x, e in ((q, spec), (s, of_scale))]
            self.made[key] = tuple(placed)
            return self.made[key]
        amax = self._amax(v, grid, user)
        top = self._amax(amax, (0,) * v.ndim, user) if format.scale == "nested" else None
        types = (TensorType(v.shape, format.dtype), TensorType(amax.shape, torch.float32))
        near = self._place(amax if top is None else top, at)
        self.made[key] = self._emit(quantize_p, (v, amax, top, grid, format), types, v, user, near)
        return self.made[key]

    def _delayed(self, v: Value, role: int, format: Format, user: Node, site: str) -> tuple[Value, ...]:
        """q and scale by the largest value known for a role; the one of now is noted.

        What several products read is quantised once, by what the first of them knows: they all saw the same."""
        grid = (0,) * v.ndim
        self.seen.setdefault(site, {})[role] = self._amax(v, grid, user)
        key = (id(v), grid, role)
        if key not in self.made:
            one = TensorType((1,) * v.ndim, torch.float32)
            near = self.first if v.node is None else self.after.setdefault(id(v.node), [])
            known = self._emit(known_p, (self.known[site], role, v.ndim), (one,), v, user, near)[0]
            types = (TensorType(v.shape, format.dtype), one)
            self.made[key] = self._emit(quantize_p, (v, known, None, grid, format), types, v, user, near)
        return self.made[key]

    def _collect(self, node: Node) -> bool:
        """Put what a site saw in the place of its `seen`; after the last of it."""
        site = node.args[1]
        seen = self.seen.get(site)
        if seen is None:
            return False
        values = [seen.get(role) for role in range(ROLES)]
        where = next((self.after.setdefault(id(v.node), []) for v in values[::-1] if v is not None), [])
        for role, v in enumerate(values):
            if v is None:
                one = (TensorType((1,), torch.float32),)
                values[role] = self._emit(known_p, (self.known[site], role, 1), one, node.outs[0], node, where)[0]
        made = Node(collect_p, (values,), {}, node.outs, node.source, "B", {})
        node.outs[0].node = made
        where.append(made)
        return True

    def _amax(self, v: Value, grid: Grid, user: Node) -> Value:
        key = (id(v), grid)
        if key not in self.made:
            shape = tuple(1 if g == 0 else n // g for n, g in zip(v.shape, grid, strict=True))
            near = self.first if v.node is None else self.after.setdefault(id(v.node), [])
            self.made[key] = self._emit(amax_p, (v, grid), (TensorType(shape, torch.float32),), v, user, near)
        return self.made[key][0]

    def _place(self, last: Value, at: Node) -> list[Node]:
        """Where what follows from `last` goes that is needed at a node."""
        assert last.node is not None
        near = _is_backward(last) == (at.phase == "B")
        return (self.before if near else self.after).setdefault(id(at if near else last.node), [])

    def _emit(
        self, op: Primitive, args: tuple, types: Sequence[TensorType], of: Value, user: Node, where: list[Node]
    ) -> tuple[Value, ...]:
        phase = "B" if _is_backward(of) else "F"
        tags = {k: v for k, v in user.tags.items() if k == "remat"} if phase == "F" else {}
        source = user.source if phase == "B" else user.source.removeprefix("bwd of ")
        node = Node(op, args, {}, source=source, phase=phase, tags=tags)
        node.outs = tuple(Value(t, node, i) for i, t in enumerate(types))
        where.append(node)
        return node.outs


def _is_backward(v: Value) -> bool:
    return v.node is not None and v.node.phase == "B"


def _moved(v: Value, grid: Grid) -> Node | None:
    """The `shard` that made a value which may as well be quantised before it moves: a byte an element travels.

    Not where its operand may be a pending sum, which would be summed first, and not blocks, which a shard may cut.
    """
    node = v.node
    if node is None or node.op is not shard_p or node.phase != "F" or any(g > 1 for g in grid):
        return None
    made = node.args[0].node
    if made is None or not isinstance(made.op, Primitive) or made.op.rule is None:
        return None
    rule = made.op.rule(made)
    ins, outs = ({f for dims in side for d in dims for f in d} for side in (rule.ins, rule.outs))
    return None if rule.linear or ins - outs - rule.resolved - rule.whole else node
