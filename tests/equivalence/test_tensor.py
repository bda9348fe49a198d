"""Tensor and sequence parallelism: gradients that are sums over ranks, vocabularies, heads that do not divide."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, ops, tree
from fmeg.models import llama
from fmeg.program.errors import ShardingError
from fmeg.testing.verify import make_params
from tests.equivalence.support import (
    CFG,
    EVERYTHING,
    SEQUENCE,
    TENSOR,
    TP,
    batch_of,
    changed,
    each,
    gradients,
    loss_and_grads,
    on_mesh,
    train,
)

FOUR = (Mesh(tp=4), Layout(**TP))
FOUR_SEQUENCE = (Mesh(tp=4), Layout(**TP, res_seq="tp"))
NORMS = ("norm1", "norm2", "q_norm", "k_norm", "final_norm")


@each(tensor=TENSOR, sequence=SEQUENCE, four=FOUR, four_sequence=FOUR_SEQUENCE)
def test_norm_weights(mesh, layout):
    """Each rank sees some heads (q, k norms) or, under sequence parallelism, some tokens (the others)."""
    errors = gradients(mesh, layout, batch_of())
    found = {path.split(".")[-1]: e for path, e in errors.items()}
    assert set(NORMS) <= set(found)
    assert max(found[n] for n in NORMS) < 1e-13


@each(tensor=TENSOR, four_sequence=FOUR_SEQUENCE, everything=EVERYTHING)
def test_a_vocabulary_of_prime_size_is_padded(mesh, layout):
    """61 classes in 64 rows: as without padding on one device, and the padding's rows get no gradient."""
    assert (CFG.vocab_size, CFG.padded_vocab) == (61, 64)
    params, batch = make_params(CFG), batch_of()
    bare = {k: v[:61] if k in ("embed", "head") else v for k, v in params.items()}
    (loss, _), grads = loss_and_grads(lambda p, b: llama.loss(p, b, changed(vocab_multiple=1)))(bare, batch)
    step = loss_and_grads(lambda params, batch: llama.loss(params, batch, CFG))
    (got, _), padded = on_mesh(step, mesh, layout, params, batch)
    torch.testing.assert_close(got, loss, rtol=1e-13, atol=0)
    for name in ("embed", "head"):
        torch.testing.assert_close(padded[name][:61], grads[name], rtol=1e-11, atol=1e-15)
        assert not padded[name][61:].any()


def test_fewer_key_heads_than_ranks_by_splitting_the_axis():
    view = dict(heads=("tk", "tr"), kv_heads="tk", ff=("tk", "tr"), vocab=("tk", "tr"), res_seq=("tk", "tr"))
    train(Mesh(tk=2, tr=2), Layout(**view), changed(kv_heads=2))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("res_seq", [(), "tp"])
def test_fewer_key_heads_than_ranks_by_keeping_them_whole(kv_heads, res_seq):
    train(Mesh(tp=4), Layout(**{**TP, "kv_heads": (), "res_seq": res_seq}), changed(kv_heads=kv_heads))


def test_key_heads_that_do_not_divide_are_an_error_that_says_so():
    with pytest.raises(ShardingError, match=r"params\.layers\.wk.*'kv_heads'.*'tp' \(size 4\), but 4 does not evenly"):
        gradients(*FOUR, batch_of(), cfg=changed(kv_heads=2))


def test_query_and_key_heads_on_axes_that_do_not_match_are_an_error_that_says_both_ways_out():
    with pytest.raises(ShardingError, match=r'(?s)heads=\("tk", "tr"\).*kv_heads=\(\)'):
        gradients(Mesh(tk=2, tr=2), Layout(heads=("tr", "tk"), kv_heads="tk"), batch_of())


@each(tensor=TENSOR, sequence=SEQUENCE, everything=EVERYTHING)
def test_tied_embeddings(mesh, layout):
    """One parameter, used first and last: a masked look-up and a column-parallel product."""
    cfg = changed(tied=True)
    assert "head" not in llama.logical_axes(cfg)
    train(mesh, layout, cfg)


@each(tensor=TENSOR, four=FOUR, everything=EVERYTHING)
@pytest.mark.parametrize(
    "options", [dict(label_smoothing=0.1), dict(z_loss=0.01), dict(label_smoothing=0.3, z_loss=0.1)], ids=str
)
def test_label_smoothing_and_z_loss_over_a_sharded_vocabulary(mesh, layout, options):
    def loss(params, batch):
        logits = llama.apply(params, batch["tokens"], CFG)
        losses = ops.cross_entropy(logits, batch["targets"], vocab=CFG.vocab_size, **options)
        return (losses * batch["mask"]).sum(), batch["mask"].sum()

    gradients(mesh, layout, batch_of(), loss)


def test_the_loss_is_the_log_of_the_vocabulary_when_all_logits_are_equal():
    """Not of a shard of it."""
    zeros = tree.map(torch.zeros_like, make_params(CFG))
    step = loss_and_grads(lambda params, batch: llama.loss(params, batch, changed(z_loss=0.0)))
    (loss, _), _ = on_mesh(step, *FOUR_SEQUENCE, zeros, batch_of())
    torch.testing.assert_close(loss, torch.tensor(61.0, dtype=torch.float64).log(), rtol=1e-14, atol=0)
