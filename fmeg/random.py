"""Random numbers that belong to a key and a place, not to a device.

A key is an int64 tensor [2] of two 32-bit words; nothing is ever drawn from hidden state. The element at flat index i
of a draw depends on (key, i) only: word i mod 4 of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
1, 2, 3", SC 2011) at counter i div 4. A shard therefore draws its own block and gets the bits that one device would.

All results are computed in float64 and rounded once, so draws of several dtypes are roundings of the same numbers.
"""

from __future__ import annotations

import builtins
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule

Key: TypeAlias = Int[Tensor, "2"]
Word: TypeAlias = Any  # 32 bits in an int64 tensor of any shape, or in an int
Shape: TypeAlias = Sequence[int]

_MASK = 0xFFFFFFFF
# The multipliers minus 2**32: a product with a 32-bit word then fits in an int64; its high half lacks that word.
_M0, _M1 = 0xD2511F53 - 2**32, 0xCD9E8D57 - 2**32
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_DRAW, _FOLD, _FOLD_NAME, _SPLIT = range(4)  # the counter's last word: what a block is for
_UNIT = 2.0**-32


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10: four random 32-bit words for a counter of four words and a key of two, elementwise.

    A round maps (c0, c1, c2, c3) to (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0)); the key is
    raised by the Weyl constants between rounds.

    >>> " ".join(f"{w:08x}" for w in philox((0, 0, 0, 0), (0, 0)))
    '6627e8d5 e169c58d bc57ac4c 9b00dbd8'
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c2 = (((p1 >> 32) + c2) ^ c1 ^ k0) & _MASK, (((p0 >> 32) + c0) ^ c3 ^ k1) & _MASK
        c1, c3 = p1, p0  # masked by the next round's `&`, or below
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


# -- keys -------------------------------------------------------------------------------------------------------------
def key(seed: int, device: torch.device | str | None = None) -> Key:
    """The key of a seed, its low and high word. The seed is taken modulo 2**64.

    >>> key(7)
    tensor([7, 0])
    """
    return torch.tensor([seed & _MASK, (seed >> 32) & _MASK], dtype=torch.int64, device=device)


def fold_in(key: Key, data: int | str | Int[Tensor, ""]) -> Key:
    """A new key from a key and a number, a name, or a 0-d integer tensor (a step, a layer index; it may be traced).

    Numbers count modulo 2**64 and an int equals the tensor of it; a name counts by its 64-bit BLAKE2b hash.

    >>> k = key(0)
    >>> torch.equal(fold_in(k, 3), fold_in(k, torch.tensor(3))), torch.equal(fold_in(k, "wq"), fold_in(k, "wk"))
    (True, False)
    """
    _check_key("fold_in", key)
    if isinstance(data, str):
        return _fold_in(key, _hash(data), purpose=_FOLD_NAME)
    if isinstance(data, Tensor) and (data.ndim or data.is_floating_point() or data.is_complex()):
        raise TypeError(f"fold_in: expected data to be an int, a str or a 0-d integer tensor, got {_describe(data)}")
    return _fold_in(key, data, purpose=_FOLD)


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def split(key: Key, n: int = 2) -> Int[Tensor, "n 2"]:
    """`n` new keys, stacked: unpack them, or scan over them. The first m of n are the m of `split(key, m)`.

    >>> a, b = split(key(0))
    >>> split(key(0), 5).shape, torch.equal(split(key(0), 5)[1], b)
    (torch.Size([5, 2]), True)
    """
    _check_key("split", key)
    return _split(key, n)


def _fold_in_reference(key: Tensor, data: Any, *, purpose: int) -> Tensor:
    if isinstance(data, Tensor):
        data = data.to(torch.int64)
    words = philox((data & _MASK, (data >> 32) & _MASK, 0, purpose), (key[0], key[1]))
    return torch.stack(words[:2])


def _split_reference(key: Tensor, n: int) -> Tensor:
    words = philox((torch.arange(n, device=key.device), 0, 0, _SPLIT), (key[0], key[1]))
    return torch.stack(words[:2], -1)


def _fold_in_rule(node: Node) -> Rule:
    whole = (("word",),)
    return Rule((whole, ()) if len(node.operands()) == 2 else (whole,), (whole,), {"word": 2}, frozenset({"word"}))


def _split_rule(node: Node) -> Rule:
    sizes = {"word": 2, "n": node.outs[0].shape[0]}
    return Rule(((("word",),),), ((("n",), ("word",)),), sizes, frozenset(sizes))


