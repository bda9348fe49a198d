"""Number formats with shared scales, and the two operations that bring a tensor into one: `amax` and `quantize`.

A *grid* says, for each dimension, how many neighbours share a scale: 1, each element has its own; n, blocks of n; 0,
the whole dimension. So (0, 0) is one scale a tensor, (1, 0) one a row, (1, 128) and (128, 128) DeepSeek-V3's blocks.

Over a sharded dimension that shares a scale, `amax` is an all-reduced maximum: which numbers come out depends on the
grid alone, never on the mesh.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fmeg.ops._common import wide
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule

Grid = tuple[int, ...]
TINY = 2.0**-100  # below this a block counts as zeros: its scale and the inverse must both be float32 numbers

ELEMENTS: dict[str, tuple[torch.dtype, float]] = {
    "e4m3": (torch.float8_e4m3fn, 448.0),
    "e5m2": (torch.float8_e5m2, 57344.0),
    "e2m1": (torch.float8_e4m3fn, 6.0),  # every E2M1 number is an E4M3 number, in which it is held
}


@dataclass(frozen=True)
class Format:
    """x ≈ q · scale, with q a small float and one scale a block.

    element  "e4m3", "e5m2" (Micikevicius et al. 2022, arXiv:2209.05433) or "e2m1" (OCP MX, arXiv:2310.10537; emulated)
    scale    "float": amax / largest, in float32; "power": that rounded up to a power of two (E8M0: no element
             saturates);
             "nested": rounded to E4M3 under one float32 scale a tensor (NVFP4, arXiv:2509.25149)

    >>> Format("e4m3").largest
    448.0
    """

    element: str
    scale: str = "float"

    def __post_init__(self) -> None:
        if self.element not in ELEMENTS or self.scale not in ("float", "power", "nested"):
            raise ValueError(
                f"Format: element must be one of {', '.join(ELEMENTS)} and scale 'float', 'power' or 'nested', given "
                f"{self.element!r} and {self.scale!r}"
            )

    @property
    def dtype(self) -> torch.dtype:
        """What elements are stored in."""
        return ELEMENTS[self.element][0]

    @property
    def largest(self) -> float:
        """The largest finite element."""
        return ELEMENTS[self.element][1]


def blocked(x: Tensor, grid: Grid) -> tuple[Tensor, list[int]]:
    """`x` with every dimension in blocks taken apart, and the dimensions of the result that share a scale."""
    shape: list[int] = []
    shared: list[int] = []
    for n, g in zip(x.shape, grid, strict=True):
        if g == 0:
            shared.append(len(shape))
            shape.append(n)
        elif g == 1:
            shape.append(n)
        else:
            shared.append(len(shape) + 1)
            shape += [n // g, g]
    return x.reshape(shape), shared


def spread(scale: Tensor, grid: Grid, shape: tuple[int, ...]) -> Tensor:
    """A scale a block, repeated for every element of it (dimensions shared as a whole stay of size 1)."""
    for d, (g, n) in enumerate(zip(grid, shape, strict=True)):
        if g > 1:
            scale = scale.unsqueeze(d + 1).expand(*scale.shape[: d + 1], g, *scale.shape[d + 1 :])
            scale = scale.reshape(*scale.shape[:d], n, *scale.shape[d + 2 :])
    return scale


def power_of_two(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Positive float32 numbers, rounded up to powers of two; NaN stays NaN.

    >>> power_of_two(torch.tensor([1.0, 1.25, 4.0, torch.nan])).tolist()
    [1.0, 2.0, 4.0, nan]
    """
    bits = x.view(torch.int32)
    return torch.where(x.isnan(), x, ((bits + 0x007FFFFF) & 0x7F800000).view(torch.float32))


def round_e2m1(x: Tensor) -> Tensor:
    """To the nearest of 0, ½, 1, 1½, 2, 3, 4, 6 (ties to even), for |x| ≤ 6."""
    a = x.abs()
    step = torch.where(a < 2, 0.5, torch.where(a < 4, 1.0, 2.0)).to(x.dtype)
    return torch.round(x / step) * step


