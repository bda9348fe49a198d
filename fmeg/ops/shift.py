"""`shift`: what comes later in a sequence, at each position; crosses the borders of a sharded sequence."""

from __future__ import annotations

import torch
from jaxtyping import Shaped
from torch import Tensor

from fmeg.ops._common import row_names
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule, rule


def _reference(x: Tensor, n: int, dim: int) -> Tensor:
    size = x.shape[dim]
    kept = max(size - abs(n), 0)
    gap = x.new_zeros([size - kept if d == dim else m for d, m in enumerate(x.shape)])
    parts = [x.narrow(dim, size - kept, kept), gap] if n > 0 else [gap, x.narrow(dim, 0, kept)]
    return torch.cat(parts, dim)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor | None]:
    x, n, dim = args
    return (shift_p(cts[0], -n, dim) if x.dtype.is_floating_point else None,)


def _local(info: Local, x: Tensor, n: int, dim: int) -> Tensor:
    """A block is the end of one block and the beginning of the next, `n` positions further on; past the last are
    zeros."""
    from fmeg.ops.collectives import ppermute

    axes, parts = info.axes(f"d{dim}"), info.parts(f"d{dim}")
    if parts == 1:
        return shift_p(x, n, dim)
    size = x.shape[dim]
    hops, rest = divmod(n, size)  # n = hops · size + rest, 0 ≤ rest < size

    def from_rank(hop: int, part: Tensor) -> Tensor:
        if hop == 0:
            return part
        return ppermute(part, axes, [(r + hop, r) for r in range(parts) if 0 <= r + hop < parts])

    end = from_rank(hops, x.narrow(dim, rest, size - rest).contiguous())
    if rest == 0:
        return end
    return torch.cat([end, from_rank(hops + 1, x.narrow(dim, 0, rest).contiguous())], dim)


def _rule(node: Node) -> Rule:
    shape = node.operands()[0].shape
    dims = row_names(len(shape))
    return rule(f"{dims} -> {dims}", [shape], linear=frozenset({0}), local=_local)


shift_p = Primitive("shift", _reference, vjp=_vjp, rule=_rule, flops=lambda n: 0)


def shift(x: Shaped[Tensor, "..."], n: int = 1, dim: int = 1) -> Shaped[Tensor, "..."]:
    """out[i] = x[i + n] along `dim`, and 0 (False) where there is none: the tokens n later, or -n earlier.

    On a mesh the dimension may be sharded: each shard gets what it lacks from those that hold it, by ppermute, not by
    a gather.

    >>> shift(torch.tensor([[1, 2, 3]])).tolist(), shift(torch.tensor([1, 2, 3]), -2, dim=0).tolist()
    ([[2, 3, 0]], [0, 0, 1])
    """
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"shift: dim must be in [{-x.ndim}, {x.ndim}) for x of shape {tuple(x.shape)}, given {dim}")
    return shift_p(x, int(n), dim % x.ndim) if n else x
