"""`shard_map`: the way out to local code with explicit collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from fmeg import tree
from fmeg.mesh import Mesh
from fmeg.ops.shard_map import DimAxes, record_shard_map
from fmeg.program import recorder
from fmeg.program.errors import ShardingError
from fmeg.sharding.spec import P, resolve


def _spec(p: Any, mesh: Mesh, what: str) -> DimAxes:
    for e in p:
        for n in () if e is None else (e,) if isinstance(e, str) else e:
            if n not in mesh.sizes:
                raise ShardingError(
                    f"shard_map: {what} names the mesh axis {n!r}, but the mesh has {', '.join(mesh.axes) or 'none'}"
                )
    return resolve(p, {}, {a: max(n, 2) for a, n in mesh.sizes.items()}, f"shard_map: {what}")


def _leaf(p: Any) -> bool:
    return isinstance(p, P)


def shard_map(fn: Callable[..., Any], *, mesh: Mesh, in_specs: Sequence[Any], out_specs: Any) -> Callable[..., Any]:
    """`fn` on each rank's blocks, with the collectives of `fmeg.ops.collectives` inside.

    in_specs   one `P` (or tree of them) an argument, of mesh axes; an argument is cut accordingly, replicated where
               None
    out_specs  the same for the result; a result is taken to be equal on all ranks of a mesh axis that its spec leaves
               out

    Inside a function under `fmeg.jit` (same mesh) it is a node of the Program, and differentiable: its transpose sums
    the
    cotangents of replicated inputs. Called on plain tensors it runs at once and returns global tensors.

    >>> from fmeg.ops.collectives import all_reduce
    >>> mesh = Mesh(dp=4)
    >>> mean = shard_map(lambda x: all_reduce(x.sum(), ("dp",)) / 8, mesh=mesh, in_specs=(P("dp"),), out_specs=P())
    >>> mean(torch.arange(8.0))
    tensor(3.5000)
    """
    name = getattr(fn, "__name__", type(fn).__name__)

    @wraps(fn)
    def run(*args: Any) -> Any:
        rec = recorder.active()
        if len(in_specs) != len(args):
            raise ShardingError(f"shard_map({name}): {len(in_specs)} in_specs for {len(args)} arguments; give one each")
        if rec is None:
            from fmeg.step.jit import jit

            return tree.map(lambda a: a.global_value(), jit(lambda *a: run(*a), mesh=mesh)(*args))
        leaves, treedef = tree.flatten(args)
        specs, shown = [], []
        for i, (a, s) in enumerate(zip(args, in_specs, strict=True)):
            flat = [s] * len(tree.leaves(a)) if _leaf(s) else tree.leaves(s, is_leaf=_leaf)
            if len(flat) != len(tree.leaves(a)):
                raise ShardingError(
                    f"shard_map({name}): in_specs[{i}] has {len(flat)} specs for {len(tree.leaves(a))} tensors of "
                    f"args[{i}]; "
                    "give one for all, or a tree of the same structure"
                )
            for path, leaf, p in zip(tree.paths(a), tree.leaves(a), flat, strict=True):
                what = f"args[{i}]{'.' + path if path else ''} of {name}"
                if not isinstance(leaf, torch.Tensor) or len(p) != leaf.ndim:
                    raise ShardingError(
                        f"shard_map: {what} is {tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf!r}, but "
                        f"its spec is {p}; give one entry a dimension"
                    )
                specs.append(_spec(p, mesh, f"in_specs[{i}]"))
                shown.append(what)
        box: list[Any] = []

        def flat_fn(*local: torch.Tensor) -> list[torch.Tensor]:
            out_leaves, out_tree = tree.flatten(fn(*tree.unflatten(treedef, local)))
            box.append(out_tree)
            return out_leaves

        def out(values: Sequence[Any]) -> list[DimAxes]:
            flat = [out_specs] * len(values) if _leaf(out_specs) else tree.leaves(out_specs, is_leaf=_leaf)
            if len(flat) != len(values):
                raise ShardingError(
                    f"shard_map({name}): {len(flat)} out_specs for {len(values)} results; give one each"
                )
            return [_spec(p, mesh, f"out_specs[{i}]") for i, p in enumerate(flat)]

        outs = record_shard_map(rec, flat_fn, leaves, specs, out, dict(mesh.sizes), name, shown)
        return tree.unflatten(box[0], outs)

    return run
