"""Convolutions: batch and channels may be sharded (in groups, groups), space is whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import Call, dims_of, factors, given_results, local_call, once
from fmeg.sharding.rules.table import Table

RULES = Table()


@dataclass(frozen=True)
class _Dims:
    """Dims of x "n (g ci) …", w "(g co) ci …" (transposed: "(g ci) co …"), b "(g co)", y "n (g co) …"."""

    x: Dims
    w: Dims
    b: Dims
    y: Dims
    sizes: dict[str, int]
    whole: frozenset[str]


def _dims(call: Call, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...]) -> _Dims:
    g = call["groups"]
    size = {"n": x[0], "g": g, "ci": x[1] // g, "co": y[1] // g}
    n, g_, ci, co = (() if size[f] == 1 else (f,) for f in ("n", "g", "ci", "co"))
    xs, ws, ys = dims_of(x[2:], "x"), dims_of(w[2:], "w"), dims_of(y[2:], "y")
    sizes = {f: s for f, s in size.items() if s != 1}
    for dims, shape in ((xs, x), (ws, w), (ys, y)):
        sizes |= {d[0]: s for d, s in zip(dims, shape[2:], strict=True) if d}
    weight = (g_ + ci, co, *ws) if call["transposed"] else (g_ + co, ci, *ws)
    return _Dims((n, g_ + ci, *xs), weight, (g_ + co,), (n, g_ + co, *ys), sizes, factors(xs, ws, ys))


def _groups(info: Local, d: _Dims) -> int:
    return info.size("g") if "g" in d.sizes else 1


@RULES.register("aten.convolution")
def convolution(node: Node) -> Rule:
    """`x * w + b`: input channels are contracted, b is added on their first shard."""
    call = Call(node)
    d = _dims(call, call.shape("input"), call.shape("weight"), node.outs[0].shape)
    has_bias = call["bias"] is not None

    def local(info: Local, a: dict[str, Any]) -> Tensor:
        bias = once(info, a["bias"], ["ci"] if "ci" in d.sizes else []) if has_bias else None
        return node.op(**(a | {"bias": bias, "groups": _groups(info, d)}))

    linear = frozenset() if has_bias else call.at("input", "weight")
    return Rule(
        call.ins(input=d.x, weight=d.w, bias=d.b),
        (d.y,),
        d.sizes,
        whole=d.whole,
        linear=linear,
        local=local_call(node.op, local),
    )


@RULES.register("aten.convolution_backward")
def convolution_backward(node: Node) -> Rule:
    """Gradients of x (pending over output channels), w and b (pending over the batch; b has no input channels)."""
    call = Call(node)
    d = _dims(call, call.shape("input"), call.shape("weight"), call.shape("grad_output"))
    co = [f for f in ("g", "co") if f in d.sizes]

    def local(info: Local, a: dict[str, Any]) -> Any:
        channels = 1
        for f in co:
            channels *= info.size(f)
        sizes = [channels] if a["bias_sizes"] else a["bias_sizes"]
        gx, gw, gb = node.op(**(a | {"groups": _groups(info, d), "bias_sizes": sizes}))
        gb = gb if gb is None else once(info, gb, ["ci"] if "ci" in d.sizes else [])
        return given_results(node, (gx, gw, gb))

    outs = call.kept(d.x, d.w, d.b)
    ins = call.ins(grad_output=d.y, input=d.x, weight=d.w)
    return Rule(ins, outs, d.sizes, whole=d.whole, linear=frozenset({0}), local=local_call(node.op, local))
