"""Batches with padding on meshes: routers, attention and losses see the same tokens wherever they lie."""

from __future__ import annotations

import pytest

from fmeg import Layout, Mesh, tree
from fmeg.models import batch_axes
from fmeg.testing import assert_equivalent
from tests.models.test_padding import MIXTURES, batch_of, grad, padded, setup

TP = dict(heads="tp", kv_heads="tp", vocab="tp", ff="tp", shared_ff="tp")
LAYOUTS = {
    "ep": (dict(dp=4), dict(batch="dp", experts="dp")),
    "tp": (dict(dp=2, tp=2), dict(TP, batch="dp", experts="tp")),
    "sp": (dict(dp=2, tp=2), dict(TP, batch="dp", res_seq="tp", experts=("dp", "tp"))),
    "sp, all_gather": (dict(dp=2, tp=2), dict(TP, batch="dp", res_seq="tp", experts="tp", dispatch="all_gather")),
    "cp": (dict(dp=2, cp=2), dict(batch="dp", seq="cp", res_seq="cp", experts=("cp", "dp"))),
    "ring": (dict(cp=4), dict(seq="cp", res_seq="cp", experts="cp", attention="ring")),
    "ulysses": (dict(dp=2, cp=2), dict(batch="dp", seq="cp", res_seq="cp", experts="dp", attention="ulysses")),
    "zero3": (dict(dp=4), dict(batch="dp", experts="dp", params=dict(embed="dp"))),
    "zero3, etp": (
        dict(dp=2, tp=2),
        dict(TP, batch="dp", res_seq="tp", experts="dp", expert_ff="tp", params=dict(embed="dp")),
    ),
    "all ranks at once": (dict(dp=2, tp=2, backend="vmap"), dict(TP, batch="dp", res_seq="tp", experts=("tp", "dp"))),
}


def on_mesh(which, mesh, layout, microbatches=1, packed=False, router=None, **how):
    """Equal to one device; rows of padding alone are at the end, and so all of the last rank's, or a microbatch's."""
    model, cfg, params = setup(which, **(router or {}))
    batch = padded(batch_of(cfg, 4, packed=packed), (0, 5, 3, 10), (10, 5, 7, 0), 4)

    def step(params, batch):
        return grad(model, cfg, params, batch, microbatches=microbatches, **how)

    have = {a for axes in tree.leaves(model.logical_axes(cfg)) for a in axes.split()}
    have |= {"batch", "seq", "res_seq", "params", "opt", "attention", "dispatch"}
    layout = Layout(**{k: v for k, v in layout.items() if k in have})
    entries = batch_axes(packed=True, padded=True)
    axes = {"params": model.logical_axes(cfg), "batch": {name: entries[name] for name in batch}}
    found = assert_equivalent(
        step, params, batch, mesh=Mesh(**mesh), layout=layout, axes=axes, strict="schedule" not in how
    )
    assert which not in MIXTURES or found["0.1.counts"] == 0.0


@pytest.mark.parametrize(
    ("which", "name"), [("moe", name) for name in LAYOUTS] + [("deepseek", name) for name in ("sp", "cp", "zero3, etp")]
)
def test_on_meshes(which, name):
    on_mesh(which, *LAYOUTS[name])


@pytest.mark.parametrize(("which", "name"), [("llama", "ring"), ("llama", "sp"), ("gpt2", "cp")])
def test_dense_models_on_meshes(which, name):
    on_mesh(which, *LAYOUTS[name])


@pytest.mark.parametrize(
    ("which", "name", "more"),
    [
        ("moe", "sp", dict(microbatches=2)),
        ("deepseek", "cp", dict(microbatches=4, packed=True)),
        ("moe", "ep", dict(router=dict(capacity_factor=0.5))),
        ("deepseek", "sp", dict(router=dict(capacity_factor=0.25, drop="position"))),
        ("moe", "ring", dict(router=dict(select="sinkhorn"))),
    ],
)
def test_microbatches_packing_and_bounds_on_meshes(which, name, more):
    on_mesh(which, *LAYOUTS[name], **more)


@pytest.mark.parametrize(
    ("which", "schedule", "mesh", "layout"),
    [
        ("moe", "1f1b", dict(pp=2, dp=2), dict(batch="dp", experts="dp", layers="pp")),
        ("deepseek", "zb_h1", dict(pp=2, tp=2), dict(TP, res_seq="tp", experts="tp", layers="pp")),
        ("deepseek", "1f1b", dict(pp=2), dict(layers="pp", dense_layers="pp", mtp_layers="pp")),
        ("llama", "1f1b", dict(pp=2, cp=2), dict(seq="cp", res_seq="cp", layers="pp")),
    ],
)
def test_in_pipelines(which, schedule, mesh, layout):
    on_mesh(which, mesh, layout, microbatches=4, schedule=schedule)
