"""A layer of experts in fewer passes over memory.

gate, up = x w_gate, x w_up                     one product, of matrices that lie beside one another
h = silu(gate) · up · weight                    one pass forward, one backward with both gradients and the weight's
dx = dgate w_gateᵀ + dup w_upᵀ                  one product; the gradients lie beside one another
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmeg.kernels import experts, grouped
from fmeg.lower.hoist import slices_of
from fmeg.lower.rewrite import depends, in_order, uses, with_nodes
from fmeg.ops._common import transformed
from fmeg.ops.activations import swiglu_bwd_p, swiglu_p
from fmeg.ops.grouped import grouped_matmul_p, row_dot_p, scale_rows_p
from fmeg.precision.ragged import rows_quantize_p
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.primitive import Primitive

aten = torch.ops.aten


# -- the operations ---------------------------------------------------------------------------------------------------
def _pair(x: Tensor, a: Tensor, b: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """[x a, x b]; transposed: the first half of x's columns times aᵀ plus the second times bᵀ."""
    if not transformed():
        return grouped.grouped_pair(x, a, b, ends, transposed)
    run, f = grouped_matmul_p.run(), a.shape[2]
    if transposed:
        return run(x[:, :f], a, ends, transposed=True) + run(x[:, f:], b, ends, transposed=True)
    return torch.cat([run(x, w, ends, transposed=False) for w in (a, b)], 1)


def _gated(gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
    """silu(gate) · up · weights."""
    if grouped.fits(gate) and not transformed():
        return experts.gated(gate, up, weights)
    return scale_rows_p.run()(swiglu_p.run()(gate, up), weights)


def _gated_bwd(gate: Tensor, up: Tensor, weights: Tensor | None, ct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) · up · weights, cotangents of gate and up beside one another, cotangent of the weights)."""
    if grouped.fits(gate) and not transformed():
        return experts.gated_bwd(gate, up, weights, ct)
    h, scale = swiglu_p.run()(gate, up), scale_rows_p.run()
    scaled = ct if weights is None else scale(ct, weights)
    pair = torch.cat(swiglu_bwd_p.run()(gate, up, scaled), 1)
    return h if weights is None else scale(h, weights), pair, row_dot_p.run()(h, ct)


def _beside(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.cat([a.to(dtype), b.to(dtype)], -1)


def _pair_flops(node: Node) -> int:
    x, w = node.operands()[:2]
    return 4 * x.shape[0] * w.shape[1] * w.shape[2]


grouped_pair_p = Primitive("grouped_pair", _pair, flops=_pair_flops)
gated_rows_p = Primitive("gated_rows", _gated, flops=lambda n: 7 * n.outs[0].type.numel)
gated_rows_bwd_p = Primitive("gated_rows_bwd", _gated_bwd, flops=lambda n: 20 * n.outs[0].type.numel)
beside_p = Primitive("beside", _beside, flops=lambda n: 0)


# -- where they stand in for others -----------------------------------------------------------------------------------
class _Rewrite:
    """One Program's nodes as they are exchanged."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.nodes = list(program.nodes)
        self.refresh()

    def refresh(self) -> None:
        now = with_nodes(self.program, self.nodes)
        self.used = uses(now)
        self.maker = {id(o): n for n in self.nodes for o in n.outs}

    def readers(self, v: Value) -> list[Node | None]:
        return self.used.get(id(v), [])

    def made_by(self, v: Any, op: Any) -> Node | None:
        n = self.maker.get(id(v))
        return n if n is not None and n.op is op else None

    def swap(self, old: Sequence[Node | None], new: Sequence[Node]) -> None:
        gone = {id(n) for n in old}
        first = next(i for i, n in enumerate(self.nodes) if id(n) in gone)
        self.nodes = [n for n in self.nodes[:first] if id(n) not in gone] + [
            *new,
            *(n for n in self.nodes[first:] if id(n) not in gone),
        ]
        self.refresh()

    def result(self) -> Program:
        ordered = in_order(self.nodes)
        assert ordered is not None
        return with_nodes(self.program, ordered)


def _new(like: Node, op: Any, args: tuple, outs: Sequence[Value | TensorType], **kwargs: Any) -> Node:
    """A node in the place of another; results are given values, or fresh ones of a type."""
    node = Node(op, args, kwargs, (), like.source, like.phase, like.tags)
    node.outs = tuple(o if isinstance(o, Value) else Value(o, node, i) for i, o in enumerate(outs))
    return node


def _halves(like: Node, pair: Value, first: Value, second: Value) -> list[Node]:
    """The halves of a value's last dimension."""
    dim, f = len(pair.shape) - 1, first.shape[-1]
    return [_new(like, aten.slice.Tensor, (pair, dim, start, start + f), [v]) for start, v in ((0, first), (f, second))]


def fuse_experts(program: Program) -> Program:
    """Everything above, wherever it is found in one body."""
    r = _Rewrite(program)
    for n in list(program.nodes):
        if n.op is swiglu_bwd_p:
            _backward(r, n)
    for n in list(r.nodes):
        if n.op is swiglu_p or n.op is gated_rows_bwd_p:
            _products(r, n)
        if n.op is swiglu_p:
            _forward(r, n)
    return r.result()


def _forward(r: _Rewrite, n: Node) -> None:
    (scale,) = got if len(got := r.readers(n.outs[0])) == 1 else (None,)
    if scale is not None and scale.op is scale_rows_p and scale.args[0] is n.outs[0]:
        r.swap([n, scale], [_new(scale, gated_rows_p, (*n.args, scale.args[1]), scale.outs)])


