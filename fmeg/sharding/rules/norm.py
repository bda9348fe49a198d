"""Normalisations: the normalised dimensions are whole, all others may be sharded.

The gradients of weight and bias are pending sums over the axes of the rows.
"""

from __future__ import annotations

from typing import Any

from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import Call, changed, dims_of, factors, given_results, node_rule
from fmeg.sharding.rules.table import Table

RULES = Table()


def _split(shape: tuple[int, ...], normalized: list[int]) -> tuple[Dims, Dims, Dims]:
    """Dims of the operand, of its normalised part and of the statistics."""
    dims = dims_of(shape)
    n = len(dims) - len(normalized)
    return dims, dims[n:], dims[:n] + ((),) * len(normalized)


@RULES.register("aten.native_layer_norm", "aten._fused_rms_norm")
def layer_norm(node: Node) -> Rule:
    """`(x - mean) / std * w + b`, and its statistics."""
    call = Call(node)
    dims, d, stats = _split(call.shape("input"), call["normalized_shape"])
    outs = (dims, stats, stats) if "layer" in str(node.op) else (dims, stats)
    return node_rule(node, call.ins(input=dims, weight=d, bias=d), call.kept(*outs), whole=factors(d))


@RULES.register("aten.native_layer_norm_backward", "aten._fused_rms_norm_backward")
def layer_norm_backward(node: Node) -> Rule:
    """Gradients of the operand, weight and bias: linear in the incoming one."""
    call = Call(node)
    dims, d, stats = _split(call.shape("input"), call["normalized_shape"])
    ins = call.ins(grad_out=dims, input=dims, mean=stats, rstd=stats, weight=d, bias=d)
    outs = (dims, d, d) if "layer" in str(node.op) else (dims, d)
    return node_rule(node, ins, call.kept(*outs), whole=factors(d), linear=frozenset({0}))


def _groups(call: Call, shape: tuple[int, ...]) -> dict[str, Any]:
    """Dims of x "n (g c) …", weight "(g c)" and statistics "n g"; sizes; a local call that is told the local sizes."""
    n, g = call["N"], call["group"]
    c = shape[1] // g
    batch, groups, inner = ((name,) if size != 1 else () for name, size in (("n", n), ("g", g), ("c", c)))
    rest = dims_of(shape[2:], "x")
    sizes = {d[0]: size for d, size in ((batch, n), (groups, g), (inner, c)) if d}
    sizes |= {d[0]: size for d, size in zip(rest, shape[2:], strict=True) if d}

    def size(info: Local, *dims: tuple[str, ...]) -> int:
        out = 1
        for d in dims:
            for f in d:
                out *= info.size(f)
        return out

    told = {
        "N": lambda info: size(info, batch),
        "C": lambda info: size(info, groups, inner),
        "group": lambda info: size(info, groups),
    }
    return {
        "x": (batch, groups + inner, *rest),
        "w": (groups + inner,),
        "stats": (batch, groups),
        "sizes": sizes,
        "whole": factors((inner, *rest)),
        "local": lambda info, *args, **kwargs: given_results(
            call.node, changed(call.op, **told)(info, *args, **kwargs)
        ),
    }


@RULES.register("aten.native_group_norm")
def group_norm(node: Node) -> Rule:
    """Each group of channels of each row normalised: rows and groups may be sharded."""
    call = Call(node)
    g = _groups(call, call.shape("input"))
    ins = call.ins(input=g["x"], weight=g["w"], bias=g["w"])
    return Rule(ins, call.kept(g["x"], g["stats"], g["stats"]), g["sizes"], whole=g["whole"], local=g["local"])


@RULES.register("aten.native_group_norm_backward")
def group_norm_backward(node: Node) -> Rule:
    """Gradients of the operand, weight and bias: linear in the incoming one."""
    call = Call(node)
    g = _groups(call, call.shape("input"))
    ins = call.ins(grad_out=g["x"], input=g["x"], mean=g["stats"], rstd=g["stats"], weight=g["w"])
    return Rule(
        ins, call.kept(g["x"], g["w"], g["w"]), g["sizes"], whole=g["whole"], linear=frozenset({0}), local=g["local"]
    )
