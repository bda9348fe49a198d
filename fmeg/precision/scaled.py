"""The product of two quantised tensors: `scaled_einsum`.

Its meaning is plain torch: multiply by the scales, contract in float32. Where the hardware has the product (Hopper and
later, float and power-of-two scales a tensor, a row, or DeepSeek-V3's blocks), `torch._scaled_mm` or
`torch.nn.functional.scaled_mm` computes it instead, on operands whose contracted dimension is contiguous.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from fmeg.kernels.fp8 import scaled_mm, scaled_mm_into
from fmeg.ops.contract import product
from fmeg.ops.einsum import format_equation, parse_equation
from fmeg.precision.formats import Grid, dequantize, grid_factors
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule

Names = tuple[str, ...]
log = logging.getLogger("fmeg")


@dataclass(frozen=True)
class Matmul:
    """An equation of two operands as a (batched) matrix product: names by their part in it.

    swapped  the second operand's rows are the result's, so that the result lies in memory as it is asked for
    """

    batch: Names
    contracted: Names
    left: Names
    right: Names
    swapped: bool


@lru_cache(maxsize=4096)
def as_matmul(equation: str) -> Matmul | None:
    """None for what is no matrix product: other than two operands, nothing contracted, a dimension summed alone.

    >>> as_matmul("b s d, d f -> b s f")
    Matmul(batch=(), contracted=('d',), left=('b', 's'), right=('f',), swapped=False)
    """
    ins, out = parse_equation(equation)
    if len(ins) != 2:
        return None
    a, b = ins
    contracted = tuple(n for n in a if n in b and n not in out)
    if not contracted or any(n not in out and n not in contracted for n in (*a, *b)):
        return None
    batch = tuple(n for n in out if n in a and n in b)
    m, k = (tuple(n for n in names if n in out and n not in batch) for names in (a, b))
    first = next((n for n in out if n not in batch), None)
    return Matmul(batch, contracted, m, k, first is not None and first in k)


def _reference(
    equation: str, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, grids: tuple[Grid, Grid], dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, y = dequantize(a, sa, grids[0], wide), dequantize(b, sb, grids[1], wide)
    (names_a, names_b), out = parse_equation(equation)
    contract = product(names_a, names_b, out, tuple(x.shape), tuple(y.shape))
    assert contract is not None, f"scaled_einsum: {equation!r} is no matrix product"
    return contract(x, y).to(dtype)


def _local(
    info: Local, equation: str, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, grids: tuple[Grid, Grid],
    dtype: torch.dtype, fast: bool = False,
) -> Tensor:  # fmt: skip
    names, _ = parse_equation(equation)
    at = tuple(
        tuple(g if g < 2 else info.size(f"{n}.in") for n, g in zip(ns, grid, strict=True))
        for ns, grid in zip(names, grids, strict=True)
    )
    return scaled_einsum_p(equation, a, sa, b, sb, at, dtype, fast)


def _rule(node: Node) -> Rule:
    """Factors of the equation; a dimension in blocks on any side is (block, in the block) on all."""
    equation, a, _, b, _, grids = node.args[:6]
    names, out = parse_equation(equation)
    finest: dict[str, int] = {}
    size: dict[str, int] = {}
    for ns, v, grid in zip(names, (a, b), grids, strict=True):
        for n, s, g in zip(ns, v.shape, grid, strict=True):
            size[n] = s
            if g > 1:
                finest[n] = g
    common = tuple(
        tuple(g if g > 1 else finest.get(n, 1) for n, g in zip(ns, grid, strict=True))
        for ns, grid in zip(names, grids, strict=True)
    )
    dims: list[tuple[Names, ...]] = []
    sizes: dict[str, int] = {}
    for ns, v, grid, whole in zip(names, (a, b), grids, common, strict=True):
        d, of_scale, more = grid_factors(ns, v.shape, whole)
        dims += [d, tuple(_scale_dims(g, f, s) for g, f, s in zip(grid, d, of_scale, strict=True))]
        sizes |= more
    result = tuple((f"{n}.block", f"{n}.in") if n in finest else (n,) for n in out)
    return Rule(tuple(dims), (result,), sizes, linear=frozenset(), local=_local)


def _scale_dims(grid: int, dims: Names, of_scale: Names) -> Names:
    return () if grid == 0 else dims if grid == 1 else of_scale


def _flops(node: Node) -> int:
    equation, a, _, b = node.args[:4]
    names, _ = parse_equation(equation)
    sizes = dict(zip((*names[0], *names[1]), (*a.shape, *b.shape), strict=True))
    return 2 * prod(sizes.values())


# -- Hopper -----------------------------------------------------------------------------------------------------------
def _default(
    equation: str, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, grids: tuple[Grid, Grid], dtype: torch.dtype,
    fast: bool = False,
) -> Tensor:  # fmt: skip
    kind = hardware(equation, a, b, grids, dtype)
    if kind is None:
        if a.is_cuda:
            _say(equation, tuple(a.shape), tuple(b.shape), grids)
        return _reference(equation, a, sa, b, sb, grids, dtype, fast)
    return _hardware(kind, equation, (a, sa), (b, sb), dtype, fast)


@lru_cache(maxsize=1024)
def _say(equation: str, a: tuple[int, ...], b: tuple[int, ...], grids: tuple[Grid, Grid]) -> None:
    """Once a product: it is emulated, at more cost than in bf16."""
    log.warning("precision: this GPU has no product for %s of %s and %s, scaled by %s: emulated", equation, a, b, grids)


def hardware(
    equation: str, a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."], grids: tuple[Grid, Grid], dtype: torch.dtype
) -> tuple[str, str] | None:
    """How a GPU's own product scales the operands, "tensor", "row", "1x128" or "128x128" each; None where it cannot.

    It needs compute capability 8.9 (9.0 for anything but "tensor"), sizes that are multiples of 16 and not two E5M2
    operands. A batch dimension is a loop.
    """
    if not a.is_cuda or dtype not in (torch.bfloat16, torch.float32, torch.float16):
        return None
    capability = torch.cuda.get_device_capability(a.device)
    mm = as_matmul(equation)
    if capability < (8, 9) or mm is None or a.dtype == b.dtype == torch.float8_e5m2:
        return None
    names, _ = parse_equation(equation)
    kinds = []
    for ns, x, grid in zip(names, (a, b), grids, strict=True):
        of = dict(zip(ns, zip(x.shape, grid, strict=True), strict=True))
        depth = [of[n] for n in mm.contracted]
        rows = [of[n] for n in ns if n not in mm.contracted and n not in mm.batch]
        if prod(n for n, _ in depth) % 16 or prod(n for n, _ in rows) % 16:
            return None
        kinds.append(_kind(depth, rows))
    one, other = kinds
    if "" in kinds or (one != other and {one, other} != {"1x128", "128x128"}):
        return None
    if one != "tensor" and (capability < (9, 0) or dtype == torch.float16):
        return None
    if one == "row" and torch.float8_e5m2 in (a.dtype, b.dtype):
        return None
    if "x" in one and (capability != (9, 0) or one == other == "128x128"):
        return None
    return one, other


def _kind(depth: list[tuple[int, int]], rows: list[tuple[int, int]]) -> str:
    """The scaling of an operand, from (size, grid) of its contracted and other dimensions; "" for any other."""

    def block(dims: list[tuple[int, int]]) -> int:
        """How many neighbours share a scale once the dimensions are merged; 0 all of them, -1 not a run of them."""
        size, fine = 1, False
        for n, g in reversed(dims):
            if fine and g != 1 and n > 1:
                return -1
            size *= n if g == 0 else g
            fine = fine or (g > 0 and g < n)
        return 0 if size == prod(n for n, _ in dims) and not fine and all(g == 0 or n == 1 for n, g in dims) else size

    d, r = block(depth), block(rows)
    deep = d == 128 or (d == 0 and prod(n for n, _ in depth) == 128)
    if d == 0 and r == 0:
        return "tensor"
    if d == 0 and r == 1 and not deep:
        return "row"
    if deep and r == 1:
        return "1x128"
    if deep and (r == 128 or (r == 0 and prod(n for n, _ in rows) == 128)):
        return "128x128"
    return ""


def _hardware(
    kinds: tuple[str, str], equation: str, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor],
    dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    mm = as_matmul(equation)
    assert mm is not None
    if mm.batch:
        return _each(kinds, equation, mm.batch[0], one, other, dtype, fast)
    (a, sa), (b, sb) = one, other
    names_a, names_b = parse_equation(equation)[0]
    one_scale = kinds == ("tensor", "tensor")
    matrix = _merged if one_scale else _matrix
    x, sx = matrix(a, sa, names_a, mm.left, mm.contracted)
    y, sy = matrix(b, sb, names_b, mm.right, mm.contracted)
    sizes = dict(zip((*names_a, *names_b), (*a.shape, *b.shape), strict=True))
    sides = (mm.left, mm.right)
    if mm.swapped:
        x, sx, y, sy, kinds, sides = y, sy, x, sx, kinds[::-1], (mm.right, mm.left)
    rows = (*sides[0], *sides[1])
    if one_scale:
        out = scaled_mm(x, sx, y, sy, *(prod(sizes[n] for n in side) for side in sides), dtype, fast)
    else:
        out = _scaled_mm(x, sx, y, sy, kinds, dtype, fast)
    out = out.view([sizes[n] for n in rows])
    wanted = parse_equation(equation)[1]
    return out.permute([rows.index(n) for n in wanted])


def _each(
    kinds: tuple[str, str], equation: str, batch: str, one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor],
    dtype: torch.dtype, fast: bool,
) -> Tensor:  # fmt: skip
    """The products of a batch, one by one."""
    names, out = parse_equation(equation)
    inner = format_equation(
        tuple(tuple(n for n in ns if n != batch) for ns in names), tuple(n for n in out if n != batch)
    )
    (a, sa), (b, sb) = (
        (q.unbind(ns.index(batch)), s.expand(_along(s, q, ns.index(batch))).unbind(ns.index(batch)))
        for ns, (q, s) in zip(names, (one, other), strict=True)
    )
    parts = [_hardware(kinds, inner, (a[i], sa[i]), (b[i], sb[i]), dtype, fast) for i in range(len(a))]
    return torch.stack(parts, out.index(batch))


def _along(scale: Tensor, q: Tensor, dim: int) -> list[int]:
    """The scale's shape with a scale for each element of a dimension."""
    return [q.shape[d] if d == dim else n for d, n in enumerate(scale.shape)]


