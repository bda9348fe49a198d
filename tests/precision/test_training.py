"""Training in low precision follows training in bf16."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import TrainState, optim, precision
from fmeg.models import llama

STEPS = 100


def _losses(recipe):
    cfg = llama.Config(
        vocab_size=32, embed=32, layers=4, heads=2, kv_heads=2, head_dim=16, ff=64, vocab_multiple=16,
        compute_dtype=torch.bfloat16,
    )  # fmt: skip
    opt = optim.adamw(3e-3)
    state = TrainState.create(llama.init(fmeg.random.key(0), cfg), opt, llama.logical_axes(cfg))
    grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), precision=recipe)

    def train_step(state, batch):
        (loss, _), grads = grad(state.params, batch)
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), loss

    step, g, losses = fmeg.jit(train_step), torch.Generator().manual_seed(0), []
    for _ in range(STEPS):
        start = torch.randint(0, 32, (8, 1), generator=g)
        stride = torch.randint(1, 4, (8, 1), generator=g)
        tokens = (start + stride * torch.arange(17)) % 32  # the next token follows from the two before it
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(8, 16)}
        state, loss = step(state, batch)
        losses.append(float(loss.global_value()))
    return torch.tensor(losses)


@pytest.fixture(scope="module")
def bf16():
    return _losses(None)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_the_loss_follows_bf16(bf16, name):
    recipes = {"mxfp8": precision.mxfp8(), "blockwise": precision.fp8("blockwise", block=16)}
    losses = _losses(recipes.get(name) or precision.fp8(name))
    assert bf16[-10:].mean() < 0.5 * bf16[0]
    smooth = lambda x: x.unfold(0, 10, 1).mean(1)
    assert (smooth(losses) - smooth(bf16)).abs().max() < 0.02 * bf16[0]
    assert not torch.equal(losses, bf16)
