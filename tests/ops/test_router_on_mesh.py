"""The router on virtual meshes: every result and gradient equals one device, and costs a few small collectives."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmeg import Layout, Mesh, jit, ops, random, scan, tree, value_and_grad
from fmeg.ops import Router, loss_counts, router, update_bias
from fmeg.testing import assert_equivalent
from fmeg.testing.strategies import meshes
from tests.ops.checks import F64, ints, rand

B, S, D, E, L = 4, 8, 8, 8, 3
EVERY_LOSS = dict(sequence_loss=0.1, batch_loss=0.2, running_loss=0.3, z_loss=0.4)
CONFIGS = {
    "softmax": Router(2, **EVERY_LOSS),
    "mixtral": Router(2, "softmax_of_top_k", counted="chosen", **EVERY_LOSS),
    "deepseek_v2": Router(3, scale=16.0, groups=4, top_groups=2, **EVERY_LOSS),
    "deepseek_v3": Router(
        2, "sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2sum", **EVERY_LOSS
    ),
    "drop by weight": Router(2, "sqrt_softplus", capacity_factor=0.75, jitter=0.1, **EVERY_LOSS),
    "drop by position": Router(2, "softmax_of_top_k", capacity_factor=0.75, drop="position", **EVERY_LOSS),
    "sinkhorn": Router(2, "sigmoid", select="sinkhorn", **EVERY_LOSS),
    "balanced": Router(2, select="balanced", counted="chosen", **EVERY_LOSS),
    "all experts": Router(E, renormalize=True, capacity_factor=0.5, drop="position", **EVERY_LOSS),
}
LAYOUTS = [
    dict(batch=("x", "y")),
    dict(batch="x", seq="y"),
    dict(seq=("y", "x")),
    dict(batch="x", seq="y", experts=("x", "y")),
    dict(seq="x", width="y", experts="x"),
]


def _data() -> tuple:
    params = {"w": rand(D, E), "x": rand(B, S, D, seed=1)}
    batch = {"ct": rand(B, S, E, seed=2), "mask": rand(B, S, seed=3) > -0.6}
    rest = {"bias": 0.1 * rand(E, seed=4), "running": ints(9, E), "key": random.key(3)}
    return params, batch, rest


AXES = {
    "params": {"w": "width experts", "x": "batch seq width"},
    "batch": {"ct": "batch seq _", "mask": "batch seq"},
    "rest": {"bias": "experts", "running": "experts", "key": "_"},
}


def _step(cfg, microbatches=1, masked=True):
    """Loss, gradients by tokens and router, the next bias, and what the router gives for the whole batch."""

    def call(p, batch, rest):
        mask = batch["mask"] if masked else None
        more = dict(bias=rest["bias"], running=rest["running"], key=rest["key"])
        return router(batch.get("x", p.get("x")), p["w"], cfg, mask=mask, **more)

    def loss(p, batch, rest):
        r, n = call(p, batch, rest), loss_counts(batch["ct"], cfg, batch["mask"] if masked else None)
        pairs = [((r.weights * batch["ct"][..., : cfg.top_k]).sum(), batch["ct"].shape[0] * S)]
        return [*pairs, *((r.losses[name], n[name]) for name in n)], {"counts": r.counts, **r.losses}

    def step(params, batch, rest):
        (value, aux), grads = value_and_grad(loss, microbatches=microbatches)(params, batch, rest)
        out = call(params, batch, rest) if microbatches == 1 else ()
        return value, aux, grads, out, update_bias(rest["bias"], aux["counts"])

    return step


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_one_device(name, layout):
    """Strictly: nothing moves that was not asked for, but a sum over a sharded width."""
    masked = name != "softmax"
    strict = "width" not in layout
    step = _step(CONFIGS[name], masked=masked)
    assert_equivalent(step, *_data(), mesh=Mesh(x=2, y=2), layout=Layout(**layout), axes=AXES, strict=strict)


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "drop by position"])
def test_microbatches(name):
    """Microbatches are those of the global batch: so are their counts, queues and losses."""
    params, batch, rest = _data()
    batch["x"] = params.pop("x")
    axes = AXES | {"params": {"w": "width experts"}, "batch": AXES["batch"] | {"x": "batch seq width"}}
    for layout in ({"batch": "x", "seq": "y"}, {"batch": "y", "opt": {"width": "x"}}):
        step = _step(CONFIGS[name], microbatches=2)
        mesh = Mesh(x=2, y=2)
        assert_equivalent(step, params, batch, rest, mesh=mesh, layout=Layout(**layout), axes=axes, strict=True)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(meshes(8, ("a", "b", "c")), st.sampled_from(sorted(CONFIGS)), st.data())
def test_any_layout(mesh, name, data):
    where = {axis: data.draw(st.sampled_from(["batch", "seq", "experts", None])) for axis in mesh.axes}
    names = ("batch", "seq", "experts")
    layout = {n: tuple(a for a in mesh.axes if where[a] == n) for n in names}
    sizes = dict(batch=12, seq=12, experts=12)
    layout = {n: axes for n, axes in layout.items() if sizes[n] % mesh.axis_size(axes) == 0}
    params = {"w": rand(D, 12), "x": rand(12, 12, D, seed=1)}
    batch = {"ct": rand(12, 12, 12, seed=2), "mask": rand(12, 12, seed=3) > -0.6}
    rest = {"bias": 0.1 * rand(12, seed=4), "running": ints(9, 12), "key": random.key(3)}
    cfg = replace(CONFIGS[name], top_k=3)
    assert_equivalent(_step(cfg), params, batch, rest, mesh=mesh, layout=Layout(**layout), axes=AXES, strict=True)


def test_the_gradient_of_the_batch_loss_does_not_shrink_with_ranks():
    """Counts of all ranks and probabilities of one, averaged over ranks, would give 1/ranks of it."""
    params, batch, rest = _data()
    step = _step(Router(2, batch_loss=1.0), masked=False)
    batch["ct"] = torch.zeros_like(batch["ct"])
    want = step(params, batch, rest)[2]["w"]
    assert want.abs().max() > 1e-3
    for n in (2, 4):
        for layout in ({"batch": "dp"}, {"seq": "dp"}):
            got = jit(step, mesh=Mesh(dp=n), layout=Layout(**layout), axes=AXES)(params, batch, rest)[2]["w"]
            torch.testing.assert_close(got.global_value(), want, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("sizes", [(4, 1, 8, 1), (1, 4, 8, 8), (4, 4, 1, 1), (1, 1, 3, 2)], ids=str)
def test_small_sizes(sizes):
    """One expert, one sequence, sequences of one token, one token."""
    b, s, e, k = sizes
    params = {"w": rand(D, e), "x": rand(b, s, D, seed=1)}
    batch = {"ct": rand(b, s, k, seed=2), "mask": torch.ones(b, s, dtype=torch.bool)}
    rest = {"bias": 0.1 * rand(e, seed=4), "running": ints(9, e), "key": random.key(3)}
    layout = Layout(batch="x" if b > 1 else (), seq="y" if s > 1 else ())
    for drop in ("weight", "position"):
        cfg = Router(k, "sigmoid", renormalize=True, capacity_factor=0.75, drop=drop, **EVERY_LOSS)
        assert_equivalent(_step(cfg), params, batch, rest, mesh=Mesh(x=2, y=2), layout=layout, axes=AXES, strict=True)


def test_ties_do_not_depend_on_the_layout():
    """Logits are small whole numbers, so many are equal; queues are longer than the capacity."""
    params = {"w": torch.eye(E, dtype=F64), "x": ints(3, B, S, E).to(F64)}
    _, batch, rest = _data()
    rest["bias"] = torch.zeros(E, dtype=F64)
    for drop in ("weight", "position"):
        cfg = Router(3, "sigmoid", capacity_factor=0.75, drop=drop, groups=2, top_groups=2)
        for layout in LAYOUTS[:4]:
            assert_equivalent(_step(cfg), params, batch, rest, mesh=Mesh(x=2, y=2), layout=Layout(**layout), axes=AXES)


def test_replay_of_a_recorded_routing():
    """Indices recorded on one mesh, replayed on another with other weights."""
    params, batch, _ = _data()
    cfg = Router(2, "sigmoid", renormalize=True, batch_loss=0.1)
    axes = {"params": AXES["params"]}
    record = lambda params: router(params["x"], params["w"], cfg).experts
    record = jit(record, mesh=Mesh(x=4), layout=Layout(batch="x"), axes=axes)
    batch["experts"] = record(params).global_value()
    assert torch.equal(batch["experts"], router(params["x"], params["w"], cfg).experts)

    def step(params, batch):
        def loss(p, batch):
            r = router(p["x"], p["w"], cfg, replay=batch["experts"])
            return [((r.weights * batch["ct"][..., :2]).sum(), 1), (r.losses["batch"], B * S)], {"counts": r.counts}

        return value_and_grad(loss)(params, batch)

    axes["batch"] = AXES["batch"] | {"experts": "batch seq _"}
    params["w"] = params["w"] + rand(D, E, seed=8)
    for layout in LAYOUTS[:4]:
        assert_equivalent(step, params, batch, mesh=Mesh(x=2, y=2), layout=Layout(**layout), axes=axes, strict=True)


def test_layers_in_a_scan():
    """Losses added over layers, counts stacked, biases of all layers updated."""
    cfg = Router(2, "sigmoid", renormalize=True, capacity_factor=1.0, drop="position", **EVERY_LOSS)
    params = {"w": rand(L, D, E), "v": rand(L, D, D, seed=1) / 3}
    batch = {"x": rand(B, S, D, seed=2), "mask": rand(B, S, seed=3) > -0.6}
    bias = 0.1 * rand(L, E, seed=4)

    def loss(p, batch, bias):
        def layer(x, layer):
            r = router(x, layer["w"], cfg, bias=layer["bias"], mask=batch["mask"])
            y = ops.einsum("b s d, d f -> b s f", x, layer["v"])
            return x + y * r.weights.sum(-1, keepdim=True), (r.losses, r.counts)

        x, (losses, counts) = scan(layer, batch["x"], {**p, "bias": bias})
        n = loss_counts(batch["x"], cfg, batch["mask"])
        return [((x * x).sum(), B * S), *((losses[name].sum(), n[name]) for name in n)], {"counts": counts}

    def step(params, batch, bias):
        (value, aux), grads = value_and_grad(loss, microbatches=2)(params, batch, bias)
        return value, grads, aux, update_bias(bias, aux["counts"])

    axes = {"params": {"w": "layers embed experts", "v": "layers embed ff"}}
    axes |= {"batch": {"x": "batch seq width", "mask": "batch seq"}, "bias": "layers experts"}
    for layout in (
        {"batch": "x", "seq": "y"},
        {"batch": "x", "params": {"embed": "x"}, "opt": {"embed": "x"}},
        {"batch": "x", "seq": "y", "experts": ("y", "x")},
    ):
        mesh = Mesh(x=2, y=2)
        assert_equivalent(step, params, batch, bias, mesh=mesh, layout=Layout(**layout), axes=axes, strict=True)


def test_a_pipeline():
    """What layers add up goes along in the carry, counts at the layer's own row."""
    cfg = Router(2, "sigmoid", renormalize=True, capacity_factor=1.0, drop="position", **EVERY_LOSS)
    params = {"w": rand(4, D, E), "v": rand(4, D, D, seed=1) / 3}
    batch = {"x": rand(B, S, D, seed=2), "mask": rand(B, S, seed=3) > -0.6}
    bias = 0.1 * rand(4, E, seed=4)

    def loss(p, batch, bias):
        def layer(carry, layer):
            x, losses, counts = carry
            r = router(x, layer["w"], cfg, bias=layer["bias"], mask=batch["mask"])
            y = ops.einsum("b s d, d f -> b s f", x, layer["v"])
            mine = torch.arange(4).unsqueeze(-1) == layer["i"]
            carry = {name: losses[name] + r.losses[name] for name in losses}, counts + torch.where(mine, r.counts, 0)
            return (x + y * r.weights.sum(-1, keepdim=True), *carry), None

        n = loss_counts(batch["x"], cfg, batch["mask"])
        start = batch["x"], tree.map(torch.zeros_like, n), torch.zeros(4, E, dtype=torch.int64)
        (x, losses, counts), _ = scan(layer, start, {**p, "bias": bias, "i": torch.arange(4)})
        return [((x * x).sum(), B * S), *((losses[name], n[name]) for name in n)], {"counts": counts}

    def step(params, batch, bias):
        (value, aux), grads = value_and_grad(loss, microbatches=2, schedule="1f1b")(params, batch, bias)
        return value, grads, aux, update_bias(bias, aux["counts"])

    axes = {"params": {"w": "layers embed experts", "v": "layers embed ff"}, "bias": "layers experts"}
    axes |= {"batch": {"x": "batch seq width", "mask": "batch seq"}}
    mesh, layout = Mesh(pp=2, x=2), Layout(layers="pp", batch="x")
    assert_equivalent(step, params, batch, bias, mesh=mesh, layout=layout, axes=axes, strict=True)


