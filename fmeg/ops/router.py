"""The router of a mixture of experts: which experts a token goes to, and with what weights.

Plain torch on global shapes: every statistic (counts, losses, queues of experts) is that of the whole batch that the
function is given, so it means the same on every layout. Indices carry no gradient; the weights do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg import random
from fmeg.kernels import experts as kernels
from fmeg.kernels.grouped import fits
from fmeg.ops._common import check_float, check_shape, elements, row_names, transformed, wide
from fmeg.ops.balance import balance_losses, sinkhorn
from fmeg.ops.capacity import capacity, slots_by_position, slots_by_weight
from fmeg.ops.einsum import einsum
from fmeg.ops.shard import shard
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule

Score = Literal["softmax", "softmax_of_top_k", "sigmoid", "sqrt_softplus"]
GroupScore = Literal["max", "top2sum"]
Select = Literal["top_k", "sinkhorn", "balanced"]
Drop = Literal["weight", "position"]
Counted = Literal["scores", "chosen"]


@dataclass(frozen=True)
class Router:
    """How tokens are routed.

    top_k             experts a token
    score             s: "softmax" over all experts, or "sigmoid", or "sqrt_softplus" (√log(1 + eˣ)); the k largest are
                      chosen and are the weights. "softmax_of_top_k": logits are chosen from, the weights are the
                      softmax of the k chosen ones
    renormalize       weights are divided by their sum (+ 1e-20)
    scale             weights are then multiplied by it
    groups            experts are in this many groups of equal size, neighbours together; a token may use experts of
    top_groups        the best `top_groups` of them,
    group_score       by their "max" score (DeepSeek-V2), or the sum of their two largest, "top2sum" (DeepSeek-V3)
    select            "top_k"; "sinkhorn": top-k of the logits' balanced transport plan (see `sinkhorn`); "balanced":
                      token t's slot j goes to expert t·k + j modulo the number of experts, for benchmarks
    sinkhorn_steps    of its iteration
    jitter            ε: inputs are multiplied by uniform numbers of [1 - ε, 1 + ε) where a key is given
    capacity_factor   c: an expert takes at most ⌈c·k·tokens/experts⌉ tokens, the rest is dropped; None: no limit
    drop              which stay: those of largest "weight", or the first, "position"; the earlier one of equals
    sequence_loss     weight of the balance loss by sequence;
    batch_loss        of that of the whole (micro)batch;
    running_loss      of that with counts that run on from batch to batch; 0: not computed. See `balance_losses`
    z_loss            weight of Σ logsumexp(logits)² (ST-MoE, arXiv:2202.08906)
    counted           what these losses count: the plain top-k of the "scores", without bias and groups (DeepSeek-V3,
                      Megatron), or the experts that were "chosen"

    >>> mixtral = Router(top_k=2, score="softmax_of_top_k", batch_loss=0.02)
    >>> deepseek_v3 = Router(8, "sigmoid", renormalize=True, scale=2.5, groups=8, top_groups=4, group_score="top2sum")
    """

    top_k: int
    score: Score = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    select: Select = "top_k"
    sinkhorn_steps: int = 16
    jitter: float = 0.0
    capacity_factor: float | None = None
    drop: Drop = "weight"
    sequence_loss: float = 0.0
    batch_loss: float = 0.0
    running_loss: float = 0.0
    z_loss: float = 0.0
    counted: Counted = "scores"

    def __post_init__(self) -> None:
        words = dict(score=Score, group_score=GroupScore, select=Select, drop=Drop, counted=Counted)
        for name, kind in words.items():
            if getattr(self, name) not in get_args(kind):
                expected = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"Router: {name} must be one of {expected}, given {getattr(self, name)!r}")
        if self.top_k < 1:
            raise ValueError(f"Router: top_k must be at least 1, given {self.top_k}")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"Router: top_groups must be in [1, groups = {self.groups}], given {self.top_groups}")
        if not 0.0 <= self.jitter < 1.0:
            raise ValueError(f"Router: jitter must be in [0, 1), given {self.jitter}")
        if self.capacity_factor is not None and self.capacity_factor <= 0:
            raise ValueError(f"Router: capacity_factor must be positive, given {self.capacity_factor}; None: no limit")


class RouterOutput(NamedTuple):
    """Where tokens go. k slots a token, best first; all counts are of the whole batch.

    experts   indices in [0, e); they replay a routing
    weights   float32 (float64 for float64 inputs); 0 where `keep` is False
    keep      False for slots that go nowhere: of padding tokens, or over an expert's capacity. None: all are kept
    slots     with a capacity: place in the expert's queue, 0 ≤ slot < capacity where kept, else the capacity
    counts    tokens an expert was chosen by; padding does not count, dropped tokens do
    losses    weighted sums "sequence", "batch", "running", "z", those asked for; `loss_counts` has their counts
    running   with `running_loss`: the counts given, and those of this batch
    """

    experts: Int[Tensor, "b s k"]
    weights: Float[Tensor, "b s k"]
    keep: Bool[Tensor, "b s k"] | None
    slots: Int[Tensor, "b s k"] | None
    counts: Int[Tensor, "e"]
    losses: dict[str, Float[Tensor, ""]]
    running: Int[Tensor, "e"] | None


def router(
    x: Float[Tensor, "b s d"],
    w: Float[Tensor, "d e"],
    cfg: Router,
    *,
    key: Int[Tensor, "2"] | None = None,
    linear_bias: Float[Tensor, "e"] | None = None,
    bias: Float[Tensor, "e"] | None = None,
    mask: Bool[Tensor, "b s"] | None = None,
    replay: Int[Tensor, "b s k"] | None = None,
    running: Int[Tensor, "e"] | None = None,
) -> RouterOutput:
    """Route tokens by the logits x·w (+ linear_bias), in float32 (float64 for float64).

    key           for `cfg.jitter`; evaluation gives none. Fold a layer's number into it
    linear_bias   added to the logits
    others        as for `router_from_logits`

    On a mesh x may be sharded over b and s; w is used whole, wherever it rests.

    >>> x, w = torch.randn(2, 3, 4), torch.randn(4, 8)
    >>> r = router(x, w, Router(top_k=2, score="softmax_of_top_k"))
    >>> r.experts.shape, r.counts.sum().item(), torch.allclose(r.weights.sum(-1), torch.ones(2, 3))
    (torch.Size([2, 3, 2]), 12, True)
    """
    check_float("router", x=x, w=w, linear_bias=linear_bias)
    if x.ndim != 3 or w.ndim != 2 or x.shape[-1] != w.shape[0]:
        raise ValueError(f"router: x must be 'b s d' and w 'd e', given shapes {tuple(x.shape)} and {tuple(w.shape)}")
    x, w = wide(x), wide(shard(w, (None, None)))
    if key is not None and cfg.jitter:
        x = x * (1 - cfg.jitter + 2 * cfg.jitter * random.uniform(key, x.shape, x.dtype))
    dtype = torch.promote_types(x.dtype, w.dtype)
    logits = einsum("b s d, d e -> b s e", x.to(dtype), w.to(dtype))
    if linear_bias is not None:
        check_shape("router", "linear_bias", linear_bias, w.shape[1:], "one number an expert")
        logits = logits + shard(linear_bias, (None,)).to(dtype)
    return router_from_logits(logits, cfg, bias=bias, mask=mask, replay=replay, running=running)


def router_from_logits(
    logits: Float[Tensor, "b s e"],
    cfg: Router,
    *,
    bias: Float[Tensor, "e"] | None = None,
    mask: Bool[Tensor, "b s"] | None = None,
    replay: Int[Tensor, "b s k"] | None = None,
    running: Int[Tensor, "e"] | None = None,
) -> RouterOutput:
    """Route tokens by logits.

        s = score(logits);   experts = top-k of s + bias;   weights = scale · s[experts] (/ Σ s[experts])

    bias      of loss-free balancing (arXiv:2408.15664): it moves the selection, never the weights. `update_bias`
    mask      False for padding tokens, which go nowhere and count nowhere
    replay    experts to use instead of selecting any (`RouterOutput.experts` of another run, all in [0, e));
              gradients flow through the weights as ever
    running   counts so far, for `running_loss`; None: zeros

    Of equal scores the expert of lower index comes first, on every layout and device; so a token's experts depend on
    its own logits alone. Sources: Switch Transformers (arXiv:2101.03961), Mixtral (2401.04088), DeepSeek-V2
    (2405.04434), DeepSeek-V3 (2412.19437). Raises ValueError for shapes that do not fit.

    >>> logits = torch.tensor([[[0.0, 2.0, 1.0, 1.0]]])
    >>> router_from_logits(logits, Router(top_k=2)).experts
    tensor([[[1, 2]]])
    >>> router_from_logits(logits, Router(top_k=2, score="sigmoid"), bias=torch.tensor([9.0, 0.0, 0.0, 0.0])).experts
    tensor([[[0, 1]]])
    """
    _check(logits, cfg, bias, mask, replay, running)
    logits = wide(logits)
    if mask is not None:
        logits = torch.where(mask.unsqueeze(-1), logits, 0.0)  # what padding holds may not be a number
    scores = _scores(logits, cfg.score)
    experts = _select(logits, scores.detach(), cfg, bias, mask) if replay is None else replay.long()
    weights = _weights(scores, experts, cfg)
    chosen = _one_hot(experts, logits.shape[-1], mask)
    keep = None if mask is None else mask.unsqueeze(-1).expand(experts.shape)
    slots = None
    if cfg.capacity_factor is not None:
        limit = capacity(cfg.capacity_factor, cfg.top_k, logits.shape[0] * logits.shape[1], logits.shape[2])
        slots = (
            slots_by_position(experts, chosen) if cfg.drop == "position" else slots_by_weight(experts, weights, keep)
        )
        within = slots < limit
        keep = within if keep is None else within & keep
        slots = torch.where(keep, slots, limit)
    if keep is not None:
        weights = torch.where(keep, weights, 0.0)
    plain = cfg.counted == "chosen" or (bias is None and replay is None and cfg.select == "top_k" and cfg.groups == 1)
    counts = chosen.sum((0, 1))

    def counted() -> tuple[Tensor, Tensor]:
        if plain:
            return chosen, counts
        hot = _one_hot(top_k(scores.detach(), cfg.top_k), logits.shape[-1], mask)
        return hot, hot.sum((0, 1))

    losses, running = balance_losses(logits, scores, cfg, counted, mask, running)
    return RouterOutput(experts, weights, keep, slots, counts, losses, running)


def top_k(x: Float[Tensor, "*rows n"], k: int) -> Int[Tensor, "*rows k"]:
    """Indices of the k largest elements, largest first; of equal ones the lower index comes first.

    >>> top_k(torch.tensor([1.0, 3.0, 3.0, 2.0]), 2)
    tensor([1, 2])
    """
    return top_k_p(x.detach(), k=k)


def _top_k(x: Tensor, k: int) -> Tensor:
    if fits(x) and not transformed():
        return kernels.top_k(x, k)
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def _top_k_rule(node: Node) -> Rule:
    (x,) = (v.shape for v in node.operands())
    rows = row_names(len(x) - 1)
    return rule(f"{rows} n -> {rows} k", [x], [node.outs[0].shape], whole=frozenset("nk"))


top_k_p = Primitive("top_k", _top_k, rule=_top_k_rule, flops=elements)


def _scores(logits: Tensor, score: Score) -> Tensor:
    if score == "softmax":
        return logits.softmax(-1)
    if score == "sigmoid":
        return logits.sigmoid()
    if score == "sqrt_softplus":
        return F.softplus(logits).clamp_min(torch.finfo(logits.dtype).tiny).sqrt()
    return logits


def _select(logits: Tensor, scores: Tensor, cfg: Router, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """The chosen experts; nothing here has a gradient."""
    b, s, e = scores.shape
    if cfg.select == "balanced":
        token = torch.arange(b, device=scores.device).view(b, 1, 1) * s
        token = token + torch.arange(s, device=scores.device).view(s, 1)
        return (token * cfg.top_k + torch.arange(cfg.top_k, device=scores.device)) % e
    if cfg.select == "sinkhorn":
        scores = sinkhorn(logits.detach(), cfg.sinkhorn_steps, mask)
    if bias is not None:
        scores = scores + shard(bias, (None,)).detach().to(scores.dtype)
    if cfg.groups > 1:
        scores = scores.masked_fill(~_allowed(scores, cfg), -torch.inf)
    return top_k(scores, cfg.top_k)


def _allowed(scores: Tensor, cfg: Router) -> Tensor:
    """Which experts are in a token's best groups."""
    grouped = scores.unflatten(-1, (cfg.groups, -1))
    best = min(1 if cfg.group_score == "max" else 2, grouped.shape[-1])
    group = top_k(grouped.topk(best, dim=-1).values.sum(-1), cfg.top_groups)
    return _one_hot(group, cfg.groups, None).unsqueeze(-1).expand(grouped.shape).flatten(-2)


