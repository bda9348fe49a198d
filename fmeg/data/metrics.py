"""How well text is predicted, in a unit that does not depend on the tokenizer, and what compressors make of it."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import tarfile
from collections.abc import Sequence

from fmeg.data.corpus import Document


def bits_per_byte(nats: float, num_bytes: int) -> float:
    """Σ -log p of all tokens, in bits, over the bytes of the text they stand for: nats / (ln 2 · bytes).

    It is the size, per byte, of what an arithmetic coder with this model would write. For that to be true every byte
    must be in a token that counts, the first one too, and so must each document's end (see `held_out_batches`).

    >>> bits_per_byte(100 * math.log(256), 100)
    8.0
    """
    if num_bytes < 1:
        raise ValueError(f"bits_per_byte: `num_bytes` should be at least 1, given {num_bytes}")
    return nats / (math.log(2) * num_bytes)


def archive(documents: Sequence[Document]) -> bytes:
    """An uncompressed tar of the documents, without times or owners.

    >>> len(archive([Document("a.py", "pass")])) % 512
    0
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for d in documents:
            data = d.text.encode()
            info = tarfile.TarInfo(d.name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def compressed_bits_per_byte(documents: Sequence[Document]) -> dict[str, float]:
    """Bits per byte of text that gzip -9 and xz -9e need for one archive of the documents.

    >>> sizes = compressed_bits_per_byte([Document("a.py", "pass\\n" * 1000)])
    >>> sizes["gzip"] < 1
    True
    """
    tar = archive(documents)
    num_bytes = sum(d.num_bytes for d in documents)
    packed = {
        "gzip": gzip.compress(tar, compresslevel=9, mtime=0),
        "xz": lzma.compress(tar, preset=9 | lzma.PRESET_EXTREME),
    }
    return {name: 8 * len(data) / num_bytes for name, data in packed.items()}
