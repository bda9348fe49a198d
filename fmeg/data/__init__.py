"""Text on this machine, its tokens, and batches that depend on a seed and a step alone.

`fmeg.data.tokenizer` needs the package `tokenizers` and is imported by its own name.
"""

from fmeg.data.corpus import Corpus, Document, load_corpus, python_library
from fmeg.data.loader import Loader
from fmeg.data.metrics import bits_per_byte, compressed_bits_per_byte
from fmeg.data.packing import Batch, Row, held_out_batches, join_documents

__all__ = [
    "Batch",
    "Corpus",
    "Document",
    "Loader",
    "Row",
    "bits_per_byte",
    "compressed_bits_per_byte",
    "held_out_batches",
    "join_documents",
    "load_corpus",
    "python_library",
]
