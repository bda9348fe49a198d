"""The mathematics of attention in plain torch: which keys are visible, the exact sums, and a quick kernel on CPUs.

Shapes: q "b s h e", k "b t k e", v "b t k f", o "b s h f", lse "b s h". Query head i reads kv head i // (h / k).
`shift` is the key position of query 0: query i sits at key position i + shift; None means t - s (bottom-right).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmeg.ops._common import transformed, wide
from fmeg.program import recorder

Shift = int | Tensor | None
Grads = tuple[Tensor, Tensor, Tensor]


class Masking(NamedTuple):
    """What decides which keys a query sees, and the scale of products."""

    segments: Tensor | None
    kv_segments: Tensor | None
    shift: Shift
    causal: bool
    window: int | None
    scale: float


def visible(q: Tensor, k: Tensor, m: Masking) -> Tensor | None:
    """The mask "1|b s t", true where a query sees a key; None when it sees all."""
    s, t = q.shape[1], k.shape[1]
    mask = None
    if m.causal:
        i = torch.arange(s, device=q.device)[:, None] + (t - s if m.shift is None else m.shift)
        j = torch.arange(t, device=q.device)[None, :]
        mask = j <= i
        if m.window is not None:
            mask = mask & (j > i - m.window)
        mask = mask[None]
    if m.segments is not None and m.kv_segments is not None:
        same = m.segments[:, :, None] == m.kv_segments[:, None, :]
        mask = same if mask is None else mask & same
    return mask


def scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Scaled products "b k g s t", -inf where masked."""
    x = torch.einsum("bskge,btke->bkgst", _grouped(q * scale, k.shape[2]), k)
    return x if mask is None else x.masked_fill(~mask[:, None, None], -torch.inf)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    return x.unflatten(2, (kv_heads, -1))


def _by_row(x: Tensor) -> Tensor:
    """ "b k g s" -> "b s h"."""
    return x.permute(0, 3, 1, 2).flatten(2)


def _by_head(x: Tensor, kv_heads: int) -> Tensor:
    """ "b s h" -> "b k g s"."""
    return _grouped(x, kv_heads).permute(0, 2, 3, 1)


def math_forward(q: Tensor, k: Tensor, v: Tensor, m: Masking) -> tuple[Tensor, Tensor]:
    """(o, lse) by the definition; rows that see nothing give 0 and -inf. lse carries no gradient."""
    mask = visible(q, k, m)
    x = scores(wide(q), wide(k), mask, m.scale)
    lse = torch.logsumexp(x.detach(), dim=-1)
    if mask is None:
        p = torch.softmax(x, dim=-1)
    else:
        empty = ~mask.any(-1, keepdim=True)[:, None, None]
        p = torch.softmax(x.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    o = torch.einsum("bkgst,btkf->bskgf", p, wide(v)).flatten(2, 3)
    return o.to(q.dtype), _by_row(lse)


def math_backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, m: Masking) -> Grads:
    """(dq, dk, dv). With p = exp(x - lse) and D = Σ_f o do: dx = p (do vᵀ - D), whatever part of the keys is given."""
    kv_heads = k.shape[2]
    mask = visible(q, k, m)
    wq, wk, wv, wdo = wide(q) * m.scale, wide(k), wide(v), _grouped(wide(do), kv_heads)
    x = scores(wq, wk, mask, 1.0)
    p = torch.exp(x - _by_head(torch.where(lse == -torch.inf, 0.0, lse), kv_heads)[..., None])
    dv = torch.einsum("bkgst,bskgf->btkf", p, wdo)
    delta = (wide(o) * wide(do)).sum(-1)
    dp = torch.einsum("bskgf,btkf->bkgst", wdo, wv)
    dx = p * (dp - _by_head(delta, kv_heads)[..., None])
    dq = torch.einsum("bkgst,btke->bskge", dx, wk).flatten(2, 3) * m.scale
    dk = torch.einsum("bkgst,bskge->btke", dx, _grouped(wq, kv_heads))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def fits_cpu_kernel(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether torch's flash kernel for CPUs may stand in: not for float64, which is exact, nor under a transform."""
    return (
        q.device.type == "cpu"
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and min(q.numel(), k.numel()) > 0
        and not transformed()
        and recorder.active() is None
    )


def _cpu_arguments(q: Tensor, k: Tensor, m: Masking) -> tuple[dict[str, Any], Tensor | None]:
    """The kernel's mask arguments, and the rows "b|1 s 1" that see nothing (None when there can be none)."""
    square = q.shape[1] == k.shape[1] and (m.shift is None or (isinstance(m.shift, int) and m.shift == 0))
    if m.segments is None and m.window is None and (square or not m.causal):
        return {"is_causal": m.causal}, None
    mask = visible(q, k, m)
    assert mask is not None
    bias = torch.zeros((), dtype=q.dtype).masked_fill(~mask[:, None], -torch.inf)
    return {"is_causal": False, "attn_mask": bias}, ~mask.any(-1, keepdim=True)


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, m: Masking) -> tuple[Tensor, Tensor]:
    """As `math_forward`, by torch's flash kernel for CPUs."""
    masks, empty = _cpu_arguments(q, k, m)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    o, lse = kernel(*(x.transpose(1, 2) for x in (q, k, v)), scale=m.scale, **masks)
    o, lse = o.transpose(1, 2), lse.transpose(1, 2)
    if empty is not None:
        o, lse = o.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -torch.inf)
    return o, lse


def cpu_backward(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, m: Masking) -> Grads:
    """As `math_backward`, by torch's flash kernel for CPUs."""
    masks, _ = _cpu_arguments(q, k, m)
    is_causal = masks.pop("is_causal")
    lse = torch.where(lse == -torch.inf, 0.0, lse)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    heads_first = [x.transpose(1, 2) for x in (do, q, k, v, o, lse)]
    dq, dk, dv = kernel(*heads_first, 0.0, is_causal, scale=m.scale, **masks)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
