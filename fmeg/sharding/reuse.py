"""Which operations may write their result into their first operand: memory is reused, and no bit changes.

The operand must have been made here, by an operation that returns fresh memory, and this must be its last use; whatever
may share that memory with it (views, results of operations of which nothing is known) must be out of use as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fmeg.program.ir import Node, Value
from fmeg.program.memory import is_view
from fmeg.sharding.local import LocalScan

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


def lying_in(nodes: Sequence[Node], inputs: set[int]) -> dict[int, set[int]]:
    """For values by id, in which of `inputs`, by id, they may lie: views of them, and what a loop may hand through."""
    found = {i: {i} for i in inputs}
    for n in nodes:
        if is_view(n) or isinstance(n.op, LocalScan):
            where = {i for v in n.operands() for i in found.get(id(v), ())}
            found.update((id(o), where) for o in n.outs if where)
    return found
