"""Text to train on: files, read alike everywhere, and a split into train and held-out that depends on names alone."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TESTS = ("test", "tests", "idle_test")
TABLES = ("encodings", "pydoc_data")  # generated: character maps and help texts, not code
INSTALLED = ("site-packages", "dist-packages", "__pycache__")
TEXT_SUFFIXES = (".py", ".txt", ".md", ".rst", ".c", ".h", ".cpp", ".rs", ".go", ".js", ".ts", ".java")
PIECES, PIECE_BYTES = 20, 65536


@dataclass(frozen=True)
class Document:
    """A text and its name: the path relative to where it was found, with `/`."""

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8."""
        return len(self.text.encode())


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents that training never sees, each sorted by name."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


def load_corpus(path: str | Path | None = None, *, held_out: float = 0.05) -> Corpus:
    """Documents of a folder or of one file (cut into pieces); None: Python's standard library, without its tests.

    Raises FileNotFoundError for a path that is not there, ValueError for fewer than two documents.

    >>> corpus = load_corpus()
    >>> len(corpus.train) > len(corpus.held_out) > 0
    True
    """
    if path is None:
        return split(python_library(), held_out)
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"load_corpus: there is no file or folder {str(path)!r}")
    documents = read_folder(path, TEXT_SUFFIXES, INSTALLED) if path.is_dir() else cut(_read(path, path.name))
    return split(documents, held_out)


def python_library(skip: Sequence[str] = INSTALLED + TESTS + TABLES) -> list[Document]:
    """The source files of the standard library of the Python that runs this.

    >>> "dataclasses.py" in {d.name for d in python_library()}
    True
    """
    return read_folder(Path(sysconfig.get_path("stdlib")), (".py",), skip)


def read_folder(root: Path, suffixes: Sequence[str], skip: Sequence[str] = ()) -> list[Document]:
    """Files below `root` with one of the suffixes, sorted by name; none below a folder named in `skip`.

    Files that are empty or not UTF-8 are left out, links to folders are not followed.
    """
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skip]
        found += [Path(folder, n) for n in names if n.endswith(tuple(suffixes))]
    documents = [_read(f, f.relative_to(root).as_posix()) for f in found if f.is_file()]
    return sorted((d for d in documents if d.text), key=lambda d: d.name)


def split(documents: Iterable[Document], held_out: float = 0.05) -> Corpus:
    """Hold a document out if the hash of its name, as a number in [0, 1), is below `held_out`; at least one, not all.

    A document's side depends on its name only: files that come or go move no other.

    >>> corpus = split([Document(f"{i}.py", "pass") for i in range(100)], 0.2)
    >>> len(corpus.train), len(corpus.held_out)
    (79, 21)
    """
    if not 0 < held_out < 1:
        raise ValueError(f"split: `held_out` should be a fraction between 0 and 1, given {held_out}")
    ranked = sorted(documents, key=lambda d: (_unit(d.name), d.name))
    if len(ranked) < 2:
        raise ValueError(f"split: expected at least 2 documents, given {len(ranked)}; give a folder with text files")
    n = min(max(1, sum(_unit(d.name) < held_out for d in ranked)), len(ranked) - 1)
    by_name = lambda ds: tuple(sorted(ds, key=lambda d: d.name))
    return Corpus(by_name(ranked[n:]), by_name(ranked[:n]))


def cut(document: Document) -> list[Document]:
    """A long document as pieces of whole lines, at least 20 if it has as many lines, of at most about 64 KiB.

    >>> pieces = cut(Document("a.txt", "one\\n" * 40))
    >>> len(pieces), pieces[0]
    (20, Document(name='a.txt:0000', text='one\\none\\n'))
    """
    lines = document.text.splitlines(keepends=True)
    size = min(PIECE_BYTES, -(-document.num_bytes // PIECES))
    pieces: list[list[str]] = [[]]
    room = size
    for line in lines:
        if room <= 0:
            pieces.append([])
            room += size
        pieces[-1].append(line)
        room -= len(line.encode())
    return [Document(f"{document.name}:{i:04d}", "".join(p)) for i, p in enumerate(pieces) if p]


def _read(file: Path, name: str) -> Document:
    try:
        return Document(name, file.read_bytes().decode())
    except UnicodeDecodeError:
        return Document(name, "")


def _unit(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64
