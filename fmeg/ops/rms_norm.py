"""Root-mean-square normalisation over the last dimension."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from fmeg.kernels import rows
from fmeg.ops._common import check_float, check_shape, differentiated, elements, row_names, wide
from fmeg.ops._eager import Eager
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule


def _plain(x: Tensor, w: Tensor | None, eps: float) -> Tensor:
    y = wide(x)
    y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + eps)
    return (y if w is None else y * w.to(y.dtype)).to(x.dtype)


def _reference_bwd(x: Tensor, w: Tensor | None, ct: Tensor, eps: float) -> Tensor | tuple[Tensor, Tensor]:
    """dx = r (g - y mean(g y)) with y = r x and g = w ct; dw = Σ_rows ct y."""
    if rows.fits(x, x.shape[-1]) and not differentiated(x, ct, *(() if w is None else (w,))):
        dx, dw = rows.rms_norm_backward(x, w, ct, None, eps)
        return dx if w is None else (dx, dw)
    h, g = wide(x), wide(ct)
    r = torch.rsqrt((h * h).mean(-1, keepdim=True) + eps)
    gw = g if w is None else g * w.to(g.dtype)
    y = h * r
    dx = (r * (gw - y * (gw * y).mean(-1, keepdim=True))).to(x.dtype)
    if w is None:
        return dx
    return dx, (g * y).reshape(-1, x.shape[-1]).sum(0).to(w.dtype)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, ...]:
    x, w = args
    grads = rms_norm_bwd_p(x, w, cts[0], **kwargs)
    return (grads,) if w is None else grads


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    x = f"{row_names(len(shapes[0]) - 1)} d"
    return rule(f"{x}, d -> {x}" if len(shapes) == 2 else f"{x} -> {x}", shapes, whole=frozenset("d"))


def _rule_bwd(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    x = f"{row_names(len(shapes[0]) - 1)} d"
    text = f"{x}, d, {x} -> {x}, d" if len(shapes) == 3 else f"{x}, {x} -> {x}"
    return rule(text, shapes, whole=frozenset("d"))


rms_norm_p = Primitive(
    "rms_norm", Eager(_plain, _vjp), vjp=_vjp, rule=_rule, flops=lambda n: 4 * elements(n), cheap=True
)
rms_norm_bwd_p = Primitive("rms_norm_bwd", _reference_bwd, rule=_rule_bwd, flops=lambda n: 10 * elements(n), cheap=True)


def rms_norm(
    x: Float[Tensor, "*rows d"], w: Float[Tensor, "d"] | None = None, eps: float = 1e-6
) -> Float[Tensor, "*rows d"]:
    """Divide each row by its root mean square, then multiply by a weight.

        out = x / sqrt(mean(x²) + eps) * w

    Computed in float32 (float64 stays float64) and returned in x's dtype. `w=None` multiplies by nothing. The last
    dimension is kept whole on a mesh; all others may be sharded. Source: Zhang and Sennrich 2019, arXiv:1910.07467.

    >>> rms_norm(torch.tensor([3.0, 4.0]), eps=0.0) * 5
    tensor([4.2426, 5.6569])
    """
    check_float("rms_norm", x=x, w=w)
    if w is not None:
        check_shape("rms_norm", "w", w, x.shape[-1:], "the last dimension of x")
    return rms_norm_p(x, w, eps=eps)
