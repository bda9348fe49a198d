"""`P` and `Layout`: where dimensions live, by name.

A *logical axis* says what a dimension is (`batch`, `heads`, …); a `Layout` maps logical axes to mesh axes, in four
views: compute (activations, and parameters in use), `params` (parameters at rest), `grads` (sums of gradients) and
`opt` (optimizer state). Each view inherits from the one before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fmeg.program.errors import ShardingError
from fmeg.sharding.value import local_size

Entry = str | tuple[str, ...] | None
DimAxes = tuple[tuple[str, ...], ...]
VIEWS = ("compute", "params", "grads", "opt")  # each inherits from the one before it
ATTENTION_KINDS = ("all_gather", "ring", "ulysses")
DISPATCH_KINDS = ("all_to_all", "all_gather")


class P(tuple):
    """Partition spec: one entry a dimension, each a logical or mesh axis name, a tuple of names, or None.

    >>> P("batch", None, ("cp", "tp"))
    P('batch', None, ('cp', 'tp'))
    """

    def __new__(cls, *entries: Entry) -> P:
        for e in entries:
            names = () if e is None else (e,) if isinstance(e, str) else e
            if not isinstance(names, tuple) or not all(isinstance(n, str) for n in names):
                raise ShardingError(f"P: an entry must be a name, a tuple of names or None, given {e!r}")
        return super().__new__(cls, entries)

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"


def _tuple(entry: Any, what: str) -> tuple[str, ...]:
    if entry is None:
        return ()
    if isinstance(entry, str):
        return (entry,)
    if isinstance(entry, (tuple, list)) and all(isinstance(e, str) for e in entry):
        for axis in entry:
            if entry.count(axis) > 1:
                raise ShardingError(f"Layout: {what} names the mesh axis {axis!r} twice, in {entry!r}; name it once")
        return tuple(entry)
    raise ShardingError(f"Layout: {what} must be a mesh axis name, a tuple of them or None, given {entry!r}")


@dataclass(frozen=True)
class Layout:
    """Logical axis -> mesh axes.

    params     overrides for parameters at rest, `dict(embed="dp")` is ZeRO-3
    grads      overrides for the sums of gradients between microbatches, `dict(embed="dp")` alone is ZeRO-2
    opt        overrides for optimizer state, `dict(embed="dp")` alone is ZeRO-1

    Overrides may put several dimensions of a tensor on one mesh axis, `params=dict(embed="dp", ff="dp", vocab="dp")`:
    the first of them that it divides is sharded. Outermost dimensions are gathered without a copy.

    attention  how attention meets a sharded sequence: "all_gather" (of K and V), "ring" or "ulysses"
    dispatch   how tokens reach their experts: "all_to_all" (once to each rank that has some) or "all_gather" (to all)
    dispatch_bound  b: a rank has room for b times an even share of rows, one for each expert of a token, and for as
               many tokens from each other rank as that are rows, or all of its tokens. No size is read by the host, as
               CUDA graphs need it; where they do not fit, the results are NaN. None: as much as it takes
    axes       the compute view

    >>> Layout(batch="dp", heads="tp", params=dict(embed="dp")).view("params")["embed"]
    ('dp',)
    """

    compute: tuple[tuple[str, tuple[str, ...]], ...]
    params: tuple[tuple[str, tuple[str, ...]], ...]
    grads: tuple[tuple[str, tuple[str, ...]], ...]
    opt: tuple[tuple[str, tuple[str, ...]], ...]
    attention: str
    dispatch: str
    dispatch_bound: float | None

    def __init__(
        self,
        *,
        params: Mapping[str, Entry] | None = None,
        grads: Mapping[str, Entry] | None = None,
        opt: Mapping[str, Entry] | None = None,
        attention: str = "all_gather",
        dispatch: str = "all_to_all",
        dispatch_bound: float | None = None,
        **axes: Entry,
    ):
        if attention not in ATTENTION_KINDS:
            raise ShardingError(f"Layout: attention must be one of {', '.join(ATTENTION_KINDS)}, given {attention!r}")
        if dispatch not in DISPATCH_KINDS:
            raise ShardingError(f"Layout: dispatch must be one of {', '.join(DISPATCH_KINDS)}, given {dispatch!r}")
        if dispatch_bound is not None and not dispatch_bound > 0:
            raise ShardingError(f"Layout: dispatch_bound must be above 0, or None, given {dispatch_bound}")
        for field, table in (("compute", axes), ("params", params), ("grads", grads), ("opt", opt)):
            object.__setattr__(self, field, tuple((k, _tuple(v, k)) for k, v in (table or {}).items()))
        object.__setattr__(self, "attention", attention)
        object.__setattr__(self, "dispatch", dispatch)
        object.__setattr__(self, "dispatch_bound", dispatch_bound)

    def view(self, name: str) -> dict[str, tuple[str, ...]]:
        """The table of a view: "compute", "params", "grads" or "opt"."""
        table: dict[str, tuple[str, ...]] = {}
        for view in VIEWS[: VIEWS.index(name) + 1]:
            table.update(getattr(self, view))
        return table

    def names(self) -> set[str]:
        """All logical axes that the layout mentions."""
        return {k for view in VIEWS for k, _ in getattr(self, view)}

    def mesh_axes(self) -> set[str]:
        """All mesh axes that the layout mentions."""
        return {a for view in VIEWS for _, axes in getattr(self, view) for a in axes}

    def options(self) -> dict[str, Any]:
        """What sharding rules may ask by `info.option`."""
        return {name: getattr(self, name) for name in ("attention", "dispatch", "dispatch_bound")}

    def __repr__(self) -> str:
        parts = [f"{k}={_show(v)}" for k, v in self.compute]
        for name in VIEWS[1:]:
            if table := getattr(self, name):
                parts.append(f"{name}=dict({', '.join(f'{k}={_show(v)}' for k, v in table)})")
        if self.attention != "all_gather":
            parts.append(f"attention={self.attention!r}")
        if self.dispatch != "all_to_all":
            parts.append(f"dispatch={self.dispatch!r}")
        if self.dispatch_bound is not None:
            parts.append(f"dispatch_bound={self.dispatch_bound}")
        return f"Layout({', '.join(parts)})"

    def check(self, mesh_axes: Iterable[str], declared: Iterable[str] | None) -> None:
        """Raise ShardingError if the layout names a mesh axis or a logical axis that does not exist."""
        have = list(mesh_axes)
        for axis in sorted(self.mesh_axes() - set(have)):
            raise ShardingError(
                f"Layout names the mesh axis {axis!r}, but the mesh has {_list(have)}; add {axis}= to the Mesh "
                "or take it out of the layout"
            )
        if declared is None:
            return
        known = set(declared)
        for name in sorted(self.names() - known):
            close = get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else "."
            raise ShardingError(
                f"Layout names the logical axis {name!r}, which nobody declared{hint} Declared are "
                f"{_list(sorted(known))}, by jit's axes=, TrainState.create or shard"
            )


def _show(axes: tuple[str, ...]) -> str:
    return repr(axes[0]) if len(axes) == 1 else repr(axes)


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def resolve(
    spec: Sequence[Entry], table: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], what: str = "spec"
) -> DimAxes:
    """Mesh axes of each dimension of `spec` under a view's table; axes of size 1, or absent from `sizes`, are dropped.

    >>> resolve(P("batch", None), {"batch": ("dp",)}, {"dp": 2})
    (('dp',), ())
    """
    out, seen = [], set()
    for entry in spec:
        names = () if entry is None else (entry,) if isinstance(entry, str) else entry
        axes = tuple(a for n in names for a in table.get(n, (n,) if n in sizes else ()))
        axes = tuple(a for a in axes if sizes.get(a, 1) > 1)
        for a in axes:
            if a in seen:
                raise ShardingError(
                    f"{what}: {tuple(spec)} puts two dimensions (or one twice) on the mesh axis {a!r}; a mesh axis can "
                    "shard one dimension of a tensor: put the others on another axis, or on none"
                )
            seen.add(a)
        out.append(axes)
    return tuple(out)


def at_rest(spec: Sequence[Entry], layout: Layout, view: str, sizes: Mapping[str, int], shape: Sequence[int]) -> P:
    """`spec` for `resolve` in the view of something stored: a mesh axis that overrides put on several dimensions stays
    on the first that its axes divide, and is taken off the others.

    >>> layout = Layout(params=dict(embed="dp", ff=("tp", "dp")))
    >>> [at_rest(P("ff", "embed"), layout, "params", {"dp": 2, "tp": 2}, shape) for shape in ((8, 4), (6, 4))]
    [P('ff', ()), P(('tp',), 'embed')]
    """
    named = {k: axes for v in VIEWS[1 : VIEWS.index(view) + 1] for k, axes in getattr(layout, v)}
    axes = {d: list(named[e]) for d, e in enumerate(spec) if isinstance(e, str) and e in named}
    changed = set()
    for axis in dict.fromkeys(a for on in axes.values() for a in on):
        dims = [d for d, on in axes.items() if axis in on]
        split = {d: tuple(a for a in axes[d] if sizes.get(a, 1) > 1) for d in dims}
        keep = next((d for d in dims if local_size(shape[d], split[d], sizes) is not None), dims[0])
        for d in dims:
            if d != keep:
                axes[d].remove(axis)
                changed.add(d)
    return P(*(tuple(axes[d]) if d in changed else entry for d, entry in enumerate(spec)))


def logical_names(text: str) -> tuple[str | None, ...]:
    """Names in a declaration such as `"layers embed heads head_dim"`; `_` stands for None.

    >>> logical_names("batch _")
    ('batch', None)
    """
    return tuple(None if n == "_" else n for n in text.split())
