"""Plain definitions of the collectives, on one tensor a rank, and the cases that backends are checked on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import Tensor

from fmeg.mesh import Mesh

Locals = list[Tensor]
REDUCE = {"sum": torch.add, "max": torch.maximum}


@cache
def group(mesh: Mesh, rank: int, axes: tuple[str, ...]) -> list[int]:
    """Ranks that differ from `rank` on `axes` only, ordered by their coordinates on `axes`."""
    here = mesh.coordinates(rank)
    same = [r for r in range(mesh.size) if all(mesh.coordinates(r)[a] == here[a] for a in mesh.axes if a not in axes)]
    return sorted(same, key=lambda r: tuple(mesh.coordinates(r)[a] for a in axes))


def all_reduce(mesh: Mesh, xs: Locals, axes: tuple[str, ...], op: str) -> Locals:
    out = []
    for r in range(mesh.size):
        first, *others = group(mesh, r, axes)
        total = xs[first]
        for other in others:
            total = REDUCE[op](total, xs[other])
        out.append(total)
    return out


def all_gather(mesh: Mesh, xs: Locals, axes: tuple[str, ...], dim: int) -> Locals:
    return [torch.cat([xs[s] for s in group(mesh, r, axes)], dim) for r in range(mesh.size)]


def _block(mesh: Mesh, x: Tensor, rank: int, axes: tuple[str, ...], dim: int) -> Tensor:
    members = group(mesh, rank, axes)
    size = x.shape[dim] // len(members)
    return x.narrow(dim, members.index(rank) * size, size)


def reduce_scatter(mesh: Mesh, xs: Locals, axes: tuple[str, ...], dim: int) -> Locals:
    return [_block(mesh, x, r, axes, dim) for r, x in enumerate(all_reduce(mesh, xs, axes, "sum"))]


def all_to_all(mesh: Mesh, xs: Locals, axes: tuple[str, ...], split_dim: int, concat_dim: int) -> Locals:
    return [
        torch.cat([_block(mesh, xs[s], r, axes, split_dim) for s in group(mesh, r, axes)], concat_dim)
        for r in range(mesh.size)
    ]


def ppermute(mesh: Mesh, xs: Locals, axes: tuple[str, ...], perm: list[tuple[int, int]]) -> Locals:
    out = []
    for r, x in enumerate(xs):
        members = group(mesh, r, axes)
        senders = [s for s, d in perm if d == members.index(r)]
        out.append(xs[members[senders[0]]] if senders else torch.zeros_like(x))
    return out


def axis_index(mesh: Mesh, axes: tuple[str, ...]) -> Locals:
    return [torch.tensor(group(mesh, r, axes).index(r)) for r in range(mesh.size)]


def factorisations(n: int) -> Iterator[tuple[int, ...]]:
    """Ordered factorisations of n into factors >= 2.

    >>> list(factorisations(8))
    [(2, 2, 2), (2, 4), (4, 2), (8,)]
    """
    if n == 1:
        yield ()
    for first in range(2, n + 1):
        if n % first == 0:
            yield from ((first, *rest) for rest in factorisations(n // first))


def meshes(largest: int = 8) -> list[tuple[int, ...]]:
    """Sizes of all meshes up to `largest` devices, and some with axes of size 1."""
    out = [sizes for n in range(1, largest + 1) for sizes in factorisations(n)]
    return [*out, (1,), (2, 1, 2), (1, 3)]


def axes_tuples(mesh: Mesh) -> list[tuple[str, ...]]:
    """Every set of axes in every order, the empty one too."""
    return [axes for k in range(len(mesh.axes) + 1) for axes in itertools.permutations(mesh.axes, k)]


def sample(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random numbers, not contiguous when there are two dimensions or more."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn((*shape[:-2], *shape[-2:][::-1]), generator=g, dtype=torch.float64)
    x = x.transpose(-1, -2) if len(shape) > 1 else x
    return x > 0 if dtype == torch.bool else (x * 4).to(dtype)


Case = tuple[str, Callable[..., list], Callable[..., Locals]]


def cases(mesh: Mesh, axes: tuple[str, ...]) -> Iterator[Case]:
    """(name, what a backend is asked for two values, the plain definition on locals)."""
    n = mesh.axis_size(axes)
    for op in ("sum", "max"):
        yield op, lambda b, xs, op=op: b.all_reduce(xs, axes, op), lambda x, op=op: all_reduce(mesh, x, axes, op)
    for d in (0, 1, -1):
        yield (
            f"all_gather {d}",
            lambda b, xs, d=d: b.all_gather(xs, axes, [d] * len(xs)),
            lambda x, d=d: all_gather(mesh, x, axes, d),
        )
    for d in (0, 1):
        yield (
            f"reduce_scatter {d}",
            lambda b, xs, d=d: b.reduce_scatter(xs, axes, [d] * len(xs)),
            lambda x, d=d: reduce_scatter(mesh, x, axes, d),
        )
    for s, c in ((0, 1), (1, 0), (0, 0), (1, 2)):
        yield (
            f"all_to_all {s} {c}",
            lambda b, xs, s=s, c=c: b.all_to_all(xs, axes, [s] * len(xs), [c] * len(xs)),
            lambda x, s=s, c=c: all_to_all(mesh, x, axes, s, c),
        )
    ring = [(i, (i + 1) % n) for i in range(n)]
    for perm in (ring, ring[:-1], [], [(0, n - 1)]):
        yield (
            f"ppermute {perm}",
            lambda b, xs, perm=perm: [b.ppermute(x, axes, perm) for x in xs],
            lambda x, perm=perm: ppermute(mesh, x, axes, perm),
        )


def value_dims(mesh: Mesh) -> list[tuple[tuple[str, ...], ...]]:
    """Placements of a 3-d value: over no axis, some, all."""
    return [((), (), ()), *(((a,), (), ()) for a in mesh.axes[:1]), (mesh.axes, (), ())]
