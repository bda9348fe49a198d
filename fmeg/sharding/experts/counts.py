"""How many rows go where, and in which order: what a rank computes from every rank's counts.

Each is a primitive that is kept for the backward pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fmeg.ops.routing import chunk_of
from fmeg.program.primitive import Primitive


def row_table(counts: Tensor, me: Tensor) -> Tensor:
    """From every rank's slots of every expert, [ranks, ranks * local experts]: [ranks, 1 + local experts], the rows
    that this rank sends to each, then those that each sends to its experts.

    >>> row_table(torch.tensor([[1, 0, 2, 3], [4, 5, 6, 7]]), torch.tensor(1)).tolist()
    [[9, 2, 3], [13, 6, 7]]
    """
    by_rank = counts.unflatten(1, (counts.shape[0], -1))
    me = me.reshape(1)
    sent = by_rank.index_select(0, me).sum(-1).t()
    return torch.cat([sent, by_rank.index_select(1, me).squeeze(1)], 1)


def arrivals(table: Tensor, width: int | None) -> Tensor:
    """[ranks, local experts]: rows that arrive, of each rank no more than `width`.

    >>> arrivals(torch.tensor([[0, 1, 4], [0, 2, 0]]), 3).tolist()
    [[1, 2], [2, 0]]
    """
    counts = table[:, 1:]
    if width is None:
        return counts
    within = counts.cumsum(1)
    return within.clamp(max=width) - (within - counts).clamp(max=width)


def row_ends(table: Tensor, width: int | None) -> Tensor:
    """Where each local expert's rows end."""
    return arrivals(table, width).sum(0).cumsum(0).to(torch.int32)


def by_expert(rows: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that arrived (rank, expert) in the order (expert, rank), as an index; and the inverse. Rows beyond those of
    the table stay in place.

    >>> [i.tolist() for i in by_expert(torch.zeros(4, 1), torch.tensor([[0, 1, 1], [0, 2, 0]]))]
    [[0, 2, 3, 1], [0, 3, 1, 2]]
    """
    counts = table[:, 1:]
    at = torch.arange(rows.shape[0], device=rows.device)
    arrived = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
    wanted = (counts.t().flatten().cumsum(0) - counts.t().flatten()).view(counts.t().shape)
    return _moved(at, counts.t(), wanted, arrived.t()), _moved(at, counts, arrived, wanted.t())


def _moved(at: Tensor, counts: Tensor, here: Tensor, there: Tensor) -> Tensor:
    """Position `there` of the row at each position `here`, chunks of `counts` rows."""
    ends = counts.flatten().cumsum(0)
    chunk = chunk_of(ends, at).clamp(max=ends.shape[0] - 1)
    shift = (there - here).flatten().index_select(0, chunk)
    return torch.where(at < ends[-1], at + shift, at)


def from_blocks(table: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As `by_expert`, for rows that arrived in a block of `width` from each rank: real ones first, then the others.

    >>> [i.tolist() for i in from_blocks(torch.tensor([[0, 1, 1], [0, 2, 0]]), 3)]
    [[0, 3, 4, 1, 2, 5], [0, 3, 4, 1, 2, 5]]
    """
    counts = arrivals(table, width)
    within, sizes = counts.cumsum(1), counts.sum(1)
    at = torch.arange(width, device=table.device)
    expert = (at[None, :, None] >= within[:, None, :]).sum(-1).clamp(max=counts.shape[1] - 1)
    wanted = (counts.t().flatten().cumsum(0) - counts.t().flatten()).view(counts.t().shape).t()
    real = at + (wanted - within + counts).gather(1, expert)
    empty = width - sizes
    other = sizes.sum() + (empty.cumsum(0) - empty - sizes)[:, None] + at
    to_arrival = torch.where(at < sizes[:, None], real, other).flatten()
    every = torch.arange(to_arrival.shape[0], device=table.device)
    return torch.zeros_like(to_arrival).scatter(0, to_arrival, every), to_arrival


row_table_p = Primitive("row_table", row_table, flops=lambda n: 0, keep=True)
to_host_p = Primitive("to_host", lambda table: table.to("cpu"), fake=torch.clone, flops=lambda n: 0, keep=True)
row_ends_p = Primitive("row_ends", row_ends, flops=lambda n: 0, keep=True)
by_expert_p = Primitive("by_expert", by_expert, flops=lambda n: 0, keep=True)
from_blocks_p = Primitive("from_blocks", from_blocks, flops=lambda n: 0, keep=True)
