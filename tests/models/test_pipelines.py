"""Mixtures of experts in pipelines. DeepSeek's first layers are the first stage's, further predictions the last
one's, unless the layout says that they too lie along the pipeline."""

from __future__ import annotations

import pytest

import fmeg
from fmeg import Layout, Mesh
from fmeg.models import batch_axes
from fmeg.pipeline import memory_report
from fmeg.testing import assert_equivalent
from tests.models import test_mixtures as mixtures

MODELS = {
    "moe": ("tiny-moe", dict(layers=4)),
    "deepseek": ("tiny-deepseek", dict(layers=4, dense_layers=2, mtp_layers=2)),
    "tied": ("tiny-deepseek", dict(layers=3, dense_layers=1, tied=True, q_latent=None)),
}
TP = dict(heads="tp", kv_heads="tp", res_seq="tp", vocab="tp", ff="tp", shared_ff="tp")


def _run(which, monkeypatch, mesh, layout, microbatches=4, **pipeline):
    monkeypatch.setattr(mixtures, "MODELS", MODELS)
    model, cfg, params, batch = mixtures.setup(which, b=8)
    have = {a for axes in fmeg.tree.leaves(model.logical_axes(cfg)) for a in axes.split()}
    layout = {k: v for k, v in layout.items() if k in have | {"batch", "seq", "res_seq", "params", "opt"}}

    def step(params, batch):
        loss = lambda p, b: model.loss(p, b, cfg)
        return fmeg.value_and_grad(loss, microbatches=microbatches, **pipeline)(params, batch)

    axes = {"params": model.logical_axes(cfg), "batch": batch_axes(packed=True)}
    how = dict(mesh=Mesh(**mesh), layout=Layout(layers="pp", **layout), axes=axes)
    return step, params, batch, how


@pytest.mark.parametrize(
    ("which", "schedule", "mesh", "layout"),
    [
        ("moe", "1f1b", dict(pp=2, dp=2), dict(batch="dp", experts="dp")),
        ("moe", "zb_h1", dict(pp=2, tp=2), dict(TP, experts="tp")),
        ("deepseek", "1f1b", dict(pp=2, dp=2, tp=2), dict(TP, batch="dp", experts=("tp", "dp"))),
        ("deepseek", "zb_h1", dict(pp=2, dp=2), dict(batch="dp", experts="dp")),
        ("deepseek", "interleaved_1f1b", dict(pp=2, cp=2), dict(seq="cp", res_seq="cp", experts="cp")),
        ("deepseek", "dualpipe_v", dict(pp=2), {}),
        ("tied", "1f1b", dict(pp=3, dp=2), dict(batch="dp", params=dict(embed="dp", expert_embed="dp"))),
    ],
)
def test_equals_one_device(which, schedule, mesh, layout, monkeypatch):
    step, *args, how = _run(which, monkeypatch, mesh, layout, schedule=schedule)
    found = assert_equivalent(step, *args, **how)
    assert found["0.1.counts"] == 0.0


def test_cut_by_cost(monkeypatch):
    """What is scanned before and after the layers counts: the last stage, with two modules, has fewer of them."""
    step, params, batch, how = _run("deepseek", monkeypatch, dict(pp=2), {}, schedule="1f1b", stages="cost")
    assert_equivalent(step, params, batch, **how)
    report = memory_report(fmeg.jit(step, **how).lower(params, batch))
    assert [s.layers for s in report.stages] == [(0, 3), (3, 4)] and min(report.peak) > 0


EVERY = dict(dense_layers="pp", mtp_layers="pp")


@pytest.mark.parametrize(
    ("schedule", "stages", "mesh", "layout"),
    [
        ("1f1b", "even", dict(pp=2), {}),
        ("zb_h1", "Ett|t*3|tm*2L", dict(pp=3), {}),
        ("zb_v", "cost", dict(pp=2, dp=2), dict(batch="dp", experts="dp")),
        ("interleaved_1f1b", (2, 1, 3, 2), dict(pp=2, tp=2), dict(TP, experts="tp")),
    ],
)
def test_all_three_scans_are_cut(schedule, stages, mesh, layout, monkeypatch):
    """Stages begin and end anywhere in the list of dense layers, layers with experts, further predictions."""
    step, *args, how = _run("deepseek", monkeypatch, mesh, {**layout, **EVERY}, schedule=schedule, stages=stages)
    found = assert_equivalent(step, *args, **how)
    assert found["0.1.counts"] == 0.0


def test_scans_of_one_length(monkeypatch):
    monkeypatch.setitem(MODELS, "even", ("tiny-deepseek", dict(layers=2, dense_layers=2, mtp_layers=1)))
    for layout in ({}, EVERY):
        step, params, batch, how = _run("even", monkeypatch, dict(pp=2), layout, schedule="1f1b")
        assert_equivalent(step, params, batch, **how)
