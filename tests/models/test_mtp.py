"""Multi-token prediction: what it computes, against transformers' modules; which positions count; packing."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from fmeg import random, tree
from fmeg.models import deepseek, hf, presets
from tests.models.oracle import Float64, ours, published, random_model, state

F64 = torch.float64


def _theirs(depth):
    """Their model, their MTP modules for it, and both as a checkpoint."""
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    layers = pytest.importorskip("transformers.modeling_layers")
    model = random_model("deepseek-v3")
    config, n = model.config, model.config.num_hidden_layers
    config._experts_implementation = "eager"
    modules = []
    for k in range(depth):
        with Float64():
            one = layers.MtpLayer(config, modeling.DeepseekV3DecoderLayer, modeling.DeepseekV3RMSNorm, n + k).double()
        for p in one.parameters():
            p.data = 0.3 * torch.randn(p.shape, dtype=F64) + (1.0 if p.ndim == 1 else 0.0)
        modules.append(one.eval())
    tensors = state(model)
    for k, one in enumerate(modules):
        for name, x in [*one.named_parameters(), *one.named_buffers()]:
            name = name.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
            tensors |= published(model, {f"model.layers.{n + k}.{name}": x.detach()})
        tensors[f"model.layers.{n + k}.shared_head.head.weight"] = model.lm_head.weight.detach()
        tensors[f"model.layers.{n + k}.embed_tokens.weight"] = model.model.embed_tokens.weight.detach()
    return model, modules, tensors


@pytest.mark.parametrize("depth", [1, 2])
def test_equals_transformers(depth):
    """Logits of each module by their losses, from a checkpoint with embedding and head written out again for each."""
    model, modules, tensors = _theirs(depth)
    _, cfg, _ = ours(model)
    cfg = deepseek.from_hf_config(model.config.to_dict(), dtype=F64, mtp_layers=depth, mtp_weight=0.3)
    params = hf.from_hf(tensors, cfg)
    b, s = 2, 13
    tokens, targets = torch.randint(cfg.vocab_size, (2, b, s))
    mask = (torch.rand(b, s) < 0.7).double()
    positions = torch.arange(s)
    with Float64():
        h = model.model(tokens).last_hidden_state
        table = model.model.rotary_emb(h, positions[None])
        causal = torch.full((1, 1, s, s), -torch.inf, dtype=F64).triu(1)
        wanted = []
        for k, one in enumerate(modules, 1):
            later = torch.cat([tokens[:, k:], torch.zeros(b, k, dtype=torch.long)], 1)
            h = one(model.model.embed_tokens(later), h, table, causal, positions[None], None)
            losses = cross_entropy(
                model.lm_head(h)[:, : s - k].flatten(0, 1), targets[:, k:].flatten(), reduction="none"
            )
            wanted.append((0.3 / depth * (losses * mask[:, k:].flatten()).sum(), mask[:, k:].sum()))
    batch = {"tokens": tokens, "targets": targets, "mask": mask, "positions": positions.double().expand(b, s)}
    pairs, aux = deepseek.loss(params, batch, cfg)
    assert len(pairs) == 1 + depth + 1 and aux["counts"].shape == (cfg.layers + depth, cfg.experts)
    for (got, n), (want, count) in zip(pairs[1 : 1 + depth], wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=0)
        assert n == count


def test_written_and_read_again():
    cfg = presets.get("tiny-deepseek", mtp_layers=2)
    params = deepseek.init(random.key(0), cfg)
    tensors = hf.to_hf(params, cfg)
    assert "model.layers.4.eh_proj.weight" in tensors and "model.layers.3.mlp.experts.7.up_proj.weight" in tensors
    again = hf.from_hf(tensors, cfg)
    real = cfg.vocab_size
    for path, a, b in zip(tree.paths(params), tree.leaves(again), tree.leaves(params), strict=True):
        table = path in ("embed", "head")
        assert torch.equal(a[:real], b[:real]) if table else torch.equal(a, b), path
    with pytest.raises(ValueError, match=r"missing \['model.layers.3"):
        hf.from_hf({k: v for k, v in tensors.items() if "layers.3." not in k and "layers.4." not in k}, cfg)


def _setup(depth, **changes):
    cfg = presets.get("tiny-deepseek", dtype=F64, mtp_layers=depth, **changes)
    params = deepseek.init(random.key(0), cfg)
    noise = lambda path, p: p + 0.1 * random.normal(random.fold_in(random.key(1), path), p.shape, dtype=F64)
    return cfg, tree.map_with_path(noise, params)


def test_the_last_token_may_be_anything():
    """The tokens that a prediction cannot know, and what it predicts, change nothing before them."""
    cfg, params = _setup(2)
    tokens = torch.randint(257, (1, 9))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "mask": torch.ones(1, 9, dtype=F64)}
    batch["mask"][0, 6:] = 0
    before, _ = deepseek.loss(params, batch, cfg)
    changed = {**batch, "tokens": torch.cat([tokens[:, :8], (tokens[:, 8:] + 1) % 257], 1)}
    after, _ = deepseek.loss(params, changed, cfg)
    for (a, n), (b, m) in zip(before[:3], after[:3], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=0)
        assert n == m
    assert [n.item() for _, n in before[:3]] == [6, 5, 4]


@pytest.mark.parametrize("depth", [1, 3])
def test_packed_documents_are_as_alone(depth):
    """Three documents in a row, or in a row each: no prediction reaches into the next document."""
    cfg, params = _setup(depth)
    docs = [torch.randint(257, (n,)) for n in (6, 3, 8)]
    parts = []
    for i, doc in enumerate(docs):
        row = {"tokens": doc[:-1], "targets": doc[1:], "mask": torch.ones(len(doc) - 1, dtype=F64)}
        parts.append(row | {"segments": torch.full((len(doc) - 1,), i), "positions": torch.arange(len(doc) - 1)})
    packed = {k: torch.cat([p[k] for p in parts])[None] for k in parts[0]}
    got, _ = deepseek.loss(params, packed, cfg)
    alone = [deepseek.loss(params, {k: v[None] for k, v in p.items()}, cfg)[0] for p in parts]
    for k in range(1 + depth):
        torch.testing.assert_close(got[k][0], sum(a[k][0] for a in alone), rtol=1e-10, atol=1e-12)
        assert got[k][1] == sum(a[k][1] for a in alone) == sum(max(len(d) - 1 - k, 0) for d in docs)


def test_weight_and_gradients():
    """The sum is weighted by weight / depth; every parameter of a module, and the shared ones, get a gradient."""
    cfg, params = _setup(2, mtp_weight=0.5)
    tokens = torch.randint(257, (2, 9))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "mask": torch.ones(2, 9, dtype=F64)}
    pairs, _ = deepseek.loss(params, batch, cfg)
    twice, _ = deepseek.loss(params, batch, presets.get("tiny-deepseek", dtype=F64, mtp_layers=2, mtp_weight=1.0))
    torch.testing.assert_close(2 * pairs[2][0], twice[2][0], rtol=1e-12, atol=0)
    uniform = 0.5 / 2 * torch.tensor(257.0, dtype=F64).log()
    assert 0.9 < pairs[1][0] / pairs[1][1] / uniform < 1.5
    leaves = [x.requires_grad_() for x in tree.leaves(params)]
    (_, _, (total, _), *_), _ = deepseek.loss(params, batch, cfg)
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    for path, g in zip(tree.paths(params), found, strict=True):
        assert g.any() == (not path.endswith("router_bias")), path


def test_without_modules_it_is_the_plain_loss():
    cfg, params = _setup(1)
    plain = presets.get("tiny-deepseek", dtype=F64, mtp_layers=0)
    tokens = torch.randint(257, (2, 9))
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1), "mask": torch.ones(2, 9, dtype=F64)}
    with_, _ = deepseek.loss(params, batch, cfg)
    without, aux = deepseek.loss({k: v for k, v in params.items() if k != "mtp_layers"}, batch, plain)
    assert torch.equal(with_[0][0], without[0][0]) and len(without) == 2 and aux["counts"].shape == (2, 8)