def _products(r: _Rewrite, n: Node) -> None:
    """gate and up, in one product."""
    gate, up = (r.made_by(v, grouped_matmul_p) for v in n.args[:2])
    if gate is None or up is None or gate is up:
        return
    (x, a, ends), (y, b, other) = gate.args, up.args
    if x is not y or ends is not other or a.type != b.type or gate.kwargs["transposed"] or up.kwargs["transposed"]:
        return
    rows, f = gate.outs[0].shape
    made = _new(gate, grouped_pair_p, (x, a, b, ends), [TensorType((rows, 2 * f), x.dtype)], transposed=False)
    r.swap([gate, up], [made, *_halves(gate, made.outs[0], gate.outs[0], up.outs[0])])


def _backward(r: _Rewrite, n: Node) -> None:
    """The activation's gradient with what surrounds it, then the product behind it."""
    gate, up, g = n.args
    if len(gate.shape) != 2 or not all(_feeds_products(r, v) for v in n.outs):
        return
    scale = r.made_by(g, scale_rows_p)
    if scale is not None and r.readers(g) != [n]:
        scale = None
    ct, weights = scale.args if scale is not None else (g, None)
    given = (ct,) if weights is None else (ct, weights)
    twins = (m for m in r.nodes if m.op is swiglu_p and m.args[0] is gate and m.args[1] is up)
    again = next((m for m in twins if not any(depends(v, m, r.maker) for v in given)), None)  # not the forward pass's
    rows, f = gate.shape
    h: Value | TensorType = gate.type
    dw: Value | TensorType = TensorType((rows, 1), torch.promote_types(gate.dtype, torch.float32))
    gone: list[Node | None] = [n, scale, again]
    if again is not None:
        for reader in r.readers(again.outs[0]) if scale is not None else ():
            if reader is not None and reader.op is scale_rows_p and reader.args[1] is weights:
                h = reader.outs[0]
            elif reader is not None and reader.op is row_dot_p and {id(v) for v in reader.args} == {
                id(again.outs[0]), id(ct)
            }:  # fmt: skip
                dw = reader.outs[0]
            else:
                return
            gone.append(reader)
        if scale is None:
            h = again.outs[0]
    made = _new(n, gated_rows_bwd_p, (gate, up, weights, ct), [h, TensorType((rows, 2 * f), gate.dtype), dw])
    pair = made.outs[1]
    r.swap(gone, [made, *_halves(n, pair, *n.outs)])
    _product_of_pair(r, pair, *n.outs)


def _feeds_products(r: _Rewrite, v: Value) -> bool:
    return any(n is not None and n.op in (grouped_matmul_p, rows_quantize_p) for n in r.readers(v))


def _product_of_pair(r: _Rewrite, pair: Value, dgate: Value, dup: Value) -> None:
    products = [
        [n for n in r.readers(v) if n is not None and n.op is grouped_matmul_p and n.args[0] is v] for v in (dgate, dup)
    ]
    if any(len(p) != 1 for p in products):
        return
    first, second = products[0][0], products[1][0]
    if not (first.kwargs["transposed"] and second.kwargs["transposed"]) or first.args[2] is not second.args[2]:
        return
    (add,) = got if len(got := r.readers(first.outs[0])) == 1 else (None,)
    if add is None or add.op is not aten.add.Tensor or add.kwargs or r.readers(second.outs[0]) != [add]:
        return
    if first.args[1].type != second.args[1].type:
        return
    args = (pair, first.args[1], second.args[1], first.args[2])
    r.swap([first, second, add], [_new(add, grouped_pair_p, args, add.outs, transposed=True)])


# -- matrices beside one another --------------------------------------------------------------------------------------
def join_casts(program: Program) -> Program:
    """Casts of two stacks that pairs of products read are made into one tensor."""
    maker = {id(o): n for n in program.nodes for o in n.outs}
    pairs: dict[int, int] = {}
    for n in program.nodes:
        if n.op is grouped_pair_p:
            pairs.setdefault(id(n.args[1]), id(n.args[2]))
        stacks = {id(inner): v for v, inner in slices_of(n)}
        for m in n.op.body.nodes if stacks else ():
            if m.op is grouped_pair_p and id(m.args[1]) in stacks and id(m.args[2]) in stacks:
                pairs.setdefault(id(stacks[id(m.args[1])]), id(stacks[id(m.args[2])]))
    nodes = list(program.nodes)
    for a, b in pairs.items():
        first, second = maker.get(a), maker.get(b)
        if first is None or second is None or not (_is_cast(first) and _is_cast(second)):
            continue
        x, y, out = first.args[0], second.args[0], first.outs[0].type
        if x.type != y.type or out != second.outs[0].type:
            continue
        wide = TensorType((*out.shape[:-1], 2 * out.shape[-1]), out.dtype)
        made = _new(first, beside_p, (x, y), [wide], dtype=out.dtype)
        at = min(i for i, n in enumerate(nodes) if n is first or n is second)
        rest = [n for n in nodes if n is not first and n is not second]
        nodes = [*rest[:at], made, *_halves(first, made.outs[0], first.outs[0], second.outs[0]), *rest[at:]]
    ordered = in_order(nodes)
    assert ordered is not None
    return with_nodes(program, ordered)


def _is_cast(n: Node) -> bool:
    return n.op is aten._to_copy.default and set(n.kwargs) == {"dtype"}
