"""Logits and every gradient equal Hugging Face's, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fmeg import ops, tree
from fmeg.models import gpt2, hf
from tests.models.oracle import CONFIGS, Float64, gradients, ours, random_model, state

ROUTED = [n for n, c in CONFIGS.items() if hasattr(c, "num_experts_per_tok")]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name):
    theirs = random_model(name)
    model, cfg, params = ours(theirs)
    tokens, targets = torch.randint(cfg.vocab_size, (2, 2, 19))
    mask = (torch.rand(2, 19) < 0.7).double()

    with Float64():
        want = theirs(tokens).logits
    want_loss = (cross_entropy(want.flatten(0, 1), targets.flatten(), reduction="none") * mask.flatten()).sum()
    want_loss.backward()

    params = tree.map(lambda p: p.requires_grad_(), params)
    # Positions in float64 make a rotary table in float64.
    where = {} if model is gpt2 else {"positions": torch.arange(19, dtype=torch.float64)}
    got = model.apply(params, tokens, cfg, **where)
    assert got.shape == (2, 19, 128) and got.dtype == torch.float64
    torch.testing.assert_close(got[..., : cfg.vocab_size], want, rtol=1e-8, atol=1e-8)

    out = model.loss(params, {"tokens": tokens, "targets": targets, "mask": mask, **where}, cfg)
    total, count = out if isinstance(out[0], torch.Tensor) else out[0][0]
    torch.testing.assert_close(total, want_loss, rtol=1e-10, atol=0)
    assert count == mask.sum()

    leaves, treedef = tree.flatten(params)
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    busy = [bool(w.any()) for n, w in gradients(theirs).items() if ".experts." in n]
    assert not busy or sum(busy) > len(busy) / 2
    grads, wants = hf.to_hf(tree.unflatten(treedef, found), cfg), gradients(theirs)
    assert set(grads) == set(state(theirs))
    for n, g in wants.items():
        assert g.abs().max() > 1e-3 or ".experts." in n, n  # an expert may have no tokens
        torch.testing.assert_close(
            grads[n], g, rtol=1e-8, atol=1e-8 * float(g.abs().max()), msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ROUTED)
def test_tokens_go_to_the_same_experts(name, monkeypatch):
    """Of every layer, the same experts exactly, with the same weights."""
    theirs = random_model(name)
    model, cfg, params = ours(theirs)
    wanted, got = [], []
    for module_name, module in theirs.named_modules():
        if module_name.endswith("mlp.gate"):
            module.register_forward_hook(lambda m, args, out: wanted.append(out[1:]))
    route = ops.router
    monkeypatch.setattr(ops, "router", lambda *a, **kw: got.append(route(*a, **kw)) or got[-1])
    tokens = torch.randint(cfg.vocab_size, (2, 19))
    with Float64():
        theirs(tokens)
    model.apply(params, tokens, cfg, positions=torch.arange(19, dtype=torch.float64))
    assert len(got) == len(wanted) == cfg.layers - len(getattr(cfg, "dense", ()))
    for (weights, experts), r in zip(wanted, got, strict=True):
        dense = torch.zeros(38, cfg.experts, dtype=torch.float64).scatter(1, experts, weights)
        mine = torch.zeros_like(dense).scatter(1, r.experts.flatten(0, 1), r.weights.flatten(0, 1))
        assert torch.equal(experts.sort(-1).values, r.experts.flatten(0, 1).sort(-1).values)
        torch.testing.assert_close(mine, dense, rtol=1e-10, atol=1e-12)
        assert torch.equal(r.counts, torch.bincount(experts.flatten(), minlength=cfg.experts))


@pytest.mark.parametrize("name", ["llama3", "mistral", "gpt2", "mixtral", "qwen2-moe", "deepseek-v3"])
def test_attention_mask(name):
    """Their `attention_mask` is our `real`: padding at the beginning, at the end, at both, and none."""
    theirs = random_model(name)
    model, cfg, params = ours(theirs)
    tokens = torch.randint(cfg.vocab_size, (4, 19))
    real = torch.arange(19) >= torch.tensor([7, 0, 3, 0]).unsqueeze(1)
    real &= torch.arange(19) < torch.tensor([19, 11, 15, 19]).unsqueeze(1)
    with Float64():
        want = theirs(tokens, attention_mask=real.long()).logits
    where = {} if model is gpt2 else {"positions": torch.arange(19, dtype=torch.float64)}
    got = model.apply(params, tokens, cfg, real=real.long(), **where)[..., : cfg.vocab_size]
    torch.testing.assert_close(got[real], want[real], rtol=1e-8, atol=1e-8)
    assert (model.apply(params, tokens, cfg, **where)[..., : cfg.vocab_size] - want)[real].abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama2", "mistral", "gpt2", "qwen2-moe"])
def test_the_oracle_would_notice(name):
    """One weight a little off, and the logits differ."""
    theirs = random_model(name)
    model, cfg, params = ours(theirs)
    tokens = torch.randint(cfg.vocab_size, (1, 19))
    before = model.apply(params, tokens, cfg)
    params["layers"]["wv"][-1, 0, 0, 0] += 1e-4
    assert (model.apply(params, tokens, cfg) - before).abs().max() > 1e-7


def test_a_window_matters():
    """The window is shorter than the sequence, so that the test above tests it."""
    theirs = random_model("mistral")
    model, cfg, params = ours(theirs)
    tokens = torch.randint(cfg.vocab_size, (1, 19))
    full = model.apply(params, tokens, replace(cfg, window=None))
    windowed = model.apply(params, tokens, cfg)
    assert cfg.window == 5
    torch.testing.assert_close(full[:, :5], windowed[:, :5])
    assert (full[:, 5:] - windowed[:, 5:]).abs().max() > 1e-3
