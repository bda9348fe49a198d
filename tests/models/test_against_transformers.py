"""Logits and every gradient equal Hugging Face's, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from fmeg import tree
from fmeg.models import gpt2, hf
from tests.models.oracle import CONFIGS, Float64, ours, random_model


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

    total, count = model.loss(params, {"tokens": tokens, "targets": targets, "mask": mask, **where}, cfg)
    torch.testing.assert_close(total, want_loss, rtol=1e-10, atol=0)
    assert count == mask.sum()

    leaves, treedef = tree.flatten(params)
    grads = hf.to_hf(tree.unflatten(treedef, torch.autograd.grad(total, leaves)), cfg)
    assert set(grads) == {n for n, _ in theirs.named_parameters()}
    for n, p in theirs.named_parameters():
        assert p.grad.abs().max() > 1e-3, n
        torch.testing.assert_close(
            grads[n], p.grad, rtol=1e-8, atol=1e-8 * float(p.grad.abs().max()), msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("name", ["llama2", "mistral", "gpt2"])
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
