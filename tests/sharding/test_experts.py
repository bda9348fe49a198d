"""Experts on a mesh, by layout alone: value and every gradient equal one device."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fmeg import Layout, Mesh, jit, ops, remat, save_names, shard, value_and_grad
from fmeg.program.errors import ShardingError
from fmeg.program.structured import walk
from fmeg.testing import assert_equivalent
from tests.ops.experts import AXES, BATCH_AXES, layer, loss, problem, step

KINDS = ("all_to_all", "all_gather")
LAYOUTS = {
    "ep": (dict(ep=2), dict(experts="ep")),
    "dp": (dict(dp=4), dict(batch="dp")),
    "ep=dp": (dict(dp=2), dict(batch="dp", experts="dp")),
    "ep=4": (dict(dp=4), dict(batch="dp", experts="dp")),
    "dp, ep=cp": (dict(dp=2, cp=2), dict(batch="dp", seq="cp", experts="cp")),
    "ep=dp+cp": (dict(dp=2, cp=2), dict(batch="dp", seq="cp", experts=("dp", "cp"))),
    "ep=cp+dp": (dict(dp=2, cp=2), dict(batch="dp", seq="cp", experts=("cp", "dp"))),
    "ep=dp+tp, tokens whole over tp": (dict(dp=2, tp=2), dict(batch="dp", experts=("dp", "tp"))),
    "ep=tp+dp, tokens whole over tp": (dict(dp=2, tp=2), dict(batch="dp", experts=("tp", "dp"))),
    "ep=dp, etp": (dict(dp=2, tp=2), dict(batch="dp", experts="dp", expert_ff="tp")),
    "ep=dp, etp, sp": (dict(dp=2, tp=2), dict(batch="dp", seq="tp", experts="dp", expert_ff="tp")),
    "etp, sp": (dict(tp=2), dict(seq="tp", expert_ff="tp")),
    "ep=dp+sp": (dict(dp=2, tp=2), dict(batch="dp", seq="tp", experts=("dp", "tp"))),
    "folded, three axes": (dict(dp=2, cp=2, tp=2), dict(batch="dp", seq="cp", experts=("tp", "cp"))),
}
ROUTINGS = ("random", "skewed", "empty", "one expert", "in order")


def _check(mesh, layout, shape, weighted="combine", backend="loop", fn=step, **more):
    params, batch = problem(**shape)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    mesh = Mesh(mesh, backend=backend)

    def run(params, batch):
        return fn(params, batch, weighted)

    return assert_equivalent(run, params, batch, mesh=mesh, layout=Layout(**layout, **more), axes=axes, strict=True)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "weighted"), [("all_to_all", "combine"), ("all_to_all", "rows"), ("all_gather", "combine")]
)
def test_layouts(name, kind, weighted):
    _check(*LAYOUTS[name], dict(layers=2, drop=weighted == "rows"), weighted, dispatch=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("name", ["ep=4", "ep=cp+dp", "ep=dp, etp, sp"])
def test_unbalanced(name, routing, kind):
    _check(*LAYOUTS[name], dict(routing=routing, k=1 if routing in ("one expert", "in order") else 2), dispatch=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ep=dp+cp", "ep=dp+tp, tokens whole over tp", "ep=dp, etp"])
@pytest.mark.parametrize("backend", ["vmap"])
def test_vmap(name, backend, kind):
    """Shapes may not depend on data there: each rank has room for all rows that may come."""
    _check(*LAYOUTS[name], dict(routing="skewed", drop=True), backend=backend, dispatch=kind)


@pytest.mark.parametrize(
    "shape",
    [dict(k=4), dict(batch=2, seq=2, k=1), dict(experts=16, k=3), dict(experts=12, batch=2, seq=2, drop=True)],
    ids=str,
)
def test_sizes(shape):
    for kind in KINDS:
        _check(*LAYOUTS["ep=dp+cp"], shape, dispatch=kind)


def test_one_token():
    _check(dict(ep=4), dict(experts="ep"), dict(batch=1, seq=1, experts=8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("view", ["params", "opt"])
def test_zero(view, kind):
    """ZeRO-3 and gradients that go straight to the optimizer's placement: embed over an axis that shards no expert."""
    layout = dict(batch="dp", seq="cp", experts="cp", dispatch=kind)
    params, batch = problem(layers=2)
    weights = {k: v for k, v in params.items() if k != "x"}

    def run(params, batch):
        return value_and_grad(lambda p, b: loss({**p, "x": b["x"]}, b))(params, batch)

    axes = {"params": {k: AXES[k] for k in weights}, "batch": {k: {**BATCH_AXES, **AXES}[k] for k in [*batch, "x"]}}
    assert_equivalent(
        run,
        weights,
        {**batch, "x": params["x"]},
        mesh=Mesh(dp=2, cp=2),
        layout=Layout(**layout, **{view: dict(embed="dp")}),
        axes=axes,
        strict=True,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["ep", "ep=cp+dp", "ep=dp, etp, sp", "folded, three axes"])
