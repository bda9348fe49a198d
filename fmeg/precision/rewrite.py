"""After differentiation: tagged products, forward and backward, become products of quantised tensors.

Of y = x·w three products remain, each contracting another dimension: y itself, x's cotangent (of y's cotangent and w)
and w's (of x and y's cotangent). Differentiating first means that each is simply computed in low precision: the cast
has no gradient of its own, which is the straight-through rule. An operand is quantised once for each grid; largest
values are found where it is made, so that those of all parameters of a layer are one reduction on a mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.ops.dispatch import dispatch_p
from fmeg.ops.einsum import einsum_p, parse_equation
from fmeg.ops.grouped import grouped_matmul_dw_p, grouped_matmul_p
from fmeg.ops.routing import route_p
from fmeg.ops.shard import shard_p
from fmeg.precision.delayed import ROLES, collect_p, known_p, seen_p, tap_p
from fmeg.precision.formats import Format, Grid, amax_p, quantize_p
from fmeg.precision.grouped import scaled_grouped_dw_p, scaled_grouped_p
from fmeg.precision.mark import TAG, Use
from fmeg.precision.ragged import groups, rows_amax_p, rows_quantize_p
from fmeg.precision.recipe import Recipe
from fmeg.precision.scaled import as_matmul, scaled_einsum_p
from fmeg.program.gradient import MIRROR
from fmeg.program.ir import Node, Program, TensorType, Value, values_in
from fmeg.program.primitive import Primitive
from fmeg.program.structured import ScanForward

aten = torch.ops.aten
PRODUCTS = (einsum_p, grouped_matmul_p, grouped_matmul_dw_p)


def lower_precision(joint: Program) -> Program:
    """`joint`, from `differentiate` on a marked Program, with its tagged products rewritten, in bodies of scans too."""
    for n in joint.nodes:
        if isinstance(n.op, ScanForward):
            n.op.pair.joint = lower_precision(n.op.pair.joint)
    if not any(_is_tagged(n) for n in joint.nodes):
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
    sent: dict[int, Value] = field(default_factory=dict)  # by id of rows: the same in low precision
    early: set[int] = field(default_factory=set)  # ids of the nodes before the first product
    start: Node | None = None

    def run(self) -> Program:
        nodes = self.joint.nodes
        self.start = next(n for n in nodes if _is_tagged(n))
        self.early = {id(n) for n in nodes[: nodes.index(self.start)]}
        self.known = {n.args[2]: n.args[1] for n in nodes if n.op is tap_p}
        for n in nodes:
            if _is_tagged(n):
                (self._product if n.op is einsum_p else self._grouped)(n, n.tags[TAG])
        collected = {id(n) for n in nodes if n.op is seen_p and self._collect(n)}
        out = self._with(self.first)
        for n in nodes:
            if id(n) in collected:
                continue
            out += [*self.before.get(id(n), []), *self._with([n])]
        outputs = self.joint.outputs
        return Program(self.joint.inputs, self._without_idle(out, outputs), outputs, self.joint.names, self.joint.name)

    def _without_idle(self, nodes: list[Node], outputs: Sequence[Any]) -> list[Node]:
        """Without rows that were dispatched as they were and that nobody reads any more."""
        used = {id(v) for v in values_in(outputs)}
        out: list[Node] = []
        for n in reversed(nodes):
            idle = id(n.outs[0]) in self.sent or n.op is MIRROR if n.outs else False
            if not idle or any(id(o) in used for o in n.outs):
                out.append(n)
                used |= {id(v) for v in n.operands()}
        gone = {i: v for i, v in self.sent.items() if i not in used}
        for n in out:
            primal, hints = n.tags.get("primal"), n.tags.get("hints", {})
            if id(primal) in gone:
                n.tags["primal"] = gone[id(primal)]
            if any(id(v) in gone for v in hints.values()):
                n.tags["hints"] = {i: gone.get(id(v), v) for i, v in hints.items()}
        return out[::-1]

    def _with(self, nodes: Sequence[Node]) -> list[Node]:
        """Nodes, each followed by those that were made for its results."""
        return [m for n in nodes for m in (n, *self._with(self.after.get(id(n), [])))]

    def _product(self, node: Node, use: Use) -> None:
        equation, a, b = node.args
        mm = as_matmul(equation)
        backward = node.phase == "B"
        cotangent = _cotangent(node, a, b)
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
            args += self._operand(v, i, grids[-1], node, use, cotangent)
        node.op = scaled_einsum_p
        node.args, node.kwargs = (equation, *args, tuple(grids), node.outs[0].dtype, not backward), {}

    def _grouped(self, node: Node, use: Use) -> None:
        """A product of rows sorted by expert with the experts' matrices, or, for the gradient of these, with others."""
        a, b, ends = node.args
        recipe, of_parameter = use.recipe, node.op is grouped_matmul_dw_p
        backward = node.phase == "B"
        cotangent = _cotangent(node, a, b)
        if (backward and cotangent is None) or (of_parameter and not recipe.weight_gradient):
            return
        rows = (a, b) if of_parameter else (a,)
        grids = [recipe.rows_grid(v.shape[1], of_parameter, sent_tokens(v, recipe) is not None) for v in rows]
        transposed = node.kwargs.get("transposed", False)
        if not of_parameter:
            mm = as_matmul(f"e r {'f' if transposed else 'd'}, e d f -> e r {'d' if transposed else 'f'}")
            assert mm is not None
            sizes = dict(zip("edf", b.shape, strict=True))
            grids.append(recipe.grid(("e", "d", "f"), sizes, mm, True))
        args: list[Value] = []
        for i, v in enumerate((a, b)):
            args += self._operand(v, i, grids[i], node, use, cotangent, None if i == 1 and not of_parameter else ends)
        node.op = scaled_grouped_dw_p if of_parameter else scaled_grouped_p
        dtype = node.outs[0].dtype
        how = (dtype,) if of_parameter else (transposed, dtype, not backward)
        node.args, node.kwargs = (*args, ends, tuple(grids), *how), {}

    def _operand(
        self, v: Value, i: int, grid: Grid, node: Node, use: Use, cotangent: int | None, ends: Value | None = None
    ) -> tuple[Value, ...]:
        """q and scale of a product's operand; `ends`: of rows sorted by expert."""
        of_gradient = i == cotangent
        parameter = i == use.parameter and not of_gradient and ends is None
        format = use.recipe.gradient if of_gradient else use.recipe.forward
        tokens = None if ends is None or grid != (0, 0) else sent_tokens(v, use.recipe)
        if tokens is not None:
            role = (2 if of_gradient else 0) if use.recipe.delayed else None
            return self._sent(v, tokens, role, format, node, use.site)
        if use.recipe.delayed:
            return self._delayed(v, 2 if of_gradient else int(parameter), format, node, use.site, ends)
        early = parameter and node.phase != "B" and (v.node is None or id(v.node) in self.early)
        near = self.start if early and self.start is not None else node
        return self._quantized(v, grid, format, node, near, ends)

    def _quantized(
        self, v: Value, grid: Grid, format: Format, user: Node, at: Node, ends: Value | None
    ) -> tuple[Value, ...]:
        """q and scale of a value, made right before the node `at`, or, if that is far away, right after `amax`.

        A layer's parameters are made at its first product, so that on a mesh they are gathered together."""
        key = (id(v), grid, format, id(ends))
        if key in self.made:
            return self.made[key]
        moved = _moved(v, grid) if ends is None else None
        if moved is not None:
            q, s = self._quantized(moved.args[0], grid, format, user, at, None)
            near = self._place(q, at)
            spec = moved.args[1]
            of_scale = tuple(e if g == 1 else None for e, g in zip(spec, grid, strict=True))
            placed = [self._emit(shard_p, (x, e), (x.type,), v, user, near)[0] for x, e in ((q, spec), (s, of_scale))]
            self.made[key] = tuple(placed)
            return self.made[key]
        nested, top = format.scale == "nested", None
        if nested and ends is not None:
            top = self._amax(v, (0, 0), user, ends)
        last = amax = self._amax(v, grid, user, ends)
        if nested and ends is None:
            last = top = self._amax(amax, (0,) * v.ndim, user, None)
        near = self._place(last, at)
        self.made[key] = self._quantize(v, amax, top, grid, format, user, near, ends)
        return self.made[key]

    def _quantize(
        self, v: Value, amax: Value, top: Value | None, grid: Grid, format: Format, user: Node, near: list[Node],
        ends: Value | None,
    ) -> tuple[Value, ...]:  # fmt: skip
        types = (TensorType(v.shape, format.dtype), TensorType(amax.shape, torch.float32))
        args = (v, amax, top, grid, format) if ends is None else (v, amax, top, ends, grid, format)
        return self._emit(quantize_p if ends is None else rows_quantize_p, args, types, v, user, near)

    def _delayed(
        self, v: Value, role: int, format: Format, user: Node, site: str, ends: Value | None
    ) -> tuple[Value, ...]:
        """q and scale by the largest value known for a role; the one of now is noted.

        What several products read is quantised once, by what the first of them knows: they all saw the same."""
        grid = (0,) * v.ndim
        self.seen.setdefault(site, {})[role] = self._amax(v, grid, user, ends)
        key = (id(v), grid, role)
        if key not in self.made:
            one = TensorType((1,) * v.ndim, torch.float32)
            near = self.first if v.node is None else self.after.setdefault(id(v.node), [])
            known = self._emit(known_p, (self.known[site], role, v.ndim), (one,), v, user, near)[0]
            self.made[key] = self._quantize(v, known, None, grid, format, user, near, ends)
        return self.made[key]

    def _sent(
        self, v: Value, tokens: tuple[Value, Value | None], role: int | None, format: Format, user: Node, site: str
    ) -> tuple[Value, ...]:
        """q and scale of rows that were dispatched: tokens are quantised, by the largest value of those that have rows
        or by what is known of a role, and sent instead."""
        dispatch = _dispatch_of(v)
        assert dispatch is not None
        (x, keep), where = tokens, self.after.setdefault(id(dispatch), [])
        v = dispatch.outs[0]
        if (id(v), "sent") not in self.made:
            self.made[id(v), "sent"] = (self._largest_token(x, keep, v, user, where),)
        (top,) = self.made[id(v), "sent"]
        if role is not None:
            self.seen.setdefault(site, {})[role] = top
        key = (id(v), "sent", format, role)
        if key not in self.made:
            known, one = top, TensorType((1,) * x.ndim, torch.float32)
            if role is not None:
                known = self._emit(known_p, (self.known[site], role, x.ndim), (one,), v, user, where)[0]
            grid = (0,) * x.ndim
            types = (TensorType(x.shape, format.dtype), one)
            q, s = self._emit(quantize_p, (x, known, None, grid, format), types, v, user, where)
            rows = TensorType(v.shape, format.dtype)
            sent = self._emit(dispatch_p, (q, *dispatch.args[1:]), (rows,), v, user, where, dispatch.kwargs)[0]
            flat = TensorType((1, 1), torch.float32)
            scale = self._emit(aten.view.default, (s, [1, 1]), (flat,), v, user, where)[0]
            self.made[key] = (sent, scale)
            self.sent[id(v)] = sent
        return self.made[key]

    def _largest_token(self, x: Value, keep: Value | None, v: Value, user: Node, where: list[Node]) -> Value:
        emit = lambda op, args, t: self._emit(op, args, (t,), v, user, where)[0]
        if keep is not None:
            any_kept = emit(aten.any.dim, (keep, -1, True), TensorType((*keep.shape[:-1], 1), torch.bool))
            x = emit(aten.where.ScalarOther, (any_kept, x, 0.0), x.type)
        return emit(amax_p, (x, (0,) * x.ndim), TensorType((1,) * x.ndim, torch.float32))

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

    def _amax(self, v: Value, grid: Grid, user: Node, ends: Value | None) -> Value:
        key = (id(v), grid, id(ends))
        if key not in self.made:
            shape = tuple(1 if g == 0 else n // g for n, g in zip(v.shape, grid, strict=True))
            if ends is not None:
                shape = (groups(v.shape[0], ends.shape[0], grid[0]), *shape[1:])
            near = self.first if v.node is None else self.after.setdefault(id(v.node), [])
            op, args = (amax_p, (v, grid)) if ends is None else (rows_amax_p, (v, ends, grid))
            self.made[key] = self._emit(op, args, (TensorType(shape, torch.float32),), v, user, near)
        return self.made[key][0]

    def _place(self, last: Value, at: Node) -> list[Node]:
        """Where what follows from `last` goes that is needed at a node."""
        assert last.node is not None
        near = _is_backward(last) == (at.phase == "B")
        return (self.before if near else self.after).setdefault(id(at if near else last.node), [])

    def _emit(
        self, op: Any, args: tuple, types: Sequence[TensorType], of: Value, user: Node, where: list[Node],
        kwargs: dict[str, Any] | None = None,
    ) -> tuple[Value, ...]:  # fmt: skip
        phase = "B" if _is_backward(of) else "F"
        tags = {k: v for k, v in user.tags.items() if k == "remat"} if phase == "F" else {}
        source = user.source if phase == "B" else user.source.removeprefix("bwd of ")
        node = Node(op, args, kwargs or {}, source=source, phase=phase, tags=tags)
        node.outs = tuple(Value(t, node, i) for i, t in enumerate(types))
        where.append(node)
        return node.outs


def sent_tokens(v: Value, recipe: Recipe) -> tuple[Value, Value | None] | None:
    """Of rows as they were dispatched, that nothing but products in low precision reads, the tokens, and which slots of
    them were kept (None: all)."""
    node = _dispatch_of(v)
    made = None if node is None else node.args[1].node
    if node is None or made is None or made.op is not route_p or not recipe.weight_gradient:
        return None
    return node.args[0], made.args[1]


def _dispatch_of(v: Value) -> Node | None:
    node = v.node
    while node is not None and node.op is MIRROR:
        node = node.args[0].node
    return node if node is not None and node.op is dispatch_p else None


def _is_tagged(node: Node) -> bool:
    return TAG in node.tags and node.op in PRODUCTS


def _cotangent(node: Node, a: Value, b: Value) -> int | None:
    """Which operand of a backward product is one."""
    return next((i for i, v in enumerate((a, b)) if _is_backward(v)), None) if node.phase == "B" else None


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
