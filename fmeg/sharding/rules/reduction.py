"""Reductions: a sharded reduced dimension gives a pending sum (sum, mean) or a small collective (max, var, norm).

A running sum over a sharded dimension needs the totals of the shards before it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from fmeg.ops.collectives import all_gather, all_reduce, axis_index
from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import FLOATS, Call, axes_of, dims_of, factors, node_rule
from fmeg.sharding.rules.table import Table

RULES = Table()

Finish = Callable[[Tensor, tuple[str, ...]], Tensor]


def reduced_dims(call: Call, ndim: int) -> tuple[int, ...]:
    """The dimensions that are reduced: all of them when `dim` is absent, None or empty."""
    dim = call["dim"]
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in ([dim] if isinstance(dim, int) else dim))


def shapes(node: Node, call: Call) -> tuple[Dims, Dims, list[str]]:
    """Dims of the operand and of the result, and the factors that are reduced."""
    dims = dims_of(call.shape("self"))
    reduced = reduced_dims(call, len(dims))
    if node.outs[0].ndim == len(dims):
        out = tuple(() if i in reduced else d for i, d in enumerate(dims))
    else:
        out = tuple(d for i, d in enumerate(dims) if i not in reduced)
    return dims, out, [f for i in reduced if dims for f in dims[i]]


def reduction(node: Node, **kw: Any) -> Rule:
    """The rule of a reduction of `self` over `dim`; `kw` as for Rule."""
    dims, out, _ = shapes(node, Call(node))
    return node_rule(node, (dims,), (out,) * len(node.outs), **kw)


@RULES.register("aten.sum", "aten.nansum", "aten.count_nonzero")
def total(node: Node) -> Rule:
    """`Σ x`: a pending sum over a sharded dimension; `sum` itself is linear."""
    return reduction(node, linear=frozenset({0} if ".sum." in str(node.op) else ()))


@RULES.register("aten.mean")
def mean(node: Node) -> Rule:
    """`Σ x / n` with the global n: the local mean over the number of shards."""
    _, _, names = shapes(node, Call(node))

    def local(info: Local, *args: Any, **kwargs: Any) -> Tensor:
        parts = prod(info.parts(f) for f in names)
        out = node.op(*args, **kwargs)
        return out / parts if parts > 1 else out

    return reduction(node, linear=frozenset({0}), local=local)


def _resolved(node: Node, finish: Finish) -> Rule:
    """Reduce locally, then `finish(partial, axes)` over the axes of the reduced dimensions."""
    _, _, names = shapes(node, Call(node))

    def local(info: Local, *args: Any, **kwargs: Any) -> Tensor:
        out, axes = node.op(*args, **kwargs), axes_of(info, names)
        return finish(out, axes) if axes else out

    return reduction(node, resolved=frozenset(names), local=local)


def _max(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    return all_reduce(x, axes, "max")


def _min(x: Tensor, axes: tuple[str, ...]) -> Tensor:
    return -all_reduce(-x, axes, "max")


@RULES.register("aten.amax", "aten.max.default")
def largest(node: Node) -> Rule:
    """The largest element: an all-reduce of the local ones."""
    return _resolved(node, _max)


@RULES.register("aten.amin", "aten.min.default")
def smallest(node: Node) -> Rule:
    """The smallest element."""
    return _resolved(node, _min)


@RULES.register("aten.any")
def any_true(node: Node) -> Rule:
    """Whether any element is true."""
    return _resolved(node, lambda x, axes: _max(x.to(torch.int32), axes).to(torch.bool))


@RULES.register("aten.all")
def all_true(node: Node) -> Rule:
    """Whether all elements are true."""
    return _resolved(node, lambda x, axes: _min(x.to(torch.int32), axes).to(torch.bool))


@RULES.register("aten.logsumexp")
def logsumexp(node: Node) -> Rule:
    """`log Σ exp x`: the largest local value, then one sum of what each shard adds."""

    def finish(x: Tensor, axes: tuple[str, ...]) -> Tensor:
        top = _max(x, axes)
        top = torch.where(top.abs() == inf, 0.0, top)
        return all_reduce((x - top).exp(), axes, "sum").log() + top

    return _resolved(node, finish)


@RULES.register("aten.linalg_vector_norm", "aten.norm")
def norm(node: Node) -> Rule:
    """`(Σ |x|^p)^(1/p)`; the largest or smallest `|x|` for p = ±inf, the number of non-zeros for p = 0."""
    call = Call(node)
    p = call["p"] if "p" in call.values else call["ord"]
    p = 2.0 if p is None else float(p)

    def finish(x: Tensor, axes: tuple[str, ...]) -> Tensor:
        if p in (inf, -inf):
            return _max(x, axes) if p > 0 else _min(x, axes)
        if p == 0.0:
            return all_reduce(x, axes, "sum")
        return all_reduce(x**p, axes, "sum") ** (1.0 / p)

    return _resolved(node, finish)


@RULES.register("aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction")
def variance(node: Node) -> Rule:
    """`Σ (x - mean)² / (n - correction)`, in two passes as one device does it."""
    call = Call(node)
    dims, out, names = shapes(node, call)
    reduced = list(reduced_dims(call, len(dims)))
    count = prod(call.shape("self")[i] for i in reduced)
    freedom = max(count - (1 if call["correction"] is None else call["correction"]), 0)
    keep = node.outs[0].ndim == len(dims)
    name = str(node.op).split(".")[1]

    def local(info: Local, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        axes = axes_of(info, names)
        if not axes:
            return node.op(x, *args, **kwargs)
        center = all_reduce(x.sum(reduced, keepdim=True), axes, "sum") / count
        var = all_reduce(((x - center) ** 2).sum(reduced, keepdim=keep), axes, "sum") / freedom
        spread = var.sqrt() if name.startswith("std") else var
        return (spread, center if keep else center.reshape(var.shape)) if name.endswith("_mean") else spread

    return node_rule(node, (dims,), (out,) * len(node.outs), resolved=frozenset(names), local=local)


@RULES.register(
    "aten.prod",
    "aten.argmax",
    "aten.argmin",
    "aten.max.dim",
    "aten.min.dim",
    "aten.median",
    "aten.nanmedian",
    "aten.mode",
    "aten.kthvalue",
)
def whole(node: Node) -> Rule:
    """Reduced dimensions must be whole."""
    _, _, names = shapes(node, Call(node))
    return reduction(node, whole=frozenset(names))


@RULES.register("aten.cumsum")
def running_sum(node: Node) -> Rule:
    """`Σ_{j ≤ i} x_j`: a sharded dimension goes on from the totals of the shards before, gathered; linear."""
    call = Call(node)
    dims = dims_of(call.shape("self"))
    dim = call["dim"] % max(len(dims), 1)
    own = factors(dims[dim : dim + 1])

    def local(info: Local, *args: Any, **kwargs: Any) -> Tensor:
        out, axes = node.op(*args, **kwargs), axes_of(info, own)
        if not axes:
            return out
        totals = all_gather(out.narrow(dim, out.shape[dim] - 1, 1), axes, dim)
        ahead = torch.arange(totals.shape[dim]) < axis_index(axes)
        ahead = ahead.reshape(-1, *(1,) * (out.ndim - dim - 1))
        return out + torch.where(ahead, totals, 0).sum(dim, keepdim=True, dtype=out.dtype)

    linear = frozenset({0} if node.outs[0].dtype in FLOATS else ())
    return node_rule(node, (dims,), (dims,), linear=linear, resolved=own, local=local)


@RULES.register("aten.cumprod", "aten.cummax", "aten.cummin", "aten.logcumsumexp")
def scan_dim(node: Node) -> Rule:
    """Other running reductions: their dimension must be whole."""
    call = Call(node)
    dims = dims_of(call.shape("self"))
    whole = factors(dims[call["dim"] : call["dim"] + 1 or None]) if dims else frozenset()
    return node_rule(node, (dims,), (dims,) * len(node.outs), whole=whole)
