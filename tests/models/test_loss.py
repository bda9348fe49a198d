"""What the loss means: masks, packing, padding of the vocabulary, precision, dropout, recomputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fmeg import random, tree
from fmeg.models import batch_axes, generate, model_of, presets

NAMES = ["tiny", "tiny-gpt2"]


def setup(name, **changes):
    cfg = presets.get(name, **({"dtype": torch.float64} | changes))
    model = model_of(cfg)
    params = model.init(random.key(0), cfg)
    # Everything random and larger than at the start, so that nothing cancels or vanishes.
    params = tree.map_with_path(
        lambda path, p: p + 0.1 * random.normal(random.fold_in(random.key(1), path), p.shape, dtype=p.dtype), params
    )
    return model, cfg, tree.map(lambda p: p.detach().requires_grad_(), params)


def batch_of(cfg, b=2, s=12, seed=0):
    torch.manual_seed(seed)
    tokens, targets = torch.randint(cfg.vocab_size, (2, b, s))
    return {"tokens": tokens, "targets": targets, "mask": (torch.rand(b, s) < 0.7).double()}


def grads(model, params, batch, cfg, **kw):
    total, count = model.loss(params, batch, cfg, **kw)
    leaves, treedef = tree.flatten(params)
    return total, count, tree.unflatten(treedef, torch.autograd.grad(total, leaves))


def assert_same(a, b, tol=1e-12):
    paths = tree.paths(a)
    for path, x, y in zip(paths, tree.leaves(a), tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=tol, atol=tol, msg=lambda m, path=path: f"{path}: {m}")


@pytest.mark.parametrize("name", NAMES)
def test_axes_fit_the_parameters(name):
    model, cfg, params = setup(name)
    axes = model.logical_axes(cfg)
    assert tree.paths(axes) == tree.paths(params)
    for path, a, p in zip(tree.paths(axes), tree.leaves(axes), tree.leaves(params), strict=True):
        assert tuple(cfg.sizes[n] for n in a.split()) == p.shape, path
        assert len(set(a.split())) == p.ndim, path
    padding = cfg.padded_vocab - cfg.vocab_size
    tables = sum(a.startswith("vocab") for a in tree.leaves(axes))
    assert sum(p.numel() for p in tree.leaves(params)) == model.num_params(cfg) + tables * padding * cfg.embed
    assert set(batch_axes(packed=True)) == {"tokens", "targets", "mask", "segments", "positions"}


@pytest.mark.parametrize("name", NAMES)
def test_init(name):
    cfg = presets.get(name, embed=128, vocab_size=1024)
    model = model_of(cfg)
    params = model.init(random.key(0), cfg)
    assert_same(params, model.init(random.key(0), cfg), tol=0)
    assert not torch.equal(params["embed"], model.init(random.key(1), cfg)["embed"])
    for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
        if "norm" in path or path.split(".")[-1].startswith("b"):
            assert (p == (1.0 if "norm" in path and "bias" not in path else 0.0)).all(), path
        else:
            std = cfg.init_std / (2 if path in ("layers.wo", "layers.w_down") else 1)  # 2 layers: √(2·2)
            assert abs(p.std() / std - 1) < 0.03 and abs(p.mean()) < 0.03 * std * 3, path
    assert params["layers"]["wq"].dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_initial_loss_is_that_of_a_uniform_guess(name):
    cfg = presets.get(name)
    model = model_of(cfg)
    total, count = model.loss(model.init(random.key(0), cfg), batch_of(cfg, 4, 32), cfg)
    assert abs(total / count - torch.tensor(257.0).log()) < 0.1


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "qwen2", "qwen3"])
def test_every_leaf_has_a_gradient(name):
    traits = {"qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True}}.get(name)
    model, cfg, params = setup("tiny" if traits else name, **(traits or {}))
    _, _, g = grads(model, params, batch_of(cfg), cfg)
    for path, x in zip(tree.paths(g), tree.leaves(g), strict=True):
        # Softmax does not see a bias on the keys without rope: its gradient is zero in theory.
        if path == "layers.bk" and name == "tiny-gpt2":
            assert x.abs().max() < 1e-12
        else:
            assert x.abs().max() > 1e-6, path
            if path.startswith("layers."):
                assert (x.flatten(1).abs().amax(1) > 1e-6).all(), path


@pytest.mark.parametrize("name", NAMES)
def test_masked_tokens_do_not_count(name):
    model, cfg, params = setup(name)
    batch = batch_of(cfg)
    total, count, g = grads(model, params, batch, cfg)
    assert count == batch["mask"].sum()
    other = batch | {"targets": torch.where(batch["mask"] > 0, batch["targets"], 0)}
    total2, _, g2 = grads(model, params, other, cfg)
    assert total == total2
    assert_same(g, g2, tol=0)
    nothing = batch | {"mask": torch.zeros_like(batch["mask"])}
    total3, count3, g3 = grads(model, params, nothing, cfg)
    assert total3 == 0 and count3 == 0 and all((x == 0).all() for x in tree.leaves(g3))


@pytest.mark.parametrize("name", NAMES)
def test_loss_is_a_sum_over_tokens(name):
    model, cfg, params = setup(name)
    batch = batch_of(cfg)
    total, count, g = grads(model, params, batch, cfg)
    rows = [grads(model, params, {k: v[i : i + 1] for k, v in batch.items()}, cfg) for i in range(2)]
    torch.testing.assert_close(total, rows[0][0] + rows[1][0], rtol=1e-13, atol=0)
    assert count == rows[0][1] + rows[1][1]
    assert_same(g, tree.map(lambda a, b: a + b, rows[0][2], rows[1][2]))


@pytest.mark.parametrize("name, changes", [("tiny", {}), ("tiny", {"window": 3, "qk_norm": True}), ("tiny-gpt2", {})])
def test_packed_equals_padded_equals_alone(name, changes):
    model, cfg, params = setup(name, **changes)
    lengths = [5, 7, 4]
    docs = [batch_of(cfg, 1, n, seed=n) for n in lengths]
    alone = [grads(model, params, d, cfg) for d in docs]
    packed = {k: torch.cat([d[k] for d in docs], 1) for k in docs[0]}
    packed["segments"] = torch.cat([torch.full((1, n), i) for i, n in enumerate(lengths)], 1)
    packed["positions"] = torch.cat([torch.arange(n)[None] for n in lengths], 1)
    width = max(lengths)
    padded = {k: torch.cat([torch.nn.functional.pad(d[k], (0, width - d[k].shape[1])) for d in docs]) for k in docs[0]}
    for batch in (packed, padded):
        total, count, g = grads(model, params, batch, cfg)
        torch.testing.assert_close(total, tree.sum([a[0] for a in alone]), rtol=1e-12, atol=0)
        assert count == tree.sum([a[1] for a in alone])
        assert_same(g, tree.map(lambda *x: tree.sum(list(x)), *[a[2] for a in alone]))
    unsegmented = {k: v for k, v in packed.items() if k != "segments"}
    assert abs(model.loss(params, unsegmented, cfg)[0] - tree.sum([a[0] for a in alone])) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_padding_of_the_vocabulary_is_not_seen(name):
    """257 words, a prime, on 257, 384 or 1,024 rows: one loss, one gradient, none for the padding."""
    model, cfg, params = setup(name, vocab_multiple=1)
    batch = batch_of(cfg)
    total, _, g = grads(model, params, batch, cfg)
    for multiple in (128, 1024):
        _, padded_cfg, _ = setup(name, vocab_multiple=multiple)
        assert padded_cfg.padded_vocab == {128: 384, 1024: 1024}[multiple]
        rows = (0, 0, 0, padded_cfg.padded_vocab - 257)
        tables = {k for k in ("embed", "head") if k in params}
        padded = params | {
            k: torch.nn.functional.pad(params[k].detach(), rows, value=3.0).requires_grad_() for k in tables
        }
        total2, _, g2 = grads(model, padded, batch, padded_cfg)
        torch.testing.assert_close(total2, total, rtol=1e-13, atol=0)
        assert all((g2[k][257:] == 0).all() for k in tables)
        assert_same(g, g2 | {k: g2[k][:257] for k in tables})


@pytest.mark.parametrize(
    "name, changes, kw", [("tiny", {}, {}), ("tiny-gpt2", {"dropout": 0.2}, {"key": random.key(5)})]
)
@pytest.mark.parametrize("policy", ["full", "dots"])
def test_remat_changes_nothing(name, changes, kw, policy):
    model, cfg, params = setup(name, **changes)
    a, b = (grads(model, params, batch_of(cfg), replace(cfg, remat=r), **kw) for r in (None, policy))
    assert a[0] == b[0]
    assert_same(a[2], b[2], tol=0)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name):
    """Computed in bfloat16: loss in float32, gradients in the parameters' own dtype, both near the exact ones."""
    model, cfg, params = setup(name)
    batch = batch_of(cfg, 4, 32)
    want, _, g = grads(model, params, batch, cfg)
    params32 = tree.map(lambda p: p.detach().float().requires_grad_(), params)
    _, low, _ = setup(name, dtype=torch.float32, compute_dtype=torch.bfloat16)
    got, count, g32 = grads(model, params32, batch, low)
    assert got.dtype == count.dtype == torch.float32 and {x.dtype for x in tree.leaves(g32)} == {torch.float32}
    assert 0 < abs(got / want - 1) < 3e-3
    for path, x, y in zip(tree.paths(g), tree.leaves(g32), tree.leaves(g), strict=True):
        if path != "layers.bk":
            assert torch.nn.functional.cosine_similarity(x.double().flatten(), y.flatten(), 0) > 0.99, path


