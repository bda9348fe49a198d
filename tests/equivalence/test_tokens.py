"""Which tokens count, and which see each other, however batch and sequence are cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmeg import Layout, Mesh, jit
from fmeg.models import llama
from fmeg.testing import errors
from fmeg.testing.verify import make_params
from tests.equivalence.support import CFG, CP, KINDS, TP, batch_of, changed, context, gradients, loss_and_grads, on_mesh

SPLITS = {
    "data": (Mesh(dp=4), Layout(batch="dp")),
    "gather": (Mesh(dp=2, cp=2), Layout(batch="dp", **CP)),
    "ring": (Mesh(dp=2, cp=2), Layout(batch="dp", **CP, attention="ring")),
    "ulysses": (Mesh(dp=2, cp=2), Layout(batch="dp", **CP, attention="ulysses")),
    "sequence": (Mesh(dp=2, tp=2), Layout(batch="dp", **TP, res_seq="tp")),
}


def loss(params, batch):
    return llama.loss(params, batch, CFG)


def with_mask(mask):
    return {**batch_of(), "mask": mask.double()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_context_rank_without_a_token_that_counts(kind):
    """Its loss is 0 of 0 tokens; it still holds keys for the others and its weights' gradients are not NaN."""
    mask = torch.ones(8, 16)
    mask[:, :4] = 0
    gradients(*context(kind, 4), with_mask(mask))


def test_a_data_rank_and_a_microbatch_without_a_token_that_counts():
    mask = torch.ones(8, 16)
    mask[:4] = 0
    gradients(*SPLITS["data"], with_mask(mask), microbatches=2)
    gradients(*SPLITS["ring"], with_mask(mask), microbatches=4)


masks = st.lists(st.integers(0, 2**16 - 1), min_size=8, max_size=8).filter(any)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("split", SPLITS)
def test_any_mask_under_any_split(split, microbatches):
    """The loss is divided by the tokens of the whole batch, once, not by each rank's or each microbatch's own."""
    mesh, layout = SPLITS[split]
    params, step = make_params(CFG), loss_and_grads(loss, microbatches)
    whole = loss_and_grads(loss)
    axes = {"params": llama.logical_axes(CFG)}
    jitted = jit(step, mesh=mesh, layout=layout, axes=axes, strict=True)

    @settings(max_examples=15)
    @given(masks)
    def holds(rows):
        batch = with_mask(torch.tensor([[row >> i & 1 for i in range(16)] for row in rows]))
        found = errors(jitted(params, batch), whole(params, batch))
        assert max(found.values()) < 1e-12, max(found, key=lambda path: found[path])

    holds()


def test_weights_that_are_no_mask():
    weights = torch.rand(8, 16, generator=torch.Generator().manual_seed(1)) * 3
    gradients(*SPLITS["ring"], with_mask(weights), microbatches=2)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_window_across_ranks(kind, size):
    gradients(*context(kind, size), batch_of(), cfg=changed(window=5))


# Three documents: 7 and 9 tokens fill one row, 12 the other, which is padded.
LENGTHS = ((7, 9), (12,))


def packed():
    """Rows of several documents, and the same documents one a row."""
    plain = batch_of(2)
    segments, positions, mask = (torch.zeros(2, 16, dtype=torch.int64) for _ in range(3))
    alone = []
    for r, lengths in enumerate(LENGTHS):
        at = 0
        for i, n in enumerate(lengths):
            segments[r, at : at + n], positions[r, at : at + n], mask[r, at : at + n] = i + 1, torch.arange(n), 1
            alone.append({k: plain[k][r : r + 1, at : at + n] for k in ("tokens", "targets")})
            at += n
    return {**plain, "mask": mask.double(), "segments": segments, "positions": positions}, alone


def test_documents_packed_are_documents_padded_are_documents_alone():
    batch, alone = packed()
    params, step = make_params(CFG), loss_and_grads(loss)
    (together, aux), _ = step(params, batch)
    sums = [loss(params, {**d, "mask": torch.ones_like(d["tokens"]).double()})[0] for d in alone]
    assert aux["count"] == sum(map(sum, LENGTHS))
    torch.testing.assert_close(together, sum(sums) / aux["count"], rtol=1e-13, atol=0)
    pad = lambda x: torch.nn.functional.pad(x, (0, 16 - x.shape[1]))
    rows = {k: torch.cat([pad(d[k]) for d in alone]) for k in ("tokens", "targets")}
    rows["mask"] = torch.cat([pad(torch.ones_like(d["tokens"])) for d in alone]).double()
    (padded, _), grads = step(params, rows)
    torch.testing.assert_close(padded, together, rtol=1e-13, atol=0)
    torch.testing.assert_close(grads, step(params, batch)[1], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_across_ranks(kind):
    """Documents begin and end within a rank's part and across its borders."""
    batch, _ = packed()
    gradients(*context(kind, 4), batch)
    gradients(Mesh(dp=2, cp=2), Layout(batch="dp", **CP, attention=kind), batch)


def test_packing_on_a_mesh_is_the_sum_of_documents_alone():
    batch, alone = packed()
    params = make_params(CFG)
    (got, _), _ = on_mesh(loss_and_grads(loss), *context("ring", 4), params, batch)
    sums = [loss(params, {**d, "mask": torch.ones_like(d["tokens"]).double()})[0] for d in alone]
    torch.testing.assert_close(got, sum(sums) / 28, rtol=1e-13, atol=0)
