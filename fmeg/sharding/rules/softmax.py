"""Softmax: over a sharded dimension it costs a maximum and a sum over the shards, of numbers a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmeg.ops.collectives import all_reduce
from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import Call, axes_of, dims_of, local_call, node_rule
from fmeg.sharding.rules.table import Table

RULES = Table()


def _dim(call: Call, name: str) -> tuple[Dims, int, tuple[str, ...]]:
    dims = dims_of(call.shape(name))
    dim = call["dim"] % max(len(dims), 1)
    return dims, dim, dims[dim] if dims else ()


@RULES.register("aten._softmax", "aten._log_softmax", "aten._safe_softmax")
def softmax(node: Node) -> Rule:
    """`exp(x - lse)`, or `x - lse`, with `lse = log Σ exp x` over a dimension."""
    dims, dim, names = _dim(Call(node), "self")
    log, safe = "log" in str(node.op), "safe" in str(node.op)
    out_dtype = node.outs[0].dtype

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        axes = axes_of(info, names)
        if not axes:
            return node.op(**a)
        x = a["self"].to(torch.float64 if out_dtype == torch.float64 else torch.float32)
        top = all_reduce(x.amax(dim, keepdim=True), axes, "max")
        x = x - (torch.where(top == -torch.inf, 0.0, top) if safe else top)
        total = all_reduce(x.exp().sum(dim, keepdim=True), axes, "sum")
        if log:
            return (x - total.log()).to(out_dtype)
        out = x.exp() / total
        return (torch.where(total == 0, 0.0, out) if safe else out).to(out_dtype)

    return node_rule(node, (dims,), (dims,), local=local_call(node.op, local))


@RULES.register("aten._softmax_backward_data", "aten._log_softmax_backward_data")
def softmax_backward(node: Node) -> Rule:
    """`y (g - Σ g y)`, or `g - exp(y) Σ g`: linear in g."""
    dims, dim, names = _dim(Call(node), "grad_output")
    log = "log" in str(node.op)
    out_dtype = node.outs[0].dtype

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        axes = axes_of(info, names)
        if not axes:
            return node.op(**a)
        wide = torch.float64 if out_dtype == torch.float64 else torch.float32
        g, y = a["grad_output"].to(wide), a["output"].to(wide)
        total = all_reduce((g if log else g * y).sum(dim, keepdim=True), axes, "sum")
        return (g - y.exp() * total if log else y * (g - total)).to(out_dtype)

    return node_rule(node, (dims, dims), (dims,), linear=frozenset({0}), local=local_call(node.op, local))
