"""The layout matrix: tensor, sequence, context and data parallelism, alone, in pairs and in triples.

Each of three tables lists the ways to use a kind of parallelism; the matrix is their product, as far as the devices and
the model's sizes go. Experts, where a model has them, lie by turns on no axis, on those that shard tokens, on those of
tensor parallelism, and on all, in either order; see `fmeg.testing.experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, product
from typing import Any

from fmeg.mesh import Mesh
from fmeg.sharding.spec import Layout


@dataclass(frozen=True)
class Case:
    """One row: a mesh, a layout, how the batch is cut into microbatches; `routing`: see `fmeg.testing.experts`."""

    name: str
    mesh: Mesh
    layout: Layout
    microbatches: int = 1
    schedule: str | None = None
    routing: str = ""


def relaid(layout: Layout, **changes: Any) -> Layout:
    """The layout with changes.

    >>> relaid(Layout(batch="dp", attention="ring"), layers="pp")
    Layout(batch='dp', layers='pp', attention='ring')
    """
    rest = {name: dict(getattr(layout, name)) for name in ("params", "grads", "opt")}
    return Layout(**{**rest, **layout.options(), **dict(layout.compute), **changes})


@dataclass(frozen=True)
class Way:
    """One way to use a kind of parallelism: the mesh axes it brings, what it puts on them, microbatches."""

    axes: Mapping[str, int] = field(default_factory=dict)
    view: Mapping[str, Any] = field(default_factory=dict)
    res_seq: tuple[str, ...] = ()
    at_rest: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 1
    attention: str = "all_gather"


_TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
# Where tp is larger than the number of key heads: keys on a part of the axis, or on every rank.
_SPLIT = dict(heads=("tk", "tr"), kv_heads="tk", ff=("tk", "tr"), vocab=("tk", "tr"))

TENSOR = {
    "": Way(),
    "tp2": Way({"tp": 2}, _TP),
    "tp2+sp": Way({"tp": 2}, _TP, ("tp",)),
    "tp4+sp": Way({"tp": 4}, _TP, ("tp",)),
    "tk2,tr2+sp": Way({"tk": 2, "tr": 2}, _SPLIT, ("tk", "tr")),
}
CONTEXT = {
    "": Way(),
    "gather2": Way({"cp": 2}, dict(seq="cp"), ("cp",)),
    "ring2": Way({"cp": 2}, dict(seq="cp"), ("cp",), attention="ring"),
    "ulysses2": Way({"cp": 2}, dict(seq="cp"), ("cp",), attention="ulysses"),
    "ring4": Way({"cp": 4}, dict(seq="cp"), ("cp",), attention="ring"),
}
# Under zero1 the sum over microbatches is whole, and reduce-scattered once; under zero2 and zero3 every microbatch's
# gradient is reduce-scattered, and the sum is a shard.
DATA = {
    "": Way(),
    "dp2": Way({"dp": 2}, dict(batch="dp")),
    "dp2 m2": Way({"dp": 2}, dict(batch="dp"), microbatches=2),
    "zero1": Way({"dp": 2}, dict(batch="dp"), at_rest=dict(opt=dict(embed="dp"))),
    "zero1 m2": Way({"dp": 2}, dict(batch="dp"), at_rest=dict(opt=dict(embed="dp")), microbatches=2),
    "zero2": Way({"dp": 2}, dict(batch="dp"), at_rest=dict(grads=dict(embed="dp")), microbatches=2),
    "zero3": Way({"dp": 2}, dict(batch="dp"), at_rest=dict(params=dict(embed="dp"))),
    "zero3 m2": Way({"dp": 2}, dict(batch="dp"), at_rest=dict(params=dict(embed="dp")), microbatches=2),
    "zero3 2x2": Way({"pod": 2, "dp": 2}, dict(batch=("pod", "dp")), at_rest=dict(params=dict(embed=("pod", "dp")))),
    "hsdp": Way({"replica": 2, "dp": 2}, dict(batch=("replica", "dp")), at_rest=dict(params=dict(embed="dp"))),
}


def _join(tensor: tuple[str, Way], context: tuple[str, Way], data: tuple[str, Way]) -> Case:
    t, c, d = tensor[1], context[1], data[1]
    view = {**d.view, **c.view, **t.view}
    if res_seq := (*c.res_seq, *t.res_seq):
        view["res_seq"] = res_seq
    layout = Layout(**view, **d.at_rest, attention=c.attention)
    mesh = Mesh({**d.axes, **c.axes, **t.axes})
    name = " ".join(n for n in (data[0], context[0], tensor[0]) if n)
    return Case(name or "one device", mesh, layout, d.microbatches)


def _fits(case: Case, sizes: Mapping[str, int]) -> bool:
    """Whether every logical axis divides, and Ulysses' exchange has heads enough, placed alike for queries and keys."""
    view, mesh = case.layout.view("compute"), case.mesh
    if any(sizes[name] % mesh.axis_size(axes) for name, axes in view.items() if name in sizes):
        return False
    if case.layout.attention != "ulysses":
        return True
    alike = "kv_heads" not in sizes or view.get("heads") == view.get("kv_heads")
    return alike and all(
        sizes[h] % mesh.axis_size((*view.get(h, ()), *view["seq"])) == 0 for h in ("heads", "kv_heads") if h in sizes
    )


