"""Attention under any mask on CUDA, by Triton: packed segments, queries that lie anywhere among the keys, windows.

Shapes and meaning as in `fmeg.ops.attention`; no matrix of all scores exists. Blocks of queries and keys whose segments
cannot meet are not visited. Equal calls give equal bits. Source of the method: Dao 2023, arXiv:2307.08691.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
WIDEST = 256
FAR = 2**29  # no key is so far from a query


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels are for these operands: in float32 they are right, but slower than the formula."""
    if q.device.type != "cuda" or q.dtype not in HALF or min(q.numel(), k.numel(), v.numel()) == 0:
        return False
    within = max(n * x.shape[2] * x.shape[3] for n, x in ((q.shape[1], q), (k.shape[1], k), (k.shape[1], v)))
    return max(q.shape[3], v.shape[3]) <= WIDEST and within < 2**31


def meeting(a: Int[Tensor, "b s"], b: Int[Tensor, "b t"], rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """For each block of `rows` of a: the first block of `columns` of b that may hold one of its ids, and the block
    after the last; (0, 0) where there is none.

    >>> ids = torch.tensor([[0, 0, 1, 1, 2, 2]])
    >>> [x.tolist() for x in meeting(ids, ids, 2, 3)]
    [[[0, 0, 1]], [[1, 2, 2]]]
    """
    (least_a, most_a), (least_b, most_b) = _ranges(a, rows), _ranges(b, columns)
    meet = (least_a[:, :, None] <= most_b[:, None]) & (least_b[:, None] <= most_a[:, :, None])
    first, n = meet.int().argmax(-1), meet.shape[-1]
    last = n - meet.flip(-1).int().argmax(-1)
    some = meet.any(-1)
    return (first * some).to(torch.int32), (last * some).to(torch.int32)


def alike(a: Int[Tensor, "b s"], b: Int[Tensor, "b t"]) -> tuple[Tensor, Tensor]:
    """Ids of queries and keys in one dtype that holds both, whatever they are: int32, or int64 if either is.

    >>> [x.dtype for x in alike(torch.tensor([[True]]), torch.tensor([[300]], dtype=torch.int16))]
    [torch.int32, torch.int32]
    """
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.int32)
    return a.to(dtype).contiguous(), b.to(dtype).contiguous()


def within(shift: int, window: int) -> tuple[int, int]:
    """Two numbers that mean the same to every pair of a query i and a key j, and whose sums with these stay in int32:
    j ≤ i + shift, j > i + shift - window.

    >>> within(3, 8), within(-(2**40), 8), within(3, 2**31 - 1)
    ((3, 8), (-536870912, 0), (3, 536870915))
    """
    near = max(-FAR, min(shift, FAR))
    return near, near - max(-FAR, min(shift - window, FAR))


