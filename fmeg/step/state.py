"""`TrainState`: parameters, optimizer state and step count, with the parameters' logical axes beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fmeg import tree
from fmeg.sharding.spec import logical_names


@dataclass(frozen=True)
class Axes:
    """Logical axes of a tree of tensors, hashable: pairs of path and names."""

    table: tuple[tuple[str, tuple[str | None, ...]], ...]

    @classmethod
    def of(cls, axes: Any) -> Axes:
        """From a tree of strings (`"layers embed heads head_dim"`), or None for no axes."""
        if isinstance(axes, Axes):
            return axes
        if axes is None:
            return cls(())
        return cls(tuple((p, logical_names(s)) for p, s in zip(tree.paths(axes), tree.leaves(axes), strict=True)))

    def names(self) -> set[str]:
        return {n for _, axes in self.table for n in axes if n is not None}

    def lookup(self, path: str, ndim: int) -> tuple[str | None, ...] | None:
        """Axes of the leaf at `path`, which may lie under a prefix (an optimizer's moments mirror the parameters).

        >>> Axes.of({"w": "embed ff"}).lookup("0.mu.w", 2)
        ('embed', 'ff')
        """
        best: tuple[str, tuple[str | None, ...]] | None = None
        for p, names in self.table:
            if (
                len(names) == ndim
                and (path == p or p == "" or path.endswith("." + p))
                and (best is None or len(p) > len(best[0]))
            ):
                best = (p, names)
        return best[1] if best else None


@tree.register_dataclass(static=("axes",))
@dataclass
class TrainState:
    """What a training step takes and returns."""

    params: Any
    opt: Any
    step: Any
    axes: Axes

    @classmethod
    def create(cls, params: Any, optimizer: Any, axes: Any = None) -> TrainState:
        """A fresh state: `optimizer.init(params)`, step 0. `axes`: the parameters' tree of logical axes.

        >>> from fmeg import optim
        >>> s = TrainState.create({"w": torch.ones(2)}, optim.sgd(0.1), {"w": "embed"})
        >>> int(s.step)
        0
        """
        table = Axes.of(axes)
        if axes is not None:
            check_axes(params, table)
        return cls(params, optimizer.init(params), torch.zeros((), dtype=torch.int64), table)

    def next(self, *, params: Any, opt: Any) -> TrainState:
        """The state after a step."""
        return replace(self, params=params, opt=opt, step=self.step + 1)


def check_axes(params: Any, axes: Axes) -> None:
    """ValueError unless every parameter has one axis name a dimension."""
    table = dict(axes.table)
    for path, leaf in zip(tree.paths(params), tree.leaves(params), strict=True):
        names = table.pop(path, None)
        if names is None:
            raise ValueError(
                f"the tree of logical axes has no entry for parameter {path!r}; give one such as 'embed ff'"
            )
        if len(names) != len(leaf.shape):
            raise ValueError(
                f"parameter {path!r} has shape {tuple(leaf.shape)} but logical axes {names}; give one name a dimension"
            )
    if table:
        raise ValueError(f"logical axes are given for {', '.join(map(repr, table))}, which are not parameters")
