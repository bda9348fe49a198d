"""Sampling, the simple way: the whole sequence again for each new token. For looking at samples while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import random
from fmeg.models.registry import model_of


@torch.no_grad()
def generate(
    params: Mapping[str, Any],
    tokens: Int[Tensor, "b s"],
    cfg: Any,
    n: int,
    *,
    temperature: float = 1.0,
    key: Int[Tensor, "2"] | None = None,
) -> Int[Tensor, "b s+n"]:
    """`tokens` and `n` more, each drawn from softmax(logits / temperature) by the Gumbel-max trick.

    temperature   0 takes the likeliest token, and needs no key
    key           a token depends on it, on the row and on how many came before, so a longer run begins as a shorter one

    >>> from fmeg.models import llama, presets
    >>> cfg = presets.get("tiny")
    >>> params = llama.init(random.key(0), cfg)
    >>> generate(params, torch.tensor([[1, 2]]), cfg, 3, temperature=0).shape
    torch.Size([1, 5])
    """
    if temperature and key is None:
        raise ValueError("generate: temperature > 0 needs a key, as fmeg.random.key(0); or take temperature=0")
    model = model_of(cfg)
    for i in range(n):
        logits = model.apply(params, tokens, cfg)[:, -1, : cfg.vocab_size]
        if temperature and key is not None:
            u = random.uniform(random.fold_in(key, i), logits.shape)
            logits = logits.float() / temperature - torch.log(-torch.log(u))
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    return tokens
