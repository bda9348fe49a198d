"""Exchanges of unequal numbers of rows. Where shapes may not depend on data, they are padded to what there is room for.

A rank's rows lie member after member, `counts[i]` of them for (or from) member i.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)


def spread(x: Tensor, counts: Int[Tensor, "n"], width: int) -> Tensor:
    """[rows, *shape] -> [n * width, *shape]: each member's rows at the start of its own block, zeros after them.

    Where a member has more than `width` rows, all is NaN (of integers: 0).

    >>> spread(torch.tensor([1, 2, 3]), torch.tensor([1, 2]), 2).tolist()
    [1, 0, 2, 3]
    >>> spread(torch.ones(2), torch.tensor([2]), 1)
    tensor([nan])
    """
    at = torch.arange(width, device=x.device)
    start, fits = counts.cumsum(0) - counts, (counts <= width).all()
    index, real = (start[:, None] + at).flatten(), (at < counts[:, None]).flatten() & fits
    fill = torch.zeros((), dtype=x.dtype if x.dtype.itemsize > 1 else torch.float32, device=x.device)
    return _pick(x, index, real, torch.where(fits, fill, torch.nan) if x.dtype.is_floating_point else fill)


def gathered(x: Tensor, counts: Int[Tensor, "n"], width: int, rows: int) -> Tensor:
    """[n * width, *shape] -> [rows, *shape]: the inverse of `spread`, zeros after the last row.

    >>> gathered(torch.tensor([1, 0, 2, 3]), torch.tensor([1, 2]), 2, 4).tolist()
    [1, 2, 3, 0]
    """
    at, ends = torch.arange(rows, device=x.device), counts.cumsum(0)
    member = (at[:, None] >= ends).sum(1).clamp(max=counts.shape[0] - 1)
    index = member * width + at - (ends - counts).index_select(0, member)
    return _pick(x, index, at < ends[-1], torch.zeros((), dtype=x.dtype, device=x.device))


def _pick(x: Tensor, index: Tensor, real: Tensor, fill: Tensor) -> Tensor:
    out = taken(x, index.clamp(0, x.shape[0] - 1))
    fill = fill.to(x.dtype)
    if x.dtype in BYTES:
        out, fill = out.view(torch.uint8), fill.view(torch.uint8)
    return torch.where(real.view(-1, *[1] * (x.ndim - 1)), out, fill).view(x.dtype)


def taken(x: Tensor, index: Int[Tensor, "m"]) -> Tensor:
    """Rows by their numbers; of 8-bit floats as bytes, for which there are all operations.

    >>> taken(torch.tensor([[1.0], [2.0]]).to(torch.float8_e5m2), torch.tensor([1, 1])).float().tolist()
    [[2.0], [2.0]]
    """
    if x.dtype in BYTES:
        return x.view(torch.uint8).index_select(0, index).view(x.dtype)
    return x.index_select(0, index)


def padded(x: Tensor, rows: int | None) -> Tensor:
    """x with zeros after its last row, `rows` in all; None: x.

    >>> padded(torch.ones(1, 2), 2).tolist()
    [[1.0, 1.0], [0.0, 0.0]]
    """
    missing = 0 if rows is None else rows - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x


def sent_and_received_tensors(table: Int[Tensor, "n c"], back: bool) -> tuple[Tensor, Tensor]:
    """How many rows go to each member, and how many come from it, by the table of an exchange.

    >>> [t.tolist() for t in sent_and_received_tensors(torch.tensor([[5, 1, 2], [0, 3, 0]]), back=False)]
    [[5, 0], [3, 3]]
    """
    send, receive = table[:, 0], table[:, 1:].sum(1)
    return (receive, send) if back else (send, receive)


def sent_and_received(table: Int[Tensor, "n c"], back: bool) -> tuple[list[int], list[int]]:
    """The same as numbers; the table lies on the host."""
    send, receive = sent_and_received_tensors(table, back)
    return send.tolist(), receive.tolist()
