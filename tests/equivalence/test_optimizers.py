"""Optimizer steps: norms in which no duplicate counts twice, every optimizer, accumulation."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, TrainState, jit, optim, tree
from fmeg.models import llama
from fmeg.testing import errors
from fmeg.testing.verify import keep_gradients, make_batch, make_params, make_state, make_step, run_steps
from tests.equivalence.support import (
    CFG,
    DP,
    EVERYTHING,
    HSDP,
    SEQUENCE,
    TENSOR,
    TP,
    ZERO1,
    ZERO3,
    batch_of,
    each,
    loss_and_grads,
    on_mesh,
    train,
)

ZERO3_TENSOR = (Mesh(dp=2, tp=2), Layout(batch="dp", **TP, res_seq="tp", params=dict(embed="dp")))
ZERO1_CONTEXT = (Mesh(dp=2, cp=2), Layout(batch="dp", seq="cp", res_seq="cp", opt=dict(embed="dp")))
AXES = llama.logical_axes(CFG)


@each(data=DP, zero1=ZERO1, zero3=ZERO3, hsdp=HSDP, tensor=TENSOR, sequence=SEQUENCE, all=EVERYTHING)
def test_the_norm_of_all_gradients(mesh, layout):
    """Some leaves are whole on every rank and some in parts: each element counts once."""

    def norm(params, batch):
        _, grads = loss_and_grads(lambda p, b: llama.loss(p, b, CFG))(params, batch)
        return optim.global_norm(grads), tree.map(lambda g: g.square().sum(), grads)

    params, batch = make_params(CFG), batch_of()
    total, leaves = norm(params, batch)
    torch.testing.assert_close(total, tree.sum(tree.leaves(leaves)).sqrt())
    got, got_leaves = on_mesh(norm, mesh, layout, params, batch)
    torch.testing.assert_close(got, total, rtol=1e-13, atol=0)
    torch.testing.assert_close(got_leaves, leaves, rtol=1e-12, atol=0)


@each(data=DP, zero1=ZERO1, hsdp=HSDP, all=EVERYTHING)
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping(mesh, layout, share):
    """To half the norm, and to twice the norm, which changes nothing: a norm counted twice would be clipped."""
    batch = batch_of()
    grad = loss_and_grads(lambda p, b: llama.loss(p, b, CFG))
    _, grads = grad(make_params(CFG), batch)
    norm = float(optim.global_norm(grads))
    opt = optim.chain(optim.clip_by_global_norm(share * norm, eps=0.0), keep_gradients(), optim.sgd(1.0))
    state = make_state(CFG, opt)
    after, _ = jit(make_step(CFG, opt), mesh=mesh, layout=layout, strict=True)(state, batch)
    assert max(errors(after.opt[1], tree.map(lambda g: g * min(1.0, share), grads)).values()) < 1e-12


MATRIX = optim.matrices(AXES)
OPTIMIZERS = {
    "adamw": optim.adamw(3e-3, weight_decay=0.1, mask=optim.decay_by_axes(AXES)),
    "sgd": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "lion": optim.lion(1e-3),
    "adafactor": optim.adafactor(1e-2, matrix=MATRIX, min_dim=4, b1=0.9),
    "muon": optim.muon(1e-2, matrix=MATRIX),
}


@each(zero1=ZERO1, zero3=ZERO3, tensor=TENSOR, zero3_tensor=ZERO3_TENSOR, zero1_context=ZERO1_CONTEXT)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, mesh, layout):
    """Two steps of a model: parameters, and the optimizer's state leaf by leaf."""
    opt = optim.chain(optim.clip_by_global_norm(0.5), OPTIMIZERS[name])
    state, batch = make_state(CFG, opt), make_batch(CFG)
    step = make_step(CFG, opt)
    want = run_steps(step, state, batch, 2)[-1]
    got = run_steps(jit(step, mesh=mesh, layout=layout, strict=True), state, batch, 2)[-1]
    found = errors(got, want)
    # Lion and Muon take signs and directions, in which rounding of a small gradient grows.
    assert max(found.values()) < (1e-9 if name == "muon" else 1e-11), max(found, key=lambda p: found[p])


@each(data=DP, zero1=ZERO1, zero3=ZERO3, all=EVERYTHING)
@pytest.mark.parametrize("microbatches", [2, 4])
def test_accumulation_is_one_large_batch(mesh, layout, microbatches):
    """On the mesh in microbatches against one device in one piece. Counts differ from one to the next."""
    params, batch = make_params(CFG), batch_of()
    loss = lambda params, batch: llama.loss(params, batch, CFG)
    want = loss_and_grads(loss)(params, batch)
    got = on_mesh(loss_and_grads(loss, microbatches), mesh, layout, params, batch, strict=True)
    assert max(errors(got, want).values()) < 1e-12


def test_accumulation_trains_as_one_large_batch_does():
    train(*HSDP, microbatches=2, steps=3)


def test_a_step_is_a_function_of_the_state_alone():
    """The same Array twice gives the same bits: nothing is updated under it."""
    opt = optim.adamw(1e-3)
    state, batch = make_state(CFG, opt), batch_of()
    step = jit(make_step(CFG, opt), mesh=ZERO3[0], layout=ZERO3[1])
    first, _ = step(state, batch)
    once, _ = step(first, batch)
    again, _ = step(first, batch)
    assert isinstance(first, TrainState)
    for a, b in zip(tree.leaves(once), tree.leaves(again), strict=True):
        assert torch.equal(a.global_value(), b.global_value())