def _collectives(cfg, **layout) -> Counter:
    """What a step costs, but for the reduction of the router's own gradient."""
    params, batch, rest = _data()
    x = params.pop("x")

    def step(params, batch):
        def loss(p, batch):
            r, n = router(batch["x"], p["w"], cfg), loss_counts(batch["ct"], cfg)
            return [((r.weights * batch["ct"][..., :2]).sum(), 32.0), *((r.losses[k], n[k]) for k in n)]

        return value_and_grad(loss)(params, batch)[1]

    axes = {"params": {"w": "width experts"}, "batch": AXES["batch"] | {"x": "batch seq width"}}
    f = jit(step, mesh=Mesh(x=2, y=2), layout=Layout(**layout), axes=axes, strict=True)
    found: Counter = Counter()

    def walk(program):
        for n in program.nodes:
            if type(n.op).__name__ == "Collective" and n.op.name not in ("axis_index", "local_slice"):
                found[n.op.name] += "gradient" not in str(n.tags.get("reason"))
            if hasattr(n.op, "body"):
                walk(n.op.body)

    walk(f.lower(params, batch | {"x": x}).program)
    return +found


def test_collectives():
    """Selection moves nothing; a loss needs its counts, once; a queue, the counts of the shards before."""
    both = dict(batch="x", seq="y")
    assert _collectives(Router(2), **both) == {}
    assert _collectives(Router(2, z_loss=1.0), **both) == {}
    assert _collectives(Router(2, batch_loss=1.0), **both) == {"all_reduce": 1}
    assert _collectives(Router(2, batch_loss=1.0), batch=("x", "y")) == {"all_reduce": 1}
    assert _collectives(Router(2, sequence_loss=1.0), **both) == {"all_reduce": 1}
    assert _collectives(Router(2, sequence_loss=1.0), batch=("x", "y")) == {}
    position = Router(2, capacity_factor=1.0, drop="position")
    assert _collectives(position, batch=("x", "y")) == {"all_gather": 1}
    assert _collectives(position, **both) == {"all_gather": 2, "all_reduce": 1}
    assert _collectives(Router(2, capacity_factor=1.0), batch=("x", "y")) == {"all_gather": 2}
    assert _collectives(Router(2, select="sinkhorn", sinkhorn_steps=3), **both) == {"all_reduce": 3}


@pytest.mark.parametrize("name", CONFIGS)
def test_compiled_on_one_device_has_the_bits_of_eager(name):
    args = _data()
    step = _step(CONFIGS[name])
    got, want = jit(step)(*args), step(*args)
    pairs = zip(tree.leaves(got), tree.leaves(want), strict=True)
    assert all(torch.equal(a.global_value(), b) for a, b in pairs)
