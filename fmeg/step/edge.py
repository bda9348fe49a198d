"""What enters and leaves a jitted function: one `Leaf` a tensor, and where the layout places it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fmeg import tree
from fmeg.program.errors import ShardingError
from fmeg.program.ir import TensorType
from fmeg.program.trace import type_of
from fmeg.sharding.spec import Layout, P, at_rest, resolve
from fmeg.sharding.value import Placement, Sizes, count, local_size
from fmeg.step.state import TrainState


@dataclass(frozen=True)
class Leaf:
    """One tensor at the edge: its path, type, role ("params", "opt" or "data") and logical axes."""

    path: str
    type: TensorType
    role: str
    axes: tuple[str | None, ...]
    note: str = ""  # for errors: where the type comes from
    of: tuple[tuple[str | None, ...], tuple[int, ...]] | None = None  # of a moment: its parameter's axes and shape


def state_leaves(state: TrainState, prefix: str) -> list[Leaf]:
    """The tensors of a TrainState in tree order, with their roles and axes."""
    out = []
    given = zip(tree.paths(state.params), tree.leaves(state.params), strict=True)
    params = [(path, t.shape) for path, x in given if (t := type_of(x)) is not None]
    for path, x in zip(tree.paths(state), tree.leaves(state), strict=True):
        t = type_of(x)
        if t is None:
            continue
        head, _, rest = path.partition(".")
        role = head if head in ("params", "opt") else "data"
        names = state.axes.lookup(rest, len(t.shape)) if role != "data" else None
        of = None
        if names is not None and role == "opt":  # factored moments keep the parameter's rank, with dimensions of size 1
            shape = _parameter(rest, len(t.shape), params)
            of = None if shape is None else (names, shape)
            names = tuple(None if n == 1 else name for name, n in zip(names, t.shape, strict=True))
        out.append(Leaf(f"{prefix}.{path}", t, role, names or (None,) * len(t.shape), of=of))
    return out


def _parameter(path: str, ndim: int, params: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[int, ...] | None:
    """The shape of the parameter that a moment at `path` belongs to: the longest whose path it ends in."""
    found = [(p, s) for p, s in params if len(s) == ndim and (path == p or p == "" or path.endswith("." + p))]
    return max(found, key=lambda pair: len(pair[0]))[1] if found else None


def of_layers(leaf: Leaf) -> bool:
    """Whether a leaf is a stack of layers: its first axis is `layers`, or such as `dense_layers`."""
    name = leaf.axes[0] if leaf.axes else None
    return name is not None and (name == "layers" or name.endswith("_layers"))


def place(leaf: Leaf, layout: Layout, sizes: Mapping[str, int], view: str, fn: str) -> Placement:
    """Placement of a leaf in a view. ShardingError in the style of JAX if a dimension does not divide.

    Stacked layers that do not divide are whole in a function without a pipeline: which rank has which is for a schedule
    to say.
    """
    spec: P = P(*leaf.axes)
    if view != "compute":  # a factored moment lies as its parameter does
        axes, shape = leaf.of or (leaf.axes, leaf.type.shape)
        rest = at_rest(axes, layout, view, sizes, shape)
        spec = P(*(None if name is None else entry for name, entry in zip(leaf.axes, rest, strict=True)))
    dims = resolve(spec, layout.view(view), sizes, f"jit({fn}): {leaf.path}, in the {view} view")
    if of_layers(leaf) and local_size(leaf.type.shape[0], dims[0], sizes) is None:
        dims = ((), *dims[1:])
    for d, (n, axes) in enumerate(zip(leaf.type.shape, dims, strict=True)):
        parts = count(axes, sizes)
        if (
            isinstance(sizes, Sizes)
            and axes == (sizes.axis,)
            and n in sizes.stored
            and not (of_layers(leaf) and d == 0)
        ):
            raise ShardingError(
                f"jit({fn}): {leaf.path}, in the {view} view, puts axis {leaf.axes[d]!r}, of size {n}, on the "
                "pipeline's "
                f"axis {sizes.axis!r}, along which {n} layers are stored unevenly; the two cannot be told apart. Cut "
                "the "
                "layers evenly, or put the axis elsewhere"
            )
        if local_size(n, axes, sizes) is None:
            over = ", ".join(f"{a!r} (size {sizes[a]})" for a in axes)
            raise ShardingError(
                f"jit({fn}): {leaf.path} of type {leaf.type}{leaf.note} has logical axes {leaf.axes}; the {view} view "
                f"puts axis {leaf.axes[d]!r} (dimension {d}, of size {n}) on the mesh axis {over}, but "
                f"{parts} does not evenly divide {n}. {KV_HEADS if leaf.axes[d] == 'kv_heads' else RESIZE}"
            )
    return Placement(dims)


RESIZE = "Change the mesh or the layout, or pad the dimension by an amount that does not depend on the layout"
KV_HEADS = (
    'Split the mesh axis, as in Mesh(tk=2, tr=2) with Layout(heads=("tk", "tr"), kv_heads="tk"), or replicate the keys '
    "and values: kv_heads=()"
)
VIEW_OF = {"params": "params", "opt": "opt", "data": "compute"}