def _weights(scores: Tensor, experts: Tensor, cfg: Router) -> Tensor:
    picked = scores.gather(-1, experts)
    if cfg.score == "softmax_of_top_k":
        picked = picked.softmax(-1)
    if cfg.renormalize:
        picked = picked / (picked.sum(-1, keepdim=True) + 1e-20)
    return picked if cfg.scale == 1.0 else picked * cfg.scale


def _one_hot(index: Tensor, n: int, mask: Tensor | None) -> Bool[Tensor, "b s n"]:
    """True at each token's indices; nowhere for tokens that the mask leaves out."""
    zeros = torch.zeros((*index.shape[:-1], n), dtype=torch.bool, device=index.device)
    hot = zeros.scatter(-1, index, True)
    return hot if mask is None else hot & mask.unsqueeze(-1)


def _check(
    logits: Tensor,
    cfg: Router,
    bias: Tensor | None,
    mask: Tensor | None,
    replay: Tensor | None,
    running: Tensor | None,
) -> None:
    check_float("router", logits=logits, bias=bias)
    if logits.ndim != 3:
        raise ValueError(f"router: logits must be 'b s e', given shape {tuple(logits.shape)}")
    e = logits.shape[-1]
    if e % cfg.groups:
        raise ValueError(f"router: groups={cfg.groups} do not divide the {e} experts")
    if cfg.top_k > e // cfg.groups * cfg.top_groups:
        raise ValueError(
            f"router: top_k={cfg.top_k}, but a token may use only {e // cfg.groups * cfg.top_groups} of the {e} "
            "experts "
            f"(top_groups={cfg.top_groups} of groups={cfg.groups})"
        )
    for name, t in {"bias": bias, "running": running}.items():
        if t is not None:
            check_shape("router", name, t, (e,), "one number an expert")
    if mask is not None:
        check_shape("router", "mask", mask, logits.shape[:2], "one a token")
        if mask.dtype != torch.bool:
            raise TypeError(f"router: mask must be bool (True: a real token), given {mask.dtype}")
    if replay is not None:
        check_shape("router", "replay", replay, (*logits.shape[:2], cfg.top_k), "top_k experts a token")
        if replay.dtype not in (torch.int64, torch.int32):
            raise TypeError(f"router: replay must be int64 or int32, given {replay.dtype}")
