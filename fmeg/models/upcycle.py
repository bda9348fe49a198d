"""From a dense model to a mixture of experts that computes the same: a cheap start for sparse training.

Every expert is a copy of the MLP, or with granularity g one g-th of it, and a token goes to g experts where it would go
to one: the router's weights of the g parts of a copy are the same, so all of them are chosen or none. Where weights sum
to one, what the k chosen experts give is then 1/g of what the MLP gave, so `up` and `down`, in which a SwiGLU is
linear, are multiplied by √g each. Layers that the mixture keeps dense (`moe.Config.dense`) keep their MLP.

Sources: Sparse Upcycling, arXiv:2212.05055; granular ("virtual groups"), arXiv:2410.07524.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import ops, tree
from fmeg.models import llama, moe


def config(dense: llama.Config, /, experts: int, top_k: int, granularity: int = 1, **changes: Any) -> moe.Config:
    """The config of a mixture with `experts` experts, of which a token uses `top_k`, each of size ff / granularity.

    changes   to other fields, such as `router` (its weights must sum to one), `shared_ff`, or `dense`: numbers of the
              layers that keep their MLP

    >>> from fmeg.models import presets
    >>> config(presets.get("llama3-8b"), experts=8, top_k=2).expert_ff
    14336
    """
    if dense.ff % granularity:
        raise ValueError(f"upcycle: granularity={granularity} does not divide the MLP's size {dense.ff}")
    shared = {f.name for f in fields(moe.Config)} - {"ff"}
    same = {f.name: getattr(dense, f.name) for f in fields(dense) if f.name in shared}
    router = ops.Router(top_k, "softmax_of_top_k", batch_loss=0.01)
    sizes = dict(experts=experts, expert_ff=dense.ff // granularity, router=router)
    kept = {"ff": dense.ff} if changes.get("dense") else {}
    return moe.Config(**{**same, **sizes, **kept, **changes})


def upcycle(
    params: Mapping[str, Any], dense: llama.Config, sparse: moe.Config, key: Int[Tensor, "2"]
) -> dict[str, Any]:
    """Parameters of the mixture `sparse` that compute what `params` do in the model `dense`.

    key   of the routers' initial weights. A shared expert, if there is one, starts with a `down` of zeros

    Raises ValueError if the configs do not fit, or the router's weights do not sum to one.

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> dense = presets.get("tiny")
    >>> sparse = config(dense, experts=8, top_k=2, granularity=2)
    >>> params = llama.init(random.key(0), dense)
    >>> tokens = torch.tensor([[1, 2, 3]])
    >>> want = llama.apply(params, tokens, dense)
    >>> got = moe.apply(upcycle(params, dense, sparse, random.key(1)), tokens, sparse)
    >>> torch.allclose(want, got, atol=1e-5)
    True
    """
    g = _granularity(dense, sparse)
    fresh = moe.init(key, sparse)
    new: dict[str, Any] = {k: v for k, v in params.items() if k != "layers"}
    for run in sparse.runs:
        period, step = {}, len(run.kinds)
        for j, kind in enumerate(run.kinds):
            start = run.first + j
            old = {k: v[start : run.first + step * run.repeats : step] for k, v in params["layers"].items()}
            period[str(j)] = old if kind == "d" else _sparse_layers(old, moe.layer(fresh[run.name], run, j), sparse, g)
        new[run.name] = period if step > 1 else period["0"]
    return tree.map(lambda x: x.to(sparse.dtype), new)


def _sparse_layers(
    old: Mapping[str, Tensor], fresh: Mapping[str, Tensor], sparse: moe.Config, g: int
) -> dict[str, Tensor]:
    """A stack of layers with experts, from one with MLPs; what only the former has begins as in `fresh`."""
    copies, up = sparse.experts // g, (g / sparse.router.scale) ** 0.5

    def spread(w: Tensor, dim: int) -> Tensor:
        """Parts of dimension `dim` as experts, copy after copy."""
        parts = torch.stack(w.chunk(g, dim), dim=1)
        return torch.cat([parts] * copies, dim=1)

    new = {**fresh, **{k: v for k, v in old.items() if k in fresh}}
    new["w_gate"] = spread(old["w_gate"], 2)
    new["w_up"], new["w_down"] = spread(old["w_up"], 2) * up, spread(old["w_down"], 1) * up
    first = fresh["router"][..., :copies]
    new["router"] = torch.stack([first] * g, dim=-1).flatten(-2)
    if sparse.shared_ff:
        new["shared_down"] = torch.zeros_like(fresh["shared_down"])
    return new


def _granularity(dense: llama.Config, sparse: moe.Config) -> int:
    shared = {f.name for f in fields(sparse)} & {f.name for f in fields(dense)}
    shared -= {"ff", "dtype", "compute_dtype", "remat", "init_std", "max_seq"}
    router = sparse.router
    g = dense.ff // max(sparse.expert_ff, 1)
    differ = sorted(n for n in shared if getattr(dense, n) != getattr(sparse, n))
    for bad, what in [
        (
            bool(sparse.dense) and sparse.ff != dense.ff,
            f"layers {list(sparse.dense)} keep their MLP: ff={sparse.ff} must be {dense.ff}",
        ),
        (differ, f"the configs differ in {', '.join(differ)}"),
        (g * sparse.expert_ff != dense.ff, f"expert_ff={sparse.expert_ff} must divide ff={dense.ff}"),
        (
            sparse.experts % max(g, 1) or router.top_k % max(g, 1),
            f"experts={sparse.experts} and top_k={router.top_k} must be multiples of ff / expert_ff = {g}",
        ),
        (
            router.score != "softmax_of_top_k" and not router.renormalize,
            "the router's weights must sum to one: set renormalize=True or score='softmax_of_top_k'",
        ),
        (router.groups > 1, "groups of experts are not supported"),
        (router.capacity_factor is not None, "a capacity would drop tokens; set capacity_factor=None"),
    ]:
        if bad:
            raise ValueError(f"upcycle: {what}")
    return g
