"""Mixtures of experts and multi-token prediction on meshes: nothing moves unasked, and all is as on one device."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, optim, random, tree
from fmeg.models import batch_axes, deepseek, model_of, presets
from fmeg.program.ir import TensorType
from fmeg.testing import assert_equivalent

F64 = torch.float64
TP = dict(heads="tp", kv_heads="tp", vocab="tp", ff="tp", shared_ff="tp")
LAYOUTS = {
    "dp": dict(batch="dp"),
    "ep": dict(batch="dp", experts="dp"),
    "tp": dict(TP, experts="tp"),
    "sp+ep": dict(TP, batch="dp", res_seq="tp", experts="tp"),
    "sp+ep+etp": dict(TP, batch="dp", res_seq="tp", experts="dp", expert_ff="tp"),
    "sp+ep folded": dict(TP, batch="dp", res_seq="tp", experts=("dp", "tp")),
    "cp+ep folded": dict(batch="dp", seq="tp", res_seq="tp", experts=("tp", "dp")),
    "ring": dict(batch="dp", seq="tp", res_seq="tp", experts="tp", attention="ring"),
    "ulysses": dict(batch="dp", seq="tp", res_seq="tp", experts="dp", attention="ulysses"),
    "all_gather": dict(TP, batch="dp", res_seq="tp", experts=("dp", "tp"), dispatch="all_gather"),
    "zero1": dict(batch=("dp", "tp"), experts=("dp", "tp"), opt=dict(embed="dp")),
    "zero3": dict(batch=("dp", "tp"), params=dict(embed="dp", expert_embed="tp")),
    "zero3+ep": dict(batch=("dp", "tp"), experts="tp", params=dict(embed=("dp", "tp"), expert_embed="dp")),
    "sp+zero3+ep": dict(TP, batch="dp", res_seq="tp", experts="dp", params=dict(embed="dp", expert_embed="tp")),
}
MODELS = {
    "mixtral": ("tiny-moe", {}),
    "qwen2": ("tiny-moe", dict(shared_ff=48, shared_gate=True, qkv_bias=True)),
    "qwen3": ("tiny-moe", dict(qk_norm=True, tied=True, remat="full")),
    "v3": ("tiny-deepseek", {}),
    "lite": ("tiny-deepseek", dict(q_latent=None, mtp_layers=0, router_bias=False, remat="dots", dense_layers=2)),
    "mtp": ("tiny-deepseek", dict(mtp_layers=3, layers=1, dense_layers=0, tied=True, mtp_weight=0.7)),
}


def setup(which, b=4, s=8):
    name, changes = MODELS[which]
    cfg = presets.get(name, dtype=F64, **changes)
    model = model_of(cfg)
    params = model.init(random.key(0), cfg)
    noise = lambda path, p: p + 0.1 * random.normal(random.fold_in(random.key(1), path), p.shape, dtype=F64)
    torch.manual_seed(0)
    tokens, targets = torch.randint(cfg.vocab_size, (2, b, s))
    batch = {"tokens": tokens, "targets": targets, "mask": (torch.rand(b, s) < 0.7).double()}
    batch["segments"] = (torch.arange(s) >= torch.tensor([2, 3, 5, s] * (b // 4)).unsqueeze(1)).long()
    batch["positions"] = torch.arange(s).expand(b, s).contiguous()
    return model, cfg, tree.map_with_path(noise, params), batch


def layout_of(name, cfg, **more):
    """The layout without the axes that a model does not have."""
    have = {a for axes in tree.leaves(model_of(cfg).logical_axes(cfg)) for a in axes.split()}
    have |= {"batch", "seq", "res_seq", "params", "opt", "attention", "dispatch"}
    return Layout(**{k: v for k, v in {**LAYOUTS[name], **more}.items() if k in have})


def check(which, name, mesh=None, microbatches=1, **more):
    model, cfg, params, batch = setup(which, b=4 * microbatches)

    def step(params, batch):
        return fmeg.value_and_grad(lambda p, b: model.loss(p, b, cfg), microbatches=microbatches)(params, batch)

    axes = {"params": model.logical_axes(cfg), "batch": batch_axes(packed=True)}
    mesh = mesh or Mesh(dp=2, tp=2)
    return assert_equivalent(
        step, params, batch, mesh=mesh, layout=layout_of(name, cfg, **more), axes=axes, strict=True
    )


PAIRS = [("mixtral", name) for name in LAYOUTS] + [
    (which, name) for which in MODELS for name in ("sp+ep+etp", "cp+ep folded", "sp+zero3+ep") if which != "mixtral"
]


@pytest.mark.parametrize(("which", "layout"), PAIRS)
def test_equals_one_device(which, layout):
    """Loss, every gradient leaf, and the counts of tokens, exactly."""
    found = check(which, layout)
    assert found["0.1.counts"] == 0.0


@pytest.mark.parametrize(("which", "layout"), [("qwen2", "zero3+ep"), ("mtp", "cp+ep folded")])
def test_microbatches(which, layout):
    """Each sum over all microbatches, divided once: also those of further tokens, of which microbatches have more and
    fewer, and of balance."""
    check(which, layout, microbatches=2)


@pytest.mark.parametrize(
    ("which", "layout", "mesh", "more"),
    [
        ("v3", "sp+ep folded", dict(dp=4, tp=2), dict(experts=("tp", "dp"))),
        ("mtp", "cp+ep folded", dict(dp=2, tp=4), {}),
        (
            "v3",
            "sp+ep+etp",
            dict(dp=2, cp=2, tp=2),
            dict(seq="cp", res_seq=("cp", "tp"), experts=("dp", "cp"), params=dict(embed="dp", kv_latent="cp")),
        ),
        ("v3", "dp", dict(dp=1, tp=1), {}),
    ],
)
def test_other_meshes(which, layout, mesh, more):
    check(which, layout, Mesh(**mesh), **more)


@pytest.mark.parametrize("which", ["qwen2", "mtp"])
def test_all_ranks_at_once(which):
    """The other virtual backend, on which shapes may not depend on data."""
    check(which, "sp+ep folded", Mesh(dp=2, tp=2, backend="vmap"))


def test_exchanges_of_a_layer():
    """Tokens go to their experts and come back, in the forward and in the backward pass: with experts on the axes of
    the tokens nothing else moves that is as wide."""
    model, cfg, params, batch = setup("mixtral")

    def step(params, batch):
        return fmeg.value_and_grad(lambda p, b: model.loss(p, b, cfg))(params, batch)

    axes = {"params": model.logical_axes(cfg), "batch": batch_axes(packed=True)}
    jitted = fmeg.jit(step, mesh=Mesh(dp=4), layout=Layout(batch="dp", experts="dp"), axes=axes, strict=True)
    rows = jitted.lower(params, batch).explain().rows
    kinds = sorted((r.phase, r.kind, r.count) for r in rows if r.count == cfg.layers and r.nbytes > 4000)
    assert kinds == [(phase, "exchange_rows", cfg.layers) for phase in "BBFF"]


def test_router_biases_move_alike():
    """A whole step: gradients, then the biases by the counts of all tokens."""
    model, cfg, params, batch = setup("v3")

    def step(params, batch):
        (loss, aux), grads = fmeg.value_and_grad(lambda p, b: model.loss(p, b, cfg), microbatches=2)(params, batch)
        moved = tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return loss, deepseek.update_bias(moved, aux["counts"], cfg, rate=0.01)

    _, after = step(params, batch)
    for stack in ("layers", "mtp_layers"):
        moved = (after[stack]["router_bias"] - params[stack]["router_bias"]).abs()
        assert ((moved - 0.01).abs().min(moved) < 1e-15).all() and moved.any()
    axes = {"params": model.logical_axes(cfg), "batch": batch_axes(packed=True)}
    layout = layout_of("sp+ep folded", cfg)
    assert_equivalent(step, params, batch, mesh=Mesh(dp=2, tp=2), layout=layout, axes=axes)


@pytest.mark.parametrize("which", ["mixtral", "v3"])
def test_initial_values_do_not_depend_on_the_layout(which):
    name, changes = MODELS[which]
    cfg = presets.get(name, **changes)
    model = model_of(cfg)
    jitted = fmeg.jit(
        lambda key: model.init(key, cfg),
        mesh=Mesh(dp=2, tp=2),
        layout=Layout(experts="tp", heads="tp", vocab="tp", params=dict(embed="dp", expert_embed="dp")),
        out_axes=model.logical_axes(cfg),
    )
    got, want = jitted(random.key(0)), model.init(random.key(0), cfg)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a.global_value(), b), path
    assert got["layers"]["w_up"].spec == ((), ("tp",), ("dp",), ())


@pytest.mark.parametrize("which", ["qwen2", "v3"])
def test_optimizers_know_matrices_from_vectors(which):
    """Each layer's and each expert's matrices, heads with what a head holds; no weight decay for norms and biases."""
    model, cfg, params, _ = setup(which)
    axes = model.logical_axes(cfg)
    spec = optim.matrices(axes)
    assert spec["layers"]["w_up"] == "layers experts (expert_embed) (expert_ff)"
    if which == "v3":
        assert spec["mtp_layers"]["wq"] == "mtp_layers (q_latent) (heads qk_dim)"
        assert spec["dense_layers"]["wo"] == "dense_layers (heads v_dim) (embed)"
    decay = optim.decay_by_axes(axes)
    for path, yes, p in zip(tree.paths(decay), tree.leaves(decay), tree.leaves(params), strict=True):
        last = path.split(".")[-1]
        assert yes == ("norm" not in last and last not in ("bq", "bk", "bv", "router_bias", "shared_weight")), path
        assert optim.decay_matrices(path, p) == yes or last in ("bq", "bk", "bv"), path


@pytest.mark.parametrize(("name", "pipeline"), [("deepseek-v3", True), ("qwen3-235b-a22b", False)])
def test_published_sizes_on_thousands_of_devices(name, pipeline):
    """A step of the whole model is partitioned under strict; nothing is allocated."""
    cfg = presets.get(name, compute_dtype=torch.bfloat16)
    model = model_of(cfg)
    axes = model.logical_axes(cfg)
    params = tree.map(lambda p: TensorType(p.shape(cfg.sizes), cfg.dtype), model.parameters(cfg))
    ids = TensorType((4096, 4096), torch.int64)
    batch = {"tokens": ids, "targets": ids, "mask": TensorType(ids.shape, torch.float32)}
    have = {a for leaf in tree.leaves(axes) for a in leaf.split()} | {"batch", "res_seq"}
    view = dict(
        TP, batch=("dp", "ep"), experts="ep", expert_ff="tp", res_seq="tp", **({"layers": "pp"} if pipeline else {})
    )
    layout = Layout(**{k: v for k, v in view.items() if k in have}, params=dict(embed="dp", expert_embed="dp"))
    mesh = Mesh(pp=8, dp=4, ep=32, tp=2) if pipeline else Mesh(dp=16, ep=64, tp=2)
    how = dict(microbatches=16, schedule="1f1b") if pipeline else {}

    def step(params, batch):
        return fmeg.value_and_grad(lambda p, b: model.loss(p, b, cfg), **how)(params, batch)

    jitted = fmeg.jit(step, mesh=mesh, layout=layout, axes={"params": axes, "batch": batch_axes()}, strict=True)
    lowered = jitted.lower(params, batch)
    assert lowered.explain().executed()["exchange_rows"] >= 4 * cfg.layers and mesh.size == 2048
    assert mesh._built is None  # nothing of the mesh's size was made
