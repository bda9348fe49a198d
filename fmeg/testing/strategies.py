"""Hypothesis strategies for meshes, layouts and specs. What they draw is valid by construction; nothing is filtered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from hypothesis import strategies as st

from fmeg.mesh import Mesh
from fmeg.sharding.spec import ATTENTION_KINDS, Layout, P

AXES = ("dp", "cp", "tp", "xp")
SIZES = dict(batch=8, seq=16, embed=16, heads=8, kv_heads=4, head_dim=4, ff=32, vocab=64)

Axes = tuple[str, ...]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@st.composite
def meshes(draw: st.DrawFn, max_devices: int = 8, axes: Sequence[str] = AXES, backend: str = "auto") -> Mesh:
    """Meshes of at most `max_devices` devices over some of `axes`, in any order; axes of size 1 occur.

    >>> from hypothesis import find
    >>> find(meshes(), lambda mesh: mesh.size == 4).size
    4
    """
    names = draw(st.permutations(draw(st.lists(st.sampled_from(list(axes)), unique=True))))
    sizes, room = {}, max_devices
    for name in names:
        sizes[name] = draw(st.integers(1, max(1, min(room, 4))))
        room //= sizes[name]
    return Mesh(sizes, backend=backend)


@st.composite
def specs(draw: st.DrawFn, shape: Sequence[int], mesh: Mesh) -> P:
    """Specs for a tensor of `shape`: each mesh axis on at most one dimension, which it divides; tuples in any order.

    >>> from hypothesis import find
    >>> find(specs((4, 3), Mesh(dp=2, tp=3)), lambda spec: all(spec))
    P(('dp',), ('tp',))
    """
    entries: list[Axes] = [()] * len(shape)
    for axis in draw(st.permutations(mesh.axes)):
        n = mesh.sizes[axis]
        fits = [d for d, size in enumerate(shape) if size % (n * mesh.axis_size(entries[d])) == 0]
        if (d := draw(st.sampled_from([None, *fits]))) is not None:
            entries[d] = (*entries[d], axis)
    return P(*entries)


class _Grid:
    """Mesh axes as they are drawn: each takes a size that divides what it shards, and room that is left."""

    def __init__(self, draw: st.DrawFn, room: int):
        self.draw, self.room, self.sizes = draw, room, {}  # type: ignore[var-annotated]

    def axis(self, name: str, *dims: int) -> Axes:
        """A new axis whose size divides every one of `dims`, or no axis. Mostly 2, which leaves room for others."""
        fits = [d for d in _divisors(min(dims)) if d <= self.room and all(n % d == 0 for n in dims)]
        size = self.draw(st.sampled_from([0, *fits, *[2 for _ in fits if 2 in fits]]))
        if size == 0:
            return ()
        self.sizes[name] = size
        self.room //= size
        return (name,)

    def count(self, axes: Axes) -> int:
        return prod(self.sizes[a] for a in axes)

    def prefix(self, axes: Axes, dim: int) -> Axes:
        """A prefix of `axes` that divides `dim`."""
        fits = [axes[:k] for k in range(len(axes) + 1) if dim % self.count(axes[:k]) == 0]
        return self.draw(st.sampled_from(fits))


@st.composite
def layouts(
    draw: st.DrawFn,
    max_devices: int = 8,
    sizes: Mapping[str, int] | None = None,
    *,
    microbatches: int = 1,
    attention: Sequence[str] = ATTENTION_KINDS,
) -> tuple[Mesh, Layout]:
    """Pairs of a mesh and a layout for a transformer whose logical axes have these sizes.

    sizes          of the logical axes that parameters and batch declare; a name that is not there is left out of the
                   layout. `res_seq` goes with `seq`. Without `kv_heads`, each head has its own keys; without `heads`,
                   tensor axes split `ff`. Default: `fmeg.testing.strategies.SIZES`
    microbatches   the layout's rows are those of one microbatch
    attention      kinds to draw from where the sequence is sharded

    Drawn are data axes (one or two: HSDP), a context axis, tensor axes (one or two: key heads on the first, query heads
    on both; one under Ulysses), sequence parallelism, and parameters and optimizer state at rest over any of the data
    and context axes (ZeRO-1, ZeRO-3, over a part of the replicas). The order of mesh axes is free; one may be unused.

    >>> from hypothesis import find
    >>> mesh, layout = find(layouts(), lambda pair: "res_seq" in pair[1].names())
    >>> mesh.size <= 8
    True
    """
    have = dict(SIZES if sizes is None else sizes)
    at = lambda name: have.get(name, 1)
    heads = have.get("heads", at("ff"))
    kv_heads = have.get("kv_heads", heads)
    grid = _Grid(draw, max_devices)
    rows = at("batch") // microbatches
    data = grid.axis("dp", rows)
    data = (*grid.axis("replica", rows // grid.count(data)), *data)
    first = grid.axis("tp", heads, kv_heads)
    kind = draw(st.sampled_from(list(attention)))
    second = () if kind == "ulysses" else grid.axis("tr", heads // grid.count(first))
    tensor = (*first, *second)
    limits = [at("seq")]
    if kind == "ulysses":
        limits += [heads // grid.count(tensor), kv_heads // grid.count(first)]
    context = grid.axis("cp", *limits)
    view: dict[str, Any] = dict(batch=data, heads=tensor, kv_heads=first, seq=context)
    view["ff"] = grid.prefix(tensor, at("ff"))
    view["vocab"] = grid.prefix(tensor, at("vocab"))
    if "seq" in have:
        view["res_seq"] = (*context, *grid.prefix(tensor, at("seq") // grid.count(context)))
    rest = _at_rest(draw, grid, (*data, *context), have, view)
    opt = _at_rest(draw, grid, (*data, *context), have, view) if not rest else {}
    known = {*have, *(("res_seq",) if "seq" in have else ())}
    table = {k: v for k, v in view.items() if k in known and (v or draw(st.booleans()))}
    grid.axis("unused", 2)
    mesh = Mesh({a: grid.sizes[a] for a in draw(st.permutations(list(grid.sizes)))})
    return mesh, Layout(**table, params=rest, opt=opt, attention=kind if context else "all_gather")


def _at_rest(
    draw: st.DrawFn, grid: _Grid, axes: Axes, sizes: Mapping[str, int], view: Mapping[str, Axes]
) -> dict[str, Axes]:
    """Where parameters or optimizer state lie: `embed` over some of `axes`, or nothing; and, for the first of a
    tensor's dimensions to be sharded, others over the same."""
    chosen: Axes = ()
    for axis in axes if "embed" in sizes else ():
        if sizes["embed"] % grid.count((*chosen, axis)) == 0 and draw(st.booleans()):
            chosen = (*chosen, axis)
    if not chosen:
        return {}
    others = {name: (*view[name], *chosen) for name in ("vocab", "heads", "kv_heads", "ff") if name in sizes}
    fit = {name: on for name, on in others.items() if sizes[name] % grid.count(on) == 0}
    return {"embed": chosen, **{name: on for name, on in fit.items() if draw(st.booleans())}}
