"""Experts are kept equally busy by the routers' biases, moved once a step, without any loss for it."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, jit, optim, random, tree
from fmeg.models import model_of, presets

STEPS, LAST = 60, 15


def train(name, rate, layout=None):
    """Tokens of each layer's busiest expert over those of an average one, step by step: "steps layers"."""
    router = presets.get(name).router
    cfg = presets.get(name, layers=2, router_bias=True, embed=32)
    cfg = presets.replace(cfg, router=presets.replace(router, score="sigmoid", batch_loss=0.0, sequence_loss=0.0))
    model = model_of(cfg)
    axes = model.logical_axes(cfg)
    opt = optim.muon(2e-3, optim.matrices(axes))

    def create(key):
        params = model.init(key, cfg)
        start = lambda path, p: p * 5 if path.endswith("router") else p  # some experts are liked from the start
        return fmeg.TrainState.create(tree.map_with_path(start, params), opt, axes)

    def step(state, batch):
        grad = fmeg.value_and_grad(lambda p, b: model.loss(p, b, cfg))
        (_, aux), grads = grad(state.params, batch)
        updates, opt_state = opt.update(grads, state.opt, state.params)
        params = model.update_bias(optim.apply_updates(state.params, updates), aux["counts"], cfg, rate)
        return state.next(params=params, opt=opt_state), aux["counts"]

    state = create(random.key(0))
    if layout is not None:
        step = jit(step, mesh=Mesh(dp=2), layout=layout)
    g = torch.Generator().manual_seed(0)
    loads = []
    for _ in range(STEPS):
        text = (torch.rand(32, 17, generator=g) ** 1.5 * cfg.vocab_size).long()  # some tokens are frequent
        batch = {"tokens": text[:, :-1], "targets": text[:, 1:], "mask": torch.ones(32, 16)}
        state, counts = step(state, batch)
        counts = (counts if layout is None else counts.global_value()).double()
        loads.append(counts.amax(-1) / counts.mean(-1))
    biases = [p for path, p in zip(tree.paths(state.params), tree.leaves(state.params), strict=True) if "bias" in path]
    return torch.stack(loads), biases


@pytest.mark.parametrize("name", ["tiny-moe", "tiny-deepseek"])
def test_a_bias_balances_and_nothing_else_does(name):
    free, none = train(name, 0.0)
    balanced, moved = train(name, 0.02)
    assert not any(b.any() for b in none) and all(b.abs().max() >= 0.02 for b in moved)
    torch.testing.assert_close(balanced[0], free[0])  # the first step's routing came before any bias
    end = lambda loads: loads[-LAST:].mean(0)
    assert (end(free) > 2.5).all(), end(free)
    assert (end(balanced) < 2.1).all() and (end(balanced) < 0.65 * end(free)).all(), end(balanced)


def test_counts_of_the_whole_batch_move_the_bias_of_every_rank():
    """With experts on the data parallel ranks a step is the same step: loads are equal, as integers are."""
    loads, (bias,) = train("tiny-moe", 0.02, Layout(batch="dp", experts="dp"))
    want, (expected,) = train("tiny-moe", 0.02)
    assert torch.equal(loads[:3], want[:3]) and bias.global_value().shape == expected.shape
    assert (loads[-LAST:].mean(0) < 2.1).all()
