from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

import fmeg
from fmeg import Layout, Mesh, ops
from fmeg.ops.shift import shift, shift_p
from fmeg.testing import assert_equivalent
from tests.ops.checks import check_vjp, close, rand
from tests.ops.ranks import check_rule, spmd

MESH = {"x": 2, "y": 2}


@pytest.mark.parametrize("n", [-9, -8, -3, -1, 0, 1, 2, 5, 8, 11])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_by_definition(n, dim):
    x = rand(8, 8, 3)
    want = torch.zeros_like(x)
    size = x.shape[dim]
    for i in range(size):
        if 0 <= i + n < size:
            want.select(dim, i).copy_(x.select(dim, i + n))
    assert torch.equal(shift(x, n, dim), want)


@pytest.mark.parametrize("n", [-5, -1, 2, 9])
def test_gradient_is_the_shift_back(n):
    x = rand(2, 8, 3)
    check_vjp(shift_p, x, n, 1)
    assert gradcheck(lambda x: shift(x, n), x.clone().requires_grad_())
    close(torch.func.vmap(lambda x: shift(x, n, 0))(x), shift(x, n))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16])
def test_dtypes(dtype):
    x = torch.ones(2, 3).to(dtype)
    assert shift(x).dtype == dtype and shift(x).sum() == 4
    assert shift(x[:0]).shape == (0, 3) and shift(x[:, :0]).shape == (2, 0)


@pytest.mark.parametrize("n", [-9, -8, -5, -4, -3, -2, -1, 1, 2, 3, 4, 6, 7, 8, 20])
def test_rule_under_every_placement(n):
    """Shards of 4 and of 2: the shift is within a shard, of whole shards, across several, and past all."""
    check_rule(shift_p, rand(4, 8), n, 1)


def test_what_moves():
    x = rand(2, 8)
    assert spmd(shift_p, (x, 1, 1), {}, {"d1": ("x", "y")}, MESH)[1] == {"ppermute": 1}
    assert spmd(shift_p, (x, 2, 1), {}, {"d1": ("x", "y")}, MESH)[1] == {"ppermute": 1}
    assert spmd(shift_p, (x, 3, 1), {}, {"d1": ("x", "y")}, MESH)[1] == {"ppermute": 2}
    assert spmd(shift_p, (x, 1, 1), {}, {"d0": ("x",)}, MESH)[1] == {}


@pytest.mark.parametrize("mesh", [{"cp": 2}, {"cp": 4}, {"dp": 2, "cp": 2}])
def test_equals_one_device_on_a_mesh(mesh):
    def loss(p, batch):
        x = batch["x"] * p
        later = ops.shift(batch["ids"]) + ops.shift(batch["ids"], 3)
        return (x * ops.shift(x, 2) * later).sum() + ops.shift(x, -1).sum(), 5

    def step(params, batch):
        return fmeg.value_and_grad(loss)(params, batch)

    assert_equivalent(
        step,
        rand(3),
        {"x": rand(4, 8, 3), "ids": torch.arange(32).reshape(4, 8, 1)},
        mesh=Mesh(**mesh),
        layout=Layout(seq="cp", batch="dp") if "dp" in mesh else Layout(seq="cp"),
        axes={"params": "_", "batch": {"x": "batch seq _", "ids": "batch seq _"}},
        strict=True,
    )


def test_errors():
    with pytest.raises(ValueError, match=r"dim must be in \[-2, 2\)"):
        shift(rand(2, 3), 1, 2)