def test_z_loss():
    model, cfg, params = setup("tiny")
    _, with_z, _ = setup("tiny", z_loss=0.01)
    batch = batch_of(cfg)
    lse = model.apply(params, batch["tokens"], cfg)[..., : cfg.vocab_size].logsumexp(-1)
    want = model.loss(params, batch, cfg)[0] + 0.01 * (lse.square() * batch["mask"]).sum()
    torch.testing.assert_close(model.loss(params, batch, with_z)[0], want, rtol=1e-12, atol=0)


def test_dropout():
    model, cfg, params = setup("tiny-gpt2", dropout=0.3)
    batch = batch_of(cfg)
    plain = model.loss(params, batch, cfg)[0]
    one, again, two = (model.loss(params, batch, cfg, key=random.key(i))[0] for i in (1, 1, 2))
    assert one == again and len({x.item() for x in (plain, one, two)}) == 3
    _, without, _ = setup("tiny-gpt2")
    assert plain == model.loss(params, batch, without, key=random.key(1))[0]


def test_dropout_differs_between_layers_and_sites(monkeypatch):
    from fmeg import ops

    keys = []
    dropout = ops.dropout
    monkeypatch.setattr(ops, "dropout", lambda x, rate, key: keys.append(tuple(key.tolist())) or dropout(x, rate, key))
    model, cfg, params = setup("tiny-gpt2", dropout=0.3)
    model.loss(params, batch_of(cfg), cfg, key=random.key(0))
    assert len(keys) == len(set(keys)) == 5  # the embedding, and two in each of two layers