def _matrix(x: Tensor, scale: Tensor, names: Names, rows: Names, depth: Names) -> tuple[Tensor, Tensor]:
    """[rows, depth], contiguous, and its scales likewise."""
    order = [names.index(n) for n in (*rows, *depth)]
    q = x.permute(order).reshape(prod(x.shape[d] for d in order[: len(rows)]), -1)
    s = scale.permute(order).reshape(prod(scale.shape[d] for d in order[: len(rows)]), -1)
    return q.contiguous(), s


def _merged(x: Tensor, scale: Tensor, names: Names, rows: Names, depth: Names) -> tuple[Tensor, Tensor]:
    """What holds "rows depth", contiguous, in any shape: Inductor computes an operand twice that it sees through a
    view."""
    return x.permute([names.index(n) for n in (*rows, *depth)]).contiguous(), scale


def _scaled_mm(
    x: Tensor, sx: Tensor, y: Tensor, sy: Tensor, kinds: tuple[str, str], dtype: torch.dtype, fast: bool
) -> Tensor:
    """x · yᵀ of contiguous [m, k] and [n, k]."""
    if kinds[0] == "row":
        scale = (sx.reshape(-1).contiguous().unsqueeze(1), sy.reshape(-1).contiguous().unsqueeze(0))
        out = torch._scaled_mm(x, y.t(), *scale, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return out.to(dtype)
    from torch.nn.functional import ScalingType, scaled_mm

    recipe = {"1x128": ScalingType.BlockWise1x128, "128x128": ScalingType.BlockWise128x128}
    s = [_block_scales(t, kind) for t, kind in zip((sx, sy), kinds, strict=True)]
    out = scaled_mm(x, y.t(), s[0], recipe[kinds[0]], s[1], recipe[kinds[1]], output_dtype=torch.bfloat16)
    return out.to(dtype)


def _block_scales(s: Tensor, kind: str) -> Tensor:
    """As cuBLAS wants them: rows outermost for 1x128; for 128x128 transposed, the depth padded to a multiple of 4."""
    if kind == "1x128":
        return s.t().reshape(-1).contiguous().view(s.shape[1], s.shape[0]).t()
    padded = torch.nn.functional.pad(s, (0, -s.shape[1] % 4))
    return padded.reshape(-1).contiguous().view(padded.shape).t()


def _into(node: Node) -> Callable[..., None] | None:
    """What writes a product in float32 into given memory: by the hardware itself, or by a copy."""
    equation, grids, dtype, fast = node.args[0], *node.args[5:]
    mm = as_matmul(equation)
    if dtype is not torch.float32 or mm is None or mm.batch:
        return None
    (names_a, names_b), out = parse_equation(equation)
    rows = (*mm.right, *mm.left) if mm.swapped else (*mm.left, *mm.right)
    lies = out == rows and all(
        names == (*(n for n in names if n not in mm.contracted), *mm.contracted) for names in (names_a, names_b)
    )

    def write(result: Tensor, a: Tensor, sa: Tensor, b: Tensor, sb: Tensor, add: bool) -> None:
        if lies and not add and hardware(equation, a, b, grids, dtype) == ("tensor", "tensor"):
            pair = ((b, sb), (a, sa)) if mm.swapped else ((a, sa), (b, sb))
            count = prod(
                s for n, s in zip(names_b if mm.swapped else names_a, pair[0][0].shape, strict=True) if n in out
            )
            scaled_mm_into(result, *pair[0], *pair[1], count, fast)
            return
        made = _default(equation, a, sa, b, sb, grids, dtype, fast)
        if add:
            result.add_(made)
        else:
            result.copy_(made)

    return write


scaled_einsum_p = Primitive(
    "scaled_einsum", _reference, rule=_rule, flops=_flops, lowerings={"default": _default, "into": _into}
)


def scaled_einsum(
    equation: str,
    a: Shaped[Tensor, "..."],
    scale_a: Float[Tensor, "..."],
    b: Shaped[Tensor, "..."],
    scale_b: Float[Tensor, "..."],
    grids: tuple[Grid, Grid],
    dtype: torch.dtype = torch.float32,
    fast: bool = False,
) -> Float[Tensor, "..."]:
    """einsum(equation, a · scale_a, b · scale_b) of quantised tensors, summed in float32.

    equation  of two operands, a matrix product (see `as_matmul`)
    grids     which elements of each operand share a scale (see `fmeg.precision.formats`)
    dtype     of the result
    fast      let the hardware sum with fewer bits, as is usual for forward products

    A sharded contracted dimension gives a pending sum, as in `fmeg.einsum`.

    >>> from fmeg.precision.formats import Format, amax, quantize
    >>> x, w = torch.ones(2, 3), torch.full((3, 4), 2.0)
    >>> qx, qw = (quantize(t, amax(t, (0, 0)), (0, 0), Format("e4m3")) for t in (x, w))
    >>> scaled_einsum("b d, d f -> b f", *qx, *qw, ((0, 0), (0, 0)))[0].tolist()
    [6.0, 6.0, 6.0, 6.0]
    """
    if as_matmul(equation) is None:
        raise ValueError(f"scaled_einsum: {equation!r} is no product of two matrices; use fmeg.einsum on float tensors")
    return scaled_einsum_p(equation, a, scale_a, b, scale_b, grids, dtype, fast)
