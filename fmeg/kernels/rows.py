"""Operations in one pass over memory: by Triton losses with their gradient, norms' gradients and rotations; by cuBLAS
products that are added to what is there.

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


def _block(width: int) -> int:
    """Columns of a row that a loss's program takes at a time; 256 a warp."""
    return max(128, min(8192, _power(width) // 4))


@torch.library.custom_op("fmeg::cross_entropy_into", mutates_args=("logits",))
def cross_entropy_into(
    logits: Tensor, targets: Tensor, ct: Tensor, vocab: int, z_loss: float, label_smoothing: float
) -> Tensor:
    """The loss of each row (float32, shape of targets); its gradient, times `ct`, replaces the logits.

    logits "… v" contiguous, targets and ct "…"; the loss is that of `fmeg.ops.cross_entropy`.
    """
    width = logits.shape[-1]
    loss = torch.empty(targets.shape, dtype=torch.float32, device=logits.device)
    block = _block(width)
    _programs().cross_entropy[(targets.numel(),)](
        logits, targets.contiguous(), ct.contiguous(), loss, z_loss, label_smoothing, width, vocab, BLOCK=block,
        SMOOTH=label_smoothing != 0.0, num_warps=max(1, block // 256),
    )  # fmt: skip
    return loss


@cross_entropy_into.register_fake
def _(logits: Tensor, targets: Tensor, ct: Tensor, vocab: int, z_loss: float, label_smoothing: float) -> Tensor:
    return torch.empty(targets.shape, dtype=torch.float32, device=logits.device)


@torch.library.custom_op("fmeg::cross_entropy_part", mutates_args=())
def cross_entropy_part(
    logits: Tensor, targets: Tensor, offset: Tensor, vocab: int, smooth: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(m, Σ exp(x - m), target's logit, Σ x) of each row's real classes, of which those here begin at `offset`: as in
    `fmeg.ops.cross_entropy`, float32, of the shape of targets, in one read; the last is empty unless `smooth`.

    logits "… v" contiguous, targets "…", offset 0-d int64; -1e30 and less count as -inf.
    """
    width = logits.shape[-1]
    block = _block(width)
    top, sumexp, picked, total = _of_parts(logits, targets, smooth)
    _programs().cross_entropy_part[(targets.numel(),)](
        logits, targets.contiguous(), offset, top, sumexp, picked, total, vocab, width, BLOCK=block, SMOOTH=smooth,
        num_warps=max(1, block // 256),
    )  # fmt: skip
    return top, sumexp, picked, total


@cross_entropy_part.register_fake
def _(
    logits: Tensor, targets: Tensor, offset: Tensor, vocab: int, smooth: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _of_parts(logits, targets, smooth)


def _of_parts(logits: Tensor, targets: Tensor, smooth: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c = (torch.empty(targets.shape, dtype=torch.float32, device=logits.device) for _ in range(3))
    return a, b, c, torch.empty(targets.shape if smooth else (0,), dtype=torch.float32, device=logits.device)


@torch.library.custom_op("fmeg::cross_entropy_gradient_into", mutates_args=("logits",))
def cross_entropy_gradient_into(
    logits: Tensor, targets: Tensor, lse: Tensor, ct: Tensor, offset: Tensor,
    vocab: int, z_loss: float, label_smoothing: float,
) -> None:  # fmt: skip
    """The gradient of each row's loss times `ct` in place of the logits, whose classes begin at `offset`.

    logits "… v" contiguous, targets, lse (float32) and ct "…", offset 0-d int64; as in `fmeg.ops.cross_entropy`.
    """
    width = logits.shape[-1]
    block = min(2048, _block(width))  # more of them at once: nothing is summed
    _programs().cross_entropy_gradient[(targets.numel(),)](
        logits, targets.contiguous(), lse.contiguous(), ct.contiguous(), offset, z_loss, label_smoothing, vocab, width,
        BLOCK=block, num_warps=max(1, block // 256),
    )  # fmt: skip


@cross_entropy_gradient_into.register_fake
def _(
    logits: Tensor, targets: Tensor, lse: Tensor, ct: Tensor, offset: Tensor,
    vocab: int, z_loss: float, label_smoothing: float,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("fmeg::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    x: Tensor,
    w: Tensor | None,
    ct: Tensor,
    residual: Tensor | None,
    eps: float,
    ct2: Tensor | None = None,
    ct3: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx, dw) as in `fmeg.ops.rms_norm`, dx plus `residual` where given; dw is empty without w. The cotangent is the
    sum of those given."""
    width = x.shape[-1]
    x, ct = x.contiguous(), ct.contiguous()
    w, ct2, ct3, residual = (v.contiguous() if v is not None else None for v in (w, ct2, ct3, residual))
    rows = x.numel() // width
    block = _power(width)
    warps = max(1, min(16, block // 512))
    programs = min(rows, 16 // warps * _processors(x.device))
    dx = torch.empty_like(x)
    parts = torch.empty((programs, width) if w is not None else (0,), dtype=torch.float32, device=x.device)
    _programs().rms_norm_backward[(programs,)](
        x, w, ct, ct2, ct3, residual, dx, parts, rows, eps, width,
        EACH=-(-rows // programs), BLOCK=block, WEIGHTED=w is not None, ADDED=residual is not None,
        num_warps=warps,
    )  # fmt: skip
    return dx, parts.sum(0).to(w.dtype) if w is not None else parts


@rms_norm_backward.register_fake
def _(
    x: Tensor,
    w: Tensor | None,
    ct: Tensor,
    residual: Tensor | None,
    eps: float,
    ct2: Tensor | None = None,
    ct3: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.empty_like(w) if w is not None else x.new_empty(
        0
    )


@torch.library.custom_op("fmeg::rope", mutates_args=())
def rope(x: Tensor, table: Tensor, inverse: bool) -> Tensor:
    """As `fmeg.ops.rope` on whole heads, half-split; x "b s h e" of any strides but 1 in e, table "(b) s e/2 2"."""
    b, s, heads, e = x.shape
    if x.stride(3) != 1 or x.stride(0) != s * x.stride(1):
        x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    table = table.contiguous()
    _programs().rope[(b * s,)](
        x, table, out, b * s, table.numel() // e, heads, x.stride(1), x.stride(2), -1.0 if inverse else 1.0,
        HALF=e // 2, HEADS=_power(heads), PAIRS=_power(e // 2), num_warps=4,
    )  # fmt: skip
    return out


@rope.register_fake
def _(x: Tensor, table: Tensor, inverse: bool) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def as_matrices(a: Tensor, b: Tensor, rows: int, columns: int, transposed: list[bool]) -> tuple[Tensor, Tensor]:
    """Operands of any shape as "rows k" and "k columns", each given so or as its transpose."""
    depth = a.numel() // rows
    left = a.reshape(depth, rows).t() if transposed[0] else a.reshape(rows, depth)
    right = b.reshape(columns, depth).t() if transposed[1] else b.reshape(depth, columns)
    return left, right


@torch.library.custom_op("fmeg::mm_into", mutates_args=("out",))
def mm_into(out: Tensor, a: Tensor, b: Tensor, rows: int, columns: int, transposed: list[bool], add: bool) -> None:
    """out = a b, or out + a b, summed in float32: a holds a matrix "rows k", b "k columns", or their transposes.

    `out` of float32, contiguous, of rows·columns elements. Everything is seen as a matrix in here: a compiler takes a
    view's place in memory for fixed, and computes anew what it sees through two views.
    """
    left, right = as_matrices(a, b, rows, columns, transposed)
    matrix = out.view(rows, columns)
    if add:
        torch.ops.aten.addmm.dtype_out(matrix, left, right, out.dtype, out=matrix)
    else:
        torch.ops.aten.mm.dtype_out(left, right, out.dtype, out=matrix)


@mm_into.register_fake
def _(out: Tensor, a: Tensor, b: Tensor, rows: int, columns: int, transposed: list[bool], add: bool) -> None:
    return None


@torch.library.custom_op("fmeg::mm_add", mutates_args=("c",))
def mm_add(c: Tensor, a: Tensor, b: Tensor, rows: int, columns: int, transposed: list[bool]) -> None:
    """c + a b into c, rounded once; operands as in `mm_into`, c contiguous, of rows·columns elements."""
    left, right = as_matrices(a, b, rows, columns, transposed)
    c.view(rows, columns).addmm_(left, right)


@mm_add.register_fake
def _(c: Tensor, a: Tensor, b: Tensor, rows: int, columns: int, transposed: list[bool]) -> None:
    return None
