"""Compiled steps on a GPU: near the eager ones in bf16, equal in float32 arithmetic to what fusing explains."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, TrainState, optim, tree
from fmeg.lower import pipeline
from fmeg.models import llama

pytestmark = pytest.mark.gpu


def train(mode, dtype, microbatches=1, steps=6):
    cfg = llama.Config(
        vocab_size=1000, embed=256, layers=3, heads=4, kv_heads=2, head_dim=64, ff=512, compute_dtype=dtype, z_loss=1e-4
    )
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3))
    axes = llama.logical_axes(cfg)

    def step(state, batch):
        grad_fn = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=microbatches)
        (loss, _), grads = grad_fn(state.params, batch)
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), loss

    with torch.device("cuda"):
        state = TrainState.create(llama.init(fmeg.random.key(0), cfg), opt, axes)
        ids = torch.randint(0, 1000, (4, 257), generator=torch.Generator("cuda").manual_seed(0))
        mask = (torch.rand(4, 256, generator=torch.Generator("cuda").manual_seed(1)) > 0.2).float()
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": mask}
        run = fmeg.jit(step, mesh=Mesh(), layout=Layout(), donate="state", mode=mode)
        losses = []
        for _ in range(steps):
            state, loss = run(state, batch)
            losses.append(float(loss))
    return losses, [x.global_value() for x in tree.leaves(state.params)]


@pytest.mark.parametrize("mode", ["inductor", "cudagraph"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_near_eager(mode, microbatches, dtype, monkeypatch):
    monkeypatch.setattr(pipeline, "LOGITS", 2**18)  # several chunks
    want, params = train("eager", dtype, microbatches)
    got, mine = train(mode, dtype, microbatches)
    tolerance = 2e-5 if dtype is None else 5e-3
    assert got == pytest.approx(want, rel=tolerance)
    assert got[-1] < got[0] - 0.5
    for a, b in zip(mine, params, strict=True):
        assert float((a - b).norm() / b.norm()) < (1e-3 if dtype is None else 3e-2)


def test_a_graph_needs_a_cuda_device():
    with pytest.raises(ValueError, match="CUDA graph"):
        fmeg.jit(lambda x: x + 1, mesh=Mesh(dp=2, backend="loop"), layout=Layout(), mode="cudagraph")(torch.ones(2))