def test_bound(name, kind):
    """With room for whatever may come, sizes are static and nothing else changes."""
    mesh, layout = LAYOUTS[name]
    bound = float(torch.tensor(list(mesh.values())).prod())
    for backend, routing in (("loop", "skewed"), ("vmap", "empty")):
        shape = dict(layers=2, drop=True, routing=routing)
        _check(mesh, layout, shape, "rows", backend, dispatch=kind, dispatch_bound=bound)
    lowered = _lowered(mesh, {**layout, "dispatch": kind, "dispatch_bound": bound})
    assert not any(n.opname in ("to_host", "exchange_rows") for n, _, _ in walk(lowered.program))


@pytest.mark.parametrize("name", ["ep=dp+cp", "ep", "ep=dp+tp, tokens whole over tp"])
def test_rows_beyond_the_bound(name):
    """Do not go unnoticed; and a bound that just fits is enough."""
    mesh, layout = LAYOUTS[name]
    params, batch = problem(routing="one expert", k=1)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}

    def run(bound):
        fn = jit(step, mesh=Mesh(mesh), layout=Layout(**layout, dispatch_bound=bound), axes=axes)
        return fn(params, batch)[0][0].global_value()

    most = float(torch.tensor([mesh[a] for a in _axes(layout["experts"])]).prod())
    assert run(most).isfinite()
    assert run(most - 0.6).isnan()


def _axes(entry):
    return (entry,) if isinstance(entry, str) else entry


def _lowered(mesh, layout, fn=step, **shape):
    params, batch = problem(**shape)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    return jit(fn, mesh=Mesh(mesh), layout=Layout(**layout), axes=axes, strict=True).lower(params, batch)


def _moves(lowered):
    """Collectives of one layer, by kind and phase, of tensors as wide as embed."""
    found = Counter()
    for node, _, path in walk(lowered.program):
        if type(node.op).__name__ == "Collective" and path and node.outs[0].shape[-1:] == (6,):
            found[node.op.name, node.phase] += 1
    return found


def test_two_wide_exchanges_each_way():
    """In a layer: tokens there and back, and their cotangents; weights there, their cotangents back; choices gathered
    once, one read of sizes by the host."""
    mesh, layout = LAYOUTS["ep=dp"]
    lowered = _lowered(mesh, layout, layers=3)
    assert {k: n for k, n in _moves(lowered).items() if k[0] == "exchange_rows"} == {
        ("exchange_rows", "F"): 2,
        ("exchange_rows", "B"): 2,
    }
    nodes = [n for n, _, _ in walk(lowered.program)]
    assert sum(n.opname == "to_host" for n in nodes) == 1
    assert [sum(n.opname == name for n in nodes) for name in ("depart", "arrive", "sort_slots")] == [1, 1, 0]
    rows = lowered.explain().select(kind="exchange_rows")
    assert sum(r.count for r in rows.rows) == 6 * 3 and all(r.owed for r in rows.rows)


def test_gathered_tokens():
    mesh, layout = LAYOUTS["ep=dp"]
    got = _moves(_lowered(mesh, {**layout, "dispatch": "all_gather"}, layers=3))
    assert got["all_gather", "F"] == got["reduce_scatter", "F"] == 1
    assert got["all_gather", "B"] == got["reduce_scatter", "B"] == 1


def test_recomputed():
    """A whole layer done again does its exchanges again, but not the sorting and the read by the host."""

    def fn(params, batch):
        def again(p, x, b, weighted):
            return remat(lambda p, x, b: layer(p, x, b, weighted))(p, x, b)

        return value_and_grad(lambda p, b: loss(p, b, "combine", again))(params, batch)

    mesh, layout = LAYOUTS["ep=dp+cp"]
    lowered = _lowered(mesh, layout, fn, layers=2)
    nodes = [n for n, _, _ in walk(lowered.program)]
    assert all(sum(n.opname == name for n in nodes) == 1 for name in ("to_host", "depart", "arrive"))
    assert sum(n.opname == "exchange_rows" and not n.args[1] for n in nodes) == 2
    _check(mesh, layout, dict(layers=2), fn=lambda p, b, _: fn(p, b))


