"""Losses over classes and over elements, with their means over the global count.

Classes may be sharded: targets that another shard holds count as ignored here, so each is counted once.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fmeg.ops.collectives import all_reduce
from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import Call, axes_of, dims_of, in_shard, local_call, node_rule
from fmeg.sharding.rules.pointwise import elementwise
from fmeg.sharding.rules.table import Table

RULES = Table()

MEAN, SUM = 1, 2
IGNORED = -100


def _dims(call: Call) -> tuple[Dims, Dims, tuple[str, ...], int]:
    """Dims of the scores and of the targets, the factor of classes and its dimension."""
    shape = call.shape("self")
    dims = dims_of(shape)
    c = 0 if len(shape) == 1 else 1
    return dims, dims[:c] + dims[c + 1 :], dims[c], c


def _target(info: Local, a: dict[str, Any], classes: tuple[str, ...], size: int) -> dict[str, Any]:
    """The targets as classes of this shard; those of other shards, and those ignored, as IGNORED."""
    if all(info.parts(f) == 1 for f in classes):
        return a
    target, here = in_shard(info, a["target"], classes[0], size)
    counted = here & (a["target"] != a["ignore_index"]) & (a["target"] >= 0)
    return a | {"target": torch.where(counted, target, IGNORED), "ignore_index": IGNORED}


@RULES.register("aten.nll_loss_forward", "aten.nll_loss2d_forward")
def nll_loss(node: Node) -> Rule:
    """`-w[t] x[t]`, each, summed, or divided by the sum of the weights `w[t]`."""
    call = Call(node)
    dims, rows, classes, c = _dims(call)
    size, mean = call.shape("self")[c], call["reduction"] == MEAN
    names = [f for d in (*rows, classes) for f in d]
    out = () if call["reduction"] else rows
    if not call["reduction"] and len(rows) == 0:
        out = ()

    def local(info: Local, a: dict[str, Any]) -> tuple[Tensor, Tensor]:
        a, axes = _target(info, a, classes, size), axes_of(info, names)
        if not (mean and axes):
            return node.op(**a)
        loss, weight = node.op(**(a | {"reduction": SUM}))
        return loss / all_reduce(weight, axes, "sum"), weight

    ins = call.ins(self=dims, target=rows, weight=(classes,))
    return node_rule(node, ins, (out, ()), local=local_call(node.op, local))


@RULES.register("aten.nll_loss_backward", "aten.nll_loss2d_backward")
def nll_loss_backward(node: Node) -> Rule:
    """`-w[t] g` at the target, over the total weight for a mean: linear in g."""
    call = Call(node)
    dims, rows, classes, c = _dims(call)
    size = call.shape("self")[c]
    grad = () if call["reduction"] or len(call.shape("grad_output")) == 0 else rows

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        return node.op(**_target(info, a, classes, size))

    ins = call.ins(grad_output=grad, self=dims, target=rows, weight=(classes,), total_weight=())
    return node_rule(node, ins, (dims,), linear=frozenset({0}), local=local_call(node.op, local))


ELEMENTWISE = ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy")


@RULES.register(*(f"aten.{name}" for name in ELEMENTWISE))
def element_loss(node: Node) -> Rule:
    """A loss of each element, or its sum, or its mean over the global count."""
    reduced = Call(node)["reduction"]
    rule = elementwise(node)
    if not reduced:
        return rule
    names = sorted(rule.sizes)

    def local(info: Local, *args: Any, **kwargs: Any) -> Tensor:
        out, parts = node.op(*args, **kwargs), prod(info.parts(f) for f in names)
        return out / parts if reduced == MEAN and parts > 1 else out

    return Rule(rule.ins, rule.outs, rule.sizes, local=local)


@RULES.register(*(f"aten.{name}_backward" for name in ELEMENTWISE))
def element_loss_backward(node: Node) -> Rule:
    """The gradient of each element; of a mean, with the global count."""
    reduced = Call(node)["reduction"]
    rule = elementwise(node, linear=frozenset({0}))
    names = sorted(rule.sizes)

    def local(info: Local, *args: Any, **kwargs: Any) -> Tensor:
        out, parts = node.op(*args, **kwargs), prod(info.parts(f) for f in names)
        return out / parts if reduced == MEAN and parts > 1 else out

    return Rule(rule.ins, rule.outs, rule.sizes, linear=rule.linear, local=local)
