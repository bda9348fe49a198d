"""Bits per byte, and the compressors that the model is compared with."""

import io
import math
import tarfile
import zlib

import pytest

from fmeg.data.corpus import Document
from fmeg.data.metrics import archive, bits_per_byte, compressed_bits_per_byte

DOCUMENTS = [Document("b.py", "import os\n" * 50), Document("sub/a.py", "é = 1\n" * 30), Document("x" * 300, "")]


def test_archive_gives_the_documents_back():
    with tarfile.open(fileobj=io.BytesIO(archive(DOCUMENTS))) as tar:
        found = [Document(m.name, tar.extractfile(m).read().decode()) for m in tar.getmembers()]
    assert found == DOCUMENTS
    assert archive(DOCUMENTS) == archive(list(DOCUMENTS))


def test_gzip_is_deflate_of_the_archive_and_a_header():
    deflated = zlib.compressobj(9, zlib.DEFLATED, -15)
    size = len(deflated.compress(archive(DOCUMENTS)) + deflated.flush()) + 18
    num_bytes = 50 * 10 + 30 * 7
    assert compressed_bits_per_byte(DOCUMENTS)["gzip"] == 8 * size / num_bytes


def test_xz_finds_repeats_that_lie_far_apart():
    import random

    noise = random.Random(0).randbytes(60_000).hex()
    sizes = compressed_bits_per_byte([Document("a", noise), Document("b", noise)])
    assert 1.9 < sizes["xz"] < 2.4 < 4 < sizes["gzip"] < 4.8


def test_bits_per_byte():
    assert bits_per_byte(7 * math.log(2), 7) == 1
    with pytest.raises(ValueError, match="at least 1, given 0"):
        bits_per_byte(1.0, 0)
