"""Tokens give the text back, for every text, and training is deterministic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmeg.data.corpus import Document, load_corpus
from fmeg.data.tokenizer import train_bpe

SAMPLE = load_corpus().train[:40]
BPE = train_bpe(SAMPLE, 600)


def test_training_twice_gives_the_same_tokenizer():
    assert train_bpe(SAMPLE, 600).inner.to_str() == BPE.inner.to_str()


def test_size_and_separator():
    assert BPE.vocab_size == 600 and BPE.separator == 599
    assert max(int(ids.max()) for ids in BPE.encode_documents(SAMPLE)) < BPE.separator


def test_library_round_trip():
    for document, ids in zip(SAMPLE, BPE.encode_documents(SAMPLE), strict=True):
        assert BPE.decode(ids) == document.text
        assert (BPE.encode(document.text) == ids).all()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_round_trip(text):
    assert BPE.decode(BPE.encode(text)) == text


def test_separators_are_not_text():
    ids = [BPE.separator, *BPE.encode("x = 1\n"), BPE.separator]
    assert BPE.decode(ids) == "x = 1\n"


def test_bytes_of_tokens_add_up_to_the_text():
    for document, ids in zip(SAMPLE, BPE.encode_documents(SAMPLE), strict=True):
        assert BPE.token_bytes[ids].sum() == document.num_bytes
    assert BPE.token_bytes[BPE.encode("né€\n")].sum() == 7
    assert BPE.token_bytes[BPE.separator] == 0


def test_merges_shorten():
    text = SAMPLE[0].text
    assert len(BPE.encode(text)) < 0.6 * len(text.encode())


def test_little_text_gives_fewer_tokens():
    assert train_bpe([Document("a", "abab")], 5000).vocab_size < 270


def test_vocab_must_hold_the_bytes():
    with pytest.raises(ValueError, match="at least 257"):
        train_bpe(SAMPLE, 256)
