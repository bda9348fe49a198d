"""Documents as rows of a fixed length.

Documents stand in one stream, with a separator before and after each:

    | a a a | b b | c c c c |          every token but the first is a target once, a document's end too

A row of length s takes s tokens and, as targets, the s that follow each by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Row:
    """Tokens and targets, int32 [n] with n ≤ s; the first `context` targets are there to be seen, not to be counted."""

    tokens: np.ndarray
    targets: np.ndarray
    context: int = 0


def join_documents(documents: Sequence[np.ndarray], separator: int) -> Int[np.ndarray, "n"]:
    """One stream, int32: separator, document, separator, …, document, separator.

    >>> join_documents([np.array([1, 2]), np.array([3])], 0)
    array([0, 1, 2, 0, 3, 0], dtype=int32)
    """
    between = np.array([separator], dtype=np.int32)
    parts = [part for d in documents for part in (between, np.asarray(d, dtype=np.int32))]
    return np.concatenate([*parts, between])


def rows(stream: np.ndarray, seq: int, context: int = 0) -> Iterator[Row]:
    """Cut a stream into rows of `seq` tokens, the last one shorter; each target counts in one row.

    context   rows after the first begin with that many tokens of the row before, whose targets do not count again

    >>> [(r.tokens.tolist(), r.targets.tolist(), r.context) for r in rows(np.array([0, 1, 2, 3, 4, 0]), 3, context=1)]
    [([0, 1, 2], [1, 2, 3], 0), ([2, 3, 4], [3, 4, 0], 1)]
    """
    if not 0 <= context < seq:
        raise ValueError(f"rows: `context` should be at least 0 and below seq={seq}, given {context}")
    begin, end = 0, len(stream) - 1
    while begin < end:
        first = begin - context if begin else 0
        last = min(first + seq, end)
        yield Row(stream[first:last], stream[first + 1 : last + 1], begin - first)
        begin = last


def stack_rows(some: Sequence[Row], batch: int, seq: int, separator: int) -> Batch:
    """A batch [batch, seq] of rows, filled up with separators that do not count.

    tokens, targets   int64
    mask              float32: 1 where the target counts
    segments          int64: number of separators up to here, so that a document is one segment
    positions         int64: from 0 in each segment

    >>> row = Row(np.array([5, 0, 6], np.int32), np.array([0, 6, 7], np.int32))
    >>> {name: values.tolist() for name, values in stack_rows([row], 1, 4, separator=0).items()}
    {'tokens': [[5, 0, 6, 0]], 'targets': [[0, 6, 7, 0]], 'mask': [[1.0, 1.0, 1.0, 0.0]],
     'segments': [[0, 1, 1, 2]], 'positions': [[0, 0, 1, 0]]}
    """
    tokens = np.full((batch, seq), separator, dtype=np.int64)
    targets = np.full((batch, seq), separator, dtype=np.int64)
    mask = np.zeros((batch, seq), dtype=np.float32)
    for i, row in enumerate(some):
        n = len(row.tokens)
        tokens[i, :n], targets[i, :n] = row.tokens, row.targets
        mask[i, row.context : n] = 1
    starts = tokens == separator
    index = np.broadcast_to(np.arange(seq), tokens.shape)
    start = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
    values = dict(
        tokens=tokens, targets=targets, mask=mask, segments=np.cumsum(starts, axis=1), positions=index - start
    )
    return {name: torch.from_numpy(x) for name, x in values.items()}


def held_out_batches(
    documents: Sequence[np.ndarray], separator: int, batch: int, seq: int, context: int = 0
) -> list[Batch]:
    """Batches in which every token of every document, and the separator that ends it, is a target exactly once.

    Each document starts a row of its own, after a separator; a long one goes on in further rows, which repeat `context`
    tokens for the model to see. All batches have one shape.

    >>> batches = held_out_batches([np.arange(1, 8), np.arange(1, 3)], 0, batch=2, seq=4, context=2)
    >>> sum(b["mask"].sum().item() for b in batches)
    11.0
    """
    some = [row for d in documents for row in rows(join_documents([d], separator), seq, context)]
    return [stack_rows(some[i : i + batch], batch, seq, separator) for i in range(0, len(some), batch)]
