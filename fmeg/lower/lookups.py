"""Rows of a table that is sharded along its width: tokens travel, the table does not.

A table "v d" with d over mesh axes is gathered to look up a rank's rows, and its gradient, as large, is reduced. Where
all ranks have fewer rows to look up than the table has, each rank rather looks up everyone's in its part of the width:

    embedding(all_gather(table), ids)                 ->  all_to_all(embedding(table, all_gather(ids)))
    reduce_scatter(embedding_bwd(ct, ids))            ->  embedding_bwd(all_to_all(ct), all_gather(ids))
"""

from __future__ import annotations

import torch

from fmeg.lower.rewrite import uses, with_nodes
from fmeg.ops.collectives import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from fmeg.ops.embedding import embedding_bwd_p, embedding_p
from fmeg.program.ir import Node, Program, TensorType, Value

_to_copy = torch.ops.aten._to_copy.default


def exchange_lookups(program: Program) -> Program:
    """Both rewrites, where they move less and nothing else reads what was moved."""
    used = uses(program)
    maker = {id(o): n for n in program.nodes for o in n.outs}
    new: dict[int, list[Node]] = {}
    gone: set[int] = set()
    for n in program.nodes:
        if n.op is embedding_p:
            gather = maker.get(id(n.args[0]))
            if gather is not None and used[id(n.args[0])] == [n] and _along(gather, ALL_GATHER, 1) and n.args[1].shape:
                table, ids, axes = gather.args[0][0], n.args[1], gather.args[1]
                parts = n.args[0].shape[1] // table.shape[1]
                if parts * ids.type.numel < table.shape[0]:
                    every = _gathered(ids, axes, parts, n)
                    found = _node(embedding_p, (table, every.outs[0]), (*every.outs[0].shape, table.shape[1]), n)
                    back = _node(ALL_TO_ALL, (list(found.outs), axes, (0,), (ids.ndim,)), n.outs[0].shape, n)
                    back.outs = n.outs
                    new[id(n)] = [every, found, back]
                    gone.add(id(gather))
        elif n.op is REDUCE_SCATTER and _along(n, REDUCE_SCATTER, 1):
            chain = _from_lookup(n, maker, used)
            if chain is not None:
                lookup, cast = chain
                ct, ids, rows = lookup.args
                axes, width = n.args[1], n.outs[0].shape[1]
                parts = ct.shape[-1] // width
                if parts * ids.type.numel < rows and ids.shape and ids.shape[0] > 0:
                    every = _gathered(ids, axes, parts, lookup)
                    shape = (parts * ct.shape[0], *ct.shape[1:-1], width)
                    sent = _node(ALL_TO_ALL, ([ct], axes, (ct.ndim - 1,), (0,)), shape, lookup, ct.dtype)
                    summing = (sent.outs[0], every.outs[0], rows)
                    summed = _node(embedding_bwd_p, summing, (rows, width), lookup, ct.dtype)
                    last = [summed]
                    if cast is not None:
                        last.append(_node(_to_copy, (summed.outs[0],), (rows, width), cast, cast.outs[0].dtype))
                        last[-1].kwargs = cast.kwargs
                    last[-1].outs = n.outs
                    new[id(n)] = [every, sent, *last]
                    gone |= {id(lookup)} | ({id(cast)} if cast is not None else set())
    return with_nodes(program, [m for n in program.nodes if id(n) not in gone for m in new.get(id(n), [n])])


def _along(node: Node, op: object, dim: int) -> bool:
    return node.op is op and len(node.outs) == 1 and node.args[2] == (dim,)


def _from_lookup(
    n: Node, maker: dict[int, Node], used: dict[int, list[Node | None]]
) -> tuple[Node, Node | None] | None:
    """The gradient of a lookup that is reduced, and the cast between, if there is one."""
    made = maker.get(id(n.args[0][0]))
    if made is None or used[id(n.args[0][0])] != [n]:
        return None
    if made.op is embedding_bwd_p:
        return made, None
    if made.op is _to_copy and set(made.kwargs) == {"dtype"}:
        lookup = maker.get(id(made.args[0]))
        if lookup is not None and lookup.op is embedding_bwd_p and used[id(made.args[0])] == [made]:
            return lookup, made
    return None


def _gathered(ids: Value, axes: tuple[str, ...], parts: int, like: Node) -> Node:
    return _node(ALL_GATHER, ([ids], axes, (0,)), (parts * ids.shape[0], *ids.shape[1:]), like, ids.dtype)


def _node(op: object, args: tuple, shape: tuple[int, ...], like: Node, dtype: torch.dtype | None = None) -> Node:
    node = Node(op, args, {}, source=like.source, phase=like.phase)
    node.outs = (Value(TensorType(tuple(shape), dtype or like.outs[0].dtype), node),)
    return node
