"""Tokens to their experts and back: `dispatch` makes rows, `combine` adds them up again.

Between the two there are rows sorted by expert, on which elementwise operations, library primitives and
`fmeg.ops.grouped_matmul` act. On a mesh that shards experts, how many rows a rank has is known only as the program
runs; see fmeg.sharding.experts.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg.ops._common import check_float, check_shape
from fmeg.ops._eager import Eager
from fmeg.ops.pack import pack, unpack, weigh, weigh_bwd
from fmeg.ops.routing import Routed, Routing, route, routing_args
from fmeg.program.ir import Node


def _dispatch(x: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, k: int, rows: int) -> Tensor:
    return pack(x, order, ends[-1], k, rows)


def _dispatch_vjp(args: tuple, kwargs: dict, outs: Any, cts: tuple) -> tuple[Tensor | None, ...]:
    x, *routing = args
    return collect_p(cts[0], *routing, tokens=tuple(x.shape[:-1]), k=kwargs["k"]), None, None, None


def _collect(rows: Tensor, order: Tensor, inverse: Tensor, ends: Tensor, tokens: tuple[int, ...], k: int) -> Tensor:
    return unpack(rows, inverse, ends[-1], k).unflatten(0, tokens)


def _collect_vjp(args: tuple, kwargs: dict, outs: Any, cts: tuple) -> tuple[Tensor | None, ...]:
    rows, *routing = args
    return dispatch_p(cts[0], *routing, k=kwargs["k"], rows=rows.shape[0]), None, None, None


def _combine(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    out = weigh(rows, inverse, ends[-1], weights.flatten(0, -2))
    return out.unflatten(0, weights.shape[:-1]), rows.view_as(rows)


def _combine_fake(rows: Tensor, weights: Tensor, *routing: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(*weights.shape[:-1], rows.shape[1]), torch.empty_like(rows)


def _combine_vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor | None, ...]:
    _, weights, *routing = args
    return *combine_bwd_p(cts[0], weights, outs[1], *routing), None, None, None


def _combine_bwd(
    ct: Tensor, weights: Tensor, back: Tensor, order: Tensor, inverse: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    flat = weights.flatten(0, -2)
    drows, dweights = weigh_bwd(ct.flatten(0, -2), back, order, inverse, ends[-1], flat, back.shape[0])
    return drows, dweights.view(weights.shape)


def _numel(node: Node) -> int:
    return node.operands()[0].type.numel


dispatch_p = Routed("dispatch", Eager(_dispatch, _dispatch_vjp), vjp=_dispatch_vjp, flops=lambda n: 0)
collect_p = Routed("collect", Eager(_collect, _collect_vjp), vjp=_collect_vjp, flops=_numel)
combine_p = Routed(
    "combine",
    Eager(_combine, _combine_vjp, saves=(1,)),
    vjp=_combine_vjp,
    flops=lambda n: 2 * _numel(n),
    fake=_combine_fake,
)
combine_bwd_p = Routed("combine_bwd", _combine_bwd, flops=lambda n: 3 * n.outs[0].type.numel)


def dispatch(
    x: Float[Tensor, "*tokens d"],
    indices: Int[Tensor, "*tokens k"],
    *,
    experts: int,
    keep: Bool[Tensor, "*tokens k"] | None = None,
    axes: tuple[str, str] = ("experts", "expert_ff"),
) -> tuple[Float[Tensor, "rows d"], Routing]:
    """Each token's row, once for each of its k experts, sorted by expert: (rows, routing).

        rows[i] = x[order[i] // k]        slots (token, j) in their order within an expert

    No slot is lost but those that `keep` drops. There are as many rows as slots, rounded up to a multiple of `experts`;
    rows that no slot needs are 0. See `route` for the other arguments, `combine` for the way back.

    On a mesh, `Layout(experts=…)` alone makes this expert parallel, over any mesh axes, those that shard tokens
    included; `Layout(dispatch="all_to_all")` sends a token once to each rank that has some of its experts, "all_gather"
    to every rank.

    >>> rows, routing = dispatch(torch.tensor([[1.0], [2.0]]), torch.tensor([[1], [0]]), experts=2)
    >>> rows.flatten().tolist(), routing.ends.tolist()
    ([2.0, 1.0], [1, 2])
    """
    check_float("dispatch", x=x)
    check_shape("dispatch", "indices", indices, (*x.shape[:-1], *indices.shape[-1:]), "the tokens of x, then k")
    routing = route(indices, experts, keep, axes)
    return dispatch_p(x, *routing_args(routing), k=routing.k, rows=routing.rows), routing


def dispatch_weights(weights: Float[Tensor, "*tokens k"], routing: Routing) -> Float[Tensor, "rows 1"]:
    """The weight of each row, to be applied between dispatch and combine (`scale_rows`); rows without a slot have 0.

    >>> routing = route(torch.tensor([[1], [0]]), experts=2)
    >>> dispatch_weights(torch.tensor([[0.5], [0.25]]), routing).flatten().tolist()
    [0.25, 0.5]
    """
    check_float("dispatch_weights", weights=weights)
    check_shape("dispatch_weights", "weights", weights, (*routing.tokens, routing.k), "tokens and k of the routing")
    return dispatch_p(weights.unsqueeze(-1), *routing_args(routing), k=1, rows=routing.rows)


def combine(
    rows: Float[Tensor, "rows d"], routing: Routing, weights: Float[Tensor, "*tokens k"] | None = None
) -> Float[Tensor, "*tokens d"]:
    """Add up each token's rows: out[t] = Σ_j weights[t, j] rows[row of slot (t, j)].

    Sums are in float32 (float64 for float64), slots in their order; the result has the rows' dtype. On a mesh, ranks
    add up what is theirs, then their sums, in that dtype, are added in the order of ranks. Without `weights`
    they are 1: give them here, or to the rows before the last product (`dispatch_weights`, `scale_rows`), which keeps
    less memory for the backward pass.

    >>> rows, routing = dispatch(torch.tensor([[1.0], [2.0]]), torch.tensor([[1, 0], [0, 1]]), experts=2)
    >>> combine(rows, routing, torch.tensor([[0.5, 0.5], [1.0, 0.25]])).flatten().tolist()
    [1.0, 2.5]
    """
    check_float("combine", rows=rows, weights=weights)
    check_shape("combine", "rows", rows, (routing.rows, *rows.shape[1:]), "rows of the routing, d")
    if weights is None:
        return collect_p(rows, *routing_args(routing), tokens=routing.tokens, k=routing.k)
    check_shape("combine", "weights", weights, (*routing.tokens, routing.k), "tokens and k of the routing")
    return combine_p(rows, weights, *routing_args(routing))[0]
