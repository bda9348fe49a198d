"""Keeping experts equally busy: auxiliary losses, a bias that needs no loss, Sinkhorn's balanced selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from fmeg.ops.shard import shard

if TYPE_CHECKING:
    from fmeg.ops.router import Router


def balance_losses(
    logits: Float[Tensor, "b s e"],
    scores: Float[Tensor, "b s e"],
    cfg: Router,
    counted: Callable[[], tuple[Bool[Tensor, "b s e"], Int[Tensor, "e"]]],
    mask: Bool[Tensor, "b s"] | None = None,
    running: Int[Tensor, "e"] | None = None,
) -> tuple[dict[str, Float[Tensor, ""]], Int[Tensor, "e"] | None]:
    """The losses that `cfg` asks for, each multiplied by its weight, and the running counts.

        L(C, T) = e / (k T) · Σ_i C_i · mean_x P_i(x)          1 where all experts are equally busy

    C_i are the counts of expert i over T tokens (no gradient), P the probabilities: the softmax over all experts, or
    scores divided by their sum. All tokens are those of the batch that is given, wherever it lies, padding left out:

        sequence   Σ over sequences of L: counts and mean of the one sequence; count: sequences with a token
        batch      Σ over tokens of L: counts and mean of the batch; count: tokens
        running    the same, with counts `running` + those of the batch
        z          Σ over tokens of logsumexp(logits)²; count: tokens

    counted   gives which experts a token counts for, and their counts

    Sums are to be divided by the sums of `loss_counts` over all microbatches. "sequence" then does not depend on how
    sequences make up microbatches; "batch" is the mean over microbatches, weighted by their tokens.

    Sources: Switch Transformers (arXiv:2101.03961, eq. 4), DeepSeek-V3 (2412.19437, eq. 17), "Demons in the Detail"
    (2501.11873) on counts of the global batch, ST-MoE (2202.08906, eq. 5).
    """
    losses: dict[str, Tensor] = {}
    after = None
    if cfg.sequence_loss or cfg.batch_loss or cfg.running_loss:
        (hot, counts), p = counted(), _probabilities(logits, scores, cfg.score)
        p = p if mask is None else torch.where(mask.unsqueeze(-1), p, 0.0)
        e, k = logits.shape[-1], cfg.top_k
        if cfg.sequence_loss:
            tokens = max(logits.shape[1], 1) if mask is None else mask.sum(1).clamp_min(1).to(p.dtype)
            each = (_complete(hot.sum(1)).to(p.dtype) * p.sum(1)).sum(-1) / (tokens * tokens)
            losses["sequence"] = each.sum() * (cfg.sequence_loss * e / k)
        if cfg.batch_loss or cfg.running_loss:
            counts, total = _complete(counts), p.sum((0, 1))
            if cfg.batch_loss:
                losses["batch"] = _summed(counts, total) * (cfg.batch_loss * e)
            if cfg.running_loss:
                after = counts if running is None else shard(running, (None,)) + counts
                losses["running"] = _summed(after, total) * (cfg.running_loss * e)
    if cfg.z_loss:
        lse = logits.logsumexp(-1)
        z = lse * lse if mask is None else torch.where(mask, lse * lse, 0.0)
        losses["z"] = z.sum() * cfg.z_loss
    return losses, after


def _complete(counts: Tensor) -> Tensor:
    """Counts as they are; on a mesh, no longer a pending sum: their product with one of probabilities then is one."""
    return counts.clamp_min(0)


def _summed(counts: Tensor, total: Tensor) -> Tensor:
    """Σ_i C_i Σ_x P_i(x) / Σ_i C_i."""
    return (counts.to(total.dtype) * total).sum() / counts.sum().clamp_min(1).to(total.dtype)


def _probabilities(logits: Tensor, scores: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return scores
    if score == "softmax_of_top_k":
        return logits.softmax(-1)
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def loss_counts(
    tokens: Shaped[Tensor, "b s *rest"], cfg: Router, mask: Bool[Tensor, "b s"] | None = None
) -> dict[str, Float[Tensor, ""]]:
    """What the sums in `RouterOutput.losses` are to be divided by, under the same names; not by layer, all are equal.

    tokens   anything with a row a sequence and a column a token

    They depend on the batch alone, so compute them outside the layers:

        loss_fn → [(cross entropy, tokens), *((sums[name], n) for name, n in loss_counts(…).items())]

    >>> from fmeg.ops.router import Router
    >>> loss_counts(torch.zeros(2, 3), Router(1, sequence_loss=0.1, z_loss=0.1))
    {'sequence': tensor(2.), 'z': tensor(6.)}
    """
    b, s = tokens.shape[:2]
    dtype = tokens.dtype if tokens.dtype == torch.float64 else torch.float32
    if mask is None:
        full = lambda n: torch.full((), n, dtype=dtype, device=tokens.device)
        sequences, n = full(b), full(b * s)
    else:
        sequences, n = mask.any(1).sum().to(dtype), mask.sum().to(dtype)
    found = {"sequence": sequences, "batch": n, "running": n, "z": n}
    weights = dict(sequence=cfg.sequence_loss, batch=cfg.batch_loss, running=cfg.running_loss, z=cfg.z_loss)
    return {name: found[name] for name, weight in weights.items() if weight}


def update_bias(
    bias: Float[Tensor, "*layers e"], counts: Int[Tensor, "*layers e"], rate: float = 1e-3
) -> Float[Tensor, "*layers e"]:
    """The next bias of loss-free balancing: b_i + rate · sign(mean(c) - c_i).

    counts   tokens an expert over a whole step: the sum of `RouterOutput.counts` over its microbatches; integers, so
             that
             "equal to the mean" is exact

    Call it once a step, after the gradients. Source: Wang et al. 2024, arXiv:2408.15664.

    >>> update_bias(torch.zeros(3), torch.tensor([5, 1, 3]))
    tensor([-0.0010,  0.0010,  0.0000])
    """
    if bias.shape != counts.shape:
        raise ValueError(f"update_bias: bias has shape {tuple(bias.shape)}, but counts {tuple(counts.shape)}")
    short = counts.sum(-1, keepdim=True) - counts.shape[-1] * counts
    return bias + rate * short.sign().to(bias.dtype)


def sinkhorn(
    logits: Float[Tensor, "b s e"], steps: int = 16, mask: Bool[Tensor, "b s"] | None = None
) -> Float[Tensor, "b s e"]:
    """The plan nearest to exp(logits) by which each token gives 1/tokens and each expert gets 1/e, by iteration.

        u = 1 / (tokens Σ_i C_i v_i),   v = 1 / (e Σ_x u_x C_x),   C = exp(logits),   plan = u C v

    Counts and sums are over all tokens of the batch, padding (where `mask` is False) left out: its plan is 0. Source:
    Sinkhorn and Knopp 1967; for experts, Clark et al. 2022, arXiv:2202.01169 (S-BASE).

    >>> plan = sinkhorn(torch.randn(2, 8, 4, dtype=torch.float64), steps=50)
    >>> torch.allclose(plan.sum((0, 1)), torch.full((4,), 0.25).double())
    True
    """
    c = (logits - logits.amax(-1, keepdim=True)).exp()
    tokens: Tensor | int = logits.shape[0] * logits.shape[1]
    if mask is not None:
        c = torch.where(mask.unsqueeze(-1), c, 0.0)
        tokens = mask.sum().clamp_min(1).to(c.dtype)
    e, tiny = logits.shape[-1], torch.finfo(c.dtype).tiny
    v = torch.ones(e, dtype=c.dtype, device=c.device)
    for _ in range(steps):
        u = 1 / (tokens * (c * v).sum(-1, keepdim=True).clamp_min(tiny))
        v = 1 / (e * (u * c).sum((0, 1)).clamp_min(tiny))
    return u * c * v
