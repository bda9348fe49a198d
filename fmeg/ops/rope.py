"""Rotary position embedding: a table of cosines and sines, and the rotation."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg.ops._common import check_float, elements
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule


@dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1: low frequencies are divided by `factor`, high ones kept, others interpolated.

    With L the original context, a frequency of wavelength λ is low if λ > L / low_freq_factor and high if
    λ < L / high_freq_factor.

    >>> Llama3Scaling(factor=8.0).original_max_position
    8192
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __call__(self, freq: Tensor) -> Tensor:
        turns = self.original_max_position * freq / (2 * pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return freq * keep + freq / self.factor * (1 - keep)


def rope_table(
    positions: Int[Tensor, "*rows"] | Float[Tensor, "*rows"],
    head_dim: int,
    base: float = 10000.0,
    scaling: Llama3Scaling | None = None,
) -> Float[Tensor, "*rows half 2"]:
    """Cosines and sines of the angles that `rope` turns by.

        angle[p, i] = p · base^(-2i / head_dim),   i < head_dim / 2;     table[…, 0] = cos, table[…, 1] = sin

    positions   integers (or floats), of any shape, e.g. [s] or [b, s]
    scaling     changes the frequencies, e.g. `Llama3Scaling`

    Angles are computed in float64, so that long contexts keep their precision; the table is float32 (float64 for
    float64 positions). Raises ValueError for an odd head_dim.

    >>> rope_table(torch.arange(5), 8).shape
    torch.Size([5, 4, 2])
    """
    if head_dim % 2:
        raise ValueError(f"rope_table: head_dim must be even, given {head_dim}")
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
    freq = base ** (-half / head_dim)
    if scaling is not None:
        freq = scaling(freq)
    angle = positions.to(torch.float64).unsqueeze(-1) * freq
    table = torch.stack([angle.cos(), angle.sin()], dim=-1)
    return table if positions.dtype == torch.float64 else table.float()


def _parts(x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The halves of x, and cos and sin with a heads dimension, in one dtype."""
    dtype = torch.promote_types(x.dtype, table.dtype)
    x1, x2 = x.to(dtype).chunk(2, dim=-1)
    cos, sin = table.to(dtype).unsqueeze(-3).unbind(-1)
    return x1, x2, cos, sin


def _reference(x: Tensor, table: Tensor, inverse: bool = False) -> Tensor:
    x1, x2, cos, sin = _parts(x, table)
    if inverse:
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1).to(x.dtype)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1).to(x.dtype)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, Tensor]:
    x, table = args
    inverse = kwargs.get("inverse", False)
    return rope_p(cts[0], table, inverse=not inverse), _table_cotangent(x, table, cts[0], inverse)


def _table_cotangent(x: Tensor, table: Tensor, ct: Tensor, inverse: bool) -> Tensor:
    """Seldom wanted (the table is data), and then dropped as dead code."""
    x1, x2, _, _ = _parts(x, table)
    g1, g2 = ct.to(x1.dtype).chunk(2, dim=-1)
    dcos = (g1 * x1 + g2 * x2).sum(-2)
    dsin = (g2 * x1 - g1 * x2).sum(-2)
    d = torch.stack([dcos, -dsin if inverse else dsin], dim=-1)
    return (d if table.ndim == 4 else d.sum(0)).to(table.dtype)


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    table = "s r c" if len(shapes[1]) == 3 else "b s r c"
    return rule(f"b s h e, {table} -> b s h e", shapes, whole=frozenset("erc"), linear=frozenset({0}))


rope_p = Primitive("rope", _reference, vjp=_vjp, rule=_rule, flops=lambda n: 3 * elements(n), cheap=True)


def rope(x: Float[Tensor, "b s h e"], table: Float[Tensor, "*b s half 2"]) -> Float[Tensor, "b s h e"]:
    """Turn each pair (x[i], x[i + e/2]) by its position's angle.

        out[i]       = x[i] cos_i - x[i + e/2] sin_i
        out[i + e/2] = x[i + e/2] cos_i + x[i] sin_i

    x       queries or keys, "b s h e"
    table   of `rope_table`, "s e/2 2" or "b s e/2 2"

    The half-split layout is that of Hugging Face; weights made for interleaved pairs must be permuted. Computed in the
    wider of the two dtypes, returned in x's. Source: Su et al. 2021, arXiv:2104.09864.

    >>> x = torch.ones(1, 3, 2, 4)
    >>> bool(torch.allclose(rope(x, rope_table(torch.arange(3), 4)).norm(), x.norm()))
    True
    """
    check_float("rope", x=x, table=table)
    b, s, _, e = x.shape if x.ndim == 4 else (0, 0, 0, 1)
    if x.ndim != 4 or e % 2:
        raise ValueError(f"rope: x must be 'b s h e' with an even e, given shape {tuple(x.shape)}")
    if tuple(table.shape) not in ((s, e // 2, 2), (b, s, e // 2, 2)):
        raise ValueError(
            f"rope: table must have shape {(s, e // 2, 2)} or {(b, s, e // 2, 2)} for x of shape {tuple(x.shape)}, "
            f"given {tuple(table.shape)}; make it by rope_table(positions, head_dim={e})"
        )
    return rope_p(x, table)
