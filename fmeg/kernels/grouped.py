"""Products of rows sorted by expert. On CUDA torch's grouped product where its alignment rules allow, else Triton; in
float64 and elsewhere one product an expert.

Shapes as in `fmeg.ops.grouped`: x "n d", w "e d f", ends "e" int32. Rows from ends[-1] on come out as 0, and so does
the gradient of an expert without rows: nothing that was not written is ever returned. Each is an operation of torch's
under the name `fmeg::…`: tracers and compilers see one opaque call, which reads no size off the GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def fits(*tensors: Tensor) -> bool:
    """Whether a kernel takes them: on CUDA, up to float32."""
    return all(t.is_cuda and t.dtype != torch.float64 for t in tensors)


def torch_takes(x: Tensor, *others: Tensor) -> bool:
    """Whether `torch._grouped_mm` computes it: bfloat16 on Hopper or later, every row a multiple of 16 bytes."""
    tensors = (x, *others)
    return (
        hasattr(torch, "_grouped_mm")
        and all(t.dtype == torch.bfloat16 and t.data_ptr() % 16 == 0 and _aligned(t) for t in tensors)
        and all(t.numel() for t in tensors)
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
    )


def _aligned(t: Tensor) -> bool:
    return t.shape[-1] % 8 == 0 and all(n % 8 == 0 for n in t.stride()[:-1])


def loop(x: Tensor, w: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """One product an expert; the sizes are read by the host."""
    w = w.transpose(1, 2) if transposed else w
    out, start = x.new_zeros(x.shape[0], w.shape[2]), 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end], w[e], out=out[start:end])
        start = end
    return out


def loop_dw(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """xᵀ y over each expert's rows, likewise."""
    out, start = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1]), 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), y[start:end], out=out[e])
        start = end
    return out


@torch.library.custom_op("fmeg::grouped_matmul", mutates_args=())
def grouped_matmul(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Each row times its expert's matrix (transposed: times its transpose)."""
    if not fits(x):
        return loop(x, w, ends, transposed)
    return _product(_rows(x), _rows(w), ends, transposed)


@grouped_matmul.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1 if transposed else 2])


@torch.library.custom_op("fmeg::grouped_pair", mutates_args=())
def grouped_pair(x: Tensor, a: Tensor, b: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """[x a, x b] in one product; transposed: x's first half of columns times aᵀ plus its second half times bᵀ.

    Where a and b lie beside one another in memory, as halves of one tensor's columns, nothing is copied.
    """
    if not fits(x):
        if not transposed:
            return torch.cat([loop(x, a, ends), loop(x, b, ends)], 1)
        f = a.shape[2]
        return loop(x[:, :f], a, ends, True) + loop(x[:, f:], b, ends, True)
    x = _rows(x)
    if torch_takes(x, a, b):
        return _product(x, beside(a, b), ends, transposed)
    from fmeg.kernels import _triton_grouped

    b = b if a.stride() == b.stride() else b.contiguous()
    return _triton_grouped.matmul(x, a if a.stride() == b.stride() else a.contiguous(), ends, transposed, b)


@grouped_pair.register_fake
def _(x: Tensor, a: Tensor, b: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], a.shape[1] if transposed else 2 * a.shape[2])


@torch.library.custom_op("fmeg::grouped_matmul_dw", mutates_args=())
def grouped_matmul_dw(x: Tensor, y: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of each expert's matrix: xᵀ y over its rows, summed in float32 where it fits."""
    if not fits(x):
        return loop_dw(x, y, ends).to(dtype)
    x, y = _rows(x), _rows(y)
    if dtype != x.dtype or not torch_takes(x, y):
        from fmeg.kernels import _triton_grouped

        return _triton_grouped.matmul_dw(x, y, ends, dtype)
    from fmeg.kernels import _triton_grouped

    return _triton_grouped.zero_empty_(torch._grouped_mm(x.t(), y, offs=ends), ends)


@grouped_matmul_dw.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1], dtype=dtype)


@torch.library.custom_op("fmeg::grouped_dw_into", mutates_args=("out",))
def grouped_dw_into(out: Tensor, x: Tensor, y: Tensor, ends: Tensor, add: bool) -> None:
    """The same into `out` of shape "e d f", contiguous, of float32; or added to what is there."""
    if not fits(x):
        made = loop_dw(x, y, ends)
        if add:
            out.add_(made)
        else:
            out.copy_(made)
        return
    from fmeg.kernels import _triton_grouped

    _triton_grouped.matmul_dw_into(out, _rows(x), _rows(y), ends, add)


@grouped_dw_into.register_fake
def _(out: Tensor, x: Tensor, y: Tensor, ends: Tensor, add: bool) -> None:
    return None


def beside(a: Tensor, b: Tensor) -> Tensor:
    """ "e d 2f" of two "e d f": a view where they lie so, else a copy.

    >>> both = torch.arange(8.0).view(1, 2, 4)
    >>> beside(both[..., :2], both[..., 2:]).data_ptr() == both.data_ptr()
    True
    """
    e, d, f = a.shape
    wanted = (2 * f * d, 2 * f, 1)
    if a.stride() == b.stride() == wanted and b.data_ptr() - a.data_ptr() == f * a.element_size():
        if a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
            return a.as_strided((e, d, 2 * f), wanted)
    return torch.cat([a, b], 2)


def _rows(x: Tensor) -> Tensor:
    """x with its last dimension dense."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _product(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    from fmeg.kernels import _triton_grouped

    if not torch_takes(x, w):
        return _triton_grouped.matmul(x, w, ends, transposed)
    out = torch._grouped_mm(x, w.transpose(1, 2) if transposed else w, offs=ends)
    return _triton_grouped.zero_tail_(out, ends)
