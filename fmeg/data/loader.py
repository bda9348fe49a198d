"""Batches as a pure function of a seed and a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from fmeg.data.packing import Batch, Row, join_documents, rows, stack_rows


class Loader:
    """`loader(step)` is the global batch of that step, the same for every mesh and layout, and after every restart.

    An epoch puts the documents in a random order, cuts their stream into rows of `seq` tokens and takes the rows in a
    random order; its randomness is Philox with the key (seed, epoch). Batch i holds the rows i·batch … (i+1)·batch - 1
    of all epochs in a line, so each target of the corpus comes once an epoch. An epoch's last row may be filled up.

    >>> loader = Loader([np.arange(1, 8), np.arange(1, 4)], separator=0, batch=2, seq=4, seed=0)
    >>> loader.rows_per_epoch, loader.tokens_per_epoch, loader(0)["tokens"].shape
    (3, 12, torch.Size([2, 4]))
    >>> bool((loader(5)["tokens"] == loader(5)["tokens"]).all())
    True
    """

    def __init__(self, documents: Sequence[np.ndarray], separator: int, batch: int, seq: int, seed: int = 0) -> None:
        if not len(documents):
            raise ValueError("Loader: expected at least one document, given none")
        for name, value in (("batch", batch), ("seq", seq)):
            if value < 1:
                raise ValueError(f"Loader: `{name}` should be at least 1, given {value}")
        self.documents, self.separator = tuple(documents), separator
        self.batch, self.seq, self.seed = batch, seq, seed
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    @property
    def tokens_per_epoch(self) -> int:
        """Targets in the corpus: its tokens, and one separator a document."""
        return sum(len(d) + 1 for d in self.documents)

    @property
    def rows_per_epoch(self) -> int:
        """Rows that hold them."""
        return -(-self.tokens_per_epoch // self.seq)

    def __call__(self, step: int) -> Batch:
        """The batch of a step: tokens, targets, mask, segments, positions, each [batch, seq]."""
        places = [divmod(step * self.batch + j, self.rows_per_epoch) for j in range(self.batch)]
        return stack_rows([self.epoch(e)[i] for e, i in places], self.batch, self.seq, self.separator)

    def _epoch(self, epoch: int) -> list[Row]:
        bits = np.random.Philox(key=[self.seed % 2**64, epoch])
        shuffled = [self.documents[i] for i in _permutation(bits, len(self.documents))]
        cut = list(rows(join_documents(shuffled, self.separator), self.seq))
        return [cut[i] for i in _permutation(bits, len(cut))]


def _permutation(bits: np.random.Philox, n: int) -> np.ndarray:
    """A random order of n things, from the generator's raw words: those are fixed by its definition."""
    return np.argsort(bits.random_raw(n), kind="stable")
