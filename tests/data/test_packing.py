"""Every token is a target exactly once, beside what truly comes before it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg.data.loader import Loader
from fmeg.data.metrics import bits_per_byte
from fmeg.data.packing import held_out_batches, join_documents, rows, stack_rows

SEPARATOR = 0


@st.composite
def documents(draw):
    """Documents whose tokens are all different, so that a token says where it belongs."""
    lengths = draw(st.lists(st.integers(1, 23), min_size=1, max_size=6))
    ids = iter(range(1, sum(lengths) + 1))
    return [np.array([next(ids) for _ in range(n)], dtype=np.int32) for n in lengths]


def successors(docs):
    """(token, next token) pairs of the documents, separators at both ends."""
    joined = [join_documents([d], SEPARATOR).tolist() for d in docs]
    return sorted(pair for d in joined for pair in zip(d, d[1:], strict=False))


def counted(batches):
    pairs = []
    for b in batches:
        on = b["mask"] == 1
        pairs += zip(b["tokens"][on].tolist(), b["targets"][on].tolist(), strict=True)
    return sorted(pairs)


@given(documents(), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**70))
def test_an_epoch_has_every_target_once(docs, batch, seq, seed):
    loader = Loader(docs, SEPARATOR, batch, seq, seed)
    epoch = loader.epoch(0)
    pairs = [p for row in epoch for p in zip(row.tokens.tolist(), row.targets.tolist(), strict=True)]
    assert sorted(pairs) == successors(docs)
    assert len(pairs) == loader.tokens_per_epoch and len(epoch) == loader.rows_per_epoch


@given(documents(), st.integers(1, 4), st.integers(1, 9))
def test_batches_line_up_the_rows_of_all_epochs(docs, batch, seq):
    loader = Loader(docs, SEPARATOR, batch, seq, seed=1)
    line = [row for e in range(3) for row in loader.epoch(e)]
    for step in range(len(line) // batch):
        expected = stack_rows(line[step * batch : (step + 1) * batch], batch, seq, SEPARATOR)
        got = loader(step)
        assert all(torch.equal(got[name], expected[name]) for name in expected)


@given(documents(), st.integers(1, 4), st.integers(2, 9), st.data())
def test_held_out_batches_have_every_target_once(docs, batch, seq, data):
    context = data.draw(st.integers(0, seq - 1))
    batches = held_out_batches(docs, SEPARATOR, batch, seq, context)
    assert counted(batches) == successors(docs)
    assert {tuple(x.shape) for b in batches for x in b.values()} == {(batch, seq)}


@given(documents(), st.integers(2, 9), st.data())
def test_context_is_what_came_before(docs, seq, data):
    context = data.draw(st.integers(0, seq - 1))
    for d in docs:
        stream = join_documents([d], SEPARATOR)
        for i, row in enumerate(rows(stream, seq, context)):
            start = np.flatnonzero(stream[:-1] == row.tokens[0])[0]
            assert (stream[start : start + len(row.tokens)] == row.tokens).all()
            assert row.context == (context if i else 0)


@given(documents(), st.integers(1, 4), st.integers(1, 9))
def test_segments_are_documents_and_positions_count_within_them(docs, batch, seq):
    owner = {int(t): i for i, d in enumerate(docs) for t in d}
    b = Loader(docs, SEPARATOR, batch, seq, seed=2)(0)
    for tokens, segments, positions in zip(b["tokens"], b["segments"], b["positions"], strict=True):
        for j in range(1, seq):
            starts = tokens[j] == SEPARATOR
            assert segments[j] == segments[j - 1] + starts.long()
            assert positions[j] == (0 if starts else positions[j - 1] + 1)
            if not starts and tokens[j - 1] != SEPARATOR:
                assert owner[int(tokens[j])] == owner[int(tokens[j - 1])]
        assert positions[0] == 0


def test_a_batch_depends_on_seed_and_step_alone():
    docs = [np.arange(1, n + 2, dtype=np.int32) for n in range(50)]
    forward, backward = (Loader(docs, SEPARATOR, 4, 16, seed=3) for _ in range(2))
    steps = range(3 * forward.rows_per_epoch // 4)
    expected = {i: forward(i) for i in steps}
    for i in reversed(steps):
        assert all(torch.equal(x, expected[i][name]) for name, x in backward(i).items())
    other = Loader(docs, SEPARATOR, 4, 16, seed=4)
    assert not torch.equal(other(0)["tokens"], expected[0]["tokens"])
    assert expected[0]["tokens"].dtype == torch.int64


def test_the_order_is_fixed_for_all_time():
    """Philox's raw words are part of its definition, so these numbers hold on every machine."""
    loader = Loader([np.arange(1, 40, dtype=np.int32)], SEPARATOR, 2, 5, seed=0)
    assert loader(0)["tokens"].tolist() == [[5, 6, 7, 8, 9], [0, 1, 2, 3, 4]]


def test_two_half_batches_are_one_whole():
    """The rows of a global batch do not depend on how large a batch is: more of them is the next ones."""
    docs = [np.arange(1, 200, dtype=np.int32)]
    small, large = (Loader(docs, SEPARATOR, n, 8, seed=5) for n in (2, 4))
    both = torch.cat([small(2)["tokens"], small(3)["tokens"]])
    assert torch.equal(large(1)["tokens"], both)


@given(documents(), st.integers(2, 9))
def test_a_uniform_model_needs_log2_vocab_bits_a_token(docs, seq):
    vocab, num_bytes = 97, 1234
    nats = sum((b["mask"].double() * math.log(vocab)).sum().item() for b in held_out_batches(docs, SEPARATOR, 2, seq))
    num_tokens = sum(len(d) + 1 for d in docs)
    assert bits_per_byte(nats, num_bytes) == pytest.approx(math.log2(vocab) * num_tokens / num_bytes, rel=1e-12)


@pytest.mark.parametrize(("kwargs", "message"), [(dict(batch=0, seq=4), "`batch`"), (dict(batch=2, seq=0), "`seq`")])
def test_loader_errors(kwargs, message):
    with pytest.raises(ValueError, match=message):
        Loader([np.array([1])], SEPARATOR, **kwargs)


def test_errors():
    with pytest.raises(ValueError, match="at least one document"):
        Loader([], SEPARATOR, 1, 1)
    with pytest.raises(ValueError, match="below seq=4, given 4"):
        next(rows(np.arange(9), 4, context=4))
