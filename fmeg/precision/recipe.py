"""Recipes: which products run in low precision, and how each of their operands is scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from fmeg.precision.formats import Format, Grid
from fmeg.precision.ragged import EXPERT
from fmeg.precision.scaled import Matmul

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")


@dataclass(frozen=True)
class Recipe:
    """What `value_and_grad(precision=…)` takes; made by `fp8`, `mxfp8` or `nvfp4`.

    name         "tensorwise", "delayed", "rowwise" (one scale for each row of a product's operands) or "blockwise"
    forward      format of activations and parameters
    gradient     format of the cotangents
    block        elements that share a scale, for "blockwise"
    square       parameters are scaled by squares of block × block, the same for both of their products
    match        patterns (as of a shell) of the parameters whose products are rewritten; `*` matches dots too
    skip_first   layers that stay as they are, at the beginning of the first scan over layers and at the end of the last
    skip_last
    weight_gradient  whether parameters' gradients are computed in low precision too
    history      steps over which "delayed" takes the largest value
    exclude      patterns of parameters that are left alone all the same: routers, whose scores decide
    """

    name: str
    forward: Format
    gradient: Format
    block: int = 0
    square: bool = False
    match: tuple[str, ...] = ("*layers*",)
    skip_first: int = 1
    skip_last: int = 1
    weight_gradient: bool = True
    history: int = 16
    exclude: tuple[str, ...] = ("*router*",)

    def __post_init__(self) -> None:
        if self.skip_first < 0 or self.skip_last < 0:
            raise ValueError(
                f"precision: skip_first and skip_last count layers, given {self.skip_first} and {self.skip_last}"
            )
        if self.delayed and self.history < 1:
            raise ValueError(f"precision: history counts steps, given {self.history}")
        if self.name == "blockwise" and self.block < 1:
            raise ValueError(f"precision: block counts elements that share a scale, given {self.block}")

    @property
    def delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return self.name == "delayed"

    def matches(self, path: str) -> bool:
        """Whether products with the parameter at `path` run in low precision."""
        found, left_out = (any(fnmatchcase(path, p) for p in patterns) for patterns in (self.match, self.exclude))
        return found and not left_out

    def grid(self, names: tuple[str, ...], sizes: Mapping[str, int], mm: Matmul, parameter: bool) -> Grid:
        """Which elements of an operand with these dimensions share a scale in a product; experts do in "delayed" only.

        >>> from fmeg.precision.scaled import as_matmul
        >>> mm, sizes = as_matmul("b s d, d f -> b s f"), dict(b=2, s=512, d=4096, f=14336)
        >>> fp8("rowwise").grid(("b", "s", "d"), sizes, mm, False)
        (1, 1, 0)
        >>> fp8("blockwise").grid(("d", "f"), sizes, mm, True)
        (128, 128)
        """
        depth = [n for n in names if n in mm.contracted]
        rows = [n for n in names if n not in mm.contracted and n not in mm.batch]
        grid = dict.fromkeys(names, 1)
        if self.delayed:
            grid = dict.fromkeys(names, 0)
        elif self.name == "tensorwise":
            grid |= dict.fromkeys((*depth, *rows), 0)
        elif self.name == "rowwise":
            grid |= dict.fromkeys(depth, 0)
        else:
            grid |= blocks(depth, sizes, self.block)
            if parameter and self.square:
                grid |= blocks(rows, sizes, self.block)
        return tuple(grid[n] for n in names)

    def rows_grid(self, columns: int, contracted: bool, sent: bool = False) -> Grid:
        """The same of rows sorted by expert (see `fmeg.precision.ragged`).

        contracted  rows are, else columns
        sent        rows are tokens as they were dispatched: one scale for all, so that they travel in a byte

        >>> fp8("blockwise").rows_grid(512, False), fp8("blockwise").rows_grid(512, True), fp8().rows_grid(512, True)
        ((1, 128), (128, 1), (-1, 0))
        """
        if self.delayed or (sent and self.name == "tensorwise"):
            return (0, 0)
        if self.name == "tensorwise":
            return (EXPERT, 0)
        if self.name == "rowwise":
            return (EXPERT, 1) if contracted else (1, 0)
        return (self.block, 1) if contracted else (1, blocks(("columns",), {"columns": columns}, self.block)["columns"])


def blocks(names: Sequence[str], sizes: Mapping[str, int], block: int) -> dict[str, int]:
    """The grid of dimensions that are merged, the last one innermost, and cut into runs of `block`.

    ValueError where the runs would not end with a dimension's elements.

    >>> blocks(("h", "e"), dict(h=32, e=64), 128), blocks(("b", "s"), dict(b=2, s=512), 128)
    ({'e': 0, 'h': 2}, {'s': 128, 'b': 1})
    """
    if prod(sizes[n] for n in names) <= block:
        return dict.fromkeys(names, 0)
    grid, left = {}, block
    for n in reversed(names):
        size = sizes[n]
        if left == 1:
            grid[n] = 1
        elif left % size == 0:
            grid[n], left = 0, left // size
        elif size % left == 0:
            grid[n], left = left, 1
        else:
            raise ValueError(
                f"precision: blocks of {block} do not fit the dimensions "
                f"{', '.join(f'{m}={sizes[m]}' for m in names)}; "
                "pad them, choose another block, or leave the parameter out of `match`"
            )
    return grid


def _patterns(match: str | Sequence[str]) -> tuple[str, ...]:
    return (match,) if isinstance(match, str) else tuple(match)


def fp8(
    recipe: str = "tensorwise",
    *,
    match: str | Sequence[str] = "*layers*",
    exclude: str | Sequence[str] = "*router*",
    skip_first: int = 1,
    skip_last: int = 1,
    gradient: str | None = None,
    power_of_two: bool = False,
    weight_gradient: bool = True,
    block: int = 128,
    history: int = 16,
) -> Recipe:
    """Products in FP8: E4M3 forward, and E5M2 or E4M3 for the gradients that flow back.

    recipe  "tensorwise"  one scale a tensor, from its largest value now
            "delayed"     one scale a tensor, from its largest value in the last `history` steps (Micikevicius et al.
                          2022, arXiv:2209.05433)
            "rowwise"     one scale for each row (token, or output channel) of every product's operands
            "blockwise"   1 × 128 blocks of activations and gradients, 128 × 128 of parameters (DeepSeek-V3,
                          arXiv:2412.19437, §3.3)
    match   patterns of parameters' paths; a product with one of them is rewritten, forward and backward
    exclude patterns of those that are left alone all the same
    skip_first, skip_last  layers that stay as they are, at the beginning of the first scan and at the end of the last;
            of layers that no scan runs none does: `exclude` them
    gradient        element of the gradients: "e5m2" (of one scale a tensor) or "e4m3" (of finer scales) by default
    power_of_two    scales are powers of two
    weight_gradient  False: parameters' gradients are computed as they were
    block           edge of the blocks

    >>> fp8("blockwise").gradient.element, fp8().gradient.element
    ('e4m3', 'e5m2')
    """
    if recipe not in RECIPES:
        raise ValueError(f"fp8: recipe must be one of {', '.join(RECIPES)}, given {recipe!r}")
    if gradient not in (None, "e4m3", "e5m2"):
        raise ValueError(f"fp8: gradient must be e4m3 or e5m2, given {gradient!r}")
    coarse = recipe in ("tensorwise", "delayed")
    kind = "power" if power_of_two else "float"
    return Recipe(
        recipe,
        Format("e4m3", kind),
        Format(gradient or ("e5m2" if coarse else "e4m3"), kind),
        block=block if recipe == "blockwise" else 0,
        square=recipe == "blockwise",
        match=_patterns(match),
        skip_first=skip_first,
        skip_last=skip_last,
        weight_gradient=weight_gradient,
        history=history,
        exclude=_patterns(exclude),
    )


def mxfp8(
    *,
    match: str | Sequence[str] = "*layers*",
    exclude: str | Sequence[str] = "*router*",
    skip_first: int = 1,
    skip_last: int = 1,
    weight_gradient: bool = True,
    block: int = 32,
) -> Recipe:
    """MXFP8: E4M3 everywhere, one power-of-two scale (E8M0) for 32 neighbours along the contracted dimension.

    Numerics only: Hopper has no such product, so operands are multiplied by their scales first. Scales are rounded up,
    so that no element saturates (Mishra et al. 2025, arXiv:2506.08027). Formats: OCP MX, arXiv:2310.10537.

    >>> mxfp8().forward
    Format(element='e4m3', scale='power')
    """
    f = Format("e4m3", "power")
    return _blockwise(f, block, False, match, exclude, skip_first, skip_last, weight_gradient)


def nvfp4(
    *,
    match: str | Sequence[str] = "*layers*",
    exclude: str | Sequence[str] = "*router*",
    skip_first: int = 1,
    skip_last: int = 1,
    weight_gradient: bool = True,
    block: int = 16,
) -> Recipe:
    """NVFP4: E2M1 with an E4M3 scale for 16 neighbours (16 × 16 of parameters) and a float32 one a tensor.

    Numerics only. Rounding is to nearest, and nothing is rotated: the stochastic rounding and the Hadamard transforms
    of the published recipe (NVIDIA 2025, arXiv:2509.25149) are not here.

    >>> nvfp4().forward.largest
    6.0
    """
    f = Format("e2m1", "nested")
    return _blockwise(f, block, True, match, exclude, skip_first, skip_last, weight_gradient)


def _blockwise(
    f: Format,
    block: int,
    square: bool,
    match: str | Sequence[str],
    exclude: str | Sequence[str],
    skip_first: int,
    skip_last: int,
    weight_gradient: bool,
) -> Recipe:
    return Recipe(
        "blockwise", f, f, block, square, _patterns(match), skip_first, skip_last, weight_gradient,
        exclude=_patterns(exclude),
    )  # fmt: skip
