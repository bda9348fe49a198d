"""What else a layer of experts does, in one pass over memory each, by Triton on CUDA: the router's top-k, sorting slots
by expert, rows from tokens and back, and the gated activation with its gradient.

Each is an operation of torch's under the name `fmeg::…`. They take CUDA tensors up to float32 (`grouped.fits`): what
they mean, and what runs elsewhere, is in `fmeg.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.library.custom_op("fmeg::top_k", mutates_args=())
def top_k(x: Tensor, k: int) -> Tensor:
    """As `fmeg.ops.router.top_k`."""
    from fmeg.kernels import _triton_experts

    return _triton_experts.top_k(x, k)


@top_k.register_fake
def _(x: Tensor, k: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], k), dtype=torch.int64)


@torch.library.custom_op("fmeg::sort_slots", mutates_args=())
def sort_slots(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `fmeg.ops.routing.sort_slots`: a counting sort, in two passes over the slots."""
    from fmeg.kernels import _triton_experts

    return _triton_experts.sort_slots(ids.contiguous(), experts)


@sort_slots.register_fake
def _(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(ids), torch.empty_like(ids), ids.new_empty(experts)


@torch.library.custom_op("fmeg::pack_rows", mutates_args=())
def pack(x: Tensor, order: Tensor, total: Tensor | None, k: int, rows: int | None) -> Tensor:
    """As `fmeg.ops.pack.pack`. Tokens are flattened in here: a compiler may compute twice what it sees through a
    view."""
    from fmeg.kernels import _triton_pack

    return _triton_pack.pack(x.flatten(0, -2), order, total, k, rows)


@pack.register_fake
def _(x: Tensor, order: Tensor, total: Tensor | None, k: int, rows: int | None) -> Tensor:
    return x.new_empty(order.shape[0] if rows is None else rows, x.shape[-1])


@torch.library.custom_op("fmeg::weigh_rows", mutates_args=())
def weigh(rows: Tensor, inverse: Tensor, total: Tensor | None, weights: Tensor | None, k: int) -> Tensor:
    """As `fmeg.ops.pack.weigh`; without weights as `unpack`."""
    from fmeg.kernels import _triton_pack

    return _triton_pack.weigh(rows, inverse, total, weights, k)


@weigh.register_fake
def _(rows: Tensor, inverse: Tensor, total: Tensor | None, weights: Tensor | None, k: int) -> Tensor:
    return rows.new_empty(inverse.shape[0] // k, rows.shape[1])


@torch.library.custom_op("fmeg::weigh_rows_bwd", mutates_args=())
def weigh_bwd(
    ct: Tensor, rows: Tensor, order: Tensor, total: Tensor | None, weights: Tensor, out_rows: int | None
) -> tuple[Tensor, Tensor]:
    """As `fmeg.ops.pack.weigh_bwd`."""
    from fmeg.kernels import _triton_pack

    return _triton_pack.weigh_bwd(ct, rows, order, total, weights, out_rows)


@weigh_bwd.register_fake
def _(
    ct: Tensor, rows: Tensor, order: Tensor, total: Tensor | None, weights: Tensor, out_rows: int | None
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape[0] if out_rows is None else out_rows, rows.shape[1]), weights.new_empty(
        weights.shape
    )


@torch.library.custom_op("fmeg::gated_rows", mutates_args=())
def gated(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    """silu(gate) · up · weights: "n f", "n f", "n 1"; rows of gate and up may lie apart."""
    from fmeg.kernels import _triton_experts

    return _triton_experts.gated(_dense(gate), _dense(up), None if weights is None else weights.contiguous())


@gated.register_fake
def _(gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("fmeg::gated_rows_bwd", mutates_args=())
def gated_bwd(gate: Tensor, up: Tensor, weights: Tensor | None, ct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(the result again, cotangents of gate and up beside one another "n 2f", those of the weights "n 1", float32)."""
    from fmeg.kernels import _triton_experts

    w = None if weights is None else weights.contiguous()
    return _triton_experts.gated_bwd(_dense(gate), _dense(up), w, ct.contiguous())


@gated_bwd.register_fake
def _(gate: Tensor, up: Tensor, weights: Tensor | None, ct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, f = gate.shape
    dweights = gate.new_empty((rows, 1) if weights is not None else (0,), dtype=torch.float32)
    return gate.new_empty(rows, f), gate.new_empty(rows, 2 * f), dweights


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()
