"""Layers without experts among those with some: scans over what repeats, on one device and on meshes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from fmeg import optim, tree
from fmeg.models import hf, moe, presets
from fmeg.models.runs import runs
from tests.models import test_padding as padding
from tests.models.test_padding_on_meshes import TP, on_mesh

MODELS = {
    "every second": ("tiny-moe", dict(layers=8, dense=(0, 2, 4, 6), ff=48, router_bias=True)),
    "the first": ("tiny-moe", dict(layers=5, dense=(0,), ff=48, router_bias=True)),
    "some": ("tiny-moe", dict(layers=6, dense=(0, 1, 5), ff=48, router_bias=True)),
    "irregular": ("tiny-moe", dict(layers=5, dense=(1,), ff=48, router_bias=True)),
}


@pytest.fixture(autouse=True)
def models(monkeypatch):
    monkeypatch.setattr(padding, "MODELS", MODELS)
    monkeypatch.setattr(padding, "MIXTURES", tuple(MODELS))
    monkeypatch.setattr("tests.models.test_padding_on_meshes.MIXTURES", tuple(MODELS))


@pytest.mark.parametrize("n", range(1, 9))
def test_every_layer_once_and_in_order(n):
    for kinds in map("".join, product("ds", repeat=n)):
        found = runs(kinds)
        assert "".join(r.kinds * r.repeats for r in found) == kinds
        assert [r.first for r in found] == [sum(len(q.kinds) * q.repeats for q in found[:i]) for i in range(len(found))]
        names = [r.name for r in found]
        assert names == [x for x in ("first_layers", "layers", "last_layers") if x in names] and "layers" in names


@pytest.mark.parametrize("which", MODELS)
def test_counts_are_in_the_order_of_layers(which):
    """One layer's router prefers an expert: its row of the counts says so, and its bias, alone, moves away."""
    model, cfg, params = padding.setup(which)
    batch = padding.batch_of(cfg)
    sparse = [i for i in range(cfg.layers) if i not in cfg.dense]
    for row, layer in enumerate(sparse):
        tensors = {n: 0 * x if n.endswith("correction_bias") else x for n, x in hf.to_hf(params, cfg).items()}
        tensors[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] += 100.0 * (torch.arange(8) == 3)
        biased = hf.from_hf(tensors, cfg)
        counts = model.loss(biased, batch, cfg)[1]["counts"]
        assert counts.shape == (len(sparse), 8) and (counts.sum(-1) == 24).all()
        assert [i for i in range(len(sparse)) if counts[i, 3] == 12] == [row]
        moved = hf.to_hf(model.update_bias(biased, counts, cfg, rate=1.0), cfg)
        for i, n in zip(sparse, counts, strict=True):
            name = f"model.layers.{i}.mlp.gate.e_score_correction_bias"
            want = (n.sum() - 8 * n).sign().double()
            torch.testing.assert_close(moved[name] - tensors[name], want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("which", MODELS)
def test_sizes_names_and_kinds_of_parameters(which):
    model, cfg, params = padding.setup(which)
    axes = model.logical_axes(cfg)
    for path, a, p in zip(tree.paths(axes), tree.leaves(axes), tree.leaves(params), strict=True):
        assert tuple(cfg.sizes[n] for n in a.split()) == p.shape, path
    tables = 2 * (cfg.padded_vocab - cfg.vocab_size) * cfg.embed
    assert sum(p.numel() for p in tree.leaves(params)) == model.num_params(cfg) + tables
    again = hf.from_hf(hf.to_hf(params, cfg), cfg)
    for path, a, b in zip(tree.paths(params), tree.leaves(again), tree.leaves(params), strict=True):
        assert path in ("embed", "head") or torch.equal(a, b), path
    decay = optim.decay_by_axes(axes)
    for path, a, d in zip(tree.paths(axes), tree.leaves(axes), tree.leaves(decay), strict=True):
        assert d == (len(a.split()) > 2 or path in ("embed", "head")), path
    cfg = replace(cfg, router_bias=False, router=presets.get("tiny-moe").router, qk_norm=True)
    described = moe.to_hf_config(cfg)
    assert moe.from_hf_config(described, router=cfg.router).dense == cfg.dense


@pytest.mark.parametrize(
    ("which", "mesh", "layout", "how"),
    [
        ("every second", dict(dp=2, tp=2), dict(TP, batch="dp", res_seq="tp", experts=("tp", "dp")), {}),
        ("every second", dict(pp=2, dp=2), dict(layers="pp", batch="dp", experts="dp"), dict(schedule="1f1b")),
        ("the first", dict(pp=2, tp=2), dict(TP, layers="pp", experts="tp"), dict(schedule="zb_h1")),
        ("some", dict(dp=2, tp=2), dict(TP, batch="dp", experts="dp", params=dict(embed="dp")), {}),
        ("irregular", dict(dp=2, cp=2), dict(batch="dp", seq="cp", res_seq="cp", experts="cp"), {}),
    ],
)
def test_on_meshes(which, mesh, layout, how):
    on_mesh(which, mesh, layout, microbatches=4 if how else 1, **how)


def test_what_does_not_fit():
    for dense, ff, match in [
        ((0, 1), 8, "take llama.Config"),
        ((2,), 8, "must be numbers below layers=2"),
        ((-1,), 8, "must be numbers below layers=2"),
        ((1,), 0, "given ff=0"),
    ]:
        with pytest.raises(ValueError, match=match):
            presets.get("tiny-moe", dense=dense, ff=ff)