def test_too_long_for_learned_positions():
    model, cfg, params = setup("tiny-gpt2")
    with pytest.raises(ValueError, match="65 positions, cfg.max_seq=64"):
        model.apply(params, torch.zeros(1, 65, dtype=torch.long), cfg)


@pytest.mark.parametrize("name", NAMES)
def test_generate(name):
    model, cfg, params = setup(name)
    tokens = torch.randint(cfg.vocab_size, (3, 4), generator=torch.Generator().manual_seed(0))
    greedy = generate(params, tokens, cfg, 5, temperature=0)
    assert greedy.shape == (3, 9) and torch.equal(greedy[:, :4], tokens)
    logits = model.apply(params, greedy[:, :-1], cfg)[..., : cfg.vocab_size]
    assert torch.equal(logits[:, 3:].argmax(-1), greedy[:, 4:])
    a, b, c = (generate(params, tokens, cfg, n, key=random.key(k)) for n, k in [(5, 0), (3, 0), (5, 1)])
    assert torch.equal(a[:, :7], b) and not torch.equal(a, c) and a.max() < cfg.vocab_size
    with pytest.raises(ValueError, match="needs a key"):
        generate(params, tokens, cfg, 1)


def test_generate_draws_from_the_softmax():
    """4,096 rows of one prompt: frequencies of the next token are its probabilities."""
    model, cfg, params = setup("tiny", vocab_size=5, layers=1)
    tokens = torch.ones(4096, 1, dtype=torch.long)
    drawn = generate(params, tokens, cfg, 1, temperature=0.5, key=random.key(3))[:, 1]
    p = torch.softmax(model.apply(params, tokens[:1], cfg)[0, 0, :5] / 0.5, 0)
    freq = torch.bincount(drawn, minlength=5) / 4096
    assert ((freq - p).abs() < 4 * (p * (1 - p) / 4096).sqrt()).all()
