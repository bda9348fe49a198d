"""Shapes of meshes: one device, axes of size 1, axes that nothing uses; precision; recomputation."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Array, Layout, Mesh, jit, tree
from fmeg.models import llama
from fmeg.testing import errors
from fmeg.testing.verify import make_batch, make_params, make_state, make_step, optimizer_under_test, run_steps
from tests.equivalence.support import (
    CFG,
    CP,
    EVERYTHING,
    TENSOR,
    TP,
    ZERO3,
    batch_of,
    changed,
    context,
    each,
    gradients,
    loss_and_grads,
    on_mesh,
    train,
)

ONES = Layout(batch=("replica", "dp"), **CP, **TP, params=dict(embed="dp"), attention="ring")


def equal_bits(got, want):
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a.global_value() if isinstance(a, Array) else a, b), path


def two_steps(cfg, mesh, layout, microbatches):
    """States and metrics of two optimizer steps, jitted and eager."""
    opt = optimizer_under_test()
    state, batch, step = make_state(cfg, opt), make_batch(cfg), make_step(cfg, opt, microbatches)
    return run_steps(jit(step, mesh=mesh, layout=layout), state, batch, 2), run_steps(step, state, batch, 2)


one_device = each(no_axes=(Mesh(), Layout()), axes_of_size_1=(Mesh(replica=1, dp=1, cp=1, tp=1), ONES))


@one_device
@pytest.mark.parametrize(("tied", "microbatches"), [(False, 1), (False, 2), (True, 1)])
def test_a_mesh_of_one_device_has_the_bits_of_eager(mesh, layout, tied, microbatches):
    """Loss, gradients, parameters and moments, bit for bit in float64."""
    equal_bits(*two_steps(changed(tied=tied), mesh, layout, microbatches))


@one_device
def test_a_parameter_with_two_uses_and_microbatches_differs_in_the_last_bit(mesh, layout):
    """Traced, each use has a sum over the microbatches, and the sums are added; autograd adds the uses first."""
    assert max(errors(*two_steps(changed(tied=True), mesh, layout, 2)).values()) < 1e-14


def test_axes_of_size_1_among_others_change_no_bit():
    opt = optimizer_under_test()
    state, batch, step = make_state(CFG, opt), make_batch(CFG), make_step(CFG, opt)
    some = jit(step, mesh=Mesh(dp=2, tp=2), layout=Layout(batch="dp", **TP, params=dict(embed="dp")))
    view = {**TP, "heads": ("tp", "tr"), "seq": "cp", "res_seq": "cp"}
    more = Layout(batch=("replica", "dp"), **view, params=dict(embed=("dp", "replica")), attention="ring")
    mesh = Mesh(replica=1, dp=2, cp=1, tp=2, tr=1)
    want = tree.map(Array.global_value, some(state, batch))
    equal_bits(jit(step, mesh=mesh, layout=more)(state, batch), want)


@each(
    nothing=(Mesh(dp=2, tp=2), Layout()),
    no_batch=(Mesh(dp=2, tp=2), Layout(**TP)),
    no_tensor=(Mesh(dp=2, tp=2), Layout(batch="dp", params=dict(embed="dp"))),
    state_only=(Mesh(dp=2, cp=2), Layout(opt=dict(embed=("dp", "cp")))),
    rest_only=(Mesh(dp=2), Layout(params=dict(embed="dp"))),
)
def test_axes_that_the_batch_does_not_use(mesh, layout):
    """Ranks that do the same work are replicas, not terms of a sum."""
    train(mesh, layout)


def test_any_order_of_mesh_axes():
    train(Mesh(tp=2, dp=2, cp=2), EVERYTHING[1])


def test_more_than_one_axis_on_a_dimension():
    view = dict(batch=("b", "a"), vocab=("v", "t"), heads=("t",), kv_heads=("t",), ff=("t", "v"))
    train(Mesh(a=2, b=2, t=2, v=2), Layout(**view, params=dict(embed=("a", "b"))))


POLICIES = {
    "full": "full",
    "dots": "dots",
    "none": "none",
    "names": fmeg.save_names("attention"),
}


@each(tensor=TENSOR, zero3=ZERO3, ring=context("ring"), all=EVERYTHING)
@pytest.mark.parametrize("policy", POLICIES)
def test_recomputation_changes_nothing(policy, mesh, layout):
    train(mesh, layout, changed(remat=POLICIES[policy]))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_both_virtual_backends(backend):
    train(Mesh(EVERYTHING[0].sizes, backend=backend), EVERYTHING[1])


def test_sixteen_devices():
    layout = Layout(batch=("replica", "dp"), **CP, **TP, params=dict(embed=("dp", "cp")))
    train(Mesh(replica=2, dp=2, cp=2, tp=2), layout)


@each(tensor=TENSOR, zero3=ZERO3, ring=context("ring"), all=EVERYTHING)
def test_float32_differs_by_reordered_sums_only(mesh, layout):
    cfg = changed(dtype=torch.float32)
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch_of().items()}
    errors = gradients(mesh, layout, batch, cfg=cfg, tol=1e-4)
    assert max(errors.values()) > 0


@each(tensor=TENSOR, zero3=ZERO3, all=EVERYTHING)
def test_bfloat16_compute_is_close(mesh, layout):
    """Float32 parameters used in bfloat16: the loss to a percent, each gradient to a tenth of its norm."""
    cfg = changed(dtype=torch.float32, compute_dtype=torch.bfloat16)
    params, batch = make_params(cfg), batch_of()
    loss = lambda params, batch: llama.loss(params, batch, cfg)
    (want, _), grads = loss_and_grads(loss)(params, batch)
    (got, _), on = on_mesh(loss_and_grads(loss), mesh, layout, params, batch)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=1e-2, atol=0)
    for path, a, b in zip(tree.paths(grads), tree.leaves(on), tree.leaves(grads), strict=True):
        assert a.dtype == torch.float32
        assert float((a - b).norm() / b.norm()) < 0.1, path
