"""ZeRO-2: the sum of gradients between microbatches is a shard, by one line of the layout; pipelines included."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, tree
from fmeg.models import llama

CONFIG = llama.Config(
    vocab_size=16, embed=16, layers=4, heads=4, kv_heads=2, head_dim=4, ff=32, vocab_multiple=8, dtype=torch.float64
)
TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp", res_seq="tp")


def step(schedule=None):
    loss = lambda p, b: llama.loss(p, b, CONFIG)
    return lambda params, batch: fmeg.value_and_grad(loss, microbatches=2, schedule=schedule)(params, batch)


def data():
    tokens = torch.randint(0, 16, (8, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(8, 8, dtype=torch.float64)}
    return llama.init(fmeg.random.key(0), CONFIG), batch


def jitted(mesh, schedule=None, **layout):
    axes = {"params": llama.logical_axes(CONFIG)}
    return fmeg.jit(step(schedule), mesh=mesh, layout=Layout(batch="dp", **layout), axes=axes, strict=True)


@pytest.mark.parametrize(
    ("mesh", "schedule", "layout"),
    [(Mesh(dp=2), None, {}), (Mesh(dp=2, tp=2), None, TP), (Mesh(pp=2, dp=2), "zb_h1", dict(layers="pp"))],
)
def test_equals_one_device(mesh, schedule, layout):
    params, batch = data()
    _, want = step()(params, batch)
    _, got = jitted(mesh, schedule, grads=dict(embed="dp"), **layout)(params, batch)
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert "dp" in {axis for d in a.spec for axis in d}
        assert (a.global_value() - b).abs().max() <= 1e-12 * b.abs().max()


def test_every_microbatch_is_reduce_scattered_and_nothing_is_left_for_the_step():
    params, batch = data()
    zero2 = jitted(Mesh(dp=2), grads=dict(embed="dp")).lower(params, batch).explain()
    zero1 = jitted(Mesh(dp=2), opt=dict(embed="dp")).lower(params, batch).explain()
    leaves = len(tree.leaves(params))
    assert zero2.counts(segment="microbatch", kind="reduce_scatter") == {"reduce_scatter": leaves}
    assert zero2.counts(segment="step", kind="reduce_scatter") == {}
    assert zero1.counts(segment="microbatch", kind="reduce_scatter") == {}
    assert zero1.counts(segment="step", kind="reduce_scatter") == {"reduce_scatter": 1}