def test_gradients_of_experts_stay():
    """With the experts on every axis that shards tokens, nothing is left to add up over the mesh."""
    mesh, layout = LAYOUTS["ep=dp+cp"]
    lowered = _lowered(mesh, layout)
    moved = [r.values for r in lowered.explain().rows if r.kind in ("all_reduce", "reduce_scatter")]
    assert not any("4@dp+cp" in v for values in moved for v in values)


# -- what is refused --------------------------------------------------------------------------------------------------
def _refused(fn, match, **layout):
    params, batch = problem()
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    with pytest.raises(ShardingError, match=match):
        jit(fn, mesh=Mesh(dp=2), layout=Layout(**{"batch": "dp", "experts": "dp", **layout}), axes=axes).lower(
            params, batch
        )


def _rows(params, batch):
    return ops.dispatch(params["x"], batch["indices"], experts=4)


def test_rows_may_not_be_cut_or_moved():
    def sliced(params, batch):
        rows, routing = _rows(params, batch)
        return ops.combine(rows[:, :3], routing)

    def sized(params, batch):
        rows, routing = _rows(params, batch)
        return ops.combine(rows * torch.ones(rows.shape[0], 1, dtype=rows.dtype), routing)

    def moved(params, batch):
        rows, routing = _rows(params, batch)
        return ops.combine(shard(rows, (None, None)), routing)

    def mixed(params, batch):
        rows, routing = _rows(params, batch)
        others, _ = ops.dispatch(params["x"], batch["indices"].flip(-1), experts=4)
        return ops.combine(rows + others, routing)

    _refused(sliced, "as many as the routing says")
    _refused(sized, "as many as the routing says")
    _refused(mixed, "rows of one routing")
    _refused(moved, "rows sorted by expert .* would have to move")
    _refused(lambda params, batch: _rows(params, batch)[0], "would have to move")


def test_routing_is_opaque():
    _refused(lambda params, batch: _rows(params, batch)[1].ends.sum(), "routing made at .* is read by something else")


def test_rows_stay_with_their_routing():
    def unnamed(params, batch):
        rows, routing = ops.dispatch(params["x"], batch["indices"], experts=4, axes=("else", "expert_ff"))
        return ops.combine(ops.grouped_matmul(rows, params["w_gate"][0], routing), routing)

    def swapped(params, batch):
        rows, _ = _rows(params, batch)
        elsewhere = ops.route(shard(batch["indices"], (None, None, None)), 4, axes=("other", "expert_ff"))
        return ops.combine(rows, elsewhere)

    _refused(unnamed, "have their experts on .* but the routing")
    _refused(swapped, "Rows are for the routing that they came with")


def test_axes_that_do_not_fit():
    def inner(params, batch):
        rows, routing = ops.dispatch(params["x"], batch["indices"], experts=4, axes=("experts", "nothing"))
        return ops.combine(ops.grouped_matmul(rows, params["w_gate"][0], routing), routing)

    _refused(inner, "which shard the tokens too", experts=(), expert_ff="dp")
    with pytest.raises(ShardingError, match="dispatch must be one of"):
        Layout(dispatch="ring")
    with pytest.raises(ShardingError, match="dispatch_bound must be above 0"):
        Layout(dispatch_bound=0)


def test_rows_that_do_not_divide():
    params, batch = problem(batch=2, seq=1, experts=2, k=1)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    with pytest.raises(ShardingError, match="2 rows .* 4 ranks"):
        jit(step, mesh=Mesh(dp=2, ep=2), layout=Layout(batch="dp", experts="ep"), axes=axes).lower(params, batch)


def test_names_are_kept():
    """A region that keeps only what is named keeps rows by name, exchange included."""

    def named(p, x, b, weighted):
        def f(p, x, b):
            return layer(p, x, b, weighted)

        return remat(f, policy=save_names("nothing"))(p, x, b)

    def fn(params, batch, weighted="combine"):
        return value_and_grad(lambda p, b: loss(p, b, weighted, named))(params, batch)

    _check(*LAYOUTS["ep=dp"], dict(layers=2), fn=fn)
