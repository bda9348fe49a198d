"""From one placement to another by the cheapest sequence of collectives.

A shortest path over placements. The moves, and what each costs a rank in bytes received (plus a fixed price a
collective):

    slice            free        add a mesh axis to a dimension of a value that is the same on that axis
    all_gather       (n-1)·b     take the last axes of a dimension off it
    all_to_all       (n-1)/n·b   move the last axes of one dimension to the end of another
    reduce_scatter   (n-1)/n·b   a pending sum becomes sharded
    all_reduce       2(n-1)/n·b  a pending sum becomes whole
    ppermute         b           reorder the axes of one dimension

with b the local bytes before the move and n the size of the group. Ties are broken by the order of the mesh, so every
rank finds the same path.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count as counter
from itertools import permutations

from fmeg.program.errors import ShardingError
from fmeg.sharding.value import Placement, count

LATENCY = 4096.0  # bytes that one more collective is worth
SLICE = 1.0


@dataclass(frozen=True)
class Move:
    """One step of a plan: its kind, the group's axes, the dimensions it acts on, and where it leads."""

    kind: str
    axes: tuple[str, ...]
    dims: tuple[int, ...]
    to: Placement
    perm: tuple[tuple[int, int], ...] = ()


def plan(
    src: Placement, dst: Placement, shape: tuple[int, ...], itemsize: int, sizes: Mapping[str, int]
) -> tuple[float, tuple[Move, ...]]:
    """Cheapest moves from `src` to `dst` for a tensor of global `shape`; (cost, moves).

    Raises ShardingError when there is none: a whole value cannot become a pending sum.

    >>> src, dst = Placement((("tp",), ()), frozenset()), Placement(((), ("tp",)))
    >>> [m.kind for m in plan(src, dst, (8, 8), 4, {"tp": 2})[1]]
    ['all_to_all']
    """
    return _plan(src, dst, shape, itemsize, tuple(sizes.items()))


@lru_cache(maxsize=65536)
def _plan(
    src: Placement, dst: Placement, shape: tuple[int, ...], itemsize: int, items: tuple[tuple[str, int], ...]
) -> tuple[float, tuple[Move, ...]]:
    sizes = dict(items)
    if src == dst:
        return 0.0, ()
    if not dst.pending <= src.pending:
        raise ShardingError(f"cannot move {src} to {dst}: a value that is whole cannot become a pending sum")
    tie = counter()
    best: dict[Placement, float] = {src: 0.0}
    heap: list[tuple[float, int, int, Placement, tuple[Move, ...]]] = [(0.0, 0, next(tie), src, ())]
    while heap:
        cost, _, _, here, path = heapq.heappop(heap)
        if here == dst:
            return cost, path
        if cost > best[here]:
            continue
        nbytes = itemsize
        for n, axes in zip(shape, here.dims, strict=True):
            nbytes *= -(-n // count(axes, sizes))
        for price, move in _moves(here, dst, shape, nbytes, sizes):
            total = cost + price
            if total < best.get(move.to, float("inf")):
                best[move.to] = total
                heapq.heappush(heap, (total, len(path) + 1, next(tie), move.to, (*path, move)))
    raise ShardingError(f"no sequence of collectives moves {src} to {dst}")


def _moves(
    here: Placement, dst: Placement, shape: tuple[int, ...], nbytes: int, sizes: Mapping[str, int]
) -> Iterator[tuple[float, Move]]:
    dims = here.dims
    target = {a: d for d, axes in enumerate(dst.dims) for a in axes}
    for d, axes in enumerate(dims):
        for k in range(1, len(axes) + 1):
            tail = axes[-k:]
            n = count(tail, sizes)
            yield LATENCY + nbytes * (n - 1), Move("all_gather", tail, (d,), _with(here, {d: axes[:-k]}))
            for e in sorted({target.get(a, -1) for a in tail} - {d, -1}):
                if _fits(dims[e] + tail, shape[e], sizes):
                    to = _with(here, {d: axes[:-k], e: dims[e] + tail})
                    yield LATENCY + nbytes * (n - 1) / n, Move("all_to_all", tail, (e, d), to)
        if len(axes) > 1:
            for order in permutations(axes):
                if order != axes and order[0] in target and target[order[0]] == d:
                    yield (
                        LATENCY + nbytes,
                        Move("ppermute", axes, (d,), _with(here, {d: order}), _reorder(axes, order, sizes)),
                    )
    free = [a for a in sizes if a not in here.used and a in target]
    for a in free:
        d = target[a]
        if _fits((*dims[d], a), shape[d], sizes):
            yield SLICE, Move("slice", (a,), (d,), _with(here, {d: (*dims[d], a)}))
    todo = tuple(a for a in sizes if a in here.pending - dst.pending)
    for group in _groups(todo):
        n = count(group, sizes)
        rest = here.pending - set(group)
        yield LATENCY + 2 * nbytes * (n - 1) / n, Move("all_reduce", group, (), Placement(dims, rest))
        for d in sorted({target[a] for a in group if a in target}):
            for order in permutations(group):
                if all(target.get(a) == d for a in group) and _fits(dims[d] + order, shape[d], sizes):
                    yield (
                        LATENCY + nbytes * (n - 1) / n,
                        Move("reduce_scatter", order, (d,), Placement(_with(here, {d: dims[d] + order}).dims, rest)),
                    )


def _groups(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for mask in range(1, 1 << len(axes)):
        yield tuple(a for i, a in enumerate(axes) if mask >> i & 1)


def _with(p: Placement, new: dict[int, tuple[str, ...]]) -> Placement:
    return Placement(tuple(new.get(i, d) for i, d in enumerate(p.dims)), p.pending)


def _fits(axes: tuple[str, ...], size: int, sizes: Mapping[str, int]) -> bool:
    return size % count(axes, sizes) == 0


def _reorder(old: tuple[str, ...], new: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[tuple[int, int], ...]:
    """Pairs (src, dst) of indices in the group `old`: who holds a block, and who shall hold it under the order
    `new`."""
    pairs = []
    for rank in range(count(old, sizes)):
        coords, rest = {}, rank
        for a in reversed(old):
            rest, coords[a] = divmod(rest, sizes[a])
        block = 0
        for a in new:
            block = block * sizes[a] + coords[a]
        pairs.append((block, rank))
    return tuple(pairs)
