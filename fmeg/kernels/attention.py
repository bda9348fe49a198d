"""Attention on CUDA: cuDNN's kernel for causal squares and full rectangles, torch's flash kernel for windows, Triton's
(`masked`) for all else.

Shapes as in `fmeg.ops.attention`: q "b s h e", k "b t k e", v "b t k f", o "b s h f", lse "b s h".
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmeg.kernels import masked

aten = torch.ops.aten
HALF = (torch.bfloat16, torch.float16)


def kernel(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None, shift: object, segments: bool
) -> str | None:
    """Which kernel computes it: "cudnn", "flash", "triton" or None.

    `shift` is the key position of query 0 (None: t - s). cuDNN aligns a causal mask at the first key, so it takes
    squares; flash at the last. Neither knows packed segments. Flash wants one size of heads:
    smaller ones are padded with zeros (multi-head latent attention: 192 for q and k, 128 for v). Under
    `torch.use_deterministic_algorithms` it is flash throughout: cuDNN's gradient of q sums in any order, and two equal
    steps differ in their last bits.
    """
    if not q.dtype == k.dtype == v.dtype:
        return None
    fallback = "triton" if masked.fits(q, k, v) else None
    if q.device.type != "cuda" or q.dtype not in HALF or segments or min(q.numel(), k.numel()) == 0:
        return fallback
    s, t, e, f = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    placed = not causal or shift is None or (isinstance(shift, int) and shift == t - s)
    if e % 8 or f % 8 or max(e, f) > 256 or not placed:
        return fallback
    square = s == t or not causal
    if window is None and square and max(e, f) <= 128 and _hopper(q.device) and not _deterministic():
        return "cudnn"
    return "flash" if s <= t or not causal else fallback


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled()


def _hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o, lse, *_ = aten._scaled_dot_product_cudnn_attention(*heads_first, None, True, 0.0, causal, False, scale=scale)
    return o.transpose(1, 2), lse.reshape(lse.shape[:3]).transpose(1, 2)


def cudnn_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    heads_first = [x.transpose(1, 2) for x in (do, q, k, v, o)]
    stats = lse.transpose(1, 2).unsqueeze(-1)
    seed = lse.new_zeros((), dtype=torch.int64)
    sizes = (q.shape[1], k.shape[1])
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first, stats, seed, seed, None, None, None, *sizes, 0.0, causal, scale=scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


def flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(o, lse)."""
    f = v.shape[3]
    q, k, v = _one_size(q, k, v)
    o, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale, **_window(window)
    )
    return o[..., :f], lse.transpose(1, 2)


def flash_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, window: int | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    seed = lse.new_zeros(2, dtype=torch.uint64)
    stats = lse.transpose(1, 2).contiguous()
    e, f = q.shape[3], v.shape[3]
    q, k, v, o, do = _one_size(q, k, v, o, do)
    dq, dk, dv = aten._flash_attention_backward(
        do, q, k, v, o, stats, None, None, q.shape[1], k.shape[1], 0.0, causal, seed, seed, scale=scale,
        **_window(window),
    )  # fmt: skip
    return dq[..., :e], dk[..., :e], dv[..., :f]


def _one_size(*xs: Tensor) -> list[Tensor]:
    """Heads padded with zeros to the largest."""
    n = max(x.shape[3] for x in xs)
    return [x if x.shape[3] == n else torch.nn.functional.pad(x, (0, n - x.shape[3])) for x in xs]


def _window(window: int | None) -> dict[str, int]:
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
