"""TransformerEngine's kernels as plain functions: attention, norms, products and grouped products, and FP8 products.

TransformerEngine (`pip install "fmeg[te]"`) is imported when one of them first runs, never before. Each but the FP8
ones is an operation of torch's under the name `fmeg::te_…`: tracers and compilers see one opaque call. Written for
version 2.20. Source: https://github.com/NVIDIA/TransformerEngine.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fmeg.kernels.rows import as_matrices

HALF = (torch.bfloat16, torch.float16)


@cache
def available() -> bool:
    """Whether TransformerEngine is installed."""
    return find_spec("transformer_engine") is not None


@cache
def _te() -> SimpleNamespace:
    from transformer_engine.pytorch import cpp_extensions as ext
    from transformer_engine.pytorch.constants import TE_DType
    from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend

    tex = import_module("transformer_engine_torch")  # a library that the package has loaded by now
    return SimpleNamespace(tex=tex, ext=ext, dtypes=TE_DType, cudnn=FusedAttnBackend["F16_arbitrary_seqlen"])


# -- attention: q "b s h e", k "b t k e", v "b t k f", o "b s h f", lse "b s h" ----------------------------------------
def _options(q: Tensor, k: Tensor, causal: bool, window: int, scale: float) -> tuple[list[Any], dict[str, Any]]:
    """What both directions are told: lengths and their sums, and how it masks."""
    b, s, t = q.shape[0], q.shape[1], k.shape[1]
    ends = [torch.arange(0, (b + 1) * n, n, dtype=torch.int32, device=q.device) for n in (s, t)]
    if window:
        sides = (window - 1, 0)
    else:
        sides = (-1, 0) if causal else (-1, -1)
    named = dict(
        attn_scale=scale, dropout=0.0, qkv_layout="bshd_bshd_bshd", o_format="bshd", attn_bias_type="no_bias",
        attn_mask_type="causal" if causal else "no_mask", window_size=sides,
    )  # fmt: skip
    return [s, t, *ends], named


@torch.library.custom_op("fmeg::te_attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse): cuDNN's kernel, with a causal mask from the first key on and, unless it is 0, a window."""
    te = _te()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    lengths, named = _options(q, k, causal, window, scale)
    o, saved, *_ = te.ext.fused_attn_fwd(True, *lengths, q, k, v, q.dtype, te.cudnn, **named)
    return o, saved[0].reshape(q.shape[0], q.shape[2], q.shape[1]).transpose(1, 2)


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, scale: float) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    lse = q.new_empty(b, h, s, dtype=torch.float32).transpose(1, 2)
    return q.new_empty(b, s, h, v.shape[3]), lse


@torch.library.custom_op("fmeg::te_attention_backward", mutates_args=())
def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv)."""
    te = _te()
    q, k, v, o, do = (x.contiguous() for x in (q, k, v, o, do))
    lengths, named = _options(q, k, causal, window, scale)
    saved = [lse.transpose(1, 2).contiguous().unsqueeze(-1), torch.zeros(2, dtype=torch.int64, device=q.device)]
    named.update(do_format="bshd", dqkv_layout="bshd_bshd_bshd", deterministic=False)
    dq, dk, dv, *_ = te.ext.fused_attn_bwd(*lengths, q, k, v, o, do, q.dtype, saved, te.cudnn, **named)
    return dq, dk, dv


@attention_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


# -- norms ------------------------------------------------------------------------------------------------------------
@torch.library.custom_op("fmeg::te_rms_norm", mutates_args=())
def rms_norm(x: Tensor, w: Tensor, eps: float) -> Tensor:
    """As `fmeg.ops.rms_norm`; x and w of one dtype."""
    te = _te()
    rows = x.contiguous().view(-1, x.shape[-1])
    return te.tex.rmsnorm_fwd(rows, w, eps, None, None, te.dtypes[x.dtype], 0, False)[0].view(x.shape)


@rms_norm.register_fake
def _(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fmeg::te_rms_norm_backward", mutates_args=())
def rms_norm_backward(x: Tensor, w: Tensor, ct: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """(dx, dw); r, of x's rows and float32, is what x was multiplied by."""
    te = _te()
    rows, dy = (t.contiguous().view(-1, t.shape[-1]) for t in (x, ct))
    dx, dw, *_ = te.tex.rmsnorm_bwd(dy, rows, r.reshape(-1).contiguous(), w, 0, False)
    return dx.view(x.shape), dw


