"""Looking up by index. The dimension that is looked into may be sharded: each shard gives what it holds, and zero
elsewhere, so that the result is a pending sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmeg.program.ir import Node, Value
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import (
    Call,
    additive,
    dims_of,
    factors,
    in_shard,
    local_call,
    no_sum,
    node_rule,
    once,
    only,
    split,
)
from fmeg.sharding.rules.table import Table, no_rule

RULES = Table()

LINEAR = frozenset({0})


def _column(mask: Tensor, after: int) -> Tensor:
    """A mask with `after` dimensions of size 1 behind."""
    return mask.reshape(*mask.shape, *(1,) * after)


@RULES.register("aten.embedding")
def embedding(node: Node) -> Rule:
    """`weight[ids]`: rows v may be sharded."""
    call = Call(node)
    ids = dims_of(call.shape("indices"), "i")
    v, d = call.shape("weight")
    table = dims_of((v, d), "w")

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        if not split(info, factors(table[:1])):
            return node.op(**a)
        index, here = in_shard(info, a["indices"], "w0", v)
        return only(_column(here, 1), node.op(**(a | {"indices": index})))

    return node_rule(node, (table, ids), ((*ids, table[1]),), linear=LINEAR, local=local_call(node.op, local))


@RULES.register("aten.embedding_dense_backward")
def embedding_backward(node: Node) -> Rule:
    """Each row of the gradient added to its row of the table: pending over the axes of the ids."""
    call = Call(node)
    ids = dims_of(call.shape("indices"), "i")
    table = dims_of(node.outs[0].shape, "w")
    v = node.outs[0].shape[0]

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        if not split(info, factors(table[:1])):
            return node.op(**a)
        n = info.size("w0")
        index, here = in_shard(info, a["indices"], "w0", v)
        index = torch.where(here & (a["indices"] != a["padding_idx"]), index, n)
        return node.op(**(a | {"indices": index, "num_weights": n + 1, "padding_idx": -1})).narrow(0, 0, n)

    whole = factors(ids) if call["scale_grad_by_freq"] else frozenset()
    ins = call.ins(grad_output=(*ids, table[1]), indices=ids)
    return node_rule(node, ins, (table,), whole=whole, linear=LINEAR, local=local_call(node.op, local))


def _matched(shape: tuple[int, ...], index: tuple[int, ...], dim: int) -> tuple[Dims, Dims, frozenset[str]]:
    """Dims of a tensor "… k …" and of an index "… i …" of the same rank: shared where sizes agree, whole where not."""
    x, i = list(dims_of(shape)), list(dims_of(index))
    whole: set[str] = set()
    for d, (n, m) in enumerate(zip(shape, index, strict=True)):
        if d == dim or n != m:
            x[d], i[d] = (() if n == 1 else (f"k{d}",)), (() if m == 1 else (f"i{d}",))
            if d != dim:
                whole |= {*x[d], *i[d]}
    return tuple(x), tuple(i), frozenset(whole)


@RULES.register("aten.gather")
def gather(node: Node) -> Rule:
    """`x[…, index[…], …]` along a dimension."""
    call = Call(node)
    shape = call.shape("self")
    if not shape:
        return node_rule(node, ((), dims_of(call.shape("index"), "i")), (dims_of(node.outs[0].shape, "i"),))
    dim = call["dim"] % len(shape)
    x, i, whole = _matched(shape, call.shape("index"), dim)

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        if not split(info, x[dim]):
            return node.op(**a)
        index, here = in_shard(info, a["index"], x[dim][0], shape[dim])
        return only(here, node.op(**(a | {"index": index})))

    whole |= no_sum(call["self"], x[dim])
    return node_rule(node, (x, i), (i,), whole=whole, linear=LINEAR, local=local_call(node.op, local))


@RULES.register("aten.index_select")
def index_select(node: Node) -> Rule:
    """Some slices of a dimension."""
    call = Call(node)
    shape = call.shape("self")
    dim = call["dim"] % max(len(shape), 1)
    dims, index = dims_of(shape), dims_of(call.shape("index"), "i")
    out = dims[:dim] + index + dims[dim + 1 :] if shape else ()

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        if not split(info, factors(dims[dim : dim + 1])):
            return node.op(**a)
        at, here = in_shard(info, a["index"], dims[dim][0], shape[dim])
        return only(_column(here, len(shape) - dim - 1), node.op(**(a | {"index": at})))

    whole = no_sum(call["self"], *dims[dim : dim + 1])
    return node_rule(node, (dims, index), (out,), whole=whole, linear=LINEAR, local=local_call(node.op, local))


def _drop(
    info: Local, a: dict[str, Any], dim: int, factor: str, size: int, run: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Write into a shard: what belongs to another one goes to a row added behind, which is cut off again."""
    x = a["self"]
    n = info.size(factor)
    index, here = in_shard(info, a["index"], factor, size)
    return run(torch.cat([x, x.narrow(dim, 0, 1)], dim), torch.where(here, index, n)).narrow(dim, 0, n)


