"""Every model under typical layouts: nothing moves unasked, loss and gradients are those of one device."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, random, tree
from fmeg.models import batch_axes, model_of, presets

TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
LAYOUTS = {
    "dp": dict(batch="dp"),
    "tp": TP,
    "sp": dict(batch="dp", res_seq="tp", **TP),
    "cp": dict(batch="dp", seq="tp", res_seq="tp"),
    "fsdp": dict(batch=("dp", "tp"), params=dict(embed="dp")),
}
MODELS = {
    "tiny": ("tiny", {}),
    "tied": ("tiny", {"tied": True, "z_loss": 1e-3}),
    "all traits": ("tiny", {"qk_norm": True, "qkv_bias": True, "window": 3}),
    "sinks and gate": ("tiny", {"sinks": True, "attn_gate": True}),
    "remat": ("tiny", {"remat": "full"}),
    "gpt2": ("tiny-gpt2", {"dropout": 0.1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", MODELS)
def test_equals_one_device(which, layout):
    name, changes = MODELS[which]
    cfg = presets.get(name, dtype=torch.float64, **changes)
    model = model_of(cfg)
    params = model.init(random.key(0), cfg)
    torch.manual_seed(0)
    tokens, targets = torch.randint(cfg.vocab_size, (2, 4, 8))
    batch = {"tokens": tokens, "targets": targets, "mask": (torch.rand(4, 8) < 0.7).double()}
    batch["segments"] = (torch.arange(8) >= torch.tensor([[2], [3], [5], [8]])).long()
    batch["positions"] = torch.arange(8).expand(4, 8).contiguous()
    rest = (random.key(1),) if name == "tiny-gpt2" else ()

    def step(params, batch, *rest):
        return fmeg.value_and_grad(lambda p, b, *r: model.loss(p, b, cfg, *r))(params, batch, *rest)

    (want, _), want_grads = step(params, batch, *rest)
    axes = {"params": model.logical_axes(cfg), "batch": batch_axes(packed=True)}
    jitted = fmeg.jit(step, mesh=Mesh(dp=2, tp=2), layout=Layout(**LAYOUTS[layout]), axes=axes, strict=True)
    (loss, _), grads = jitted(params, batch, *rest)
    torch.testing.assert_close(loss.global_value(), want, rtol=1e-12, atol=0)
    for path, got, w in zip(tree.paths(grads), tree.leaves(grads), tree.leaves(want_grads), strict=True):
        torch.testing.assert_close(
            got.global_value(), w, rtol=1e-10, atol=1e-12, msg=lambda m, path=path: f"{path}: {m}"
        )


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2"])
def test_initial_values_do_not_depend_on_the_layout(name):
    cfg = presets.get(name)
    model = model_of(cfg)
    layout = Layout(**TP, params=dict(embed="dp"))
    jitted = fmeg.jit(
        lambda key: model.init(key, cfg), mesh=Mesh(dp=2, tp=2), layout=layout, out_axes=model.logical_axes(cfg)
    )
    got, want = jitted(random.key(0)), model.init(random.key(0), cfg)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a.global_value(), b), path
    assert got["layers"]["wq"].spec == ((), ("dp",), ("tp",), ())
