"""A mixture of experts in place of the MLP: routed experts, and one that every token goes to.

    out = Σ_{i chosen} weight_i · expert_i(h)  (+ shared(h), or sigmoid(w·h) · shared(h))

Each expert is a SwiGLU. Tokens go to the experts from where they lie: with the residual stream sharded along the
sequence nothing is gathered first. The layout says where experts live: `experts=` any mesh axes, `expert_ff=` within
an expert, `shared_ff=` within the shared one; `params=dict(expert_embed=…)` is ZeRO-3 for experts.

Sources: Mixtral, arXiv:2401.04088; DeepSeekMoE, arXiv:2401.06066 (shared experts).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg import P, einsum, ops, region, shard
from fmeg.models.llama import swiglu
from fmeg.models.table import Param, cast

Stats = dict[str, Tensor]


class Sizes(Protocol):
    """What is read of a model's config.

    shared_ff     inner size of the shared expert, 0: there is none
    shared_gate   its result is multiplied by the sigmoid of a product with the input (Qwen2)
    router_bias   scores are biased for the choice of experts: see `update_bias`
    """

    @property
    def embed(self) -> int: ...
    @property
    def experts(self) -> int: ...
    @property
    def expert_ff(self) -> int: ...
    @property
    def router(self) -> ops.Router: ...
    @property
    def shared_ff(self) -> int: ...
    @property
    def shared_gate(self) -> bool: ...
    @property
    def router_bias(self) -> bool: ...


QWEN = dict(
    router="mlp.gate.weight",
    bias="mlp.gate.e_score_correction_bias",
    gate="mlp.experts.{}.gate_proj.weight",
    up="mlp.experts.{}.up_proj.weight",
    down="mlp.experts.{}.down_proj.weight",
    shared="mlp.shared_expert.",
    shared_gate="mlp.shared_expert_gate.weight",
)
"""What Hugging Face calls the parts in Qwen's models."""
DEEPSEEK = QWEN | dict(shared="mlp.shared_experts.")
MIXTRAL = QWEN | dict(
    router="block_sparse_moe.gate.weight",
    gate="block_sparse_moe.experts.{}.w1.weight",
    up="block_sparse_moe.experts.{}.w3.weight",
    down="block_sparse_moe.experts.{}.w2.weight",
)


def axis_sizes(cfg: Sizes) -> dict[str, int]:
    """Sizes of the logical axes of `parameters`.

    `routes` are the router's experts, of which every rank has all. `expert_embed` is the experts' `embed`, so that they
    may rest on other axes than the rest: experts="dp" and params=dict(embed="dp") go together.
    """
    same = ("experts", "expert_ff", "shared_ff")
    return {"routes": cfg.experts, "expert_embed": cfg.embed, **{a: getattr(cfg, a) for a in same}}


def parameters(
    cfg: Sizes, names: Mapping[str, str], stack: str, first: int, std: float, out: float
) -> dict[str, Param]:
    """Rows of the table of parameters of a stack of layers.

    names   what Hugging Face calls the parts
    stack   logical axis of the stack; `first`: Hugging Face's number of its first layer
    std     of the initial values; `out`: of those of projections back into the residual stream
    """

    def row(axes: str, init: Any, name: str, hf_axes: str = "") -> Param:
        return Param(f"{stack} {axes}", init, "model.layers.{}." + name, hf_axes, first=first)

    rows = {
        "router": row("embed routes", std, names["router"], "routes embed"),
        "w_gate": row("experts expert_embed expert_ff", std, names["gate"], "expert_ff expert_embed"),
        "w_up": row("experts expert_embed expert_ff", std, names["up"], "expert_ff expert_embed"),
        "w_down": row("experts expert_ff expert_embed", out, names["down"], "expert_embed expert_ff"),
    }
    if cfg.router_bias:
        rows["router_bias"] = row("routes", "zeros", names["bias"])
    if cfg.shared_ff:
        shared = names["shared"]
        rows |= {
            "shared_gate": row("embed shared_ff", std, shared + "gate_proj.weight", "shared_ff embed"),
            "shared_up": row("embed shared_ff", std, shared + "up_proj.weight", "shared_ff embed"),
            "shared_down": row("shared_ff embed", out, shared + "down_proj.weight", "embed shared_ff"),
        }
        if cfg.shared_gate:
            rows["shared_weight"] = row("embed", std, names["shared_gate"], "1 embed")
    return rows