@rms_norm_backward.register_fake
def _(x: Tensor, w: Tensor, ct: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(w)


# -- products ---------------------------------------------------------------------------------------------------------
@torch.library.custom_op("fmeg::te_product", mutates_args=())
def product(a: Tensor, b: Tensor, rows: int, columns: int, transposed: list[bool]) -> Tensor:
    """A product of matrices "rows k" and "k columns" of any shapes, each given so or as its transpose (`as_matrices`).

    The library's own order is the other way round: a layout "XY" computes Y(second) X(first) with T for a transpose.
    """
    left, right = as_matrices(a, b, rows, columns, transposed)
    if transposed[0] and transposed[1]:
        left = left.contiguous()
    first, x = (right.t(), "T") if transposed[1] else (right, "N")
    second, y = (left.t(), "T") if transposed[0] and not transposed[1] else (left, "N")
    return _te().ext.general_gemm(first.contiguous(), second.contiguous(), out_dtype=a.dtype, layout=x + y)[0]


@product.register_fake
def _(a: Tensor, b: Tensor, rows: int, columns: int, transposed: list[bool]) -> Tensor:
    return a.new_empty(rows, columns)


def _parts(ends: Tensor) -> list[int]:
    """Rows of each expert, read by the host."""
    stops = ends.tolist()
    return [b - a for a, b in zip([0, *stops], stops, strict=False)]


@torch.library.custom_op("fmeg::te_grouped", mutates_args=())
def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """As `fmeg.kernels.grouped`: each row times its expert's matrix. The host waits for the sizes: no CUDA graph."""
    sizes, x, w = _parts(ends), x.contiguous(), w.contiguous()
    out = x.new_zeros(x.shape[0], w.shape[1 if transposed else 2])
    used = [e for e, n in enumerate(sizes) if n]
    if used:
        n = [sizes[e] for e in used]
        rows = sum(n)
        _te().ext.general_grouped_gemm(
            [w[e] for e in used], list(x[:rows].split(n)), [out[:rows]], [None] * len(used), x.dtype,
            layout="TN" if transposed else "NN", m_splits=n, single_output=True,
        )  # fmt: skip
    return out


@grouped_matmul.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1 if transposed else 2])


@torch.library.custom_op("fmeg::te_grouped_dw", mutates_args=())
def grouped_matmul_dw(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """xᵀ y over each expert's rows."""
    sizes, x, y = _parts(ends), x.contiguous(), y.contiguous()
    out = x.new_zeros(len(sizes), x.shape[1], y.shape[1])
    used = [e for e, n in enumerate(sizes) if n]
    if used:
        n = [sizes[e] for e in used]
        rows = sum(n)
        _te().ext.general_grouped_gemm(
            list(y[:rows].split(n)), list(x[:rows].split(n)), [out[e] for e in used], [None] * len(used), x.dtype,
            layout="NT", m_splits=n, grad=True,
        )  # fmt: skip
    return out


@grouped_matmul_dw.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


# -- FP8 --------------------------------------------------------------------------------------------------------------
def quantized(x: Tensor, blockwise: int = 0) -> Any:
    """A matrix in E4M3, with one scale (0), one for every 128 of a row (1), or for every 128 x 128 block (2)."""
    _te()
    from transformer_engine.pytorch.constants import DType
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    usage: dict[str, Any] = dict(rowwise=True, columnwise=False)
    if not blockwise:
        return Float8CurrentScalingQuantizer(DType.kFloat8E4M3, x.device, **usage)(x)
    return Float8BlockQuantizer(DType.kFloat8E4M3, block_scaling_dim=blockwise, **usage)(x)


def fp8_product(x: Any, w: Any, dtype: torch.dtype = torch.bfloat16, split: bool = False) -> Tensor:
    """x wᵀ of quantised matrices "m k" and "n k"; `split`: sums in float32 throughout."""
    return _te().ext.general_gemm(w, x, out_dtype=dtype, layout="TN", use_split_accumulator=split)[0]
