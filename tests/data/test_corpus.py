"""Files are read alike everywhere, and a document's side of the split depends on its name."""

import pytest

from fmeg.data.corpus import TABLES, TESTS, Document, cut, load_corpus, python_library, read_folder, split


def test_the_library_has_no_tests_and_no_installed_packages():
    names = [d.name for d in python_library()]
    assert names == sorted(names) and len(names) == len(set(names))
    assert {"dataclasses.py", "json/decoder.py", "asyncio/events.py"} <= set(names)
    unwanted = {*TESTS, *TABLES, "site-packages", "dist-packages"}
    assert not [n for n in names if unwanted & set(n.split("/")[:-1])]


def test_reading_twice_gives_the_same_corpus():
    assert load_corpus() == load_corpus()


def test_sides_are_disjoint_and_cover_everything():
    corpus = load_corpus(held_out=0.05)
    train, held_out = ({d.name for d in side} for side in (corpus.train, corpus.held_out))
    assert not train & held_out
    assert train | held_out == {d.name for d in python_library()}
    assert 0.02 < len(held_out) / len(train | held_out) < 0.1


def test_a_new_file_moves_no_other():
    documents = [Document(f"{i}.py", "pass") for i in range(200)]
    before, after = split(documents[:150]), split(documents)
    assert set(before.train) <= set(after.train) and set(before.held_out) <= set(after.held_out)


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_no_side_is_empty(fraction):
    corpus = split([Document("a", "x"), Document("b", "y")], fraction)
    assert len(corpus.train) == len(corpus.held_out) == 1


def test_folder_skips_what_is_no_text(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "skipped").mkdir()
    (tmp_path / "sub" / "b.py").write_bytes("é\r\n".encode())
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "c.bin").write_bytes(b"x")
    (tmp_path / "skipped" / "d.py").write_text("x")
    documents = read_folder(tmp_path, [".py"], ["skipped"])
    assert documents == [Document("a.py", "x = 1\n"), Document("sub/b.py", "é\r\n")]
    assert documents[1].num_bytes == 4


def test_one_file_is_cut_into_pieces_that_give_it_back(tmp_path):
    text = "".join(f"line {i}é\n" for i in range(3000)) + "no end"
    (tmp_path / "t.txt").write_bytes(text.encode())
    corpus = load_corpus(tmp_path / "t.txt")
    pieces = sorted(corpus.train + corpus.held_out, key=lambda d: d.name)
    assert "".join(d.text for d in pieces) == text
    assert len(pieces) >= 20 and corpus.held_out


def test_pieces_of_a_long_file_are_bounded():
    pieces = cut(Document("t", "0123456\n" * 2**18))
    assert max(p.num_bytes for p in pieces) <= 65536 + 8 and len(pieces) == 32


def test_errors_say_what_to_try(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file or folder"):
        load_corpus(tmp_path / "none")
    with pytest.raises(ValueError, match="at least 2 documents, given 0"):
        load_corpus(tmp_path)
    with pytest.raises(ValueError, match="between 0 and 1, given 1"):
        split([], 1)
