"""Sharding rules as data: how an operation's dimensions relate.

A rule names *factors*. Each dimension of each operand and result is a tuple of factors, major first: most dimensions
are one factor, a merged dimension `(a b)` is two, a dimension of size 1 that only broadcasts is none. From a rule the
partitioner derives what may be sharded, what becomes a pending sum and what must be whole.

    einsum "b s d, d f -> b s f"     d contracted: sharded d gives a pending sum
    softmax over the last dim        "b s v -> b s v", whole = {v}
    view (8, 6) -> (48,)             "a b -> (a b)"
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

Dims = tuple[tuple[str, ...], ...]


class Local(Protocol):
    """What a rule's `local` function may ask about the placement that was chosen."""

    def size(self, factor: str) -> int:
        """Local size of a factor."""
        ...

    def axes(self, factor: str) -> tuple[str, ...]:
        """Mesh axes that shard a factor, major first; () when it is whole."""
        ...

    def parts(self, factor: str) -> int:
        """How many shards a factor has."""
        ...

    def offset(self, factor: str) -> Any:
        """Global index of the first local element of a factor: the int 0 when whole, else a 0-d int64 tensor."""
        ...

    def option(self, name: str, default: Any = None) -> Any:
        """An option of the layout, such as `attention="ring"`."""
        ...


@dataclass(frozen=True)
class Rule:
    """How one node may be sharded.

    ins, outs   factors of each dimension of each tensor operand (in the order of `Node.operands()`) and result
    sizes       global size of each factor
    whole       factors that may not be sharded
    linear      operands (by index) in which the operation is linear; a pending sum may pass through them
    joint       True when it is linear in all of `linear` *together* (add, cat, where): all must be pending.
                False: in each alone (mul, einsum): one is pending, the others are not
    resolved    factors absent from the results whose sum `local` completes itself (so the result is not pending)
    prefer      a whole factor -> the factor that takes its mesh axes if it can (instead of gathering)
    declared    True when gathering a whole factor is part of the operation's meaning (strict mode lets it pass)
    local       local(info, *args, **kwargs) -> results, run on local tensors, may call fmeg.ops.collectives;
                None: the operation itself on the local tensors
    exchange    (option, value, {from: to}): when the layout's option has this value, the axes of factor `from` are
                exchanged
                for a split of factor `to` (all_to_all) before the operation; `give_back` lists the results that are
                brought back to where the operands were
    at_rest     of a parameter (the first operand) it is done where that rests, and the results are brought into use
    tied        groups of factors of different operands that one mesh axis may shard together (queries and keys)
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims, ...]
    sizes: dict[str, int]
    whole: frozenset[str] = frozenset()
    linear: frozenset[int] = frozenset()
    joint: bool = False
    resolved: frozenset[str] = frozenset()
    prefer: dict[str, str] = field(default_factory=dict)
    declared: bool = False
    local: Callable[..., Any] | None = None
    tied: tuple[tuple[str, ...], ...] = ()
    exchange: tuple[str, str, dict[str, str]] | None = None
    give_back: frozenset[int] = frozenset()
    at_rest: bool = False


def parse_dims(text: str) -> Dims:
    """Parse one side's term: names, `(a b)` for a merged dimension, `1` for a broadcast one.

    >>> parse_dims("b (h e) 1")
    (('b',), ('h', 'e'), ())
    """
    out = []
    for m in re.finditer(r"\(([^)]*)\)|(\S+)", text):
        inner, single = m.groups()
        if inner is not None:
            out.append(tuple(inner.split()))
        else:
            out.append(() if single == "1" else (single,))
    return tuple(out)


def rule(text: str, shapes: Iterable[tuple[int, ...]], outs: Iterable[tuple[int, ...]] = (), **kw: Any) -> Rule:
    """Build a Rule from einops-like text and the operands' global shapes (sizes are read off single-factor dims).

    `outs` gives result shapes, needed only for factors that operands do not show alone.

    >>> rule("b s d, d f -> b s f", [(2, 3, 4), (4, 5)], linear=frozenset({0, 1})).sizes
    {'b': 2, 's': 3, 'd': 4, 'f': 5}
    """
    left, right = text.split("->")
    ins = tuple(parse_dims(t) for t in left.split(",")) if left.strip() else ()
    out_dims = tuple(parse_dims(t) for t in right.split(","))
    sizes: dict[str, int] = dict(kw.pop("sizes", {}))
    for dims, shape in [*zip(ins, shapes, strict=True), *zip(out_dims, outs, strict=False)]:
        if len(dims) != len(shape):
            raise ValueError(f"sharding rule {text!r}: {dims} does not fit shape {shape}")
        for d, n in zip(dims, shape, strict=True):
            if len(d) == 1:
                if sizes.setdefault(d[0], n) != n:
                    raise ValueError(f"sharding rule {text!r}: factor {d[0]!r} has sizes {sizes[d[0]]} and {n}")
    return Rule(ins, out_dims, sizes, **kw)
