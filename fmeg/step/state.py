"""`TrainState`: parameters, optimizer state and step count, with the parameters' logical axes beside them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from fmeg import tree
from fmeg.program.errors import ShardingError
from fmeg.program.trace import type_of
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

    def check(self, arg: Any, where: str, name: str, *, every: bool) -> None:
        """ShardingError where the names do not fit the tensors of `arg`.

        With `every`, each tensor must have names, and no others may be given.
        """
        shapes = {
            p: tuple(t.shape)
            for p, x in zip(tree.paths(arg), tree.leaves(arg), strict=True)
            if (t := type_of(x)) is not None
        }
        under = lambda path, p: path == p or p == "" or path.endswith("." + p)
        for p, names in self.table:
            if every and p and not any(under(path, p) for path in shapes):
                raise ShardingError(
                    f"{where}logical axes are given for {name}.{p}, which is not there{_meant(p, shapes)}. It has "
                    f"{', '.join(shapes) or 'no tensors'}"
                )
            for path, shape in shapes.items():
                if p and path == p and len(names) != len(shape):
                    raise ShardingError(
                        f"{where}{name}.{path} has shape {shape}, but its logical axes are "
                        f"{' '.join(n or '_' for n in names)!r}; give one name a dimension ('_' for none)"
                    )
        for path, shape in shapes.items():
            if every and shape and self.table and self.lookup(path, len(shape)) is None:
                shown = f"{name}.{path}" if path else name
                raise ShardingError(
                    f"{where}{shown}, of shape {shape}, has no logical axes; give one name a dimension, such as "
                    "'embed ff' ('_' for none)"
                )

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


def _meant(path: str, paths: Iterable[str]) -> str:
    close = get_close_matches(path, list(paths), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


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
