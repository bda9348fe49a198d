"""What may act on values whose first dimension has a size that only the run knows (rows sorted by expert).

Their types say an even share. So no operation may have that size written in it, and nothing may move along that
dimension but what fmeg.sharding.experts moves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule
from fmeg.sharding.value import Placed, Placement

aten = torch.ops.aten
_SIZELESS = {aten.mm.default, aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten._to_copy.default}
_LEAVES = ("border", "output", "scanned layers must be whole", "microbatches must be whole", "shard_map")


def check_move(p: Placed, target: Placement, reason: str, source: str) -> None:
    """Raise ShardingError where rows would leave their place, or the body that they were made in."""
    if target.dims[0] != p.home.dims[0] or reason in _LEAVES:
        raise ShardingError(
            f"{source or 'an operation'}: rows sorted by expert {p.home.describe(p.type)} would have to move "
            f"({reason}). How many a rank has depends on the routing, so rows stay with their experts until "
            "ops.combine: call it in the same body, and let no shard and no operation ask for another placement"
        )


def rows_of(node: Node, rule: Rule, operands: Sequence[Placed]) -> tuple[object, str]:
    """What made the rows that a node acts on, and the factor of their first dimension; (None, "") where there are none.

    Raises ShardingError where the operation has the number of rows written in it, or mixes rows of two routings.
    """
    made = {id(p.ragged): p.ragged for p in operands if p.ragged is not None}
    if not made:
        return None, ""
    first = {rule.ins[i][:1] for i, p in enumerate(operands) if p.ragged is not None}
    factor = next(iter(first))[0]
    others = [d for i, p in enumerate(operands) if p.ragged is None for d in rule.ins[i]]
    elsewhere = [d for i, p in enumerate(operands) if p.ragged is not None for d in rule.ins[i][1:]]
    moved = [d for dims in rule.outs for d in dims[1:]]
    fine = isinstance(node.op, Primitive) or (
        isinstance(node.op, torch._ops.OpOverload) and (torch.Tag.pointwise in node.op.tags or node.op in _SIZELESS)
    )
    alone = len(first) == 1 and len(factor) == 1 and not any(factor[0] in d for d in (*others, *elsewhere, *moved))
    if len(made) > 1 or not fine or not alone or factor[0] in rule.whole:
        raise ShardingError(
            f"{node.opname} at {node.source} acts on rows sorted by expert, of which there are as many as the routing "
            "says. Between ops.dispatch and ops.combine there may be elementwise operations, sums, products and fmeg's "
            "own operations, on rows of one routing; no views, slices or tensors of the rows' size"
        )
    return next(iter(made.values())), factor[0]
