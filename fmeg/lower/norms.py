"""The gradient of a norm and the residual stream's, which is added to it, in one pass over memory; and the sum of the
products whose cotangent it takes, in the same one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.kernels import rows
from fmeg.lower.rewrite import depends, in_order, uses, with_nodes
from fmeg.ops.rms_norm import rms_norm_bwd_p
from fmeg.program.ir import Node, Program, Value
from fmeg.program.primitive import Primitive


def _reference(x: Tensor, w: Tensor | None, ct: Tensor, residual: Tensor, eps: float) -> Any:
    """As `rms_norm_bwd`, dx plus the residual."""
    if rows.fits(x, x.shape[-1]):
        dx, dw = rows.rms_norm_backward(x, w, ct, residual, eps)
        return dx if w is None else (dx, dw)
    got = rms_norm_bwd_p.run()(x, w, ct, eps=eps)
    return got + residual if w is None else (got[0] + residual, got[1])


def _sum_reference(x: Tensor, w: Tensor | None, cts: tuple[Tensor, ...], residual: Tensor | None, eps: float) -> Any:
    """As `rms_norm_bwd` of the sum of two or three cotangents, dx plus the residual."""
    if rows.fits(x, x.shape[-1]):
        dx, dw = rows.rms_norm_backward(x, w, cts[0], residual, eps, *cts[1:])
        return dx if w is None else (dx, dw)
    ct = cts[0] + cts[1] if len(cts) == 2 else cts[0] + cts[1] + cts[2]
    return rms_norm_bwd_p.run()(x, w, ct, eps=eps) if residual is None else _reference(x, w, ct, residual, eps)


rms_norm_bwd_sum_p = Primitive("rms_norm_bwd_sum", _sum_reference, flops=rms_norm_bwd_p.flops)
rms_norm_bwd_add_p = Primitive("rms_norm_bwd_add", _reference, flops=rms_norm_bwd_p.flops)


def add_residual(program: Program) -> Program:
    """Norms' gradients whose only reader adds them to a tensor of the same type."""
    used = uses(program)
    maker = {id(o): n for n in program.nodes for o in n.outs}
    swapped: dict[int, Node] = {}
    dropped: set[int] = set()
    for n in program.nodes:
        if n.op is not torch.ops.aten.add.Tensor or n.kwargs or not all(isinstance(a, Value) for a in n.args):
            continue
        for mine, other in (n.args, n.args[::-1]):
            norm = maker.get(id(mine))
            if norm is None or norm.op is not rms_norm_bwd_p or mine is not norm.outs[0] or id(norm) in dropped:
                continue
            if used[id(mine)] != [n] or other.type != mine.type or other is mine or depends(other, norm, maker):
                continue
            x, w, ct = norm.args[:3]
            outs = (n.outs[0], *norm.outs[1:])
            made = Node(rms_norm_bwd_add_p, (x, w, ct, other), norm.kwargs, outs, norm.source, n.phase)
            swapped[id(n)] = made
            maker.update((id(o), made) for o in outs)
            dropped.add(id(norm))
            break
    kept = [swapped.get(id(n), n) for n in program.nodes if id(n) not in dropped]
    ordered = in_order(kept)
    assert ordered is not None
    return with_nodes(program, ordered)


def sum_cotangents(program: Program) -> Program:
    """Norms' gradients whose cotangent is a sum of two or three tensors that nothing else reads."""
    used = uses(program)
    maker = {id(o): n for n in program.nodes for o in n.outs}
    swapped: dict[int, Node] = {}
    dropped: set[int] = set()
    for n in program.nodes:
        if n.op not in (rms_norm_bwd_p, rms_norm_bwd_add_p):
            continue
        x, w, ct = n.args[:3]
        terms, sums = [ct], []
        while (add := _sum(terms, maker, used, x)) is not None:
            at = next(i for i, v in enumerate(terms) if v is add.outs[0])
            terms[at : at + 1] = add.args
            sums.append(add)
        if sums:
            args = (x, w, tuple(terms), n.args[3] if n.op is rms_norm_bwd_add_p else None)
            swapped[id(n)] = Node(rms_norm_bwd_sum_p, args, n.kwargs, n.outs, n.source, n.phase, n.tags)
            dropped |= {id(s) for s in sums}
    return with_nodes(program, [swapped.get(id(n), n) for n in program.nodes if id(n) not in dropped])


def _sum(terms: list[Value], maker: dict[int, Node], used: dict[int, list[Node | None]], x: Value) -> Node | None:
    """A sum among the terms that can be taken apart."""
    for v in terms if len(terms) < 3 else ():
        n = maker.get(id(v))
        if n is None or n.op is not torch.ops.aten.add.Tensor or n.kwargs or len(used[id(v)]) != 1:
            continue
        if all(isinstance(a, Value) and a.type == x.type for a in n.args):
            return n
    return None
