"""What has a row a layer, in the layers' own order, meets parameters that a pipeline stores in the order of its
stages."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, tree
from fmeg.models import llama
from fmeg.testing.pipelines import alone
from fmeg.testing.verify import check, config, make_batch, make_params

HOW = [
    ("1f1b", 2, dict(layers=4)),
    ("interleaved_1f1b", 2, dict(layers=4)),
    ("zb_v", 2, dict(layers=4)),
    ("1f1b", 3, dict(layers=7, stages=(4, 1, 2))),
    ("zb_v", 2, dict(layers=7, stages=(1, 3, 2, 1))),
]


@pytest.mark.parametrize(("schedule", "pp", "changes"), HOW)
def test_a_rate_for_each_layer(schedule, pp, changes):
    """Rates that the step makes, that come as an input, and that are computed from the parameters of all layers."""
    stages, n = changes.get("stages", "even"), changes["layers"]
    cfg = config()
    cfg = type(cfg)(**{**cfg.__dict__, "layers": n})
    params, batch = make_params(cfg), make_batch(cfg)
    given = torch.linspace(1, 2, n, dtype=torch.float64)

    def step(params, batch, given):
        grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=4, schedule=schedule, stages=stages)
        _, grads = grad(params, batch)
        made = torch.arange(n, dtype=torch.float64) + 1
        scaled = lambda g, by: g * by.reshape(-1, *[1] * (g.ndim - 1))
        layers = tree.map(lambda g: scaled(g, made) - scaled(g, given), grads["layers"])
        return layers, grads["layers"]["norm1"] + given[:, None]

    axes = {"params": llama.logical_axes(cfg), "given": "_"}
    got = fmeg.jit(step, mesh=Mesh(pp=pp), layout=Layout(layers="pp"), axes=axes, strict=True)(params, batch, given)
    want = step(params, batch, given)
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a.global_value(), b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("schedule", "pp", "changes"), HOW)
def test_counts_of_experts_move_the_biases_of_their_own_layers(schedule, pp, changes):
    row = check(alone(schedule, pp, 4, **changes), config("tricky-moe"), steps=2)
    assert row.ok and not row.error, row