def active(cfg: Sizes) -> int:
    """Parameters of matrices that a token meets in one layer."""
    return cfg.embed * (cfg.experts + 3 * (cfg.router.top_k * cfg.expert_ff + cfg.shared_ff))


def cast_layer(p: Mapping[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """A layer's parameters in the dtype to compute in, but for the router's, which computes in float32."""
    mine = ("router", "router_bias")
    return {k: v if k in mine else cast(v, dtype) for k, v in p.items()}


def mixture(
    p: Mapping[str, Tensor], h: Float[Tensor, "b s d"], cfg: Sizes, real: Bool[Tensor, "b s"] | None = None
) -> tuple[Float[Tensor, "b s d"], ops.RouterOutput]:
    """(what is added to the residual stream, where tokens went), from the normed stream `h` (batch res_seq embed).

    real   False for padding, which goes to no expert
    """
    with region("moe"):
        return _mixture(p, h, cfg, real)


def _mixture(p: Mapping[str, Tensor], h: Tensor, cfg: Sizes, real: Tensor | None) -> tuple[Tensor, ops.RouterOutput]:
    chosen = ops.router(h, p["router"], cfg.router, bias=p.get("router_bias"), mask=real)
    rows, routing = ops.dispatch(h, chosen.experts, experts=cfg.experts, keep=chosen.keep)
    gate = ops.grouped_matmul(rows, p["w_gate"], routing)
    up = ops.grouped_matmul(rows, p["w_up"], routing)
    weights = ops.dispatch_weights(chosen.weights, routing)
    with region("moe_act"):
        inner = ops.scale_rows(ops.swiglu(gate, up), weights)
    o = shard(ops.combine(ops.grouped_matmul(inner, p["w_down"], routing), routing), P("batch", "res_seq", None))
    return (o + _shared(p, h, cfg) if cfg.shared_ff else o), chosen


def _shared(p: Mapping[str, Tensor], h: Tensor, cfg: Sizes) -> Tensor:
    """The experts that every token goes to."""
    with region("shared_experts"):
        o = swiglu(h, p["shared_gate"], p["shared_up"], p["shared_down"])
        if cfg.shared_gate:
            o = o * torch.sigmoid(einsum("b s d, d -> b s", h, p["shared_weight"])).unsqueeze(-1)
        return o


def no_stats(cfg: Sizes, layers: int, like: Tensor) -> Stats:
    """What `add_stats` starts from: {"counts": [layers, experts], and a sum for each loss of the router}."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    losses = ops.loss_counts(like, cfg.router)
    return {
        "counts": torch.zeros(layers, cfg.experts, dtype=torch.int64, device=like.device),
        **{name: torch.zeros((), dtype=dtype, device=like.device) for name in losses},
    }


def add_stats(stats: Stats, chosen: ops.RouterOutput, layer: Int[Tensor, ""]) -> Stats:
    """`stats` with those of one more layer."""
    here = torch.arange(stats["counts"].shape[0], device=layer.device) == layer
    counts = stats["counts"] + here.unsqueeze(1) * chosen.counts
    return {"counts": counts, **{name: stats[name] + total for name, total in chosen.losses.items()}}


def join_stats(parts: Sequence[Stats]) -> Stats:
    """Those of several stacks of layers as one."""
    total = {n: reduce(torch.add, [part[n] for part in parts]) for n in parts[0] if n != "counts"}
    return {"counts": torch.cat([part["counts"] for part in parts]), **total}


def loss_pairs(stats: Stats, batch: Mapping[str, Tensor], cfg: Sizes, like: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(sum, count) of each loss of the router: sums are over the layers, counts are those of one."""
    counts = ops.loss_counts(batch["tokens"], cfg.router, batch.get("real"))
    return [(stats[name], n.to(like.dtype)) for name, n in counts.items()]
