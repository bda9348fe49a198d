"""Batches with padding: as those without it, whatever the padding holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmeg
from fmeg import random, tree
from fmeg.models import model_of, presets
from fmeg.models.padding import blank

F64 = torch.float64
LOSSES = dict(sequence_loss=0.3, batch_loss=0.2, z_loss=0.05)
MODELS = {
    "llama": ("tiny", dict(window=5)),
    "gpt2": ("tiny-gpt2", {}),
    "moe": ("tiny-moe", dict(shared_ff=48, shared_gate=True, router_bias=True)),
    "deepseek": ("tiny-deepseek", dict(mtp_layers=2)),
}
MIXTURES = ("moe", "deepseek")


def setup(which, **router):
    name, changes = MODELS[which]
    cfg = presets.get(name, dtype=F64, **changes)
    if which in MIXTURES:
        cfg = replace(cfg, router=replace(cfg.router, **LOSSES, **router))
    model = model_of(cfg)
    noise = lambda path, p: p + 0.1 * random.normal(random.fold_in(random.key(1), path), p.shape, dtype=F64)
    return model, cfg, tree.map_with_path(noise, model.init(random.key(0), cfg))


def batch_of(cfg, b=2, s=6, packed=False):
    torch.manual_seed(0)
    tokens, targets = torch.randint(cfg.vocab_size, (2, b, s))
    batch = {"tokens": tokens, "targets": targets, "mask": (torch.rand(b, s) < 0.7).double()}
    batch["positions"] = torch.arange(s).expand(b, s).contiguous()
    if packed:
        batch["segments"] = (torch.arange(s) >= torch.tensor([2, 4] * (b // 2)).unsqueeze(1)).long()
    return batch


JUNK = dict(tokens=-1, targets=-100, mask=1.0, positions=3, segments=1)


def padded(batch, before, after, rows=0):
    """Each row with so many places of junk before it and after it, and rows of junk."""
    width = batch["tokens"].shape[1] + before[0] + after[0]
    out = {}
    for name, x in {**batch, "real": torch.ones_like(batch["tokens"], dtype=torch.bool)}.items():
        junk = JUNK.get(name, 0)
        out[name] = torch.full((len(x) + rows, width), junk, dtype=x.dtype)
        for i, (row, n) in enumerate(zip(x, before, strict=True)):
            out[name][i, n : n + len(row)] = row
    return out


PADDED = {
    "end": dict(before=(0, 0), after=(3, 3)),
    "begin": dict(before=(2, 2), after=(0, 0)),
    "both, and a row": dict(before=(3, 1), after=(1, 3), rows=1),
}


def grad(model, cfg, params, batch, **how):
    return fmeg.value_and_grad(lambda p, b: model.loss(p, b, cfg), **how)(params, batch)


def compare(got, want):
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("how", PADDED)
@pytest.mark.parametrize("which", MODELS)
def test_as_without_padding(which, how, packed):
    """Loss, every gradient, the counts of tokens, and the biases that these move."""
    model, cfg, params = setup(which)
    batch = batch_of(cfg, packed=packed)
    want = grad(model, cfg, params, batch)
    got = grad(model, cfg, params, padded(batch, **PADDED[how]))
    compare(got, want)
    if which in MIXTURES:
        counts = [found[0][1]["counts"] for found in (got, want)]
        assert torch.equal(*counts) and counts[0].sum(-1).unique() == 12 * cfg.router.top_k
        compare(*(model.update_bias(params, n, cfg) for n in counts))


@pytest.mark.parametrize("drop", ["weight", "position"])
@pytest.mark.parametrize("which", MIXTURES)
def test_padding_takes_no_room(which, drop):
    """With a capacity of as many tokens: it is reckoned from all places, so the factor is half for twice as many."""
    b, s = 2, 6
    for factor in (0.5, 0.75):
        model, cfg, params = setup(which, capacity_factor=factor, drop=drop)
        half = replace(cfg, router=replace(cfg.router, capacity_factor=factor / 2))
        batch = batch_of(cfg, b, s)
        want = grad(model, cfg, params, batch)
        for before, after in [((0, 0), (6, 6)), ((6, 6), (0, 0)), ((2, 4), (4, 2))]:
            compare(grad(model, half, params, padded(batch, before, after)), want)
        free = grad(model, replace(cfg, router=replace(cfg.router, capacity_factor=None)), params, batch)
        assert (free[0][0] - want[0][0]).abs() > 1e-6


@pytest.mark.parametrize("which", MODELS)
def test_no_padding_is_no_mask(which):
    """Bit for bit; and `real` may be 1 and 0."""
    model, cfg, params = setup(which)
    batch = batch_of(cfg)
    want = grad(model, cfg, params, batch)
    for real in (torch.ones(2, 6, dtype=torch.bool), torch.ones(2, 6, dtype=torch.int64)):
        got = grad(model, cfg, params, {**batch, "real": real})
        for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
            assert torch.equal(a, b), path
        where = dict(positions=batch["positions"])
        assert torch.equal(
            model.apply(params, batch["tokens"], cfg, real=real, **where),
            model.apply(params, batch["tokens"], cfg, **where),
        )


@pytest.mark.parametrize("which", MODELS)
def test_nothing_but_padding(which):
    """Sums and counts are 0; no gradient, and none that is not a number."""
    model, cfg, params = setup(which)
    batch = batch_of(cfg)
    batch["real"] = torch.zeros(2, 6, dtype=torch.bool)
    found = model.loss(params, batch, cfg)
    pairs = found[0] if which in MIXTURES else [found]
    assert all(total == 0 and n == 0 for total, n in pairs)
    assert not any(x.any() for x in tree.leaves(grad(model, cfg, params, batch)))


@pytest.mark.parametrize("which", MODELS)
def test_apply(which):
    model, cfg, params = setup(which)
    batch = batch_of(cfg)
    want = model.apply(params, batch["tokens"], cfg, positions=batch["positions"])
    more = padded(batch, **PADDED["both, and a row"])
    got = model.apply(params, more["tokens"], cfg, positions=more["positions"], real=more["real"])
    assert got.isfinite().all()
    torch.testing.assert_close(got[0, 3:9], want[0], rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(got[1, 1:7], want[1], rtol=1e-11, atol=1e-11)


def test_what_is_not_a_mask():
    batch = {"tokens": torch.zeros(2, 3, dtype=torch.int64)}
    for real in (torch.ones(3, dtype=torch.bool), torch.ones(2, 1, 3, 3), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"batch\['real'\]: expected bool of the tokens' shape \(2, 3\)"):
            blank({**batch, "real": real})
