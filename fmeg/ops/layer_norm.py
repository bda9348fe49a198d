"""Layer normalisation over the last dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fmeg.ops._common import check_float, check_shape, elements, row_names, wide
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule


def _reference(x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(wide(x), x.shape[-1:], _wide(w), _wide(b), eps).to(x.dtype)


def _reference_bwd(
    x: Tensor, w: Tensor | None, b: Tensor | None, ct: Tensor, eps: float
) -> Tensor | tuple[Tensor, ...]:
    """(dx, dw, db) without those whose operand is None; statistics are computed again from x."""
    d, h = list(x.shape[-1:]), wide(x)
    _, mean, rstd = torch.native_layer_norm(h, d, None, None, eps)
    wanted = [True, w is not None, b is not None]
    grads = torch.ops.aten.native_layer_norm_backward(wide(ct), h, d, mean, rstd, _wide(w), _wide(b), wanted)
    out = tuple(g.to(t.dtype) for g, t in zip(grads, (x, w, b), strict=True) if t is not None)
    return out if len(out) > 1 else out[0]


def _wide(t: Tensor | None) -> Tensor | None:
    return None if t is None else wide(t)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, ...]:
    grads = layer_norm_bwd_p(*args, cts[0], **kwargs)
    return grads if isinstance(grads, tuple) else (grads,)


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    x = f"{row_names(len(shapes[0]) - 1)} d"
    return rule(", ".join([x, *["d"] * (len(shapes) - 1)]) + f" -> {x}", shapes, whole=frozenset("d"))


def _rule_bwd(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    x, params = f"{row_names(len(shapes[0]) - 1)} d", ["d"] * (len(shapes) - 2)
    text = ", ".join([x, *params, x]) + " -> " + ", ".join([x, *params])
    return rule(text, shapes, whole=frozenset("d"))


layer_norm_p = Primitive("layer_norm", _reference, vjp=_vjp, rule=_rule, flops=lambda n: 7 * elements(n), cheap=True)
layer_norm_bwd_p = Primitive(
    "layer_norm_bwd", _reference_bwd, rule=_rule_bwd, flops=lambda n: 14 * elements(n), cheap=True
)


def layer_norm(
    x: Float[Tensor, "*rows d"],
    w: Float[Tensor, "d"] | None = None,
    b: Float[Tensor, "d"] | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "*rows d"]:
    """Centre and scale each row to mean 0 and variance 1, then apply a weight and a bias.

        out = (x - mean(x)) / sqrt(var(x) + eps) * w + b          var: the mean of squares, not Bessel's

    Computed in float32 (float64 stays float64) and returned in x's dtype; `w` and `b` may be None. The last dimension
    is kept whole on a mesh. Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.

    >>> layer_norm(torch.tensor([1.0, 3.0]), eps=0.0)
    tensor([-1.,  1.])
    """
    check_float("layer_norm", x=x, w=w, b=b)
    for name, t in (("w", w), ("b", b)):
        if t is not None:
            check_shape("layer_norm", name, t, x.shape[-1:], "the last dimension of x")
    return layer_norm_p(x, w, b, eps=eps)
