"""Activations: SwiGLU, GeGLU and GELU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fmeg.ops._common import check_float, check_shape, differentiated, elements, pointwise_rule
from fmeg.ops._eager import Eager
from fmeg.program.primitive import Primitive

aten = torch.ops.aten


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _swiglu_bwd(gate: Tensor, up: Tensor, ct: Tensor) -> tuple[Tensor, Tensor]:
    return _silu_backward(ct * up, gate), ct * F.silu(gate)


def _silu_backward(ct: Tensor, x: Tensor) -> Tensor:
    """ct s (1 + x (1 - s)) with s = sigmoid(x)."""
    if differentiated(ct, x):
        s = torch.sigmoid(x)
        return ct * s * (1 + x * (1 - s))
    return aten.silu_backward(ct, x)


def _geglu(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return F.gelu(gate, approximate=approximate) * up


def _geglu_bwd(gate: Tensor, up: Tensor, ct: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return aten.gelu_backward(ct * up, gate, approximate=approximate), ct * F.gelu(gate, approximate=approximate)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _gelu_bwd(x: Tensor, ct: Tensor, approximate: str) -> Tensor:
    return aten.gelu_backward(ct, x, approximate=approximate)


def _swiglu_vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, Tensor]:
    return swiglu_bwd_p(*args, cts[0])


def _geglu_vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, Tensor]:
    return geglu_bwd_p(*args, cts[0], **kwargs)


swiglu_p = Primitive(
    "swiglu",
    Eager(_swiglu, _swiglu_vjp),
    vjp=_swiglu_vjp,
    rule=lambda node: pointwise_rule(node, linear=frozenset({1})),
    flops=lambda node: 6 * elements(node),
    cheap=True,
)
swiglu_bwd_p: Primitive = Primitive(
    "swiglu_bwd",
    _swiglu_bwd,
    rule=lambda node: pointwise_rule(node, outs=2, linear=frozenset({2})),
    flops=lambda node: 12 * elements(node),
    cheap=True,
)
geglu_p = Primitive(
    "geglu",
    Eager(_geglu, _geglu_vjp),
    vjp=_geglu_vjp,
    rule=lambda node: pointwise_rule(node, linear=frozenset({1})),
    flops=lambda node: 10 * elements(node),
    cheap=True,
)
geglu_bwd_p: Primitive = Primitive(
    "geglu_bwd",
    _geglu_bwd,
    rule=lambda node: pointwise_rule(node, outs=2, linear=frozenset({2})),
    flops=lambda node: 20 * elements(node),
    cheap=True,
)
gelu_p = Primitive(
    "gelu",
    _gelu,
    vjp=lambda args, kwargs, outs, cts: (gelu_bwd_p(*args, cts[0], **kwargs),),
    rule=lambda node: pointwise_rule(node),
    flops=lambda node: 9 * elements(node),
    cheap=True,
)
gelu_bwd_p: Primitive = Primitive(
    "gelu_bwd",
    _gelu_bwd,
    rule=lambda node: pointwise_rule(node, linear=frozenset({1})),
    flops=lambda node: 14 * elements(node),
    cheap=True,
)


def swiglu(gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Gated linear unit with SiLU: out = silu(gate) · up, silu(x) = x / (1 + exp(-x)).

    Both of one shape, any dimension may be sharded. Source: Shazeer 2020, arXiv:2002.05202.

    >>> swiglu(torch.tensor([0.0, 100.0]), torch.tensor([3.0, 3.0]))
    tensor([  0., 300.])
    """
    check_float("swiglu", gate=gate, up=up)
    check_shape("swiglu", "up", up, gate.shape, "that of gate")
    return swiglu_p(gate, up)


def geglu(
    gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"], approximate: str = "tanh"
) -> Float[Tensor, "*shape"]:
    """Gated linear unit with GELU: out = gelu(gate) · up, see `gelu`.

    Both of one shape, any dimension may be sharded. Source: Shazeer 2020, arXiv:2002.05202.

    >>> geglu(torch.tensor([0.0, 100.0]), torch.tensor([3.0, 3.0]))
    tensor([  0., 300.])
    """
    check_float("geglu", gate=gate, up=up)
    check_shape("geglu", "up", up, gate.shape, "that of gate")
    return geglu_p(gate, up, approximate=_known(approximate, "geglu"))


def gelu(x: Float[Tensor, "*shape"], approximate: str = "tanh") -> Float[Tensor, "*shape"]:
    """Gaussian error linear unit.

        "none"   out = x Φ(x),  Φ the normal distribution function
        "tanh"   out = x/2 (1 + tanh(sqrt(2/π) (x + 0.044715 x³)))

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415.

    >>> gelu(torch.tensor([-100.0, 0.0, 100.0])).abs()
    tensor([  0.,   0., 100.])
    """
    check_float("gelu", x=x)
    return gelu_p(x, approximate=_known(approximate, "gelu"))


def _known(approximate: str, op: str) -> str:
    if approximate not in ("tanh", "none"):
        raise ValueError(f"{op}: approximate must be 'tanh' or 'none', given {approximate!r}")
    return approximate