def _no_gradient(args: Any, kwargs: Any, outs: Any, cts: Any) -> tuple[None, ...]:
    return (None,) * builtins.sum(isinstance(a, Tensor) for a in args)


_fold_in = Primitive("fold_in", _fold_in_reference, vjp=_no_gradient, rule=_fold_in_rule)
_split = Primitive("split_key", _split_reference, vjp=_no_gradient, rule=_split_rule)


# -- blocks -----------------------------------------------------------------------------------------------------------
def _generate(
    finish: Callable[..., Sequence[Tensor]], key: Tensor, shape: Shape, block: Shape, offset: Shape
) -> Tensor:
    """Draw the elements [offset, offset + block) of a draw of `shape`; `finish` turns four words into four elements."""
    n, starts = _runs(shape, block, offset, key.device)
    aligned = isinstance(starts, int)
    width = -(-n // 4) if aligned else -(-(n + 3) // 4)  # Philox blocks that a run of n elements may touch
    counters = torch.arange(width, device=key.device)
    if not aligned:
        counters = (starts[..., None] >> 2) + counters
    parts = []
    for c in counters.reshape(-1).split(2**14 if key.device.type == "cpu" else 2**24):  # what stays in a core's cache
        words = philox((c & _MASK, c >> 32, 0, _DRAW), (key[0], key[1]))
        parts.append(torch.stack(tuple(finish(*words)), -1))
    drawn = (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(-1 if width else 1, 4 * width)
    if aligned:
        return drawn[:, :n].reshape(block)
    index = (starts[..., None] & 3) + torch.arange(n, device=key.device)
    return torch.gather(drawn, 1, index).reshape(block)


def _runs(shape: Shape, block: Shape, offset: Shape, device: torch.device) -> tuple[int, Any]:
    """Length and first flat indices [rows] of the contiguous runs that make up a block; the int 0 for a whole draw."""
    ndim = len(shape)
    inner = ndim  # dims from here on are whole
    while inner and block[inner - 1] == shape[inner - 1]:
        inner -= 1
    if inner == 0:
        return math.prod(shape), 0
    n = math.prod(block[inner - 1 :])
    starts = torch.zeros(1, dtype=torch.int64, device=device)
    for d in range(inner):
        stride = math.prod(shape[d + 1 :])
        first = torch.arange(block[d] if d < inner - 1 else 1, device=device) + offset[d]
        starts = (starts[:, None] + first * stride).reshape(-1)
    return n, starts


def _draw_rule(node: Node) -> Rule:
    factors = tuple(f"d{i}" for i in range(node.outs[0].ndim))
    sizes = {"word": 2, **dict(zip(factors, node.outs[0].shape, strict=True))}

    def local(info: Local, key: Tensor, *, shape: Shape, **kwargs: Any) -> Tensor:
        block = tuple(info.size(f) for f in factors)
        return node.op(key, *(info.offset(f) for f in factors), shape=shape, block=block, **kwargs)

    return Rule(((("word",),),), (tuple((f,) for f in factors),), sizes, frozenset({"word"}), local=local)


def _distribution(name: str, finish: Callable[..., Sequence[Tensor]]) -> Primitive:
    """The primitive `name(key, *offset, shape, block=None, dtype, **params)`, with `finish(*words, dtype, **params)`.

    With a `block` it draws that part of the draw, beginning at `offset` (ints or 0-d tensors, one a dimension).
    """

    def reference(key: Tensor, *offset: Any, shape: Shape, block: Shape | None = None, **kw: Any) -> Tensor:
        if block is None:
            block, offset = shape, (0,) * len(shape)
        return _generate(lambda *words: finish(*words, **kw), key, shape, block, offset)

    def fake(
        key: Tensor, *offset: Any, shape: Shape, block: Shape | None = None, dtype: torch.dtype, **kw: Any
    ) -> Tensor:
        return key.new_empty(shape if block is None else block, dtype=dtype)

    return Primitive(name, reference, vjp=_no_gradient, rule=_draw_rule, fake=fake)


# -- distributions ----------------------------------------------------------------------------------------------------
def bits(key: Key, shape: Shape) -> Int[Tensor, "..."]:
    """Uniform 32-bit words in an int64 tensor: 0 <= x < 2**32.

    >>> bits(key(0), (2,)).tolist() == [0x6627E8D5, 0xE169C58D]
    True
    """
    return _draw(_bits, key, shape, dtype=torch.int64)


def uniform(key: Key, shape: Shape, dtype: torch.dtype = torch.float32) -> Float[Tensor, "..."]:
    """Uniform in [0, 1): the leading 32 bits (float64), 24 (float32), 11 (float16) or 8 (bfloat16) of each word.

    >>> uniform(key(1), (1000,)).mean().round(decimals=1)
    tensor(0.5000)
    """
    return _draw(_uniform, key, shape, dtype=_floating("uniform", dtype))


def normal(key: Key, shape: Shape, dtype: torch.dtype = torch.float32) -> Float[Tensor, "..."]:
    """Standard normal, by Box and Muller (1958): sqrt(-2 ln u) (cos 2 pi v, sin 2 pi v) for each pair of words u, v.

    >>> x = normal(key(1), (4, 1000), torch.float64)
    >>> bool(x.mean().abs() < 0.05), bool((x.std() - 1).abs() < 0.05)
    (True, True)
    """
    return _draw(_normal, key, shape, dtype=_floating("normal", dtype))


def truncated_normal(
    key: Key, shape: Shape, lower: float = -2.0, upper: float = 2.0, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "..."]:
    """Standard normal conditioned on [lower, upper], by inversion.

    sqrt(2) erfinv(a + (b - a) u) with u uniform, a = erf(lower / sqrt 2), b = erf(upper / sqrt 2). Its standard
    deviation is below 1 (0.8796 for the defaults). ValueError unless lower < upper.

    >>> x = truncated_normal(key(1), (1000,))
    >>> bool(x.min() >= -2), bool(x.max() <= 2)
    (True, True)
    """
    if not lower < upper:
        raise ValueError(f"truncated_normal: expected lower < upper, got lower={lower}, upper={upper}")
    return _draw(_truncated_normal, key, shape, dtype=_floating("truncated_normal", dtype), lower=lower, upper=upper)


def bernoulli(key: Key, shape: Shape, p: float = 0.5) -> Bool[Tensor, "..."]:
    """True with probability p, to within 2**-32. ValueError unless 0 <= p <= 1.

    >>> bernoulli(key(1), (1000,), 0.25).sum() in range(200, 300)
    True
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: expected 0 <= p <= 1, got p={p}")
    return _draw(_bernoulli, key, shape, dtype=torch.bool, p=p)


def randint(key: Key, shape: Shape, low: int, high: int, dtype: torch.dtype = torch.int64) -> Int[Tensor, "..."]:
    """Integers low <= x < high: low + floor(word (high - low) / 2**32), uniform to within (high - low) / 2**32.

    ValueError unless 1 <= high - low <= 2**31.

    >>> sorted(set(randint(key(1), (100,), 3, 6).tolist()))
    [3, 4, 5]
    """
    if not 1 <= high - low <= 2**31:
        raise ValueError(f"randint: expected 1 <= high - low <= 2**31, got low={low}, high={high}")
    return _draw(_randint, key, shape, dtype=dtype, low=low, high=high)


_KEPT_BITS = {torch.float64: 32, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def _finish_uniform(*words: Tensor, dtype: torch.dtype) -> list[Tensor]:
    drop = 32 - _KEPT_BITS[dtype]
    return [((w >> drop).double() * 2.0 ** (drop - 32)).to(dtype) for w in words]


def _finish_normal(*words: Tensor, dtype: torch.dtype) -> list[Tensor]:
    out = []
    for a, b in (words[:2], words[2:]):
        radius = ((a.double() + 0.5) * _UNIT).log().mul(-2.0).sqrt()
        angle = b.double() * (2.0 * math.pi * _UNIT)
        out += [(radius * angle.cos()).to(dtype), (radius * angle.sin()).to(dtype)]
    return out


def _finish_truncated(*words: Tensor, dtype: torch.dtype, lower: float, upper: float) -> list[Tensor]:
    first, last = math.erf(lower / math.sqrt(2.0)), math.erf(upper / math.sqrt(2.0))
    return [
        ((w.double() + 0.5) * ((last - first) * _UNIT) + first)
        .erfinv()
        .mul(math.sqrt(2.0))
        .clamp(lower, upper)
        .to(dtype)
        for w in words
    ]


_bits = _distribution("random_bits", lambda *words, dtype: words)
_uniform = _distribution("uniform", _finish_uniform)
_normal = _distribution("normal", _finish_normal)
_truncated_normal = _distribution("truncated_normal", _finish_truncated)
_bernoulli = _distribution("bernoulli", lambda *words, dtype, p: [w < round(p * 2**32) for w in words])
_randint = _distribution(
    "randint", lambda *words, dtype, low, high: [(((w * (high - low)) >> 32) + low).to(dtype) for w in words]
)


# -- noise ------------------------------------------------------------------------------------------------------------
def rounding_bits(key: Key, shape: Shape, name: str = "") -> Int[Tensor, "..."]:
    """Uniform 16-bit integers in an int32 tensor, 0 <= x < 2**16: enough for rounding, not for sampling.

    A few pointwise operations an element, so that they fuse with what they are for: the element at flat index i is the
    high half of m(m(i ^ a) ^ b), with m a bijective mixer of 32 bits and (a, b) the key xor the 64-bit BLAKE2b hash of
    `name`: one key serves many tensors.

    Source of m: Wellons, "Prospecting for hash functions", https://nullprogram.com/blog/2018/07/31 ("lowbias32").

    >>> x = rounding_bits(key(0), (1000,))
    >>> int(x.min()) >= 0, int(x.max()) < 2**16, bool((x.double().mean() / 2**16 - 0.5).abs() < 0.05)
    (True, True, True)
    """
    return _draw(_rounding_bits, key, shape, salt=_hash(name))


def _rounding_reference(
    key: Tensor, *offset: Any, shape: Shape, salt: int, block: Shape | None = None
) -> Int[Tensor, "..."]:
    if block is None:
        block, offset = shape, (0,) * len(shape)
    large = math.prod(shape) > 2**31
    index = torch.zeros((), dtype=torch.int64 if large else torch.int32, device=key.device)
    stride = 1
    for d in reversed(range(len(shape))):
        here = torch.arange(block[d], dtype=index.dtype, device=key.device) + offset[d]
        index = index + (here * stride).reshape(-1, *(1,) * (len(shape) - 1 - d))
        stride *= shape[d]
    words = [_as_int32(salt >> shift) for shift in (0, 32)]
    a, b = (key[i].to(torch.int32) ^ words[i] for i in (0, 1))
    mixed = _mixed(index.to(torch.int32) ^ a) ^ b
    if large:
        mixed = mixed ^ _mixed((index >> 32).to(torch.int32))
    return _unsigned_shift(_mixed(mixed), 16)


def _as_int32(word: int) -> int:
    return ((word + 2**31) & _MASK) - 2**31


def _unsigned_shift(x: Tensor, n: int) -> Tensor:
    return (x >> n) & (2 ** (32 - n) - 1)


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _unsigned_shift(x, 16)) * 0x7FEB352D
    x = (x ^ _unsigned_shift(x, 15)) * _as_int32(0x846CA68B)
    return x ^ _unsigned_shift(x, 16)


def _rounding_fake(
    key: Tensor, *offset: Any, shape: Shape, salt: int, block: Shape | None = None
) -> Int[Tensor, "..."]:
    return key.new_empty(shape if block is None else block, dtype=torch.int32)


_rounding_bits = Primitive(
    "rounding_bits", _rounding_reference, vjp=_no_gradient, rule=_draw_rule, fake=_rounding_fake, cheap=True
)


def _draw(primitive: Primitive, key: Tensor, shape: Shape, **kwargs: Any) -> Tensor:
    _check_key(primitive.name, key)
    sizes = tuple(int(s) for s in shape)
    if any(s < 0 for s in sizes):
        raise ValueError(f"{primitive.name}: expected sizes >= 0, got shape={sizes}")
    return primitive(key, shape=sizes, **kwargs)


def _floating(name: str, dtype: torch.dtype) -> torch.dtype:
    if dtype not in _KEPT_BITS:
        raise TypeError(f"{name}: expected dtype to be one of {', '.join(map(str, _KEPT_BITS))}, got {dtype}")
    return dtype


def _check_key(name: str, key: Any) -> None:
    if not isinstance(key, Tensor) or key.dtype != torch.int64 or tuple(key.shape) != (2,):
        raise TypeError(
            f"{name}: expected key to be an int64 tensor [2], got {_describe(key)}; make one by fmeg.random.key(seed)"
        )


def _describe(x: Any) -> str:
    return f"a {x.dtype} tensor {list(x.shape)}" if isinstance(x, Tensor) else repr(x)
