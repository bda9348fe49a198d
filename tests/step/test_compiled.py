"""Compiled steps: the numbers of eager ones; donated memory is written into, and nobody else's."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fmeg
from fmeg import Array, Layout, Mesh, TrainState, optim, tree
from fmeg.sharding.compiled import Inductor

OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def train_step(state, batch, microbatches=1):
    def loss_fn(p, b):
        def layer(x, w):
            return torch.tanh(fmeg.einsum("b d, d e -> b e", x, w)), None

        x, _ = fmeg.scan(layer, b["x"], p["w"])
        return ((x - b["y"]) ** 2).sum(), x.numel()

    (loss, _), grads = fmeg.value_and_grad(loss_fn, microbatches=microbatches)(state.params, batch)
    updates, opt = OPT.update(grads, state.opt, state.params)
    return state.next(params=optim.apply_updates(state.params, updates), opt=opt), loss


def example():
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 4, 4, dtype=torch.float64, generator=g)}
    batch = {k: torch.randn(6, 4, dtype=torch.float64, generator=g) for k in "xy"}
    return TrainState.create(params, OPT, {"w": "layers embed ff"}), batch


def run(mode, mesh, layout, steps=3, microbatches=1):
    state, batch = example()
    step = fmeg.jit(partial(train_step, microbatches=microbatches), mesh=mesh, layout=layout, donate="state", mode=mode)
    losses = []
    for _ in range(steps):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, state


def test_equal_to_eager_and_written_in_place():
    want, plain = run("eager", Mesh(), Layout())
    got, state = run("inductor", Mesh(), Layout())
    assert got == pytest.approx(want, rel=1e-13)
    for a, b in zip(tree.leaves(state), tree.leaves(plain), strict=True):
        assert torch.allclose(a.global_value(), b.global_value(), rtol=1e-12, atol=1e-15)


def test_microbatches_add_their_gradients_where_they_lie():
    want, plain = run("eager", Mesh(), Layout(), microbatches=3)
    got, state = run("inductor", Mesh(), Layout(), microbatches=3)
    assert got == pytest.approx(want, rel=1e-13)
    for a, b in zip(tree.leaves(state), tree.leaves(plain), strict=True):
        assert torch.allclose(a.global_value(), b.global_value(), rtol=1e-12, atol=1e-15)


def test_donated_memory_is_reused_and_a_callers_tensors_are_not():
    state, batch = example()
    before = tree.map(torch.clone, state)
    step = fmeg.jit(train_step, mesh=Mesh(), layout=Layout(), donate="state", mode="inductor")
    first, _ = step(state, batch)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(before), strict=True))
    assert all(x.own for x in tree.leaves(first))
    where = [x.value.data_ptr() for x in tree.leaves(first)]
    second, _ = step(first, batch)
    assert [x.value.data_ptr() for x in tree.leaves(second)] == where
    placed = tree.map(lambda x: Array.from_global(x, Mesh()), before)  # shares the caller's memory
    kept = tree.map(torch.clone, before)
    step(placed, batch)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(kept), strict=True))


def test_a_virtual_mesh_takes_the_mode_too():
    want, _ = run("eager", Mesh(), Layout())
    got, _ = run("inductor", Mesh(dp=2), Layout(batch="dp", params=dict(embed="dp")))
    assert got == pytest.approx(want, rel=1e-12)


def test_unknown_modes_and_graphs_without_a_gpu_are_refused():
    state, batch = example()
    with pytest.raises(ValueError, match="eager, inductor, cudagraph"):
        fmeg.jit(train_step, mode="fast")(state, batch)
    with pytest.raises(ValueError, match="CUDA graph"):
        fmeg.jit(train_step, mode="cudagraph")(state, batch)


def test_as_many_runs_are_compiled_for_many_layers_as_for_few(monkeypatch):
    made = []
    init = Inductor.__init__

    def counted(self, fn, name):
        made.append(name)
        init(self, fn, name)

    monkeypatch.setattr(Inductor, "__init__", counted)
    counts = []
    for layers in (2, 32):
        made.clear()
        state, batch = example()
        params = {"w": state.params["w"][:1].expand(layers, 4, 4).clone()}
        deep = TrainState.create(params, OPT, {"w": "layers embed ff"})
        fmeg.jit(train_step, mesh=Mesh(), layout=Layout(), mode="inductor").lower(deep, batch).compile("inductor")
        counts.append(len(made))
    assert counts[0] == counts[1] > 0