def _experts(case: Case, view: Mapping[str, Any], sizes: Mapping[str, int], turn: int) -> dict[str, Any]:
    """Where the experts of a case lie, and their inner dimension: on the axes of tensor parallelism that they leave."""
    tensor = view.get("heads", ())
    tokens = tuple(a for a in case.mesh.axes if a not in tensor)
    ways = [(), tokens, tensor, (*tokens, *tensor), (*tensor, *tokens)]
    fit = [axes for axes in (*ways[turn % 5 :], *ways) if sizes["experts"] % case.mesh.axis_size(axes) == 0]
    inner = () if set(tensor) & set(fit[0]) else tensor
    shared = {"shared_ff": tensor} if sizes.get("shared_ff") else {}
    return {"experts": fit[0], "expert_ff": inner, **shared}


def _experts_at_rest(view: dict[str, Any], experts: tuple[str, ...]) -> dict[str, Any]:
    """With what shards `embed` at rest and does not shard experts, for experts too."""
    left = tuple(a for a in view.get("embed", ()) if a not in experts)
    return {**view, "expert_embed": left} if left else view


def cases(sizes: Mapping[str, int], devices: int = 16) -> Iterator[Case]:
    """The matrix for a model of these sizes (of its logical axes, `batch`, `seq` and `res_seq` among them).

    A layout names only axes that are in `sizes`. Microbatched ways are crossed with at most one other kind.

    >>> sizes = dict(batch=8, seq=16, res_seq=16, embed=16, heads=8, kv_heads=4, ff=32, vocab=64)
    >>> names = [case.name for case in cases(sizes, devices=8)]
    >>> len(names) > 60, "zero3 ring2 tp2+sp" in names
    (True, True)
    """
    turn = count()
    for data, context, tensor in product(DATA.items(), CONTEXT.items(), TENSOR.items()):
        if data[1].microbatches > 1 and context[0] and tensor[0]:
            continue
        case = _join(tensor, context, data)
        view: dict[str, Any] = {k: v for k, v in case.layout.compute if k in sizes}
        rest: dict[str, Any] = {name: dict(getattr(case.layout, name)) for name in ("params", "grads", "opt")}
        if "experts" in sizes:
            view |= _experts(case, view, sizes, next(turn))
            rest |= {n: _experts_at_rest(v, view["experts"]) for n, v in rest.items()}
        layout = Layout(**rest, attention=case.layout.attention, **view)
        case = replace(case, layout=layout)
        if case.mesh.size <= devices and _fits(case, sizes):
            yield case
