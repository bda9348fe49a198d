"""Which operations may write their result into their first operand: memory is reused, and no bit changes.

The operand must have been made here, by an operation that returns fresh memory, and this must be its last use; whatever
may share that memory with it (views, results of operations of which nothing is known) must be out of use as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fmeg.ops.collectives import PPERMUTE, Collective
from fmeg.program.ir import Node, Value, values_in
from fmeg.program.memory import is_view
from fmeg.sharding.local import LocalScan, LocalScanBackward

aten = torch.ops.aten

IN_PLACE = {
    aten.abs.default: Tensor.abs_,
    aten.add.Tensor: Tensor.add_,
    aten.div.Tensor: Tensor.div_,
    aten.exp.default: Tensor.exp_,
    aten.log.default: Tensor.log_,
    aten.masked_fill.Scalar: Tensor.masked_fill_,
    aten.mul.Tensor: Tensor.mul_,
    aten.neg.default: Tensor.neg_,
    aten.pow.Tensor_Scalar: Tensor.pow_,
    aten.reciprocal.default: Tensor.reciprocal_,
    aten.rsqrt.default: Tensor.rsqrt_,
    aten.sigmoid.default: Tensor.sigmoid_,
    aten.sqrt.default: Tensor.sqrt_,
    aten.sub.Tensor: Tensor.sub_,
    aten.tanh.default: Tensor.tanh_,
}


_FRESH = {
    aten._to_copy.default,
    aten.addmm.default,
    aten.amax.default,
    aten.amin.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.cat.default,
    aten.clone.default,
    aten.index_select.default,
    aten.logsumexp.default,
    aten.mean.default,
    aten.mean.dim,
    aten.mm.default,
    aten.stack.default,
    aten.sum.default,
    aten.sum.dim_IntList,
}


def is_fresh(node: Node) -> bool:
    """Whether the results are known to share memory with nothing."""
    op = node.op
    if not isinstance(op, torch._ops.OpOverload) or any(r.alias_info is not None for r in op._schema.returns):
        return False
    return op in _FRESH or torch.Tag.pointwise in op.tags


def writers(nodes: Sequence[Node], needed: set[int]) -> set[int]:
    """ids of the nodes that may write into their first operand. `needed`: ids of the values that outlive the nodes."""
    last = {id(v): i for i, n in enumerate(nodes) for v in (*n.operands(), *n.outs)}
    family: dict[int, list[Value]] = {}  # of a value made here: all that may share its memory
    ours: dict[int, bool] = {}
    found = set()
    for i, n in enumerate(nodes):
        operands = n.operands()
        if n.op in IN_PLACE and isinstance(n.args[0], Value) and n.outs[0].type == n.args[0].type:
            target = n.args[0]
            alone = all(id(v) not in needed and last[id(v)] <= i for v in family.get(id(target), ()))
            once = sum(any(v is u for u in family.get(id(target), ())) for v in operands) == 1
            if ours.get(id(target), False) and alone and once:
                found.add(id(n))
        if is_fresh(n):
            for o in n.outs:
                family[id(o)], ours[id(o)] = [o], True
        else:
            shared = list(n.outs)
            for v in operands:
                shared += [u for u in family.get(id(v), [v]) if all(u is not w for w in shared)]
            family.update((id(v), shared) for v in shared)
            ours.update((id(o), False) for o in n.outs)
    return found


def lying_in(
    nodes: Sequence[Node], inputs: set[int], alone: Callable[[Sequence[str]], bool] = lambda axes: False
) -> dict[int, set[int]]:
    """For values by id, in which of `inputs`, by id, they may lie: views of them, and what a loop or a collective may
    hand through.

    alone   whether mesh axes are one rank, so that collectives along them do nothing
    What this does not find must lie in memory of its own (see `apart`).
    """
    found = {i: {i} for i in inputs}
    for n in nodes:
        where = {i for v in _handed_on(n, alone) for i in found.get(id(v), ())}
        found.update((id(o), where) for o in n.outs if where)
    return found


def _handed_on(n: Node, alone: Callable[[Sequence[str]], bool]) -> list[Value]:
    """The operands in whose memory results may lie."""
    if isinstance(n.op, LocalScanBackward):
        return list(values_in(n.args[:2]))  # cotangents that every step hands on as they are
    if isinstance(n.op, Collective):
        return n.operands() if n.op is PPERMUTE or alone(n.args[1]) else []
    return n.operands() if is_view(n) or isinstance(n.op, LocalScan) else []


def apart(x: Any, given: Sequence[Any]) -> Any:
    """x, or a copy of it if it lies in the memory of a given tensor."""
    if not isinstance(x, Tensor):
        return x
    here = x.untyped_storage()._cdata
    shared = any(isinstance(v, Tensor) and v.untyped_storage()._cdata == here for v in given)
    return x.clone() if shared else x
