"""torch.func inside a jitted function: per-sample gradients, Jacobians and Hessians on a mesh equal one device."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, einsum, ops
from fmeg.testing import assert_equivalent

AXES = dict(params=dict(norm="embed", up="embed ff", head="vocab embed"))
LAYOUTS = [Layout(batch="dp"), Layout(batch="dp", ff="tp", vocab="tp"), Layout(batch="dp", params=dict(embed="tp"))]


def arguments():
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    params = dict(norm=draw(8), up=draw(8, 8), head=draw(16, 8))
    return params, dict(x=draw(4, 6, 8), targets=torch.randint(0, 16, (4, 6), generator=g))


def one(params, sample):
    h = einsum("s d, d f -> s f", ops.rms_norm(sample["x"], params["norm"]), params["up"])
    losses = ops.cross_entropy(einsum("s f, v f -> s v", ops.gelu(h), params["head"]), sample["targets"])
    return losses.sum() / losses.numel()


def each(params, batch):
    return torch.func.vmap(one, in_dims=(None, 0))(params, batch)


def gradients(params, batch):
    return torch.func.vmap(torch.func.grad(one), in_dims=(None, 0))(params, batch)


def jacobian(params, batch):
    return torch.func.jacfwd(lambda norm: each({**params, "norm": norm}, batch))(params["norm"])


def hessian(params, batch):
    return torch.func.hessian(lambda norm: each({**params, "norm": norm}, batch).sum())(params["norm"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fn", [each, gradients, jacobian, hessian])
def test_transforms_on_a_mesh(fn, layout):
    params, batch = arguments()
    assert_equivalent(fn, params, batch, mesh=Mesh(dp=2, tp=2), layout=layout, axes=AXES)


def test_the_mean_of_per_sample_gradients_is_the_gradient():
    params, batch = arguments()
    whole = torch.func.grad(lambda p: each(p, batch).mean())(params)
    for name, g in gradients(params, batch).items():
        torch.testing.assert_close(g.mean(0), whole[name])
