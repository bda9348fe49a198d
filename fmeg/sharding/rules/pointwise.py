"""Elementwise operations: every dimension may be sharded; operands broadcast.

A pending sum passes through what is linear: scaling (`x * 2`, `x / n`), sums of pending sums, the incoming gradient of
a `_backward`. It does not pass through `x + 1`: every rank would add its own 1.
"""

from __future__ import annotations

from typing import Any

import torch

from fmeg.program.ir import Node, Value
from fmeg.program.rule import Rule
from fmeg.sharding.rules.common import FLOATS, Call, additive, aligned, node_rule
from fmeg.sharding.rules.table import Table

RULES = Table()

NONLINEAR = (
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "celu", "clamp", "clamp_max",
    "clamp_min", "copysign", "cos", "cosh", "digamma", "elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
    "floor", "floor_divide", "fmax", "fmin", "fmod", "frac", "gelu", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "heaviside", "hypot", "isinf", "isnan", "isposinf", "isneginf", "leaky_relu", "lgamma", "log",
    "log10", "log1p", "log2", "logaddexp", "logaddexp2", "logit", "log_sigmoid_forward", "maximum", "minimum",
    "mish", "nan_to_num", "nextafter", "polar", "pow", "reciprocal", "relu", "remainder", "round", "rsqrt", "sgn",
    "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "special_entr",
    "special_erfcx", "special_i0e", "special_i1", "special_i1e", "special_log_ndtr", "special_ndtri",
    "special_xlog1py", "special_zeta", "sqrt", "tan", "tanh", "threshold", "trunc", "xlogy", "_prelu_kernel", "eq",
    "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "logical_not", "bitwise_and",
    "bitwise_or", "bitwise_xor", "bitwise_not", "bitwise_left_shift", "bitwise_right_shift", "__lshift__",
    "__rshift__", "gcd", "lcm",
)  # fmt: skip

# linear in the first operand: the value itself, or the incoming gradient
LINEAR = (
    "neg", "clone", "deg2rad", "rad2deg", "_conj", "threshold_backward", "gelu_backward", "silu_backward",
    "sigmoid_backward", "tanh_backward", "hardtanh_backward", "hardswish_backward", "hardsigmoid_backward",
    "leaky_relu_backward", "elu_backward", "softplus_backward", "log_sigmoid_backward", "logit_backward",
    "mish_backward", "softshrink_backward", "hardshrink_backward", "native_dropout_backward",
)  # fmt: skip


def elementwise(node: Node, **kw: Any) -> Rule:
    """The rule of an operation that acts on each element alone; `kw` as for Rule."""
    operands = node.operands()
    shape = tuple(torch.broadcast_shapes(*(v.shape for v in operands)))
    ins = tuple(aligned(v.shape, shape) for v in operands)
    return node_rule(node, ins, tuple(aligned(v.shape, shape) for v in node.outs), **kw)


@RULES.register(*(f"aten.{name}" for name in NONLINEAR))
def nonlinear(node: Node) -> Rule:
    """`f(x, …)`: pending sums are completed first."""
    return elementwise(node)


@RULES.register(*(f"aten.{name}" for name in LINEAR))
def linear(node: Node) -> Rule:
    """`f(x)` or `g * f'(x)`: linear in the first argument."""
    return elementwise(node, linear=frozenset({0}))


@RULES.register("aten.add", "aten.sub", "aten.rsub", "aten.where", "aten.lerp")
def sums(node: Node) -> Rule:
    """`a + alpha b`, `where(c, a, b)`, `lerp(a, b, w)`: linear in both together."""
    call = Call(node)
    return elementwise(node, **additive(call, "self", "end" if "end" in call.given else "other"))


@RULES.register("aten.masked_fill")
def masked_fill(node: Node) -> Rule:
    """`where(mask, value, x)`."""
    return elementwise(node, **additive(Call(node), "self", "value"))


@RULES.register("aten.addcmul", "aten.addcdiv")
def addc(node: Node) -> Rule:
    """`x + value * a * b` or `x + value * a / b`: linear in x and a together."""
    return elementwise(node, **additive(Call(node), "self", "tensor1"))


@RULES.register("aten.mul")
def mul(node: Node) -> Rule:
    """`a * b`: linear in each alone."""
    return elementwise(node, linear=Call(node).at("self", "other"))


@RULES.register("aten.div")
def div(node: Node) -> Rule:
    """`a / b`: linear in a, unless the quotient is rounded."""
    call = Call(node)
    return elementwise(node, linear=frozenset() if call["rounding_mode"] else call.at("self"))


@RULES.register("aten._to_copy")
def to_copy(node: Node) -> Rule:
    """A cast: linear unless it rounds to integers."""
    source, target = node.operands()[0].dtype, node.outs[0].dtype
    ok = target in FLOATS or (source not in FLOATS and torch.bool not in (source, target))
    return elementwise(node, linear=frozenset({0} if ok else ()))


@RULES.register("aten.copy")
def copy(node: Node) -> Rule:
    """`copy(self, src)`: src, in self's shape."""
    return elementwise(node, linear=Call(node).at("src"))


@RULES.register("aten.fill")
def fill(node: Node) -> Rule:
    """`fill(self, value)`: value, in self's shape."""
    call = Call(node)
    return elementwise(node, linear=call.at("value") if isinstance(call["value"], Value) else frozenset())


@RULES.register("aten.view_as_real", "aten.view_as_complex")
def complex_pairs(node: Node) -> Rule:
    """Complex numbers as pairs in a last dimension, which stays whole."""
    ins = tuple(
        aligned(v.shape[: v.ndim - (v.dtype not in _COMPLEX)], v.shape[: v.ndim - (v.dtype not in _COMPLEX)])
        for v in node.operands()
    )
    pair = (("pair",),)
    if node.outs[0].dtype in _COMPLEX:
        return node_rule(node, (ins[0] + pair,), ins, whole=frozenset({"pair"}), linear=frozenset({0}))
    return node_rule(node, ins, (ins[0] + pair,), whole=frozenset({"pair"}), linear=frozenset({0}))


_COMPLEX = frozenset({torch.complex64, torch.complex128})
