"""The place of each row among all rows of its expert, in the order of tokens, wherever they lie on the mesh."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fmeg.ops.dispatch import dispatch_p
from fmeg.ops.routing import sort_slots
from fmeg.program.ir import Node, TensorType, Value
from fmeg.program.primitive import Primitive
from fmeg.sharding.experts.travel import dispatch
from fmeg.sharding.experts.wire import Wire, flat, record
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.value import Placement, count


def slot_places(indices: Tensor, keep: Tensor | None, experts: int) -> tuple[Tensor, Tensor]:
    """(the place of each slot among those of its expert, as float64 "*tokens k 1"; how many slots each expert has).

    >>> places, counts = slot_places(torch.tensor([[1, 0], [1, 2], [0, 1]]), None, 3)
    >>> places.flatten().tolist(), counts.tolist()
    ([0.0, 0.0, 1.0, 0.0, 1.0, 2.0], [2, 3, 1])
    """
    ids = indices.reshape(-1)
    if keep is not None:
        ids = torch.where(keep.reshape(-1), ids, experts)
    _, inverse, counts = sort_slots(ids, experts)
    first = torch.cat([counts.cumsum(0) - counts, counts.sum().reshape(1)])
    return (inverse - first.index_select(0, ids)).double().view(*indices.shape, 1), counts


slot_places_p = Primitive("slot_places", slot_places, flops=lambda n: 0, keep=True)


def in_order(wire: Wire, sizes: Mapping[str, int]) -> bool:
    """Whether each expert's rows lie on one rank, in the order of their tokens: then the rank knows their places."""
    if set(wire.rows) != set(wire.experts) or flat(wire.tokens) != wire.exchanged:
        return False
    last = max((d for d, axes in enumerate(wire.tokens) if axes), default=0)
    tokens = wire.node.args[0].shape
    return all(count(wire.tokens[d], sizes) == tokens[d] for d in range(last))


def places_of(part: Partitioner, wire: Wire) -> dict[str, Value]:
    """Local `places` and `counts` of `fmeg.precision.ragged`: every rank sorts all tokens' choices by expert, and
    places travel as rows do."""
    if "places" not in wire.locals_:
        indices, keep = wire.node.args
        experts = wire.node.kwargs["experts"]
        whole = [
            None if v is None else part.get(part.placed(v), Placement(((),) * v.ndim), "rule") for v in (indices, keep)
        ]
        got = record(part, lambda i, k: dict(zip("pc", slot_places_p(i, k, experts), strict=True)), tuple(whole), {})
        places = Value(TensorType((*indices.shape, 1), torch.float64))
        part.define(places, Placement(((),) * places.ndim), got["p"])
        counts = Value(TensorType((experts,), torch.int64))
        p = part.define(counts, Placement(((),)), got["c"])
        rows = -(-indices.type.numel // experts) * experts
        node = Node(dispatch_p, (places, *wire.node.outs), {"k": 1, "rows": rows}, source=wire.node.source)
        node.outs = (Value(TensorType((rows, 1), torch.float64), node),)
        dispatch(part, node)
        (made,) = part.placed(node.outs[0]).copies.values()
        integers = record(part, lambda x: {"places": torch.nan_to_num(x).long().squeeze(1)}, (made,), {})
        wire.locals_ |= integers | {"counts": part.get(p, Placement((wire.experts,)), "slice")}
        wire.kept += [places, counts, node]
    return wire.names("places", "counts")
