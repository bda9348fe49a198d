"""What the losses of models with experts mean: shapes, initial values, gradients, precision, recomputation, packing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fmeg import ops, random, tree, value_and_grad
from fmeg.models import generate, mixture, model_of, moe, presets

F64 = torch.float64
MODELS = {
    "moe": ("tiny-moe", {}),
    "shared": ("tiny-moe", dict(shared_ff=48, shared_gate=True, router_bias=True, sinks=True, attn_gate=True)),
    "deepseek": ("tiny-deepseek", dict(mtp_layers=2)),
    "lite": ("tiny-deepseek", dict(q_latent=None, dense_layers=0, mtp_layers=0, tied=True)),
}


def setup(which, **changes):
    name, traits = MODELS[which]
    cfg = presets.get(name, **({"dtype": F64} | traits | changes))
    model = model_of(cfg)
    params = model.init(random.key(0), cfg)
    noise = lambda path, p: p + 0.1 * random.normal(random.fold_in(random.key(1), path), p.shape, dtype=p.dtype)
    return model, cfg, tree.map_with_path(noise, params)


def batch_of(cfg, b=2, s=12, seed=0):
    torch.manual_seed(seed)
    tokens, targets = torch.randint(cfg.vocab_size, (2, b, s))
    return {"tokens": tokens, "targets": targets, "mask": (torch.rand(b, s) < 0.7).double()}


def grad(model, params, batch, cfg):
    return value_and_grad(lambda p, b: model.loss(p, b, cfg))(params, batch)


@pytest.mark.parametrize("which", MODELS)
def test_axes_and_counts_fit_the_parameters(which):
    model, cfg, params = setup(which)
    axes = model.logical_axes(cfg)
    assert tree.paths(axes) == tree.paths(params)
    for path, a, p in zip(tree.paths(axes), tree.leaves(axes), tree.leaves(params), strict=True):
        assert tuple(cfg.sizes[n] for n in a.split()) == p.shape, path
        assert len(set(a.split())) == p.ndim, path
    tables = sum(a.startswith("vocab") for a in tree.leaves(axes))
    padding = tables * (cfg.padded_vocab - cfg.vocab_size) * cfg.embed
    assert sum(p.numel() for p in tree.leaves(params)) == model.num_params(cfg) + padding


@pytest.mark.parametrize("which", MODELS)
def test_initial_values(which):
    """Normal with the config's deviation, smaller by √(2·layers) into the residual; norms 1, biases and sinks 0."""
    name, traits = MODELS[which]
    cfg = presets.get(name, embed=96, **traits)
    params = model_of(cfg).init(random.key(0), cfg)
    layers = cfg.layers + getattr(cfg, "dense_layers", 0)
    for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
        last = path.split(".")[-1]
        if "norm" in last:
            assert (p == 1).all(), path
        elif last in ("router_bias", "sinks"):
            assert (p == 0).all(), path
        else:
            std = cfg.init_std / ((2 * layers) ** 0.5 if last in ("wo", "w_down", "shared_down") else 1)
            assert abs(p.std() / std - 1) < 0.15, path
    batch = batch_of(cfg, 4, 32)
    pairs, _ = model_of(cfg).loss(params, batch | {"mask": batch["mask"].float()}, cfg)
    assert abs(pairs[0][0] / pairs[0][1] - torch.tensor(257.0).log()) < 0.1


@pytest.mark.parametrize("which", MODELS)
def test_every_leaf_has_a_gradient(which):
    """But for the routers' biases, which only choose."""
    model, cfg, params = setup(which)
    _, grads = grad(model, params, batch_of(cfg, 4, 24), cfg)
    for path, g in zip(tree.paths(grads), tree.leaves(grads), strict=True):
        if path.endswith("router_bias"):
            assert not g.any()
        else:
            assert g.abs().max() > 1e-7, path


@pytest.mark.parametrize("which", MODELS)
def test_rows_are_independent_but_for_the_balance_over_a_batch(which):
    model, cfg, params = setup(which)
    batch = batch_of(cfg)
    pairs, aux = model.loss(params, batch, cfg)
    rows = [model.loss(params, {k: v[i : i + 1] for k, v in batch.items()}, cfg) for i in range(2)]
    n = len(pairs) - (1 if cfg.router.batch_loss else 0)
    for k in range(n):
        torch.testing.assert_close(pairs[k][0], rows[0][0][k][0] + rows[1][0][k][0], rtol=1e-12, atol=0)
        assert pairs[k][1] == rows[0][0][k][1] + rows[1][0][k][1]
    assert torch.equal(aux["counts"], rows[0][1]["counts"] + rows[1][1]["counts"])
    assert (aux["counts"].sum(-1) == 24 * cfg.router.top_k).all()


