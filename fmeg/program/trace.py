"""`trace`: from a Python function to a Program on global shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

import torch

from fmeg import tree
from fmeg.program.errors import TraceError
from fmeg.program.ir import Program, TensorType
from fmeg.program.recorder import Recorder, active


@dataclass(eq=False)
class Traced:
    """A Program with the structure of what its function returned."""

    program: Program
    out_tree: Any
    declared_axes: frozenset[str]
    function: str


def type_of(leaf: Any) -> TensorType | None:
    """The type of an array-like leaf (tensor, `TensorType`, anything with `.type`), None for static data."""
    if isinstance(leaf, torch.Tensor):
        return TensorType.of(leaf)
    if isinstance(leaf, TensorType):
        return leaf
    t = getattr(leaf, "type", None)
    return t if isinstance(t, TensorType) else None


def argument_paths(fn: Callable[..., Any], args: Sequence[Any]) -> list[str]:
    """What to call each leaf of `fn`'s arguments: the parameter's name and the path within it.

    >>> argument_paths(lambda params, *rest: None, ({"w": 1, "b": 2}, 3, 4))
    ['params.b', 'params.w', 'args[1]', 'args[2]']
    """
    try:
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in signature(fn).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        names = []
    names += [f"args[{i}]" for i in range(len(names), len(args))]
    return [f"{name}.{path}" if path else name for name, a in zip(names, args, strict=False) for path in tree.paths(a)]


def record_flat(
    fn: Callable[..., Any],
    types: Sequence[TensorType],
    names: Sequence[str] = (),
    *,
    parent: Recorder | None = None,
    name: str = "program",
    mesh_sizes: dict[str, int] | None = None,
) -> tuple[Recorder, Any]:
    """Run `fn` on fresh fakes of the given types under a new Recorder; returns it and the result."""
    from fmeg.ops.intercept import Intercept

    rec = Recorder(parent, name)
    rec.mesh_sizes = mesh_sizes if mesh_sizes is not None else (parent.mesh_sizes if parent else None)
    fakes = [rec.new_input(t, n) for t, n in zip(types, names or [""] * len(types), strict=True)]
    with torch.inference_mode(False), rec, Intercept():
        out = fn(*fakes)
    return rec, out


def trace(fn: Callable[..., Any], *args: Any) -> Traced:
    """Trace `fn(*args)` once on fake tensors.

    `args` are pytrees; tensors (or `TensorType`s: no data is needed) become inputs, everything else is static.
    Raises TraceError for data-dependent branches, closed-over tensors and hidden randomness.

    >>> import torch
    >>> t = trace(lambda x: torch.sin(x) + 1, torch.zeros(2, 3))
    >>> [n.opname for n in t.program.nodes]
    ['aten.sin.default', 'aten.add.Tensor']
    """
    leaves, in_tree = tree.flatten(args)
    paths = argument_paths(fn, args)
    types = [type_of(x) for x in leaves]
    fn_name = getattr(fn, "__name__", type(fn).__name__)
    out_box: list[Any] = []

    def flat(*fakes: torch.Tensor) -> list[Any]:
        it = iter(fakes)
        full = [next(it) if t is not None else leaf for t, leaf in zip(types, leaves, strict=True)]
        out_leaves, out_tree = tree.flatten(fn(*tree.unflatten(in_tree, full)))
        out_box.append(out_tree)
        return out_leaves

    dyn = [(t, p) for t, p in zip(types, paths, strict=True) if t is not None]
    outer = active()
    rec, outs = record_flat(flat, [t for t, _ in dyn], [p for _, p in dyn], parent=outer, name=fn_name)
    if rec.captured and outer is None:
        raise TraceError(f"{fn_name}: captured tensors in a top-level trace")
    program = rec.program(outs, [p for _, p in dyn])
    program.check()
    return Traced(program, out_box[0], frozenset(rec.declared_axes), fn_name)