def _amax(x: Tensor, grid: Grid) -> Tensor:
    y, shared = blocked(x.detach(), grid)
    m = (torch.linalg.vector_norm(y, torch.inf, shared) if shared else y.abs()).float()
    shape = [1 if g == 0 else n // g for n, g in zip(x.shape, grid, strict=True)]
    return m.reshape(shape)


def scales(amax: Tensor, format: Format, top: Tensor | None = None) -> Tensor:
    """The scale of each block, float32, from its largest absolute value; 1 where that is (nearly) zero.

    top  the largest of the whole tensor, for nested scales

    Multiplied by constants, not divided: a division of a tensor by a number rounds once on a CPU and twice on CUDA.
    """
    zero = amax < TINY
    s = torch.where(zero, 1.0, amax * (1.0 / format.largest))
    if format.scale == "power":
        return power_of_two(s)
    if format.scale == "nested":
        assert top is not None
        outer = torch.where(top < TINY, 1.0, top * (1.0 / (format.largest * 448.0)))
        inner = (s / outer).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()
        return torch.where(zero, 1.0, inner * outer)
    return s


def _quantize(x: Tensor, amax: Tensor, top: Tensor | None, grid: Grid, format: Format) -> tuple[Tensor, Tensor]:
    s = scales(amax, format, top)
    v = wide(x) * spread(torch.reciprocal(s), grid, tuple(x.shape)).to(wide(x).dtype)
    v = v.clamp(-format.largest, format.largest)
    if format.element == "e2m1":
        v = round_e2m1(v)
    return v.to(format.dtype), s


def dequantize(q: Shaped[Tensor, "..."], scale: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """q · scale in `dtype`.

    >>> dequantize(torch.tensor([2.0, 3.0]).to(torch.float8_e4m3fn), torch.tensor([0.5]), (0,), torch.float32)
    tensor([1.0000, 1.5000])
    """
    return q.to(dtype) * spread(scale, grid, tuple(q.shape)).to(dtype)


# -- rules ------------------------------------------------------------------------------------------------------------
def grid_factors(
    names: tuple[str, ...], shape: tuple[int, ...], grid: Grid
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...], dict[str, int]]:
    """Factors of a tensor's dimensions and of its scale's: a dimension in blocks is (which block, where in it)."""
    dims: list[tuple[str, ...]] = []
    of_scale: list[tuple[str, ...]] = []
    sizes: dict[str, int] = {}
    for name, n, g in zip(names, shape, grid, strict=True):
        if g > 1:
            dims.append((f"{name}.block", f"{name}.in"))
            of_scale.append((f"{name}.block",))
            sizes |= {f"{name}.block": n // g, f"{name}.in": g}
        else:
            dims.append((name,))
            of_scale.append((name,) if g else ())
            sizes[name] = n
    return tuple(dims), tuple(of_scale), sizes


def _names(ndim: int) -> tuple[str, ...]:
    return tuple(f"d{i}" for i in range(ndim))


def _local_grid(info: Local, grid: Grid) -> Grid:
    """The grid at local shapes: where a block lies on several ranks, each holds a part of one."""
    return tuple(g if g < 2 else info.size(f"d{d}.in") for d, g in enumerate(grid))


def _amax_local(info: Local, x: Tensor, grid: Grid) -> Tensor:
    from fmeg.ops.collectives import all_reduce

    m = amax_p(x, _local_grid(info, grid))
    axes = {a for d, g in enumerate(grid) if g != 1 for a in info.axes(f"d{d}.in" if g else f"d{d}")}
    return all_reduce(m, tuple(sorted(axes)), op="max") if axes else m


def _amax_rule(node: Node) -> Rule:
    x, grid = node.args
    dims, of_scale, sizes = grid_factors(_names(x.ndim), x.shape, grid)
    shared = {f for d in dims for f in d} - {f for d in of_scale for f in d}
    return Rule((dims,), (of_scale,), sizes, resolved=frozenset(shared), local=_amax_local, at_rest=True)


def _quantize_local(
    info: Local, x: Tensor, amax: Tensor, top: Tensor | None, grid: Grid, format: Format
) -> tuple[Tensor, Tensor]:
    return quantize_p(x, amax, top, _local_grid(info, grid), format)


def _quantize_rule(node: Node) -> Rule:
    x, _, top, grid = node.args[:4]
    dims, of_scale, sizes = grid_factors(_names(x.ndim), x.shape, grid)
    ins = (dims, of_scale) if top is None else (dims, of_scale, ((),) * x.ndim)
    shared = {f for d in dims for f in d} - {f for d in of_scale for f in d}
    return Rule(ins, (dims, of_scale), sizes, resolved=frozenset(shared), local=_quantize_local, at_rest=True)


amax_p = Primitive("amax", _amax, rule=_amax_rule)
quantize_p = Primitive("quantize", _quantize, rule=_quantize_rule)


def amax(x: Float[Tensor, "..."], grid: Grid) -> Float[Tensor, "..."]:
    """The largest absolute value of each block, float32; dimensions that share a scale have size 1.

    >>> amax(torch.tensor([[1.0, -3.0], [2.0, 0.5]]), (1, 0)).tolist()
    [[3.0], [2.0]]
    """
    return amax_p(x, grid)


def quantize(
    x: Float[Tensor, "..."],
    amax: Float[Tensor, "..."],
    grid: Grid,
    format: Format,
    *,
    top: Tensor | None = None,
) -> tuple[Shaped[Tensor, "..."], Float[Tensor, "..."]]:
    """(q, scale) with x ≈ q · scale: s = amax / largest, q = round(clamp(x / s)), to nearest, ties to even.

    amax    of each block, from `amax(x, grid)` or from earlier steps; what exceeds it saturates
    top     the largest absolute value of the whole tensor, for nested scales

    NaN gives NaN, and where `amax` is NaN or infinite everything does: so infinite values, unless `amax` is from
    earlier steps, where they saturate and are seen in the largest value of now.

    >>> x = torch.tensor([1.0, 2.0, 4.0])
    >>> q, s = quantize(x, amax(x, (0,)), (0,), Format("e4m3", "power"))
    >>> q.float().tolist(), s.tolist()
    ([64.0, 128.0, 256.0], [0.015625])
    """
    return quantize_p(x, amax, top, grid, format)
