"""Rotary position embedding: a table of cosines and sines, ways to stretch it, and the rotation."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi
from typing import Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg.kernels import rows
from fmeg.ops._common import check_float, differentiated, elements
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule

Part = Literal["all", "first", "last"]


class RopeScaling(Protocol):
    """What stretches a rotary embedding to a longer context: a map of the frequencies, and a factor on the table."""

    @property
    def magnitude(self) -> float:
        """What cosines and sines are multiplied by."""
        ...

    def __call__(self, freq: Tensor, base: float) -> Tensor:
        """The frequencies to use, from `freq[i] = base^(-i / len(freq))`."""
        ...


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
    magnitude = 1.0

    def __call__(self, freq: Tensor, base: float) -> Tensor:
        turns = self.original_max_position * freq / (2 * pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return freq * keep + freq / self.factor * (1 - keep)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN: what turns often over the original context is kept, what turns little is slowed down by `factor`.

        freq_i ← freq_i · keep_i + freq_i / factor · (1 - keep_i),   keep_i = 1 - clamp((i - low) / (high - low), 0, 1)

    With L the original context, low and high are the indices of the frequencies that turn `beta_fast` and `beta_slow`
    times over L, rounded outwards unless `truncate` is False. With m(a) = 0.1 · a · ln(factor) + 1 (1 if factor ≤ 1),

    magnitude        of the table: `attention_factor` if given, else m(mscale) / m(mscale_all_dim) if both are set, else
                     m(1)
    softmax_factor   m(mscale_all_dim)², on attention's scale, as DeepSeek-V2 and -V3 have it; 1 when it is not set

    Source: Peng et al. 2023, arXiv:2309.00071; DeepSeek-V2, arXiv:2405.04434.

    >>> round(YarnScaling(factor=40.0, mscale=1.0, mscale_all_dim=1.0).softmax_factor * 192**-0.5, 6)
    0.135234
    """

    factor: float
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def _m(self, mscale: float) -> float:
        return 0.1 * mscale * log(self.factor) + 1.0 if self.factor > 1 else 1.0

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._m(self.mscale) / self._m(self.mscale_all_dim)
        return self._m(1.0)

    @property
    def softmax_factor(self) -> float:
        return self._m(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def bounds(self, half: int, base: float) -> tuple[float, float]:
        """(low, high) for `half` frequencies.

        >>> YarnScaling(factor=40.0).bounds(32, 10000.0)
        (10, 23)
        """
        low, high = (
            half * log(self.original_max_position / (turns * 2 * pi)) / log(base)
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = floor(low), ceil(high)
        return max(low, 0), min(high, 2 * half - 1)

    def __call__(self, freq: Tensor, base: float) -> Tensor:
        low, high = self.bounds(len(freq), base)
        high += 0.001 if low == high else 0.0
        ramp = (torch.arange(len(freq), dtype=freq.dtype, device=freq.device) - low) / (high - low)
        keep = 1 - ramp.clamp(0.0, 1.0)
        return freq * keep + freq / self.factor * (1 - keep)


def rope_table(
    positions: Int[Tensor, "*rows"] | Float[Tensor, "*rows"],
    head_dim: int,
    base: float = 10000.0,
    scaling: RopeScaling | None = None,
) -> Float[Tensor, "*rows half 2"]:
    """Cosines and sines of the angles that `rope` turns by.

        angle[p, i] = p · base^(-2i / head_dim),   i < head_dim / 2;     table[…, 0] = cos, table[…, 1] = sin

    positions   integers (or floats), of any shape, e.g. [s] or [b, s]
    head_dim    how many dimensions of a head turn: all, or fewer (`rope` leaves the others as they are)
    scaling     stretches it: `Llama3Scaling` or `YarnScaling`

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
        freq = scaling(freq, base)
    angle = positions.to(torch.float64).unsqueeze(-1) * freq
    table = torch.stack([angle.cos(), angle.sin()], dim=-1)
    if scaling is not None and scaling.magnitude != 1.0:
        table = table * scaling.magnitude
    return table if positions.dtype == torch.float64 else table.float()


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and second elements of each pair."""
    n = x.shape[-1] // 2
    return (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :n], x[..., n:])


def _joined(x1: Tensor, x2: Tensor, interleaved: bool) -> Tensor:
    return torch.stack([x1, x2], dim=-1).flatten(-2) if interleaved else torch.cat([x1, x2], dim=-1)


def _split(x: Tensor, table: Tensor, part: Part) -> tuple[Tensor, Tensor | None]:
    """The dimensions that turn, and the others."""
    n = 2 * table.shape[-2]
    if n == x.shape[-1]:
        return x, None
    return (x[..., -n:], x[..., :-n]) if part == "last" else (x[..., :n], x[..., n:])


def _parts(x: Tensor, table: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both elements of each pair, and cos and sin with a heads dimension, in one dtype."""
    dtype = torch.promote_types(x.dtype, table.dtype)
    x1, x2 = _halves(x.to(dtype), interleaved)
    cos, sin = table.to(dtype).unsqueeze(-3).unbind(-1)
    return x1, x2, cos, sin


def _reference(
    x: Tensor, table: Tensor, inverse: bool = False, interleaved: bool = False, part: Part = "all"
) -> Tensor:
    """Turned by the conjugate of the table if `inverse`: its transpose, and its inverse where cos² + sin² = 1."""
    whole = not interleaved and x.shape[-1] == 2 * table.shape[-2]
    if whole and rows.fits(x, x.shape[-1] * x.shape[-2]) and not differentiated(x, table):
        return rows.rope(x, table, inverse)
    turning, rest = _split(x, table, part)
    x1, x2, cos, sin = _parts(turning, table, interleaved)
    sin = -sin if inverse else sin
    out = _joined(x1 * cos - x2 * sin, x2 * cos + x1 * sin, interleaved).to(x.dtype)
    if rest is None:
        return out
    return torch.cat([rest, out] if part == "last" else [out, rest], dim=-1)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, Tensor]:
    x, table = args
    inverse = kwargs.get("inverse", False)
    back = rope_p(cts[0], table, **{**kwargs, "inverse": not inverse})
    return back, _table_cotangent(x, table, cts[0], **kwargs)


def _table_cotangent(
    x: Tensor, table: Tensor, ct: Tensor, inverse: bool = False, interleaved: bool = False, part: Part = "all"
) -> Tensor:
    """Seldom wanted (the table is data), and then dropped as dead code."""
    x1, x2, _, _ = _parts(_split(x, table, part)[0], table, interleaved)
    g1, g2 = _halves(_split(ct, table, part)[0].to(x1.dtype), interleaved)
    dcos = (g1 * x1 + g2 * x2).sum(-2)
    dsin = (g2 * x1 - g1 * x2).sum(-2)
    d = torch.stack([dcos, -dsin if inverse else dsin], dim=-1)
    return (d if table.ndim == 4 else d.sum(0)).to(table.dtype)


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    table = "s r c" if len(shapes[1]) == 3 else "b s r c"
    return rule(f"b s h e, {table} -> b s h e", shapes, whole=frozenset("erc"), linear=frozenset({0}))


rope_p = Primitive("rope", _reference, vjp=_vjp, rule=_rule, flops=lambda n: 3 * elements(n), cheap=True)


def rope(
    x: Float[Tensor, "b s h e"],
    table: Float[Tensor, "*b s half 2"],
    *,
    interleaved: bool = False,
    part: Part = "all",
) -> Float[Tensor, "b s h e"]:
    """Turn each pair (x[i], x[i + e/2]) by its position's angle.

        out[i]       = x[i] cos_i - x[i + e/2] sin_i
        out[i + e/2] = x[i + e/2] cos_i + x[i] sin_i

    x             queries or keys, "b s h e"
    table         of `rope_table`, "s r/2 2" or "b s r/2 2"
    interleaved   pairs are neighbours, (x[2i], x[2i + 1]), as in DeepSeek's checkpoints and the original paper
    part          which dimensions turn: "all" (r = e), or the "first" or the "last" r of them; the others stay as they
                  are. DeepSeek's heads end in what turns, GPT-NeoX's and Qwen3-Next's begin with it

    The half-split layout is that of Hugging Face's Llama. Computed in the wider of the two dtypes, returned in x's.
    Source: Su et al. 2021, arXiv:2104.09864.

    >>> x = torch.ones(1, 3, 2, 4)
    >>> bool(torch.allclose(rope(x, rope_table(torch.arange(3), 4)).norm(), x.norm()))
    True
    >>> rope(x, rope_table(torch.arange(3), 2), part="last")[0, 1, 0, :2]
    tensor([1., 1.])
    """
    check_float("rope", x=x, table=table)
    if x.ndim != 4:
        raise ValueError(f"rope: x must be 'b s h e', given shape {tuple(x.shape)}")
    b, s, _, e = x.shape
    if part not in ("all", "first", "last"):
        raise ValueError(f"rope: part must be 'all', 'first' or 'last', given {part!r}")
    half = e // 2 if part == "all" or table.ndim < 2 else table.shape[-2]
    if tuple(table.shape) not in ((s, half, 2), (b, s, half, 2)) or (2 * half != e if part == "all" else 2 * half > e):
        fewer = "" if part == "all" else ", or fewer pairs"
        raise ValueError(
            f"rope: table must have shape {(s, e // 2, 2)} or {(b, s, e // 2, 2)}{fewer} for x of shape "
            f"{tuple(x.shape)}, given {tuple(table.shape)}; make it by rope_table(positions, head_dim={e})"
        )
    options = ({"interleaved": True} if interleaved else {}) | ({} if part == "all" else {"part": part})
    return rope_p(x, table, **options)