def _ranges(ids: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The least and the largest id of each block."""
    bounds, more = torch.iinfo(ids.dtype), -ids.shape[1] % block
    least, most = (torch.nn.functional.pad(ids, (0, more), value=x) for x in (bounds.max, bounds.min))
    return least.unflatten(1, (-1, block)).amin(-1), most.unflatten(1, (-1, block)).amax(-1)


def _blocks(q: Tensor, v: Tensor, what: str) -> dict[str, int]:
    """Sizes of blocks, and how many warps work on one: "forward", "q" or "kv". As many registers as there are."""
    wide = max(q.shape[3], v.shape[3])
    if q.dtype == torch.float32:
        return _SMALL
    if wide > 128:
        return dict(BM=64, BN=32, num_warps=4, num_stages=2) if what == "forward" else _SMALL
    if what == "forward":
        return dict(BM=128, BN=64, num_warps=8 if wide > 64 else 4, num_stages=3)
    if what == "q":
        return dict(BM=64, BN=64, num_warps=4, num_stages=2)
    return dict(BM=32 if wide > 64 else 64, BN=128, num_warps=8, num_stages=2)


_SMALL = dict(BM=32, BN=32, num_warps=4, num_stages=1)


def _call(
    q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, offset: int, causal: bool, window: int, scale: float
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What all kernels are told, by position after their tensors, and by name."""
    s, h, e, t, kv, f = q.shape[1], q.shape[2], q.shape[3], k.shape[1], k.shape[2], v.shape[3]
    padded = [max(16, 1 << (n - 1).bit_length()) for n in (e, f)]
    named: dict[str, Any] = dict(E=e, F=f, EP=padded[0], FP=padded[1], CAUSAL=causal, WINDOW=window > 0)
    named["PRECISION"] = "ieee" if q.dtype == torch.float32 else "tf32"
    offset, window = (0, min(window, 2**62)) if shift is not None else within(offset, window)
    return (shift, offset, window, scale, s, t, h, h // kv), named


def _segments(
    seg_q: Tensor | None, seg_k: Tensor | None, rows: int, columns: int, turned: bool
) -> tuple[tuple[Any, ...], bool]:
    if seg_q is None or seg_k is None:
        return (None, None, None, None), False
    seg_q, seg_k = alike(seg_q, seg_k)
    bounds = meeting(seg_k, seg_q, columns, rows) if turned else meeting(seg_q, seg_k, rows, columns)
    return (seg_q, seg_k, *bounds), True


def place(q: Tensor, k: Tensor, shift: int | Tensor | None) -> tuple[Tensor | None, int]:
    """`shift` as the kernels take it: a tensor, or a number (None: t - s)."""
    if isinstance(shift, Tensor):
        return shift, 0
    return None, k.shape[1] - q.shape[1] if shift is None else shift


@torch.library.custom_op("fmeg::masked_attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, seg_q: Tensor | None, seg_k: Tensor | None, shift: Tensor | None, offset: int,
    causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(o, lse). Query i lies at key i + `shift`, or i + `offset` if that is None; `window` 0 is none."""
    from fmeg.kernels import _triton_attention as programs

    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    blocks = _blocks(q, v, "forward")
    (b, s, h, _), f = q.shape, v.shape[3]
    o, lse = q.new_empty(b, s, h, f), q.new_empty(b, s, h, dtype=torch.float32)
    segments, packed = _segments(seg_q, seg_k, blocks["BM"], blocks["BN"], False)
    numbers, named = _call(q, k, v, shift, offset, causal, window, scale)
    programs.forward[(-(-s // blocks["BM"]) * b * h,)](
        q, k, v, o, lse, *segments, *numbers, **named, SEGMENTS=packed, **blocks
    )
    return o, lse


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, seg_q: Tensor | None, seg_k: Tensor | None, shift: Tensor | None, offset: int,
    causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("fmeg::masked_attention_backward", mutates_args=())
def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, seg_q: Tensor | None, seg_k: Tensor | None,
    shift: Tensor | None, offset: int, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    from fmeg.kernels import _triton_attention as programs

    q, k, v, o, lse, do = (x.contiguous() for x in (q, k, v, o, lse, do))
    (b, s, h, _), (t, kv), f = q.shape, k.shape[1:3], v.shape[3]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    numbers, named = _call(q, k, v, shift, offset, causal, window, scale)
    delta = torch.empty_like(lse)
    programs.delta[(-(-delta.numel() // 64),)](o, do, delta, delta.numel(), F=f, FP=named["FP"], BM=64)
    for what, kernel, results in (("q", programs.backward_q, (dq,)), ("kv", programs.backward_kv, (dk, dv))):
        blocks = _blocks(q, v, what)
        segments, packed = _segments(seg_q, seg_k, blocks["BM"], blocks["BN"], what == "kv")
        grid = (-(-s // blocks["BM"]) * b * h if what == "q" else -(-t // blocks["BN"]) * b * kv,)
        kernel[grid](q, k, v, do, lse, delta, *results, *segments, *numbers, **named, SEGMENTS=packed, **blocks)
    return dq, dk, dv


@backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, seg_q: Tensor | None, seg_k: Tensor | None,
    shift: Tensor | None, offset: int, causal: bool, window: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
