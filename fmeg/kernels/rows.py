"""Row-wise operations in one pass over memory, by Triton: losses with their gradient, and the gradient of RMS norms.

Each is an operation of torch's under the name `fmeg::…`, so that tracers and compilers see one opaque call.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

WIDEST = 16384  # elements of a row that a norm's program holds


@cache
def available() -> bool:
    """Whether Triton can be imported."""
    return find_spec("triton") is not None


def fits(x: Tensor, width: int = 0) -> bool:
    """Whether a kernel here takes rows like x's, of at most `WIDEST` where they are held whole."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and x.numel() > 0 and width <= WIDEST and available()


@cache
def _programs() -> Any:
    from fmeg.kernels import _triton_rows

    return _triton_rows


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@torch.library.custom_op("fmeg::cross_entropy_into", mutates_args=("logits",))
def cross_entropy_into(
    logits: Tensor, targets: Tensor, ct: Tensor, vocab: int, z_loss: float, label_smoothing: float
) -> Tensor:
    """The loss of each row (float32, shape of targets); its gradient, times `ct`, replaces the logits.

    logits "… v" contiguous, targets and ct "…"; the loss is that of `fmeg.ops.cross_entropy`.
    """
    width = logits.shape[-1]
    loss = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    block = min(8192, _power(width))
    _programs().cross_entropy[(targets.numel(),)](
        logits, targets.contiguous(), ct.contiguous(), loss, z_loss, label_smoothing, width, vocab, BLOCK=block,
        num_warps=16 if block >= 4096 else 4,
    )  # fmt: skip
    return loss


@cross_entropy_into.register_fake
def _(logits: Tensor, targets: Tensor, ct: Tensor, vocab: int, z_loss: float, label_smoothing: float) -> Tensor:
    return torch.empty(targets.shape, dtype=torch.float32, device=logits.device)


@torch.library.custom_op("fmeg::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    x: Tensor, w: Tensor | None, ct: Tensor, residual: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(dx, dw) as in `fmeg.ops.rms_norm`, dx plus `residual` where given; dw is empty without w."""
    width = x.shape[-1]
    x, ct = x.contiguous(), ct.contiguous()
    rows = x.numel() // width
    programs = min(rows, 4 * _processors(x.device))
    dx = torch.empty_like(x)
    parts = torch.empty((programs, width) if w is not None else (0,), dtype=torch.float32, device=x.device)
    block = _power(width)
    _programs().rms_norm_backward[(programs,)](
        x, w, ct, residual.contiguous() if residual is not None else None, dx, parts, rows, eps, width,
        EACH=-(-rows // programs), BLOCK=block, WEIGHTED=w is not None, ADDED=residual is not None, num_warps=max(1, min(16, block // 256)),
    )  # fmt: skip
    return dx, parts.sum(0).to(w.dtype) if w is not None else parts


@rms_norm_backward.register_fake
def _(x: Tensor, w: Tensor | None, ct: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(w) if w is not None else x.new_empty(
        0
    )


@torch.library.custom_op("fmeg::mm_into", mutates_args=("out",))
def mm_into(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    """out = a b, or out + a b, summed in float32; a "m k", b "k n", out of float32 and m·n elements, contiguous.

    `out` is seen as a matrix in here: a compiled caller would take a view's place in memory for fixed.
    """
    matrix = out.view(a.shape[0], b.shape[1])
    if add:
        torch.ops.aten.addmm.dtype_out(matrix, a, b, out.dtype, out=matrix)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=matrix)


@mm_into.register_fake
def _(out: Tensor, a: Tensor, b: Tensor, add: bool) -> None:
    return None
