"""The property that fmeg stands on: a function on a mesh equals itself on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from fmeg import tree
from fmeg.mesh import Mesh
from fmeg.sharding.array import Array
from fmeg.sharding.spec import Layout
from fmeg.step import jit

FLOOR = 1e-3
"""Differences are measured against at least this. What should be exactly zero has no scale of its own: its rounding is
that of the terms that cancel. At a tolerance of 1e-10 nothing above 1e-13 can hide below it."""


def relative_error(a: Shaped[Tensor, "..."], b: Shaped[Tensor, "..."], floor: float = FLOOR) -> float:
    """max |a - b| / max(max |b|, floor), in float64; 0 for empty tensors.

    floor   see `FLOOR`

    Where either is not finite, both must be the same, else the error is infinite. Integers and bools are compared
    exactly: the error is 0 or infinite. Raises ValueError if shapes or dtypes differ.

    >>> relative_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0]))
    0.25
    >>> relative_error(torch.tensor([1]), torch.tensor([2]))
    inf
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"relative_error: {tuple(a.shape)} of {a.dtype} against {tuple(b.shape)} of {b.dtype}")
    if not b.numel():
        return 0.0
    if not b.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else math.inf
    x, y = a.double(), b.double()
    finite = x.isfinite() & y.isfinite()
    same = finite | (x == y) | (x.isnan() & y.isnan())
    if not bool(same.all()):
        return math.inf
    x, y = x.where(finite, 0.0), y.where(finite, 0.0)
    return float((x - y).abs().max() / max(float(y.abs().max()), floor))


def blocks(x: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Every distinct block of an Array that this process holds, with its place in the global tensor; a tensor is one.

    Of layers that are stored by pipeline stage, the place is a list of rows; rows that only pad are left out.

    >>> [(i, b.tolist()) for i, b in blocks(Array.from_global(torch.arange(2), Mesh(dp=2), ("dp",)))]
    [((slice(0, 1, None),), [0]), ((slice(1, 2, None),), [1])]
    """
    if not isinstance(x, Array):
        yield (slice(None),) * x.ndim, x
        return
    seen = set()
    for shard in x.addressable_shards:
        key = (id(shard.data), *((s.start, s.stop) for s in shard.index))
        if key not in seen:
            seen.add(key)
            if x.order is None:
                yield shard.index, shard.data
            else:
                rows = x.order[shard.index[0]]
                real = [k for k, row in enumerate(rows) if row >= 0]
                yield ([rows[k] for k in real], *shard.index[1:]), shard.data[real]


def leaf_error(got: Any, want: Any, floor: float = FLOOR) -> float:
    """Relative error of a leaf: every block that any rank holds, replicas too, against the global value wanted.

    Leaves that are no tensors must be equal.
    """
    if not isinstance(want, Tensor):
        return 0.0 if got == want else math.inf
    if tuple(got.shape) != tuple(want.shape):
        raise ValueError(f"the shape is {tuple(got.shape)}, but {tuple(want.shape)} on one device")
    scale = float(want.double().abs().max()) if want.is_floating_point() and want.numel() else 0.0
    scale = scale if math.isfinite(scale) else 0.0
    return max(relative_error(b, want[i], max(floor, scale)) for i, b in blocks(got))


def errors(got: Any, want: Any, floor: float = FLOOR) -> dict[str, float]:
    """Relative error of every leaf, by path; `got` may hold Arrays, `want` tensors. The trees must have one structure.

    >>> errors({"w": torch.ones(2), "n": 3}, {"w": torch.ones(2), "n": 3})
    {'n': 0.0, 'w': 0.0}
    """
    if tree.structure(got) != tree.structure(want):
        raise ValueError(f"errors: the trees differ: {tree.structure(got)} against {tree.structure(want)}")
    return {
        path: leaf_error(g, w, floor)
        for path, g, w in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True)
    }


def assert_equivalent(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh,
    layout: Layout,
    tol: float = 1e-10,
    axes: Mapping[str, Any] | None = None,
    floor: float = FLOOR,
    **options: Any,
) -> dict[str, float]:
    """Run `fn(*args)` eagerly on one device and jitted on the mesh; every leaf of the results must be equal to `tol`.

    args      what `fmeg.jit` takes: trees of tensors, a `TrainState`; use float64
    axes      logical axes of the arguments, as for `fmeg.jit`
    floor     see `FLOOR`
    options   more arguments of `fmeg.jit`, such as `strict=True`

    Every block of every result is compared, on every rank, so replicas that differ are found. Returns the relative
    errors by path. Raises AssertionError that names the worst leaf, its error, the mesh and the layout.

    >>> fn = lambda params, batch: (batch * params).sum()
    >>> args = torch.tensor(2.0, dtype=torch.float64), torch.ones(4, 2, dtype=torch.float64)
    >>> assert_equivalent(fn, *args, mesh=Mesh(dp=2), layout=Layout(batch="dp"))
    {'': 0.0}
    """
    want = fn(*args)
    got = jit(fn, mesh=mesh, layout=layout, axes=axes, **options)(*args)
    found = errors(got, want, floor)
    bad = {path: e for path, e in found.items() if not e <= tol}
    if bad:
        worst = max(bad, key=lambda path: bad[path])
        raise AssertionError(
            f"{len(bad)} of {len(found)} leaves differ from one device by more than {tol:g}; the worst is "
            f"{worst or 'the result'!r} with a relative error of {bad[worst]:.3g}, on {mesh} with {layout}"
        )
    return found
