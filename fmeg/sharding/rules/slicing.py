"""Parts of a dimension, and dimensions put together: slice, select, split, cat, stack, pad and their gradients.

The dimension that is cut or joined is whole, but for one element of it: that is held by one shard, and is zero, a
pending sum, on the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import (
    Call,
    additive,
    changed,
    dims_of,
    factors,
    local_call,
    local_shape,
    no_sum,
    node_rule,
    only,
)
from fmeg.sharding.rules.table import Table

RULES = Table()

LINEAR = frozenset({0})


def replaced(dims: Dims, i: int, new: tuple[str, ...]) -> Dims:
    """Dims with dimension `i` named otherwise."""
    return (*dims[:i], new, *dims[i + 1 :])


def own(dims: Dims, i: int, name: str, size: int) -> Dims:
    """Dims with a factor of its own on dimension `i`."""
    return replaced(dims, i, () if size == 1 else (name,))


def bounds(call: Call, n: int) -> tuple[int, int]:
    """First index and number of elements of a slice of a dimension of size `n`."""
    start, stop, step = slice(call["start"], call["end"]).indices(n)[:2] + (call["step"] or 1,)
    return start, len(range(start, stop, step))


def pick(info: Local, x: Tensor, dim: int, index: int, keep: bool) -> Tensor:
    """Element `index` (global) of a sharded dimension: on the shard that holds it, zero on the others."""
    at = index - info.offset(f"d{dim}")
    size = info.size(f"d{dim}")
    here = (at >= 0) & (at < size)
    out = only(here, x.index_select(dim, torch.where(here, at, 0).reshape(1)))
    return out if keep else out.squeeze(dim)


def put(info: Local, x: Tensor, dim: int, index: int) -> Tensor:
    """The transpose of `pick`: `x`, with size 1 at `dim`, as element `index` of a sharded dimension of zeros."""
    size = info.size(f"d{dim}")
    hit = torch.arange(size, device=x.device) == index - info.offset(f"d{dim}")
    return only(hit.reshape(-1, *(1,) * (x.ndim - dim - 1)), x)


def _one(node: Node, dim: int, index: int, keep: bool) -> Rule:
    x = node.operands()[0]
    dims = dims_of(x.shape)
    out = replaced(dims, dim, ()) if keep else dims[:dim] + dims[dim + 1 :]
    held = factors((dims[dim],))

    def local(info: Local, *args: Any, **kwargs: Any) -> Tensor:
        if any(info.parts(f) > 1 for f in held):
            return pick(info, args[0], dim, index, keep)
        return node.op(*args, **kwargs)

    return node_rule(node, (dims,), (out,), whole=no_sum(x, dims[dim]), linear=LINEAR, local=local)


@RULES.register("aten.select.int")
def select(node: Node) -> Rule:
    """`x[…, i, …]`."""
    call = Call(node)
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    return _one(node, dim, call["index"] % shape[dim], keep=False)


@RULES.register("aten.slice.Tensor")
def slices(node: Node) -> Rule:
    """`x[…, i:j, …]`: the dimension is whole, unless the slice is all of it or one element."""
    call = Call(node)
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    n = shape[dim]
    start, count = bounds(call, n)
    dims = dims_of(shape)
    if count == n:
        return node_rule(node, (dims,), (dims,), linear=LINEAR, local=lambda info, x, *args, **kwargs: x)
    if count == 1:
        return _one(node, dim, start, keep=True)
    return node_rule(
        node, (dims,), (own(dims, dim, "cut", count),), whole=factors((dims[dim],)) | {"cut"}, linear=LINEAR
    )


def _spread(node: Node, dim: int, index: int, keep: bool) -> Rule:
    """The gradient of `_one`: any dimension may be sharded."""
    out = dims_of(node.outs[0].shape)
    grad = replaced(out, dim, ()) if keep else out[:dim] + out[dim + 1 :]
    sizes = "input_sizes"

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        if any(info.parts(f) > 1 for f in out[dim]):
            g = a["grad_output"]
            return put(info, g if keep else g.unsqueeze(dim), dim, index)
        return node.op(**(a | {sizes: local_shape(info, out)}))

    return node_rule(node, (grad,), (out,), linear=LINEAR, local=local_call(node.op, local))


@RULES.register("aten.select_backward")
def select_backward(node: Node) -> Rule:
    """Zeros, with the gradient at one index of a dimension."""
    call = Call(node)
    shape = call["input_sizes"]
    dim = call["dim"] % len(shape)
    return _spread(node, dim, call["index"] % shape[dim], keep=False)


@RULES.register("aten.slice_backward")
def slice_backward(node: Node) -> Rule:
    """Zeros, with the gradient in a slice of a dimension."""
    call = Call(node)
    shape = call["input_sizes"]
    dim = call["dim"] % len(shape)
    start, count = bounds(call, shape[dim])
    if count == 1:
        return _spread(node, dim, start, keep=True)
    out = dims_of(node.outs[0].shape)
    grad = out if count == shape[dim] else own(out, dim, "cut", count)
    whole = frozenset() if grad == out else factors((out[dim],)) | {"cut"}

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        return a["grad_output"] if grad == out else node.op(**(a | {"input_sizes": local_shape(info, out)}))

    return node_rule(node, (grad,), (out,), whole=whole, linear=LINEAR, local=local_call(node.op, local))


@RULES.register("aten.slice_scatter")
def slice_scatter(node: Node) -> Rule:
    """`x` with a slice replaced."""
    call = Call(node)
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    dims = dims_of(shape)
    count = call.shape("src")[dim]
    src = dims if count == shape[dim] else own(dims, dim, "cut", count)
    whole = frozenset() if src == dims else factors((dims[dim],)) | factors((src[dim],))
    return node_rule(node, call.ins(self=dims, src=src), (dims,), whole=whole, **additive(call, "self", "src"))


@RULES.register("aten.select_scatter", "aten.diagonal_scatter")
def select_scatter(node: Node) -> Rule:
    """`x` with one element of a dimension, or the diagonal of two, replaced."""
    call = Call(node)
    shape = call.shape("self")
    dims = dims_of(shape)
    if "index" in call.values:
        dim = call["dim"] % len(shape)
        src, whole = dims[:dim] + dims[dim + 1 :], factors((dims[dim],))
    else:
        src, whole = _diagonal(call, dims, call.shape("src")[-1])
    return node_rule(node, call.ins(self=dims, src=src), (dims,), whole=whole, **additive(call, "self", "src"))


@RULES.register("aten.split", "aten.split_with_sizes", "aten.unbind")
def split(node: Node) -> Rule:
    """A dimension in pieces."""
    call = Call(node)
    shape = call.shape("self")
    dim = call["dim"] % len(shape)
    dims = dims_of(shape)
    if node.outs[0].ndim < len(shape):
        return node_rule(
            node, (dims,), (dims[:dim] + dims[dim + 1 :],) * len(node.outs), whole=factors((dims[dim],)), linear=LINEAR
        )
    if len(node.outs) == 1:
        return node_rule(node, (dims,), (dims,), linear=LINEAR, local=lambda info, x, *args, **kwargs: (x,))
    outs = tuple(own(dims, dim, f"piece{i}", v.shape[dim]) for i, v in enumerate(node.outs))
    return node_rule(node, (dims,), outs, whole=factors(*((d[dim],) for d in (dims, *outs))), linear=LINEAR)


@RULES.register("aten.cat", "aten.stack")
def cat(node: Node) -> Rule:
    """Tensors one after the other along a dimension, which is whole, or along a new one."""
    call = Call(node)
    out = node.outs[0]
    dim = call["dim"] % out.ndim
    dims = dims_of(out.shape)
    whole = factors((dims[dim],))
    if str(node.op).startswith("aten.stack"):
        ins = [dims[:dim] + dims[dim + 1 :]] * len(call["tensors"])
    else:
        ins = [
            own(dims, dim, f"piece{i}", v.shape[dim]) if v.ndim == out.ndim else (("none",),)
            for i, v in enumerate(call["tensors"])
        ]
        whole |= factors(*((d[dim] if len(d) == out.ndim else d[0],) for d in ins))
        if len(ins) == 1:
            return node_rule(node, (dims,), (dims,), linear=LINEAR)
    return node_rule(node, call.ins(tensors=ins), (dims,), whole=whole, **additive(call, "tensors"))


@RULES.register("aten.flip", "aten.roll", "aten.rot90")
def moved(node: Node) -> Rule:
    """Elements moved along a dimension, which is whole."""
    call = Call(node)
    dims = dims_of(call.shape("self"))
    which = call["dims"] if call["dims"] else range(len(dims))
    whole = factors(tuple(dims[d] for d in which))
    out = dims
    if str(node.op).startswith("aten.rot90") and call["k"] % 2:
        i, j = (d % len(dims) for d in call["dims"])
        out = replaced(replaced(dims, i, dims[j]), j, dims[i])
    return node_rule(node, (dims,), (out,), whole=whole, linear=LINEAR)


def _diagonal(call: Call, dims: Dims, size: int) -> tuple[Dims, frozenset[str]]:
    i, j = (call[name] % len(dims) for name in ("dim1", "dim2"))
    rest = tuple(d for k, d in enumerate(dims) if k not in (i, j))
    diag: tuple[str, ...] = () if size == 1 else ("diag",)
    return (*rest, diag), factors((dims[i], dims[j], diag))


@RULES.register("aten.diagonal")
def diagonal(node: Node) -> Rule:
    """The diagonal of two dimensions, as a last one."""
    call = Call(node)
    dims = dims_of(call.shape("self"))
    out, whole = _diagonal(call, dims, node.outs[0].shape[-1])
    return node_rule(node, (dims,), (out,), whole=whole, linear=LINEAR)


@RULES.register("aten.diagonal_backward", "aten.diag_embed")
def diagonal_backward(node: Node) -> Rule:
    """Zeros, with the operand on the diagonal of two dimensions."""
    call = Call(node)
    out = dims_of(node.outs[0].shape)
    grad, whole = _diagonal(call, out, node.operands()[0].shape[-1])

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        return node.op(**(a | {"input_sizes": local_shape(info, out)} if "input_sizes" in a else a))

    return node_rule(node, (grad,), (out,), whole=whole, linear=LINEAR, local=local_call(node.op, local))


@RULES.register("aten.tril", "aten.triu")
def triangle(node: Node) -> Rule:
    """Keep `j - i <= k` (tril) or `j - i >= k` (triu), by global positions."""
    call = Call(node)
    dims = dims_of(call.shape("self"))
    lower = str(node.op).startswith("aten.tril")

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        x, k = a["self"], a["diagonal"]
        if all(info.parts(f) == 1 for f in factors(dims[-2:])):
            return node.op(x, k)
        i, j = (
            torch.arange(n, device=x.device) + (info.offset(d[0]) if d else 0)
            for n, d in zip(x.shape[-2:], dims[-2:], strict=True)
        )
        away = j - i.unsqueeze(-1)
        return only(away <= k if lower else away >= k, x)

    return node_rule(node, (dims,), (dims,), linear=LINEAR, local=local_call(node.op, local))


@RULES.register("aten.constant_pad_nd")
def constant_pad_nd(node: Node) -> Rule:
    """A constant before and after some dimensions, which are whole."""
    call = Call(node)
    shape = call.shape("self")
    dims, out = dims_of(shape), dims_of(shape)
    whole: set[str] = set()
    for i, n in enumerate(node.outs[0].shape):
        at = 2 * (len(shape) - 1 - i)
        if any(call["pad"][at : at + 2]):
            out = own(out, i, f"padded{i}", n)
            whole |= factors((dims[i], out[i]))
    linear = LINEAR if call["value"] == 0 else frozenset()
    return node_rule(node, (dims,), (out,), whole=frozenset(whole), linear=linear)


def _windows(call: Call, shape: tuple[int, ...], out: tuple[int, ...]) -> tuple[Dims, Dims, frozenset[str]]:
    """Dims of a tensor and of its windows; factors that are whole."""
    dim = call.values.get("dimension", call["dim"]) % len(shape)
    dims = dims_of(shape)
    windows = (*own(dims, dim, "windows", out[dim]), () if out[-1] == 1 else ("window",))
    return dims, windows, factors((dims[dim], windows[dim], windows[-1]))


@RULES.register("aten.unfold")
def unfold(node: Node) -> Rule:
    """Windows of a dimension, which is whole, as a last one."""
    call = Call(node)
    dims, windows, whole = _windows(call, call.shape("self"), node.outs[0].shape)
    return node_rule(node, (dims,), (windows,), whole=whole, linear=LINEAR)


@RULES.register("aten.unfold_backward")
def unfold_backward(node: Node) -> Rule:
    """Windows added where they came from, in a dimension that is whole."""
    call = Call(node)
    dims, windows, whole = _windows(call, node.outs[0].shape, call.shape("grad_in"))
    local = changed(node.op, input_sizes=lambda info: local_shape(info, dims))
    return node_rule(node, (windows,), (dims,), whole=whole, linear=LINEAR, local=local)
