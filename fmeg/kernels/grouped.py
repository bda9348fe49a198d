"""Products of rows sorted by expert on CUDA: torch's grouped product where its alignment rules allow, else Triton.

Shapes as in `fmeg.ops.grouped`: x "n d", w "e d f", ends "e" int32. Rows from ends[-1] on come out as 0, and so does
the gradient of an expert without rows: nothing that was not written is ever returned.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def torch_takes(x: Tensor, *others: Tensor) -> bool:
    """Whether `torch._grouped_mm` computes it: bfloat16 on Hopper or later, every row a multiple of 16 bytes."""
    tensors = (x, *others)
    return (
        hasattr(torch, "_grouped_mm")
        and all(t.dtype == torch.bfloat16 and t.shape[-1] % 8 == 0 and t.data_ptr() % 16 == 0 for t in tensors)
        and all(t.numel() for t in tensors)
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """Each row times its expert's matrix (transposed: times its transpose)."""
    x, w = x.contiguous(), w.contiguous()
    if not torch_takes(x, w):
        from fmeg.kernels import _triton_grouped

        return _triton_grouped.matmul(x, w, ends, transposed)
    out = torch._grouped_mm(x, w.transpose(1, 2) if transposed else w, offs=ends)
    return _zeroed_tail(out, ends)


def grouped_matmul_dw(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """The gradient of each expert's matrix: xᵀ y over its rows."""
    x, y = x.contiguous(), y.contiguous()
    if not torch_takes(x, y):
        from fmeg.kernels import _triton_grouped

        return _triton_grouped.matmul_dw(x, y, ends)
    return _zeroed_empty(torch._grouped_mm(x.t(), y, offs=ends), ends)


def _zeroed_tail(out: Tensor, ends: Tensor) -> Tensor:
    from fmeg.kernels import _triton_grouped

    return _triton_grouped.zero_tail_(out, ends)


def _zeroed_empty(out: Tensor, ends: Tensor) -> Tensor:
    from fmeg.kernels import _triton_grouped

    return _triton_grouped.zero_empty_(out, ends)
