"""Models with experts in low precision on meshes and in pipelines, against one device in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, precision
from fmeg.models import deepseek, moe, presets
from fmeg.testing import assert_equivalent

ALL = dict(match="*w_*", skip_first=0, skip_last=0)
RECIPES = {"tensorwise": precision.fp8(**ALL), "blockwise": precision.fp8("blockwise", block=4, **ALL)}


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
@pytest.mark.parametrize(
    ("mesh", "layout", "schedule"),
    [
        (dict(pp=2, dp=2), dict(layers="pp", batch="dp", experts="dp"), "zb_h1"),
        (dict(pp=2, tp=2), dict(layers="pp", experts="tp", heads="tp", kv_heads="tp", vocab="tp"), "1f1b"),
    ],
)
def test_a_pipeline_is_one_device(name, mesh, layout, schedule):
    cfg = presets.get("tiny-moe", dtype=torch.float64, embed=32, heads=2, kv_heads=2, expert_ff=16)
    tokens = torch.randint(0, 257, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(4, 8, dtype=torch.float64)}
    axes = {"params": moe.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    grad = fmeg.value_and_grad(
        lambda p, b: moe.loss(p, b, cfg), microbatches=2, schedule=schedule, precision=RECIPES[name]
    )
    step = lambda params, batch: grad(params, batch)
    params = moe.init(fmeg.random.key(0), cfg)
    assert_equivalent(step, params, batch, mesh=Mesh(mesh), layout=Layout(**layout), axes=axes, tol=1e-10)


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("which", ["padding", "capacity", "remat", "deepseek"])
def test_other_models(name, which):
    tp = dict(heads="tp", kv_heads="tp", vocab="tp")
    module, mesh, layout = moe, dict(dp=2, tp=2), dict(tp, batch="dp", experts=("dp", "tp"))
    cfg = presets.get("tiny-moe", dtype=torch.float64, remat="full" if which == "remat" else None)
    tokens = torch.randint(0, 257, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(4, 8, dtype=torch.float64)}
    if which == "padding":
        batch["real"] = torch.arange(8)[None] < torch.tensor([8, 3, 5, 7])[:, None]
        mesh, layout = dict(dp=2, cp=2), dict(batch="dp", seq="cp", res_seq="cp", experts="cp")
    elif which == "capacity":
        cfg = replace(cfg, router=replace(cfg.router, capacity_factor=1.0))
    elif which == "deepseek":
        module, cfg = deepseek, presets.get("tiny-deepseek", dtype=torch.float64)
        layout = dict(batch="dp", heads="tp", vocab="tp", experts=("dp", "tp"), params=dict(embed="dp"))
    axes = {"params": module.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    recipe = replace(RECIPES[name], block=8) if name == "blockwise" else RECIPES[name]
    grad = fmeg.value_and_grad(lambda p, b: module.loss(p, b, cfg), microbatches=2, precision=recipe)
    step = lambda params, batch: grad(params, batch)
    params = module.init(fmeg.random.key(0), cfg)
    assert_equivalent(step, params, batch, mesh=Mesh(mesh), layout=Layout(**layout), axes=axes, tol=1e-10)
