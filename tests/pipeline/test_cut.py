"""What a loss function may do around its scan: equal to one device where it can be cut, refused by name where it
cannot."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, einsum, ops, scan, tree
from fmeg.pipeline import ScheduleError

G = torch.Generator().manual_seed(0)
D, L = 6, 4


def r(*shape):
    return torch.randn(*shape, generator=G, dtype=torch.float64) * 0.4


PARAMS = dict(e=r(12, D), w=r(L, D, D), u=r(L, D, D), g=r(L, D), head=r(12, D))
AXES = dict(e="v d", w="layers d d2", u="layers d d2", g="layers d", head="v d")
BATCH = dict(
    x=torch.randint(0, 12, (8, 5), generator=G),
    y=torch.randint(0, 12, (8, 5), generator=G),
    m=(torch.rand(8, 5, generator=G) > 0.3).double(),
)


def layer(x, w, u, scale=1.0):
    return x + torch.tanh(einsum("b s d, d k -> b s k", x, w + u.sin())) * scale


def plain(p, x, b):
    return scan(lambda x, wu: (layer(x, *wu), None), x, (p["w"], p["u"]))[0], {}


def carried_mask(p, x, b):
    body = lambda c, wu: ((layer(c[0], *wu, c[1]), c[1]), None)
    return scan(body, (x, b["m"].unsqueeze(-1) * 2), (p["w"], p["u"]))[0][0], {}


def carried_mask_first(p, x, b):
    body = lambda c, wu: ((c[0], layer(c[1], *wu, c[0])), None)
    return scan(body, (b["m"].unsqueeze(-1) * 2, x), (p["w"], p["u"]))[0][1], {}


def count_carry(p, x, b):
    body = lambda c, wu: ((layer(c[0], *wu), c[1] + 1), None)
    x, n = scan(body, (x, torch.zeros((), dtype=torch.int64)), (p["w"], p["u"]))[0]
    return x * n, {}


def sum_before(p, x, b):
    return plain(p, x, b)[0], {"n": (x**2).sum()}


def elementwise_outside(p, x, b):
    return scan(lambda x, wu: (layer(x, *wu), None), x, (torch.exp(p["w"]) * 0.3, p["u"].detach()))[0], {}


def in_the_carry(p, x, b):
    body = lambda c, wu: ((layer(c[0], *wu), c[1] + (wu[0] ** 2).sum()), None)
    x, penalty = scan(body, (x, torch.zeros((), dtype=torch.float64)), (p["w"], p["u"]))[0]
    return x, {"penalty": penalty}


def stacked(p, x, b):
    """What the scan stacks: as it is, elementwise, and summed in several ways."""
    body = lambda x, wu: (layer(x, *wu), {"mean": x.mean(), "by": (x * b["m"].unsqueeze(-1)).sum((0, 1))})
    x, ys = scan(body, x, (p["w"], p["u"]))
    weights = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    sums = {"sum": ys["mean"].sum(), "over": ys["by"].sum(0), "average": ys["by"].exp().mean()}
    return x + ys["by"].sum(0), {"ys": ys["mean"], "exp": torch.exp(ys["by"]) * weights, **sums}


def penalty(p, x, b):
    """Sums over stacks before and after their scan, of one that no scan has, of elementwise functions."""
    before = (p["w"] ** 2).sum() + (p["u"] * p["w"]).mean()
    x = scan(lambda x, wu: (layer(x, *wu), None), x, (p["w"], torch.exp(p["u"]) * 0.3))[0]
    last = (p["u"] * b["m"].sum()).abs().sum((0, 2))
    return x * (1 + 1e-3 * before), {"n": (p["w"].detach() ** 2).sum(), "last": last}


def one_layer(p, x, b):
    return plain(p, x, b)[0] + p["w"][0].sum(), {}


def norm(p, x, b):
    return plain(p, x, b)[0], {"n": torch.linalg.vector_norm(p["w"])}


def needed_whole(p, x, b):
    x, ys = scan(lambda x, wu: (layer(x, *wu), x), x, (p["w"], p["u"]))
    return x + einsum("l b s d -> b s d", ys), {}


def twice(p, x, b):
    return plain(p, plain(p, x, b)[0], b)[0], {}


def returned(p, x, b):
    return plain(p, x, b)[0], {"w": p["w"] * 2}


def scanned_activations(p, x, b):
    body = lambda c, wux: (layer(c + wux[2], wux[0], wux[1]), None)
    return scan(body, x, (p["w"], p["u"], torch.stack([x, 2 * x, 3 * x, x])))[0], {}


def steps(model, schedule=None):
    def loss(p, b):
        x, aux = model(p, ops.embedding(p["e"], b["x"]), b)
        losses = ops.cross_entropy(einsum("b s d, v d -> b s v", x, p["head"]), b["y"])
        return ((losses * b["m"]).sum(), b["m"].sum()), aux

    return lambda params, batch: fmeg.value_and_grad(loss, microbatches=4, schedule=schedule)(params, batch)


def on_mesh(model, schedule, mesh=None, axes=AXES, **layout):
    mesh, layout = mesh or Mesh(pp=2), Layout(layers="pp", **layout)
    return fmeg.jit(steps(model, schedule), mesh=mesh, layout=layout, axes={"params": axes})(PARAMS, BATCH)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
@pytest.mark.parametrize(
    "model",
    [
        plain,
        carried_mask,
        carried_mask_first,
        count_carry,
        sum_before,
        elementwise_outside,
        in_the_carry,
        stacked,
        penalty,
    ],
)
def test_equals_one_device(model, schedule):
    (want, want_aux), want_grads = steps(model)(PARAMS, BATCH)
    for mesh, layout in [(Mesh(pp=2), {}), (Mesh(pp=2, dp=2), dict(batch="dp", params=dict(v="dp")))]:
        (got, aux), grads = on_mesh(model, schedule, mesh, **layout)
        assert abs(float(got) - float(want)) < 1e-12
        assert all(aux[k].shape == want_aux[k].shape for k in want_aux)
        assert all((aux[k].global_value() - want_aux[k]).abs().max() < 1e-9 for k in want_aux)
        for a, b in zip(tree.leaves(grads), tree.leaves(want_grads), strict=True):
            assert a.shape == b.shape and (a.global_value() - b).abs().max() < 1e-12


@pytest.mark.parametrize("view", ["params", "opt"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_other_parameters_may_rest_along_the_pipeline(schedule, view):
    _, want = steps(plain)(PARAMS, BATCH)
    _, grads = on_mesh(plain, schedule, **{view: dict(v="pp")})
    for a, b in zip(tree.leaves(grads), tree.leaves(want), strict=True):
        assert (a.global_value() - b).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("model", "axes", "message"),
    [
        (needed_whole, AXES, r"what the scan at test_cut.py:\d+ needed_whole stacks is needed whole"),
        (norm, AXES, r"linalg_vector_norm.default at test_cut.py:\d+ norm reads the layers of several stages"),
        (twice, AXES, r"p.u is scanned at test_cut.py:\d+ plain and again at .* give each scan a stack of its own"),
        (returned, AXES, "the loss function returns a stack of layers, which lies on several stages"),
        (scanned_activations, AXES, r"the value made at test_cut.py:\d+ .* used again .* on another stage"),
        (plain, {**AXES, "g": "layers d", "w": "_ d d2", "u": "_ d d2"}, "must have a scan over the layers"),
        (one_layer, AXES, r"aten.select.int at test_cut.py:\d+ one_layer reads the layers of several stages"),
        (plain, {**AXES, "u": "_ d d2"}, "p.u is scanned .* declare `layers` as the first logical axis"),
    ],
)
def test_refused(model, axes, message):
    with pytest.raises(ScheduleError, match=message):
        on_mesh(model, "1f1b", axes=axes)
