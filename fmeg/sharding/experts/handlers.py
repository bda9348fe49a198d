"""Which handler a node on a routing has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fmeg.program.ir import Node
from fmeg.sharding.experts import scaled
from fmeg.sharding.experts.products import bias, matmul, matmul_dw, sums
from fmeg.sharding.experts.route import route
from fmeg.sharding.experts.travel import collect, combine, combine_bwd, dispatch
from fmeg.sharding.experts.wire import Opaque
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.spec import resolve


def partition_routed(part: Partitioner, node: Node) -> None:
    """Partition a node whose op is a `Routed` primitive."""
    if _spread(part, node):
        part.tags = {**part.tags, "opaque": True}
    if not part.ctx.sizes:
        part._whole(node)
    else:
        _HANDLERS[node.op.name](part, node)


def _spread(part: Partitioner, node: Node) -> bool:
    """Whether a mesh axis shards the experts; else every shape is known before the program runs."""
    if node.op.name == "route":
        return bool(resolve(node.kwargs["axes"][:1], part.ctx.table, part.ctx.sizes)[0])
    routings: list[Any] = [part.env[id(v)] for v in node.operands()]
    return any(p.wire.experts for p in routings if isinstance(p, Opaque))


_HANDLERS: dict[str, Callable[[Partitioner, Node], None]] = {
    "route": route,
    "dispatch": dispatch,
    "collect": collect,
    "combine": combine,
    "combine_bwd": combine_bwd,
    "grouped_matmul": matmul,
    "grouped_matmul_dw": matmul_dw,
    "grouped_bias": bias,
    "expert_sums": sums,
    "rows_amax": scaled.amax,
    "rows_quantize": scaled.quantize,
    "scaled_grouped": scaled.matmul,
    "scaled_grouped_dw": scaled.matmul_dw,
}
