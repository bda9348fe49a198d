"""Overrides that put several dimensions of a tensor on one mesh axis: the first that it divides is sharded."""

from dataclasses import replace

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, optim, tree
from fmeg.models import llama
from fmeg.program.errors import ShardingError
from fmeg.testing import pipelines, verify
from fmeg.testing.matrix import Case

ALL = dict.fromkeys(("embed", "heads", "ff", "vocab"), "dp")


def specs(layout, mesh, **changes):
    cfg = llama.Config(**{**dict(vocab_size=32, embed=16, layers=2, heads=4, kv_heads=2, head_dim=4, ff=24), **changes})
    axes = llama.logical_axes(cfg)
    init = fmeg.jit(lambda key: llama.init(key, cfg), mesh=mesh, layout=layout, out_axes=axes)
    params = init(fmeg.random.key(0))
    names = tree.map(lambda p: p.axes.split(), llama.parameters(cfg), is_leaf=lambda x: hasattr(x, "axes"))
    pairs = zip(tree.leaves(params), tree.leaves(names, is_leaf=lambda x: isinstance(x, list)), strict=True)
    return [[n for n, s in zip(ns, x.spec, strict=True) if s == ("dp",)] for x, ns in pairs]


def test_each_parameter_is_sharded_once_outermost_first():
    found = specs(Layout(batch="dp", params=ALL), Mesh(dp=2))
    assert all(len(names) == 1 for names in found)
    assert {n for names in found for n in names} == {"embed", "heads", "ff", "vocab"}
    assert all("embed" in names for names in specs(Layout(batch="dp", params=dict(embed="dp")), Mesh(dp=2)))


def test_a_dimension_that_does_not_divide_is_passed_over():
    found = specs(Layout(batch="dp", params=ALL), Mesh(dp=4), ff=25, heads=6, kv_heads=2)
    assert {n for names in found for n in names} == {"embed", "vocab"}
    with pytest.raises(ShardingError, match="does not evenly divide 15"):
        specs(Layout(batch="dp", params=ALL), Mesh(dp=4), ff=25, heads=6, embed=15, vocab_size=32)


def test_the_compute_view_still_refuses_two_dimensions_on_an_axis():
    with pytest.raises(ShardingError, match="two dimensions"):
        specs(Layout(batch="dp", embed="dp", ff="dp"), Mesh(dp=2))
    with pytest.raises(ShardingError, match="two dimensions"):
        specs(Layout(ff="dp", params=dict(embed="dp")), Mesh(dp=2))


@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (dict(dp=2), Layout(batch="dp", params=ALL)),
        (dict(dp=4), Layout(batch="dp", opt=ALL)),
        (dict(dp=2), Layout(batch="dp", grads=ALL)),
        (dict(dp=2, tp=2), Layout(batch="dp", heads="tp", kv_heads="tp", ff="tp", vocab="tp", res_seq="tp",
                                  params=dict(embed="dp", heads=("tp", "dp"), ff=("tp", "dp")))),
    ],
    ids=["zero3", "zero1", "zero2", "with tp"],
)  # fmt: skip
def test_two_steps_equal_one_device(mesh, layout):
    cfg, keep = verify.config(verify.DEFAULT), verify.optimizer_under_test()
    state, batch = verify.make_state(cfg, keep), verify.make_batch(cfg)
    micro = 2 if layout.grads else 1
    step = verify.make_step(cfg, keep, micro)
    want = verify.run_steps(step, state, batch, 2)
    got = verify.run_steps(fmeg.jit(step, mesh=Mesh(mesh), layout=layout), state, batch, 2)
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        g = g.global_value() if isinstance(g, fmeg.Array) else torch.as_tensor(g)
        assert torch.allclose(g, torch.as_tensor(w), rtol=1e-12, atol=1e-14)


ON_STAGES = dict.fromkeys(("layers", "vocab", "embed", "ff"), "pp")


@pytest.mark.parametrize("layout", [Layout(layers="pp", **{view: ON_STAGES}) for view in ("params", "grads", "opt")])
def test_layers_stored_unevenly_are_the_first_dimension(layout):
    """Three layers on two stages: the pipeline stores them as two and two."""
    case = pipelines.alone("1f1b", 2, 2, layers=3, rows=4)
    row = verify.check(replace(case, layout=layout), verify.config(verify.DEFAULT), steps=1)
    assert row.ok, row.error


def test_layers_of_a_pipeline_rest_on_its_axis():
    case = pipelines.over(
        Case("dp", Mesh(dp=2), Layout(batch="dp", params=dict(layers=("pp", "dp"), embed="dp"))), 2, "1f1b", 4
    )
    row = verify.check(case, verify.config(verify.DEFAULT), steps=1)
    assert "'layers' on ('pp',), and at rest on ('pp', 'dp')" in row.error


def test_axes_of_size_one_shard_nothing():
    found = specs(Layout(batch="dp", params=dict(embed="dp", ff=("tp", "dp"), vocab=("tp", "dp"))), Mesh(dp=2, tp=1))
    assert {n for names in found for n in names} == {"embed", "ff", "vocab"}
    assert not any(specs(Layout(batch="dp", params=ALL), Mesh(dp=1)))


@pytest.mark.parametrize("view", ["params", "opt"])
def test_factored_moments_lie_as_their_parameter_does(view):
    """So that nothing else moves than where one dimension alone is sharded; a vector of columns alone would be cut."""
    cfg, opt = verify.config(verify.DEFAULT), optim.adafactor(1e-2, min_dim=4)
    state = fmeg.TrainState.create(verify.make_params(cfg), opt, llama.logical_axes(cfg))
    step, batch = verify.make_step(cfg, opt), verify.make_batch(cfg)
    run = fmeg.jit(step, mesh=Mesh(dp=2), layout=Layout(batch="dp", **{view: ALL}), strict=True)
    assert run.lower(state, batch).explain().executed()["all_gather"] == (7 if view == "params" else 1)
    want, got = step(state, batch)[0], run(state, batch)[0]
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.allclose(g.global_value(), w, rtol=1e-10, atol=1e-13)
    row, col = (m["layers"]["w_up"] for m in (got.opt.v_row, got.opt.v_col))
    up = got.params["layers"]["w_up"] if view == "params" else got.opt.v_row["layers"]["w_up"]
    assert [x.spec for x in (row, col)] == [((), ("dp",), ()), ((), (), ())] and up.spec[1:] == (("dp",), ())
