"""Gathers and reductions in parts, one a member of the group, that travel while others are computed with.

Members read one another's memory (`Peers`): nothing is sent, each fetches what it needs when it is there. Copies are
launched apart from what computes; on GPUs copy engines make them, which take no multiprocessor away.

    gathered     own part   use(own) ……………… use(next) ……
                 copies               next ……… the one after …

    scattered    produce(for next) … produce(for the one after) … produce(own) … sum
    copies                            of the one before ………………

Who reads memory is done with it before it is written again: that is what the barriers are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

PIECES = 64  # copies that are launched in the time of a product


class Peers(Protocol):
    """Memory of each member of a group that all others may read, and the order of what each launches.

    size, index    of the group, and of this member in it
    """

    size: int
    index: int

    def reserve(self, nbytes: int) -> None:
        """So much will be asked for: the first `buffers` allocates all of it."""
        ...

    def buffers(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """A tensor in the memory of each member, the same memory at each call."""
        ...

    def barrier(self) -> None:
        """What is launched here after it runs after what every member launched before it."""
        ...

    def apart(self) -> AbstractContextManager[Any]:
        """What is launched inside runs after what was launched before, and beside what comes later."""
        ...

    def mark(self) -> Any:
        """A point in what is launched apart."""
        ...

    def wait(self, mark: Any) -> None:
        """What is launched from here on runs after that point."""
        ...

    def join(self) -> None:
        """What is launched from here on runs after all that was launched apart."""
        ...


def gathered(
    peers: Peers, x: Tensor, dim: int, use: Callable[[int, Tensor], None], whole: bool = False
) -> Tensor | None:
    """`use(member, part)` with every member's x: this one's at once, the others' as they come, the next member's first.

    whole    the result is all parts, concatenated along `dim` in group order; else None
    """
    n, me, x = peers.size, peers.index, x.contiguous()
    others = [(me + i) % n for i in range(1, n)]
    length = x.shape[dim]
    out = x.new_empty(*x.shape[:dim], n * length, *x.shape[dim + 1 :]) if whole else None
    parts = {r: torch.empty_like(x) if out is None else out.narrow(dim, r * length, length) for r in others}
    there = peers.buffers(x.shape, x.dtype)
    there[me].copy_(x)
    peers.barrier()
    marks = {}
    with peers.apart():
        for r in others:
            _copy(parts[r], there[r], dim)
            marks[r] = peers.mark()
        peers.barrier()
        if out is not None:
            _copy(out.narrow(dim, me * length, length), x, dim)
    use(me, x)
    for r in others:
        peers.wait(marks[r])
        use(r, parts[r])
    peers.join()
    return out


def scattered(
    peers: Peers, shape: Sequence[int], dtype: torch.dtype, device: torch.device, produce: Callable[[int, Tensor], None]
) -> Tensor:
    """The sum over the members of what each produces for this one.

    `produce(member, memory)` writes what is for a member, contiguous, of `shape`: for the next member first, for this
    one last. Summed in float32 where the parts are narrower, and rounded once.
    """
    n, me = peers.size, peers.index
    parts = torch.empty((n, *shape), dtype=dtype, device=device)
    if n > 1:
        there = peers.buffers((n - 1, *shape), dtype)
        for step in range(1, n):
            produce((me + step) % n, there[me][step - 1])
            peers.barrier()
            source = (me - step) % n
            with peers.apart():
                parts[source].copy_(there[source][step - 1])
        with peers.apart():
            peers.barrier()
    produce(me, parts[me])
    peers.join()
    return parts[0] + parts[1] if n == 2 else parts.sum(0)


def _copy(target: Tensor, source: Tensor, dim: int) -> None:
    """In as few pieces as are contiguous on both sides, as copy engines take them, or by one kernel where those are
    many; only `dim` of the target may be cut out of a larger one."""
    rows, rest = prod(target.shape[:dim]), target.shape[dim:]
    if target.is_contiguous() or rows > PIECES:
        target.copy_(source)
        return
    for a, b in zip(target.view(rows, *rest), source.view(rows, *rest), strict=True):
        a.copy_(b)
