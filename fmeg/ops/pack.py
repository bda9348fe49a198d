"""Rows sorted by expert, made from one rank's tokens and added up again: what `dispatch` and `combine` do on a rank."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg.kernels import experts
from fmeg.kernels.grouped import fits
from fmeg.ops._common import differentiated, wide
from fmeg.program.primitive import Primitive


def pack(
    x: Float[Tensor, "*t d"], order: Int[Tensor, "s"], total: Tensor | None, k: int, rows: int | None = None
) -> Tensor:
    """rows[i] = x[order[i] // k] for i < total (None: all of `order`), else 0; as many as `order` has unless `rows`.

    >>> pack(torch.tensor([[1.0], [2.0]]), torch.tensor([1, 0]), None, k=1, rows=3).flatten().tolist()
    [2.0, 1.0, 0.0]
    """
    if x.dtype in BYTES:
        return pack(x.view(torch.uint8), order, total, k, rows).view(x.dtype)
    if _fused(x) and x.shape[-1] >= NARROW:
        return experts.pack(x, order, total, k, rows)
    out = x.flatten(0, -2).index_select(0, order // k if k > 1 else order)
    return _tail(out, total, rows)


def _tail(packed: Tensor, total: Tensor | None, rows: int | None) -> Tensor:
    """Rows from `total` on are 0, and there are `rows` of them, if given."""
    if total is not None:
        there = torch.arange(packed.shape[0], device=packed.device) < total
        packed = torch.where(there[:, None], packed, torch.zeros((), dtype=packed.dtype, device=packed.device))
    missing = 0 if rows is None else rows - packed.shape[0]
    return torch.cat([packed, packed.new_zeros(missing, packed.shape[1])]) if missing else packed


BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)  # moved as the bytes that they are
NARROW = 16  # rows of fewer numbers are not worth a kernel's program each: their gather is fused with its neighbours


def _fused(*tensors: Tensor) -> bool:
    """Whether a kernel does it: on CUDA, up to float32, where no derivative is asked for."""
    return fits(*tensors) and not differentiated(*tensors)


def _slots(rows: Tensor, inverse: Tensor, total: Tensor | None) -> Tensor:
    """Each slot's row; 0 where it has none: its place is not below `total`, and may be beyond the rows there are."""
    if total is None:
        return rows.index_select(0, inverse)
    if not rows.shape[0]:
        return rows.new_zeros(inverse.shape[0], *rows.shape[1:])
    out = rows.index_select(0, inverse.clamp(max=rows.shape[0] - 1))
    return torch.where((inverse < total)[:, None], out, 0.0)


def slots(rows: Float[Tensor, "n d"], inverse: Int[Tensor, "s"], total: Tensor | None, k: int) -> Tensor:
    """[t, k, d]: the row of each slot; 0 for those that have none.

    >>> slots(torch.tensor([[2.0], [1.0]]), torch.tensor([1, 0]), torch.tensor(1), k=2).tolist()
    [[[0.0], [2.0]]]
    """
    return _slots(rows, inverse, total).unflatten(0, (inverse.shape[0] // k, k))


def unpack(rows: Float[Tensor, "n d"], inverse: Int[Tensor, "s"], total: Tensor | None, k: int) -> Tensor:
    """out[t] = Σ_j rows[inverse[t·k + j]], slots in their order, those whose row is not below total left out.

    >>> unpack(torch.tensor([[2.0], [1.0]]), torch.tensor([1, 0]), None, k=2).tolist()
    [[3.0]]
    """
    if _fused(rows) and rows.shape[1] >= NARROW:
        return experts.weigh(rows, inverse, total, None, k)
    each = wide(slots(rows, inverse, total, k))
    out = each[:, 0]
    for j in range(1, k):
        out = out + each[:, j]
    return out.to(rows.dtype)


def weigh(rows: Float[Tensor, "n d"], inverse: Int[Tensor, "s"], total: Tensor | None, weights: Tensor) -> Tensor:
    """out[t] = Σ_j weights[t, j] rows[inverse[t·k + j]], in float32, slots in their order."""
    k = weights.shape[1]
    if _fused(rows, weights):
        return experts.weigh(rows, inverse, total, weights, k)
    each = wide(slots(rows, inverse, total, k))
    w = weights.to(each.dtype)
    out = each[:, 0] * w[:, :1]
    for j in range(1, k):
        out = out + each[:, j] * w[:, j : j + 1]
    return out.to(rows.dtype)


def weigh_bwd(
    ct: Float[Tensor, "t d"],
    rows: Float[Tensor, "n d"],
    order: Int[Tensor, "s"],
    inverse: Int[Tensor, "s"],
    total: Tensor | None,
    weights: Float[Tensor, "t k"],
    out_rows: int | None,
) -> tuple[Tensor, Tensor]:
    """Cotangents of `weigh`'s rows (packed, `out_rows` of them, or as many as there are) and weights. `order` may end
    where slots without a row begin."""
    k = weights.shape[1]
    if _fused(ct, rows, weights):
        return experts.weigh_bwd(ct, rows, order, total, weights, out_rows)
    wide_ct = wide(ct)
    dweights = (wide(slots(rows, inverse, total, k)) * wide_ct[:, None]).sum(-1).to(weights.dtype)
    w = weights.reshape(-1, 1).to(wide_ct.dtype).index_select(0, order)
    drows = (wide_ct.index_select(0, order // k) * w).to(rows.dtype)
    if out_rows is None:
        return _tail(drows[: rows.shape[0]], total, rows.shape[0]), dweights
    return _tail(drows, total, out_rows), dweights


pack_p = Primitive("pack_rows", pack, flops=lambda n: 0)
slots_p = Primitive("slot_rows", slots, flops=lambda n: 0)
unpack_p = Primitive("unpack_rows", unpack, flops=lambda n: n.operands()[0].type.numel)
weigh_p = Primitive("weigh_rows", weigh, flops=lambda n: 2 * n.operands()[0].type.numel)
weigh_bwd_p = Primitive("weigh_rows_bwd", weigh_bwd, flops=lambda n: 3 * n.operands()[0].type.numel)
