"""The queues of experts with a limited capacity, in the global order of tokens: row by row.

A slot is a token's place in its expert's queue. Slots 0, 1, 2 … of an expert are dense, so that they may also be rows
of a padded buffer [experts, capacity].
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg.ops.shard import shard


def capacity(factor: float, top_k: int, tokens: int, experts: int) -> int:
    """Tokens that an expert takes at most: min(⌈factor · top_k · tokens / experts⌉, tokens).

    `tokens` are all of the global (micro)batch, padding too, so that buffers have one size. The factor counts as the
    decimal number that it is written as. Source: Switch Transformers, arXiv:2101.03961, §2.2.

    >>> capacity(1.25, 2, 16, 8), capacity(1.1, 1, 10, 1), capacity(100.0, 2, 16, 8)
    (5, 10, 16)
    """
    return min(ceil(Fraction(str(factor)) * top_k * tokens / experts), tokens)


def slots_by_position(experts: Int[Tensor, "b s k"], chosen: Bool[Tensor, "b s e"]) -> Int[Tensor, "b s k"]:
    """Places in the experts' queues, first come first served: how many tokens before chose the same expert.

    chosen   True where a token goes to an expert (padding goes to none)

    On a mesh it is a running sum: each shard goes on from the counts of the shards before it.

    >>> experts = torch.tensor([[[0], [1], [0]], [[0], [1], [1]]])
    >>> slots_by_position(experts, torch.nn.functional.one_hot(experts, 2).sum(2).bool())[..., 0]
    tensor([[0, 0, 1],
            [2, 1, 2]])
    """
    rows = chosen.sum(1, dtype=torch.int32)
    before = rows.cumsum(0, dtype=torch.int32) - rows
    within = chosen.cumsum(1, dtype=torch.int32) - chosen.to(torch.int32)
    return (within + before.unsqueeze(1)).gather(-1, experts).long()


def slots_by_weight(
    experts: Int[Tensor, "b s k"], weights: Float[Tensor, "b s k"], keep: Bool[Tensor, "b s k"] | None = None
) -> Int[Tensor, "b s k"]:
    """Places in the experts' queues, largest weight first, then by position; those not to be kept queue elsewhere.

    A place depends on all tokens that chose the expert: on a mesh, experts and weights (k numbers a token) are
    gathered.

    >>> experts, weights = torch.tensor([[[0], [1], [0]]]), torch.tensor([[[0.1], [0.2], [0.3]]])
    >>> slots_by_weight(experts, weights)[..., 0]
    tensor([[1, 0, 0]])
    """
    whole = (None, None, None)
    queue = experts.to(torch.int32)
    if keep is not None:
        queue = torch.where(keep, queue, torch.iinfo(torch.int32).max)
    queue = shard(queue, whole).flatten()
    order = shard(weights.detach(), whole).flatten().sort(stable=True, descending=True).indices
    queue, by_queue = queue.gather(0, order).sort(stable=True)
    order = order.gather(0, by_queue)
    place = torch.arange(len(queue), device=queue.device)
    begins = torch.cat([queue.new_ones(1, dtype=torch.bool), queue[1:] != queue[:-1]])
    place = place - torch.where(begins, place, 0).cummax(0).values
    return torch.zeros_like(order).scatter(0, order, place).view(experts.shape)
