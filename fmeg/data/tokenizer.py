"""Byte-level BPE, trained on the spot: any text has tokens, and they give back its bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from fmeg.data.corpus import Document

# Words with the space before them, single digits, and punctuation with the line break and indentation after it.
PIECES = r" ?[A-Za-z]+|[0-9]|[\r\n]+[ \t]*|[^\sA-Za-z0-9]+[\r\n]+[ \t]*|\s+(?!\S)| ?[^\sA-Za-z0-9]+|\s+"


@dataclass(frozen=True)
class Bpe:
    """A trained tokenizer. Its last token, `separator`, stands before and after each document and is in no text."""

    inner: Tokenizer

    @property
    def separator(self) -> int:
        """Id of the token between documents."""
        return self.inner.get_vocab_size()

    @property
    def vocab_size(self) -> int:
        """Number of tokens, the separator included."""
        return self.separator + 1

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """How many bytes of text each token stands for, int64 [vocab_size]; the separator for none."""
        lengths = [len(self.inner.id_to_token(i) or "") for i in range(self.separator)]  # one character a byte
        return np.array([*lengths, 0], dtype=np.int64)

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, int32 [n]."""
        return np.asarray(self.inner.encode(text).ids, dtype=np.int32)

    def encode_documents(self, documents: Sequence[Document]) -> list[np.ndarray]:
        """Ids of each document's text, in parallel."""
        return [np.asarray(e.ids, dtype=np.int32) for e in self.inner.encode_batch([d.text for d in documents])]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of some ids; separators are left out, bytes that are not UTF-8 become U+FFFD."""
        return self.inner.decode([int(i) for i in ids if int(i) < self.separator], skip_special_tokens=False)


def train_bpe(documents: Iterable[Document], vocab_size: int) -> Bpe:
    """Byte-pair encoding of at most `vocab_size` tokens: 256 bytes, merges of the most frequent pairs, the separator.

    The same documents give the same one. Reference: Sennrich et al., https://arxiv.org/abs/1508.07909; on bytes as
    in GPT-2.

    >>> bpe = train_bpe([Document("a", "def f(x):\\n    return x\\n" * 10)], 300)
    >>> ids = bpe.encode("return né")
    >>> bpe.decode(ids)
    'return né'
    """
    if vocab_size < 257:
        raise ValueError(f"train_bpe: `vocab_size` should be at least 257 (bytes, separator), given {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator((d.text for d in documents), trainer)
    return Bpe(tokenizer)
