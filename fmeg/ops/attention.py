"""Attention, with grouped heads, causal order, sliding windows and packed segments."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg.kernels import attention as kernels
from fmeg.kernels import masked
from fmeg.ops import attention_cp
from fmeg.ops._common import check_float, check_shape, differentiated, transformed
from fmeg.ops._eager import Eager
from fmeg.ops.attention_math import (
    Grads,
    Masking,
    cpu_backward,
    cpu_forward,
    fits_cpu_kernel,
    math_backward,
    math_forward,
)
from fmeg.program.ir import Node, Value
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule


def _masking(masks: tuple, options: dict[str, Any]) -> Masking:
    """From a node's operands after the tensors, () or (segments, kv_segments) or (…, …, shift), and its options."""
    return Masking(*(*masks, None, None, None)[:3], **options)


def _plain(q: Tensor, k: Tensor, v: Tensor, *masks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return math_forward(q, k, v, _masking(masks, options))


def _device_kernel(q: Tensor, k: Tensor, v: Tensor, m: Masking) -> str | None:
    """The CUDA kernel that computes it, if there is one."""
    if transformed():
        return None
    return kernels.kernel(q, k, v, causal=m.causal, window=m.window, shift=m.shift, segments=m.segments is not None)


def _kernel(q: Tensor, k: Tensor, v: Tensor, *masks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    m = _masking(masks, options)
    found = _device_kernel(q, k, v, m)
    if found == "cudnn":
        return kernels.cudnn_forward(q, k, v, m.causal, m.scale)
    if found == "flash":
        return kernels.flash_forward(q, k, v, m.causal, m.window, m.scale)
    if found == "triton":
        at = masked.place(q, k, m.shift)
        return masked.forward(q, k, v, m.segments, m.kv_segments, *at, m.causal, m.window or 0, m.scale)
    run = cpu_forward if fits_cpu_kernel(q, k, v) else math_forward
    return run(q, k, v, m)


def _reference_bwd(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, *masks: Any, **options: Any
) -> Grads:
    m = _masking(masks, options)
    if differentiated(q, k, v, o, lse, do):
        return math_backward(q, k, v, o, lse, do, m)
    found = _device_kernel(q, k, v, m)
    if found == "cudnn":
        return kernels.cudnn_backward(q, k, v, o, lse, do, m.causal, m.scale)
    if found == "flash":
        return kernels.flash_backward(q, k, v, o, lse, do, m.causal, m.window, m.scale)
    if found == "triton":
        at = masked.place(q, k, m.shift)
        return masked.backward(q, k, v, o, lse, do, m.segments, m.kv_segments, *at, m.causal, m.window or 0, m.scale)
    run = cpu_backward if fits_cpu_kernel(q, k, v) else math_backward
    return run(q, k, v, o, lse, do, m)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor | None, ...]:
    q, k, v, *masks = args
    o, lse = outs
    if cts[1] is not None:
        raise NotImplementedError("attention: the log-sum-exp has no gradient; only the output does")
    grads = attention_bwd_p(q, k, v, o, lse, cts[0], *masks, **kwargs)
    return *grads, *(None for m in masks if isinstance(m, Tensor))


def _fake(q: Tensor, k: Tensor, v: Tensor, *masks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, s, h, dtype=lse_dtype)


def _fake_bwd(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Grads:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


_MASKS = {1: ["b s", "b t"], 0: []}
_ULYSSES = ("attention", "ulysses", {"s": "h", "t": "k"})
_TIED = (("s", "t"), ("h", "k"))


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    segments = _MASKS[len(shapes) > 3]
    text = ", ".join(["b s h e", "b t k e", "b t k f", *segments]) + " -> b s h f, b s h"
    return rule(
        text,
        shapes,
        whole=frozenset("ef"),
        resolved=frozenset("tk"),
        tied=_TIED,
        exchange=_ULYSSES,
        give_back=frozenset({0}),
        local=attention_cp.forward,
    )


def _rule_bwd(node: Node) -> Rule:
    """dk and dv stay pending over the axes of s and of h that do not shard them."""
    shapes = [v.shape for v in node.operands()]
    segments = _MASKS[len(shapes) > 6]
    ins = ["b s h e", "b t k e", "b t k f", "b s h f", "b s h", "b s h f", *segments]
    text = ", ".join(ins) + " -> b s h e, b t k e, b t k f"
    return rule(
        text,
        shapes,
        whole=frozenset("ef"),
        resolved=frozenset("tk"),
        tied=_TIED,
        exchange=_ULYSSES,
        linear=frozenset({5}),
        local=attention_cp.backward,
    )


def visible_pairs(node: Node) -> int:
    """How many (query, key) pairs a head computes: those that order and window allow; segments are not known."""
    (b, s, *_), t = node.args[0].shape, node.args[1].shape[1]
    if not node.kwargs["causal"]:
        return b * s * t
    shifts = [a for a in node.args[3:] if isinstance(a, int)]
    unknown = [a for a in node.args[3:] if isinstance(a, Value) and a.ndim == 0]
    if unknown:
        return b * s * t // 2
    shift, window = (shifts or [t - s])[0], node.kwargs["window"]
    last = [min(i + shift, t - 1) for i in range(s)]
    first = [max(0, i + shift - window + 1) if window else 0 for i in range(s)]
    return b * sum(max(0, hi - lo + 1) for lo, hi in zip(first, last, strict=True))


def _flops(node: Node) -> int:
    """q kᵀ and p v: two products."""
    q, v = node.args[0].shape, node.args[2].shape
    return 2 * visible_pairs(node) * q[2] * (q[3] + v[3])


def _flops_bwd(node: Node) -> int:
    """q kᵀ again, and dq, dk of e; dp, dv of f: five products."""
    q, v = node.args[0].shape, node.args[2].shape
    return 2 * visible_pairs(node) * q[2] * (3 * q[3] + 2 * v[3])


attention_p = Primitive(
    "attention", Eager(_plain, _vjp, _kernel, saves=(0, 1)), vjp=_vjp, rule=_rule, flops=_flops, fake=_fake
)
attention_bwd_p = Primitive("attention_bwd", _reference_bwd, rule=_rule_bwd, flops=_flops_bwd, fake=_fake_bwd)


def attention(
    q: Float[Tensor, "b s h e"],
    k: Float[Tensor, "b t k e"],
    v: Float[Tensor, "b t k f"],
    *,
    causal: bool = True,
    window: int | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    kv_segments: Int[Tensor, "b t"] | None = None,
    scale: float | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    gate: Float[Tensor, "b s h f"] | None = None,
) -> Float[Tensor, "b s h f"]:
    """Softmax attention.

        out[i] = Σ_j softmax_j(scale · q_i · k_j) v_j        over the keys j that query i sees

    q, k, v     heads h a multiple of kv heads k; head i reads kv head i // (h / k) (grouped queries)
    causal      key j is seen if j ≤ i + t - s: the last query sees all keys (bottom-right, as when decoding)
    window      of w: only the last w of those, i - w < j (Mistral); needs causal
    segments    packed documents: a query sees only keys of its own segment. `kv_segments` is that of the keys, by
                default the same
    scale       by default 1/sqrt(e)
    sinks       a logit a head of one more key, of value 0: the weights of the others then sum to less than one
                (gpt-oss)
    gate        the result is multiplied by sigmoid(gate) (Qwen3-Next)

    A query that sees nothing gives 0 (and no gradient). Products are summed in float32 (float64 for float64) and the
    result has q's dtype. On a mesh, heads may be sharded (kv heads by the same axes, by a prefix of them, or not at
    all), and so may both sequences, by one tuple of axes: `Layout(attention=...)` then chooses "all_gather" of keys and
    values, "ring", or "ulysses". Sources: Vaswani et al. 2017, arXiv:1706.03762; Ainslie et al. 2023,
    arXiv:2305.13245 (groups); Liu et al. 2023, arXiv:2310.01889 (ring); Jacobs et al. 2023, arXiv:2309.14509 (ulysses);
    Xiao et al. 2023, arXiv:2309.17453 (sinks); Qiu et al. 2025, arXiv:2505.06708 (gate).

    >>> q, k, v = torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 2, 8), torch.arange(32.0).reshape(1, 2, 2, 8)
    >>> attention(q, k, v)[0, :, 0, 0]      # the mean of the values seen so far
    tensor([0., 8.])
    """
    check_float("attention", q=q, k=k, v=v, sinks=sinks, gate=gate)
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"attention: q, k, v must be 'b s h e', 'b t k e', 'b t k f', given {[tuple(x.shape) for x in (q, k, v)]}"
        )
    b, s, h, e = q.shape
    t, kv_heads = k.shape[1:3]
    check_shape("attention", "k", k, (b, t, kv_heads, e), "b and e of q")
    check_shape("attention", "v", v, (b, t, kv_heads, v.shape[-1]), "b, t and k of k")
    if h % kv_heads:
        raise ValueError(f"attention: q's heads must be a multiple of k's, given {h} and {kv_heads}")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"attention: a window must be at least 1 and causal, given window={window}, causal={causal}")
    if segments is None and kv_segments is not None:
        raise ValueError("attention: kv_segments are given, segments are not; give both")
    if segments is not None:
        kv_segments = segments if kv_segments is None else kv_segments
        for name, ids in (("segments", segments), ("kv_segments", kv_segments)):
            if ids.dtype.is_floating_point or ids.dtype.is_complex:
                raise TypeError(f"attention: {name} must be integers, given {ids.dtype}; convert them with .long()")
        check_shape("attention", "segments", segments, (b, s), "b and s of q")
        check_shape(
            "attention", "kv_segments", kv_segments, (b, t), "b and t of k; give it when it differs from segments"
        )
    if sinks is not None:
        check_shape("attention", "sinks", sinks, (h,), "h of q")
    if gate is not None:
        check_shape("attention", "gate", gate, (b, s, h, v.shape[-1]), "b, s, h of q and f of v")
    scale = e**-0.5 if scale is None else float(scale)
    masks = () if segments is None else (segments, kv_segments)
    options = dict(causal=causal, window=window, scale=scale)
    if sinks is None:
        o = attention_p(q, k, v, *masks, **options)[0]
    else:
        from fmeg.ops.attention_sinks import attention_sinks_p

        o = attention_sinks_p(q, k, v, sinks, *masks, **options)[0]
    return o if gate is None else o * torch.sigmoid(gate)