@pytest.mark.parametrize("which", MODELS)
def test_packed_equals_alone(which):
    model, cfg, params = setup(which)
    docs = [batch_of(cfg, 1, n, seed=n) for n in (5, 7, 4)]
    packed = {k: torch.cat([d[k] for d in docs], 1) for k in docs[0]}
    packed["segments"] = torch.cat([torch.full((1, d["tokens"].shape[1]), i) for i, d in enumerate(docs)], 1)
    packed["positions"] = torch.cat([torch.arange(d["tokens"].shape[1])[None] for d in docs], 1)
    got = model.loss(params, packed, cfg)[0][0]
    alone = [model.loss(params, d, cfg)[0][0] for d in docs]
    torch.testing.assert_close(got[0], sum(a[0] for a in alone), rtol=1e-10, atol=0)
    assert got[1] == sum(a[1] for a in alone)


@pytest.mark.parametrize("which", MODELS)
def test_all_masked(which):
    """No token counts: the loss is that of the balance alone, and gradients are finite."""
    model, cfg, params = setup(which)
    batch = batch_of(cfg)
    batch["mask"] = torch.zeros_like(batch["mask"])
    (loss, _), grads = grad(model, params, batch, cfg)
    pairs, _ = model.loss(params, batch, cfg)
    torch.testing.assert_close(loss, pairs[-1][0] / pairs[-1][1], rtol=1e-12, atol=0)
    assert all(g.isfinite().all() for g in tree.leaves(grads))


@pytest.mark.parametrize("which", MODELS)
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_remat_changes_nothing(which, policy):
    model, cfg, params = setup(which)
    results = [grad(model, params, batch_of(cfg), replace(cfg, remat=r)) for r in (None, policy)]
    for a, b in zip(*(tree.leaves(r) for r in results), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("which", MODELS)
def test_bfloat16(which):
    """The loss is near that in float64, gradients have the parameters' dtype; the router computes in float32."""
    model, cfg, params = setup(which)
    batch = batch_of(cfg, 4, 32)
    (want, _), _ = grad(model, params, batch, cfg)
    low = replace(cfg, dtype=torch.float32, compute_dtype=torch.bfloat16)
    params = tree.map(lambda p: p.float(), params)
    (got, aux), grads = grad(model, params, {**batch, "mask": batch["mask"].float()}, low)
    assert got.dtype == torch.float32 and abs(got / want - 1) < 0.02
    assert {g.dtype for g in tree.leaves(grads)} == {torch.float32} and aux["counts"].dtype == torch.int64
    layer = mixture.cast_layer(tree.map(lambda p: p[0], params["layers"]), torch.bfloat16)
    kept = {k for k, v in layer.items() if v.dtype == torch.float32}
    assert kept == {k for k in layer if k in ("router", "router_bias")}


@pytest.mark.parametrize("which", ["moe", "deepseek"])
def test_z_loss_and_vocabulary_padding(which):
    model, cfg, params = setup(which)
    batch = batch_of(cfg)
    lse = model.apply(params, batch["tokens"], cfg)[..., : cfg.vocab_size].logsumexp(-1)
    want = model.loss(params, batch, cfg)[0][0][0] + 0.01 * (lse.square() * batch["mask"]).sum()
    torch.testing.assert_close(model.loss(params, batch, replace(cfg, z_loss=0.01))[0][0][0], want, rtol=1e-12, atol=0)
    wide = {k: torch.nn.functional.pad(params[k], (0, 0, 0, 640), value=3.0) for k in ("embed", "head")}
    got = model.loss({**params, **wide}, batch, replace(cfg, vocab_multiple=1024))[0]
    for (a, n), (b, m) in zip(got, model.loss(params, batch, cfg)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert n == m


@pytest.mark.parametrize("which", MODELS)
def test_generate(which):
    _, cfg, params = setup(which)
    prompt = torch.tensor([[3, 1, 4], [1, 5, 9]])
    long = generate(params, prompt, cfg, 5, key=random.key(0))
    assert torch.equal(long[:, :5], generate(params, prompt, cfg, 2, key=random.key(0))) and long.max() < 257


def test_a_capacity_drops_tokens():
    """Of the router's options: dropped tokens get no expert, and the rest is as it was."""
    model, cfg, params = setup("moe")
    tight = replace(cfg, router=replace(cfg.router, capacity_factor=0.25))
    loose = replace(cfg, router=replace(cfg.router, capacity_factor=8.0))
    tokens = torch.randint(257, (2, 16))
    same, free, dropped = (model.apply(params, tokens, c) for c in (cfg, loose, tight))
    torch.testing.assert_close(free, same, rtol=1e-12, atol=1e-12)
    assert (dropped - same).abs().max() > 1e-3 and dropped.isfinite().all()


def test_impossible_sizes():
    with pytest.raises(ValueError, match="must be a multiple of kv_heads=3"):
        presets.get("tiny-moe", kv_heads=3)
    with pytest.raises(ValueError, match="rope_dim=7 must be even"):
        presets.get("tiny-deepseek", rope_dim=7)
    with pytest.raises(ValueError, match="layers=0, those with experts"):
        presets.get("tiny-deepseek", layers=0)
    cfg = presets.get("tiny-moe", router=ops.Router(9))
    with pytest.raises(ValueError, match="top_k=9"):
        moe.apply(moe.init(random.key(0), cfg), torch.tensor([[1, 2]]), cfg)