@RULES.register("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def scatter(node: Node) -> Rule:
    """`x` with `src` written, or added, at `index` along a dimension; that of the index may be sharded when adding."""
    call = Call(node)
    shape, index = call.shape("self"), call.shape("index")
    adds = str(node.op).startswith("aten.scatter_add")
    if not shape:
        dims = {"self": (), "index": dims_of(index, "i"), "src": dims_of(index, "i")}
        return node_rule(node, call.ins(**dims), ((),), whole=factors(dims["index"]))
    dim = call["dim"] % len(shape)
    x, i, whole = _matched(shape, index, dim)
    src = i
    if isinstance(call["src"], Value) and call.shape("src") != index:
        src, matched, more = _matched(call.shape("src"), index, -1)
        src = tuple((f"s{d}",) if s and s != i[d] else s for d, s in enumerate(src))
        whole |= more | factors(src) | factors(i)
    if not adds:
        whole |= factors((i[dim],))
    plain = adds or (str(node.op).startswith("aten.scatter.") and "reduce" not in call.given)

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        a = a | {"self": once(info, a["self"], i[dim])} if adds else a
        if not split(info, x[dim]):
            return node.op(**a)
        return _drop(info, a, dim, x[dim][0], shape[dim], lambda y, at: node.op(**(a | {"self": y, "index": at})))

    linear = additive(call, "self", "src" if "src" in call.given else "value") if plain else {}
    return node_rule(
        node, call.ins(self=x, index=i, src=src), (x,), whole=whole, local=local_call(node.op, local), **linear
    )


@RULES.register("aten.index_add", "aten.index_copy")
def index_add(node: Node) -> Rule:
    """`x` with slices added, or written, at `index` of a dimension; the index may be sharded when adding."""
    call = Call(node)
    shape = call.shape("self")
    if not shape or not call.shape("index"):
        raise no_rule(node)
    dim = call["dim"] % len(shape)
    adds = str(node.op).startswith("aten.index_add")
    x, index = dims_of(shape), dims_of(call.shape("index"), "i")
    source = x[:dim] + index + x[dim + 1 :]

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        a = a | {"self": once(info, a["self"], factors(index))} if adds else a
        if not split(info, x[dim]):
            return node.op(**a)
        return _drop(info, a, dim, x[dim][0], shape[dim], lambda y, at: node.op(**(a | {"self": y, "index": at})))

    whole = frozenset() if adds else factors(index)
    ins = call.ins(self=x, index=index, source=source)
    return node_rule(node, ins, (x,), whole=whole, local=local_call(node.op, local), **additive(call, "self", "source"))


def _advanced(node: Node, call: Call) -> tuple[Dims, list[Dims], Dims, list[int], int]:
    """Dims of x, of each index, of `x[indices]`; the dimensions looked into; how many follow theirs in the result."""
    shape = call.shape("self")
    indices = call["indices"]
    tensors = [v for v in indices if v is not None]
    if any(v.dtype in (torch.bool, torch.uint8) for v in tensors):
        raise no_rule(node)
    at = [d for d, v in enumerate(indices) if v is not None]
    together = torch.broadcast_shapes(*(v.shape for v in tensors))
    names = dims_of(together, "i")
    index = [
        tuple(d if n != 1 else () for d, n in zip(names[len(names) - v.ndim :], v.shape, strict=True)) for v in tensors
    ]
    x = tuple(() if n == 1 else (f"k{d}" if d in at else f"d{d}",) for d, n in enumerate(shape))
    rest = [d for d in range(len(shape)) if d not in at]
    adjacent = at == list(range(at[0], at[0] + len(at)))
    before = [d for d in rest if adjacent and d < at[0]]
    after = [d for d in rest if d not in before]
    out = (*(x[d] for d in before), *names, *(x[d] for d in after))
    return x, index, out, at, len(after)


def _local_indices(
    info: Local, a: dict[str, Any], x: Dims, at: list[int], shape: tuple[int, ...]
) -> tuple[list[Any], Tensor | None]:
    """The indices as local ones, and where all of them are local (None: everywhere)."""
    indices, mask = list(a["indices"]), None
    for d in at:
        if split(info, x[d]):
            indices[d], here = in_shard(info, indices[d], x[d][0], shape[d])
            mask = here if mask is None else mask & here
    return indices, mask


@RULES.register("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(node: Node) -> Rule:
    """`x[i, j, :, …]` with integer tensors."""
    call = Call(node)
    x, ids, out, at, after = _advanced(node, call)
    shape = call.shape("self")

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        indices, mask = _local_indices(info, a, x, at, shape)
        got = torch.ops.aten._unsafe_index(a["self"], indices)  # integers: the shape does not depend on data
        return got if mask is None else only(_column(mask, after), got)

    whole = no_sum(call["self"], *(x[d] for d in at))
    return node_rule(node, (x, *ids), (out,), whole=whole, linear=LINEAR, local=local_call(node.op, local))


@RULES.register("aten.index_put.default", "aten._unsafe_index_put.default")
def index_put(node: Node) -> Rule:
    """`x[i, j, :, …] = values`, or `+=`: when adding, indices and the dimensions looked into may be sharded."""
    call = Call(node)
    x, ids, got, at, after = _advanced(node, call)
    shape = call.shape("self")
    n = len(call.shape("values"))
    values = tuple(() if size == 1 else d for d, size in zip(got[len(got) - n :], call.shape("values"), strict=True))
    over = sorted(factors(*ids))
    looked = factors(tuple(x[d] for d in at))

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        indices, mask = _local_indices(info, a, x, at, shape)
        if a["accumulate"]:
            a = a | {"self": once(info, a["self"], over)}
        if mask is not None:
            a = a | {"values": only(_column(mask, after), a["values"])}
        return node.op(**(a | {"indices": indices}))

    whole = frozenset() if call["accumulate"] else looked | frozenset(over)
    ins = call.ins(self=x, indices=ids, values=values)
    return node_rule(node, ins, (x,), whole=whole, local=local_call(node.op, local), **additive(call, "self", "values"))


@RULES.register("aten.topk", "aten.sort")
def ordered(node: Node) -> Rule:
    """Largest elements, or all in order, along a dimension, which is whole."""
    call = Call(node)
    shape = call.shape("self")
    dims = dims_of(shape)
    if not shape:
        return node_rule(node, ((),), ((),) * len(node.outs))
    dim = call["dim"] % len(shape)
    n = node.outs[0].shape[dim]
    out = dims if n == shape[dim] else (*dims[:dim], () if n == 1 else ("top",), *dims[dim + 1 :])
    return node_rule(node, (dims,), (out,) * len(node.outs), whole=factors((dims[dim], out[dim])))


@RULES.register("aten.bucketize.Tensor", "aten.isin.Tensor_Tensor")
def against_table(node: Node) -> Rule:
    """Each element looked up in a table, which is whole."""
    x, table = node.operands()
    dims, t = dims_of(x.shape), dims_of(table.shape, "t")
    return node_rule(node, (dims, t), (dims,), whole=factors(t))
