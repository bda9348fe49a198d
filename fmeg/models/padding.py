"""Padding: places of a batch that hold no token, so that rows of several lengths make one batch.

A batch says where its tokens are by an entry `real`: True (or 1) for a token, False (or 0) for padding, as
`transformers`' `attention_mask` does. Padding may begin rows, end them, lie between packed documents or be a whole row.
No token attends to it; it counts in no loss and no statistic; routers send it nowhere, so it takes no expert's room
(but for a capacity, which is reckoned from all places: see `fmeg.ops.router`). All of a model that tokens do not meet
in is computed there too, and means nothing.

Causal attention with padding at the ends of rows would need no mask, but the mask is made: on a GPU it costs what
packed segments cost.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Batch = Mapping[str, Tensor]


def blank(batch: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """The batch without what its padding holds; as it is where there is no `real`.

    Padding gets token and target 0, whatever was there (−100, −1), counts for nothing by the `mask`, and is of a
    segment that no token is of. Entries that are None are left out. `positions` stay: count them from the first token
    where the model learns them (GPT-2); rotary embeddings know distances only.

    >>> tokens, real = torch.tensor([[7, 8, -1]]), torch.tensor([[1, 1, 0]])
    >>> batch = blank({"tokens": tokens, "mask": torch.ones(1, 3), "real": real})
    >>> batch["tokens"].tolist(), batch["mask"].tolist(), batch["real"].tolist()
    ([[7, 8, 0]], [[1.0, 1.0, 0.0]], [[True, True, False]])
    """
    out = {name: x for name, x in batch.items() if x is not None}
    if "real" not in out:
        return out
    tokens, real = out["tokens"], out["real"]
    if real.shape != tokens.shape or real.is_floating_point():
        raise ValueError(
            f"batch['real']: expected bool of the tokens' shape {tuple(tokens.shape)}, True where there is one, given "
            f"{real.dtype} {tuple(real.shape)}"
        )
    real = real.to(torch.bool)
    segments = out.get("segments", torch.zeros_like(tokens))
    new = {"real": real, "segments": torch.where(real, segments, torch.iinfo(segments.dtype).min)}
    new |= {name: torch.where(real, out[name], 0) for name in ("tokens", "targets") if name in out}
    return {**out, **new, **({"mask": out["mask"] * real} if "mask" in out else {})}
