"""In float64 a step in low precision on a mesh is the one on one device: scales know nothing of the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, TrainState, optim, precision
from fmeg.models import llama, moe, presets
from fmeg.pipeline.errors import ScheduleError
from fmeg.testing import assert_equivalent

TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
LAYOUTS = {
    "tp": (dict(tp=4), Layout(**TP)),
    "tp, sp": (dict(tp=2), Layout(res_seq="tp", **TP)),
    "tp, sp, zero3": (dict(dp=2, tp=2), Layout(batch="dp", res_seq="tp", params=dict(embed="dp"), **TP)),
    "all": (dict(dp=2, tp=2, cp=2), Layout(batch="dp", seq="cp", res_seq=("cp", "tp"), opt=dict(embed="dp"), **TP)),
}
RECIPES = {
    "tensorwise": precision.fp8(),
    "rowwise": precision.fp8("rowwise", skip_first=0),
    "blockwise": precision.fp8("blockwise", block=8, power_of_two=True),
    "mxfp8": precision.mxfp8(block=4, skip_first=0, skip_last=2),
    "nvfp4": precision.nvfp4(block=4),
}


def _config(**changes):
    sizes = dict(vocab_size=61, embed=16, layers=3, heads=4, kv_heads=4, head_dim=8, ff=32, vocab_multiple=16)
    return llama.Config(**{**sizes, "dtype": torch.float64, **changes})


def _problem(cfg, rows=4):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 61, (rows, 17), generator=g)
    mask = (torch.rand(rows, 16, generator=g) > 0.2).to(cfg.dtype)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}
    axes = {"params": llama.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    return llama.init(fmeg.random.key(0), cfg), batch, axes


@pytest.mark.parametrize("layout", ["tp", "tp, sp, zero3", "all"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_mesh_is_one_device(name, layout):
    cfg = _config()
    params, batch, axes = _problem(cfg)
    step = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=2, precision=RECIPES[name])
    mesh, table = LAYOUTS[layout]
    step_of = lambda params, batch: step(params, batch)
    assert_equivalent(step_of, params, batch, mesh=Mesh(mesh), layout=table, axes=axes, strict=True, tol=1e-11)


def test_vmap_meshes_too():
    cfg = _config()
    params, batch, axes = _problem(cfg)
    mesh, table = LAYOUTS["all"]
    for name in ("tensorwise", "nvfp4"):
        step = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), precision=RECIPES[name])
        on = Mesh(mesh, backend="vmap")
        step_of = lambda params, batch, step=step: step(params, batch)
        assert_equivalent(step_of, params, batch, mesh=on, layout=table, axes=axes, tol=1e-11)


def test_three_steps_of_an_optimizer():
    cfg = _config()
    params, batch, _ = _problem(cfg)
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), precision=precision.fp8())

    def train(state, batch):
        for _ in range(3):
            (_, _), grads = grad(state.params, batch)
            updates, new = opt.update(grads, state.opt, state.params)
            state = state.next(params=optim.apply_updates(state.params, updates), opt=new)
        return state.params

    state = TrainState.create(params, opt, llama.logical_axes(cfg))
    mesh, table = LAYOUTS["tp, sp, zero3"]
    assert_equivalent(train, state, batch, mesh=Mesh(mesh), layout=table, tol=1e-9)


def _collectives(recipe, layout="tp, sp"):
    cfg = _config(dtype=torch.float32, compute_dtype=torch.bfloat16)
    params, batch, axes = _problem(cfg)
    step = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), precision=recipe)
    mesh, table = LAYOUTS[layout]
    f = fmeg.jit(lambda params, batch: step(params, batch), mesh=Mesh(mesh), layout=table, axes=axes, strict=True)
    return f.lower(params, batch).explain()


def test_what_travels_between_layers_travels_in_a_byte():
    skip = dict(skip_first=0, skip_last=0)
    table = str(_collectives(precision.fp8(**skip)))
    body = [line for line in table.splitlines() if line.startswith("scan body")]
    gathers = [line for line in body if "all_gather" in line]
    assert len(gathers) == 6 and all("f8e" in line for line in gathers)  # 2 forward, 2 again, 2 backward
    assert sum("f8e5m2" in line for line in gathers) == 2
    forward = [line for line in body if "all_reduce" in line and " F " in line]
    assert len(forward) == 4  # all parameters' largest values at once, and three activations'
    assert sum("7 more" in line for line in forward) == 1


def test_parameters_at_rest_are_gathered_in_a_byte_and_at_once():
    table = str(_collectives(precision.fp8(skip_first=0, skip_last=0), "tp, sp, zero3"))
    body = [line for line in table.splitlines() if line.startswith("scan body") and "all_gather" in line]
    parameters = [line for line in body if "parameter" in line]
    assert len(parameters) == 4  # of products and of norms, forward and again
    assert sum("f8e4m3" in line and "6 more" in line for line in parameters) == 2
    assert sum("bf16" in line and "1 more" in line for line in parameters) == 2
    assert all("f8e" in line for line in body if line not in parameters)


def test_one_device_with_a_layout_says_the_same():
    cfg = _config()
    params, batch, _ = _problem(cfg)
    step = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), precision=precision.fp8())
    want = step(params, batch)[0][0]
    got = fmeg.jit(step, mesh=Mesh(dp=1), layout=Layout(batch="dp"))(params, batch)[0][0]
    assert torch.equal(want, got.global_value())


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "nvfp4"])
def test_a_pipeline_is_one_device(name, schedule):
    cfg = _config(layers=4)
    params, batch, axes = _problem(cfg)
    recipe = replace(RECIPES[name], skip_first=0, skip_last=0)
    loss = lambda p, b: llama.loss(p, b, cfg)
    step = fmeg.value_and_grad(loss, microbatches=4, schedule=schedule, precision=recipe)
    step_of = lambda params, batch: step(params, batch)
    mesh = Mesh(pp=2, dp=1) if name == "rowwise" else Mesh(pp=2, tp=2)
    layout = Layout(layers="pp", batch="dp") if name == "rowwise" else Layout(layers="pp", res_seq="tp", **TP)
    assert_equivalent(step_of, params, batch, mesh=mesh, layout=layout, axes=axes, tol=1e-11)


def test_layers_left_out_do_not_fit_a_pipeline():
    cfg = _config(layers=4)
    params, batch, axes = _problem(cfg)
    loss = lambda p, b: llama.loss(p, b, cfg)
    step = fmeg.value_and_grad(loss, microbatches=2, schedule="1f1b", precision=precision.fp8())
    f = fmeg.jit(lambda params, batch: step(params, batch), mesh=Mesh(pp=2), layout=Layout(layers="pp"), axes=axes)
    with pytest.raises(ScheduleError, match="skip_first=0 and skip_last=0"):
        f(params, batch)
    on_one = fmeg.value_and_grad(loss, microbatches=2, precision=precision.fp8())(params, batch)
    assert torch.equal(step(params, batch)[0][0], on_one[0][0])


def test_a_mixture_of_experts_keeps_its_router():
    cfg = replace(presets.get("tiny-moe"), dtype=torch.float64)
    params, batch = moe.init(fmeg.random.key(0), cfg), _problem(_config())[1]
    loss = lambda p, b: moe.loss(p, b, cfg)
    all_low = dict(skip_first=0, skip_last=0)
    sites = fmeg.amax_history(loss, precision.fp8("delayed", **all_low), params, batch)
    assert sorted(sites) == [f"layers.{w}" for w in ("w_down", "w_gate", "w_up", "wk", "wo", "wq", "wv")]
    step = fmeg.value_and_grad(loss, microbatches=2, precision=precision.fp8(**all_low))
    axes = {"params": moe.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    layout = Layout(batch="dp", experts="dp", heads="tp", kv_heads="tp", vocab="tp")
    step_of = lambda params, batch: step(params, batch)
    assert_equivalent(step_of, params, batch, mesh=Mesh(dp=2, tp=2), layout=layout, axes=axes, tol=1e-11)
