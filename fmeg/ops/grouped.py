"""Products of rows sorted by expert with each expert's own matrix, and what else acts on such rows."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg.kernels import grouped as kernels
from fmeg.ops._common import check_float, check_shape, elements, transformed, wide
from fmeg.ops._eager import Eager
from fmeg.ops.routing import Routed, Routing, chunk_of
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule


def expert_of_rows(ends: Int[Tensor, "e"], rows: int) -> Int[Tensor, "rows"]:
    """The expert of each row; the number of experts for rows beyond all.

    >>> expert_of_rows(torch.tensor([1, 1, 3]), 4).tolist()
    [0, 2, 2, 3]
    """
    return chunk_of(ends, torch.arange(rows, device=ends.device, dtype=ends.dtype))


def _masks(ends: Tensor, rows: int) -> Tensor:
    """[rows, e]: whether a row is an expert's."""
    return expert_of_rows(ends, rows)[:, None] == torch.arange(ends.shape[0], device=ends.device)


# -- x[rows of e] @ w[e] ----------------------------------------------------------------------------------------------
def _dense(x: Tensor, w: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """Every expert on every row, then the right one: for transforms, which cannot cut by data."""
    mask = _masks(ends, x.shape[0])
    w = w.transpose(1, 2) if transposed else w
    out = x.new_zeros(x.shape[0], w.shape[2])
    for e in range(w.shape[0]):
        out = torch.where(mask[:, e : e + 1], x @ w[e], out)
    return out


def _product(x: Tensor, w: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    if transformed():
        return _dense(x, w, ends, transposed)
    return kernels.grouped_matmul(x, w, ends, transposed)


# -- x[rows of e]ᵀ @ y[rows of e] -------------------------------------------------------------------------------------
def _dense_dw(x: Tensor, y: Tensor, ends: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`dtype`: of the result, if wider than the operands'."""
    mask = _masks(ends, x.shape[0])
    out = torch.stack([torch.where(mask[:, e : e + 1], x, 0.0).t() @ y for e in range(ends.shape[0])])
    return out if dtype is None else out.to(dtype)


def _product_dw(x: Tensor, y: Tensor, ends: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    if transformed():
        return _dense_dw(x, y, ends, dtype)
    return kernels.grouped_matmul_dw(x, y, ends, x.dtype if dtype is None else dtype)


def _product_fake(x: Tensor, w: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1 if transposed else 2])


def _product_vjp(args: tuple, kwargs: dict, outs: Any, cts: tuple) -> tuple[Tensor | None, ...]:
    x, w, ends = args
    (ct,), transposed = cts, kwargs.get("transposed", False)
    dx = grouped_matmul_p(ct, w, ends, transposed=not transposed)
    dw = grouped_matmul_dw_p(ct, x, ends) if transposed else grouped_matmul_dw_p(x, ct, ends)
    return dx, dw, None


def _product_flops(node: Node) -> int:
    x, w = node.operands()[:2]
    return 2 * x.shape[0] * w.shape[1] * w.shape[2]


def _dw_flops(node: Node) -> int:
    x, y = node.operands()[:2]
    return 2 * x.shape[0] * x.shape[1] * y.shape[1]


def _dw_vjp(args: tuple, kwargs: dict, outs: Any, cts: tuple) -> tuple[Tensor | None, ...]:
    x, y, ends = args
    dx = grouped_matmul_p(y, cts[0], ends, transposed=True)
    return dx, grouped_matmul_p(x, cts[0], ends, transposed=False), None


grouped_matmul_p = Routed(
    "grouped_matmul",
    Eager(_dense, _product_vjp, kernel=_product),
    vjp=_product_vjp,
    flops=_product_flops,
    fake=_product_fake,
)
grouped_matmul_dw_p: Primitive = Routed(
    "grouped_matmul_dw",
    Eager(_dense_dw, _dw_vjp, kernel=_product_dw),
    vjp=_dw_vjp,
    flops=_dw_flops,
    fake=lambda x, y, ends, dtype=None: x.new_empty(ends.shape[0], x.shape[1], y.shape[1], dtype=dtype),
)


# -- x[rows of e] + b[e] ----------------------------------------------------------------------------------------------
def _bias(x: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    e = expert_of_rows(ends, x.shape[0])
    return x + torch.cat([b, b.new_zeros(1, b.shape[1])]).index_select(0, e)


def _bias_vjp(args: tuple, kwargs: dict, outs: Any, cts: tuple) -> tuple[Tensor | None, ...]:
    return cts[0], expert_sums_p(cts[0], args[2]), None


def _sums(x: Tensor, ends: Tensor) -> Tensor:
    e, n = expert_of_rows(ends, x.shape[0]), ends.shape[0]
    return torch.zeros(n + 1, x.shape[1], dtype=wide(x).dtype, device=x.device).index_add(0, e, wide(x))[:n].to(x.dtype)


grouped_bias_p = Routed("grouped_bias", Eager(_bias, _bias_vjp), vjp=_bias_vjp, flops=elements, cheap=True)
expert_sums_p = Routed(
    "expert_sums", _sums, flops=elements, fake=lambda x, ends: x.new_empty(ends.shape[0], x.shape[1])
)


# -- x · weight of the row --------------------------------------------------------------------------------------------
def _scale(x: Tensor, w: Tensor) -> Tensor:
    return (wide(x) * w).to(x.dtype)


def _scale_vjp(args: tuple, kwargs: dict, outs: Any, cts: tuple) -> tuple[Tensor, Tensor]:
    x, w = args
    return scale_rows_p(cts[0], w), row_dot_p(x, cts[0]).to(w.dtype)


def _scale_rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    return rule("r d, r 1 -> r d", shapes, linear=frozenset({0, 1}))


def _dot_rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    return rule("r d, r d -> r 1", shapes, linear=frozenset({0, 1}))


scale_rows_p = Primitive(
    "scale_rows", Eager(_scale, _scale_vjp), vjp=_scale_vjp, rule=_scale_rule, flops=elements, cheap=True
)
row_dot_p: Primitive = Primitive(
    "row_dot", lambda x, y: (wide(x) * wide(y)).sum(-1, keepdim=True), rule=_dot_rule, flops=lambda n: 2 * elements(n)
)


# -- what models call -------------------------------------------------------------------------------------------------
def grouped_matmul(
    rows: Float[Tensor, "rows d"], w: Float[Tensor, "experts d f"], routing: Routing
) -> Float[Tensor, "rows f"]:
    """Each row times its expert's matrix: out[i] = rows[i] @ w[expert of row i]; rows without a slot give 0.

    On a mesh, `w` and the routing must agree on where the experts are. A sharded d makes the result a pending sum.

    >>> from fmeg.ops import dispatch
    >>> rows, routing = dispatch(torch.ones(3, 1), torch.tensor([[1], [0], [1]]), experts=2)
    >>> grouped_matmul(rows, torch.tensor([[[10.0]], [[20.0]]]), routing).flatten().tolist()
    [10.0, 20.0, 20.0, 0.0]
    """
    check_float("grouped_matmul", rows=rows, w=w)
    if rows.dtype != w.dtype:
        raise TypeError(f"grouped_matmul: rows and w must have one dtype, given {rows.dtype} and {w.dtype}; cast one")
    check_shape("grouped_matmul", "rows", rows, (routing.rows, *rows.shape[1:]), "rows of the routing, d")
    check_shape("grouped_matmul", "w", w, (routing.ends.shape[0], rows.shape[1], *w.shape[2:]), "experts, d, f")
    return grouped_matmul_p(rows, w, routing.ends, transposed=False)


def grouped_bias(
    rows: Float[Tensor, "rows f"], b: Float[Tensor, "experts f"], routing: Routing
) -> Float[Tensor, "rows f"]:
    """Each row plus its expert's bias; rows without a slot stay as they are.

    >>> from fmeg.ops import dispatch
    >>> rows, routing = dispatch(torch.zeros(2, 1), torch.tensor([[1], [0]]), experts=2)
    >>> grouped_bias(rows, torch.tensor([[1.0], [2.0]]), routing).flatten().tolist()
    [1.0, 2.0]
    """
    check_float("grouped_bias", rows=rows, b=b)
    check_shape("grouped_bias", "b", b, (routing.ends.shape[0], rows.shape[1]), "experts, f")
    return grouped_bias_p(rows, b, routing.ends)


def scale_rows(rows: Float[Tensor, "rows d"], weights: Float[Tensor, "rows 1"]) -> Float[Tensor, "rows d"]:
    """Rows times their weights (see `dispatch_weights`), computed in float32, in the rows' dtype.

    >>> scale_rows(torch.ones(2, 1), torch.tensor([[0.5], [2.0]])).flatten().tolist()
    [0.5, 2.0]
    """
    check_float("scale_rows", rows=rows, weights=weights)
    check_shape("scale_rows", "weights", weights, (rows.shape[0], 1), "one weight a row")
    return scale_rows_p(rows, weights)
