"""Initial values and dropout belong to a key and a global index: every mesh draws the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fmeg import Layout, Mesh, jit, random, tree, value_and_grad
from fmeg.models import gpt2, llama, presets
from fmeg.testing import assert_equivalent
from fmeg.testing.verify import make_batch, shrink
from tests.equivalence.support import CFG, EVERYTHING, HSDP, ONE, SEQUENCE, TENSOR, TP, ZERO3, each

LAYERS = (Mesh(dp=2, tp=2, pp=2), Layout(layers="pp", **TP, params=dict(embed="dp")))


@each(one=ONE, tensor=TENSOR, zero3=ZERO3, hsdp=HSDP, layers=LAYERS, all=EVERYTHING)
def test_initial_values_have_the_bits_of_one_device(mesh, layout):
    """Made in place, each block where it rests."""
    init = lambda key: llama.init(key, CFG)
    key = random.key(7)
    made = jit(init, mesh=mesh, layout=layout, out_axes=llama.logical_axes(CFG))(key)
    for path, a, b in zip(tree.paths(made), tree.leaves(made), tree.leaves(init(key)), strict=True):
        assert torch.equal(a.global_value(), b), path
    rest = layout.view("params")
    assert made["layers"]["wq"].spec == tuple(rest.get(n, ()) for n in ("layers", "embed", "heads", "head_dim"))


GPT2 = shrink(presets.get("gpt2"))


def dropped(rate):
    def step(params, batch, key):

        cfg = replace(GPT2, dropout=rate)
        return value_and_grad(lambda p, b, k: gpt2.loss(p, b, cfg, k))(params, batch, key)

    return step


@each(one=ONE, tensor=TENSOR, sequence=SEQUENCE, zero3=ZERO3, hsdp=HSDP, all=EVERYTHING)
def test_dropout_drops_the_same_elements(mesh, layout):
    params, batch, key = gpt2.init(random.key(0), GPT2), make_batch(GPT2), random.key(3)
    view = {k: v for k, v in layout.compute if k != "kv_heads"}
    layout = Layout(params=dict(layout.params), attention=layout.attention, **view)
    axes = {"params": gpt2.logical_axes(GPT2)}
    assert_equivalent(dropped(0.2), params, batch, key, mesh=mesh, layout=layout, axes=axes, tol=1e-12)
    (with_dropout, _), _ = dropped(0.2)(params, batch, key)
    (without, _), _ = dropped(0.0)(params, batch, key)
    assert abs(float(with_dropout - without)) > 1e-3


@pytest.mark.parametrize("draw", ["uniform", "normal", "truncated_normal"])
def test_draws_inside_a_step(draw):
    """A draw added to a sharded value is made at its local size, with the global draw's bits."""

    def noisy(batch, key):
        return batch + getattr(random, draw)(key, batch.shape, dtype=batch.dtype)

    batch, key = torch.zeros(8, 16, dtype=torch.float64), random.key(1)
    got = jit(noisy, mesh=Mesh(dp=2, cp=2), layout=Layout(batch="dp", seq="cp"))(batch, key)
    assert torch.equal(got.global_value(), noisy(batch, key))
