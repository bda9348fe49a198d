"""Models with several scans over layers: dense layers, then experts, then multi-token prediction; cut anywhere."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fmeg
from fmeg import Layout, Mesh, einsum, ops, optim, scan, shard, tree
from fmeg.pipeline import SCHEDULES, ScheduleError, by_name
from fmeg.pipeline.cut import Where
from fmeg.pipeline.stages import by_cost, parse, plan
from fmeg.program.errors import ShardingError
from fmeg.sharding.spec import P

D, V, E = 8, 12, 4
NAMES = [name for name in SCHEDULES if name != "none"]
AXES = dict(
    e="vocab embed",
    dense=dict(w="layers embed ff", v="layers ff embed"),
    middle="embed",
    moe=dict(router="layers embed _", w="layers _ embed ff", v="layers _ ff embed"),
    mtp=dict(join="layers _ embed", w="layers embed ff", v="layers ff embed"),
    norm="embed",
)


def init(dense=2, moe=3, mtp=1):
    g = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64) * 0.4
    return dict(
        e=r(V, D),
        dense=dict(w=r(dense, D, 16), v=r(dense, 16, D)),
        middle=1 + r(D),
        moe=dict(router=r(moe, D, E), w=r(moe, E, D, 4), v=r(moe, E, 4, D)),
        mtp=dict(join=r(mtp, 2 * D, D), w=r(mtp, D, 16), v=r(mtp, 16, D)),
        norm=1 + r(D),
    )


def batch(rows=8):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (rows, 8), generator=g)
    mask = (torch.rand(rows, 6, generator=g) > 0.3).double()
    return dict(x=ids[:, :6], y=ids[:, 1:7], next=ids[:, 2:], m=mask)


BATCH_AXES = dict(x="batch seq", y="batch seq", next="batch seq", m="batch seq")


def mlp(x, p):
    h = torch.tanh(einsum("b s d, d f -> b s f", ops.rms_norm(x), p["w"]))
    return x + shard(einsum("b s f, f d -> b s d", h, p["v"]), P("batch", "res_seq", None))


def experts(carry, p):
    """Every expert on every token; the sum of scores squared is an auxiliary loss, scores are counted a layer."""
    x, aux = carry
    scores = torch.softmax(einsum("b s d, d e -> b s e", x, p["router"]), -1)
    h = torch.tanh(einsum("b s d, e d f -> b s e f", x, p["w"]))
    y = einsum("b s e f, e f d, b s e -> b s d", h, p["v"], scores)
    chosen = (scores > 1 / E).double().sum((0, 1))
    return (x + shard(y, P("batch", "res_seq", None)), aux + (scores**2).sum()), dict(chosen=chosen, size=(y**2).sum())


def model(p, b):
    """Three scans; between them a norm; two losses with one head, an auxiliary one, a penalty, statistics a layer."""
    embed = lambda ids: shard(ops.embedding(p["e"], ids), P("batch", "res_seq", None))
    x, _ = scan(lambda x, w: (mlp(x, w), None), embed(b["x"]), p["dense"])
    x = ops.rms_norm(x, p["middle"])
    (x, aux), stats = scan(experts, (x, torch.zeros((), dtype=torch.float64)), p["moe"])
    nxt = embed(b["next"])

    def predict(h, w, nxt):
        both = torch.cat([ops.rms_norm(h), ops.rms_norm(nxt)], -1)
        return mlp(einsum("b s c, c d -> b s d", both, w["join"]), w), None

    h, _ = scan(predict, x, p["mtp"], nxt)

    def loss(x, y):
        logits = einsum("b s d, v d -> b s v", ops.rms_norm(x, p["norm"]), p["e"])
        return (ops.cross_entropy(logits, y) * b["m"]).sum()

    penalty = (p["moe"]["w"] ** 2).sum() * b["m"].sum() + stats["size"].mean()
    n = b["m"].sum()
    main, second = loss(x, b["y"]), loss(h, b["next"])
    metrics = {"chosen": stats["chosen"], "log": torch.log(1 + stats["size"]), "main": main}
    return [(main, n), (second * 0.3, n), (aux * 0.01 + penalty * 0.001, 40)], metrics


def step(schedule=None, stages="even", microbatches=4, fn=model):
    how = {} if schedule is None else dict(schedule=schedule, stages=stages)
    return lambda params, batch: fmeg.value_and_grad(fn, microbatches=microbatches, **how)(params, batch)


@cache
def one_device(dense=2, moe=3, mtp=1, microbatches=4, rows=8):
    (loss, aux), grads = step(microbatches=microbatches)(init(dense, moe, mtp), batch(rows))
    return [loss, *tree.leaves(aux), *tree.leaves(grads)]


def on_mesh(mesh, layout, schedule, stages="even", microbatches=4, strict=True, **sizes):
    rows = sizes.pop("rows", 8)
    f = fmeg.jit(
        step(schedule, stages, microbatches),
        mesh=mesh,
        layout=layout,
        axes={"params": AXES, "batch": BATCH_AXES},
        strict=strict,
    )
    (loss, aux), grads = f(init(**sizes), batch(rows))
    return [x.global_value() for x in (loss, *tree.leaves(aux), *tree.leaves(grads))]


def worst(got, want):
    assert all(a.shape == b.shape for a, b in zip(got, want, strict=True))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule(schedule):
    assert worst(on_mesh(Mesh(pp=2), Layout(layers="pp"), schedule), one_device()) < 1e-12


@pytest.mark.parametrize(
    "stages",
    ["cost", (1, 2, 3), (0, 2, 4), (5, 1, 0), (3, 3, 0), (2, 0, 4), (6, 0, 0), (0, 0, 6), "Ett|ttt|mL", "Et|(t)*4|m,L"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_stages(stages, schedule):
    assert worst(on_mesh(Mesh(pp=3), Layout(layers="pp"), schedule, stages), one_device()) < 1e-12


TENSOR = dict(ff="tp", vocab="tp", res_seq="tp")


@pytest.mark.parametrize(
    ("schedule", "stages", "axes", "layout"),
    [
        ("1f1b", (3, 3), dict(pp=2, tp=2), TENSOR),
        ("zb_v", "even", dict(dp=2, pp=2), dict(batch="dp", params=dict(embed="dp"))),
        ("interleaved_1f1b", "cost", dict(pp=2, dp=2), dict(batch="dp", opt=dict(embed="dp"), params=dict(vocab="pp"))),
        ("zb_h1", (4, 2), dict(pp=2, dp=2, tp=2), dict(TENSOR, batch="dp", grads=dict(embed="dp"))),
    ],
)
def test_composes(schedule, stages, axes, layout):
    """Also with parameters that no scan runs over at rest along the pipeline: `params=dict(vocab="pp")`."""
    got = on_mesh(Mesh(axes), Layout(layers="pp", **layout), schedule, stages, strict="tp" not in axes)
    assert worst(got, one_device()) < 1e-11


@given(st.data())
@settings(max_examples=5, deadline=None)
def test_random_models_and_cuts(data):
    sizes = {name: data.draw(st.integers(1, 3)) for name in ("dense", "moe", "mtp")}
    schedule = data.draw(st.sampled_from(NAMES))
    pp = data.draw(st.sampled_from([2, 3]))
    n = by_name(schedule, ranks=pp, microbatches=pp * 2).stages
    borders = sorted(data.draw(st.lists(st.integers(0, sum(sizes.values())), min_size=n - 1, max_size=n - 1)))
    cut = tuple(b - a for a, b in zip([0, *borders], [*borders, sum(sizes.values())], strict=True))
    how = dict(microbatches=pp * 2, rows=pp * 4)
    assert (
        worst(on_mesh(Mesh(pp=pp), Layout(layers="pp"), schedule, cut, **sizes, **how), one_device(**sizes, **how))
        < 1e-11
    )


def test_a_value_that_skips_scans_travels_through_them():
    """The embedding of the first scan is added in front of the last one and in the head; nothing else is made twice."""

    def skipping(p, b):
        x0 = ops.embedding(p["e"], b["x"])
        x, _ = scan(lambda x, w: (mlp(x, w), None), x0, p["dense"])
        y, _ = scan(lambda y, w, x0: (mlp(y + 0.1 * x0, w), None), ops.rms_norm(x) + x0.exp(), p["mtp"], x0)
        logits = einsum("b s d, v d -> b s v", y + x + x0, p["e"])
        return ((ops.cross_entropy(logits, b["y"]) * b["m"]).sum(), b["m"].sum()), {"x0": (x0**2).sum()}

    params, data = {k: v for k, v in init(2, 1, 2).items() if k in ("e", "dense", "mtp")}, batch()
    params["mtp"].pop("join")
    axes = {"params": {"e": AXES["e"], "dense": AXES["dense"], "mtp": AXES["dense"]}}
    (loss, aux), grads = step(fn=skipping)(params, data)
    want = [loss, *tree.leaves(aux), *tree.leaves(grads)]
    for schedule, stages in (("1f1b", (1, 3)), ("zb_h1", (3, 1)), ("zb_v", "even")):
        f = fmeg.jit(step(schedule, stages, fn=skipping), mesh=Mesh(pp=2), layout=Layout(layers="pp"), axes=axes)
        (loss, aux), grads = f(params, data)
        assert worst([x.global_value() for x in (loss, *tree.leaves(aux), *tree.leaves(grads))], want) < 1e-12


def test_optimizers_know_whose_moments_are_whose():
    """Two stacks of one length that ranks store in different orders: moments and new parameters go by their paths."""
    params, data = init(3, 3, 1), batch()
    opt = optim.adamw(1e-2)

    def train(schedule, stages):
        def run(state, batch):
            how = {} if schedule is None else dict(schedule=schedule, stages=stages)
            (loss, _), grads = fmeg.value_and_grad(model, microbatches=4, **how)(state.params, batch)
            updates, moments = opt.update(grads, state.opt, state.params)
            return state.next(params=optim.apply_updates(state.params, updates), opt=moments), loss

        return run

    state = fmeg.TrainState.create(params, opt, AXES)
    want, got = state, state
    step_ = fmeg.jit(train("zb_v", (2, 2, 1, 2)), mesh=Mesh(pp=2), layout=Layout(layers="pp"))
    for _ in range(2):
        want, _ = train(None, None)(want, data)
        got, _ = step_(got, data)
    found = [x.global_value() for x in tree.leaves(got.params)]
    assert worst(found, tree.leaves(want.params)) < 1e-10
    orders = {got.params[k]["w"].order for k in ("dense", "moe")}
    assert len(orders) == 2 and got.params["mtp"]["w"].order is None


def test_layers_of_two_scans_do_not_meet_outside():
    def mixed(params, batch):
        (loss, _), grads = step("1f1b", (3, 2))(params, batch)
        return loss, tree.map(
            lambda a, b: (a - b).sum(), grads["dense"]["w"].sum((1, 2)), grads["moe"]["w"].sum((1, 2, 3))
        )

    f = fmeg.jit(mixed, mesh=Mesh(pp=2), layout=Layout(layers="pp"), axes={"params": AXES})
    with pytest.raises(ShardingError, match="combines layers of two scans, which the pipeline stores in different"):
        f(init(2, 2, 1), batch())


def test_drawings_are_held_against_the_scans():
    assert parse("Ettt|(t)*58,m|L", [3, 58, 1]) == [3, 59, 0]
    for text, lengths, message in (
        ("Etm|tL", [2, 1], "t stands behind m"),
        ("Etm|mL", [2, 1], "m stands for 2 layers; the scans over layers have 2, 1, and m are those of the last ones"),
        ("Et|xL", [2], r"stage 1 has 'x'; known are E .* m \(layer of a multi-token-prediction block\)"),
    ):
        with pytest.raises(ScheduleError, match=message):
            parse(text, lengths)
    with pytest.raises(ScheduleError, match=r"the model has 6 layers, 2 \+ 3 \+ 1, and the schedule '1f1b' 2 stages"):
        on_mesh(Mesh(pp=2), Layout(layers="pp"), "1f1b", (3, 2))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 5), st.data())
def test_stages_share_out_layers_and_what_is_between_scans(lengths, n, data):
    """Each layer, and each gap, is one stage's; where a stage begins with what one scan hands on, the last one
    ended."""
    total = sum(lengths)
    borders = [0, *sorted(data.draw(st.lists(st.integers(0, total), min_size=n - 1, max_size=n - 1))), total]
    p = plan(
        by_name("1f1b", ranks=n, microbatches=n), lengths, [b - a for a, b in zip(borders, borders[1:], strict=False)]
    )
    places = [Where.of(span, lengths, s == 0, s == n - 1) for s, span in enumerate(p.spans)]
    assert sorted(g for w in places for g in w.gaps) == list(range(len(lengths) + 1))
    for k, length in enumerate(lengths):
        mine = [list(range(*w.parts[k])) for w in places]
        assert sum(mine, []) == list(range(length)) and [w.parts[k] for w in places] == [p.part(s, k) for s in range(n)]
        assert sorted(i for i in p.orders[k] if i >= 0) == list(range(length))
        assert len(p.orders[k]) == n * p.rows[k]
    assert all(a.leaves == b.enters is not None for a, b in zip(places, places[1:], strict=False))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=7), st.integers(1, 4), st.integers(0, 6), st.integers(0, 6))
def test_cut_by_cost_is_the_best_there_is(costs, n, before, after):
    def longest(counts):
        ends = [sum(counts[: i + 1]) for i in range(n)]
        each = [sum(costs[e - c : e]) for e, c in zip(ends, counts, strict=True)]
        each[0] += before
        each[-1] += after
        return max(each)

    def all_counts(left, stages):
        least = int(len(costs) >= n)
        if stages == 1:
            return [(left,)] if left >= least else []
        return [(c, *rest) for c in range(least, left + 1) for rest in all_counts(left - c, stages - 1)]

    found = [b - a for a, b in by_cost(len(costs), n, before, costs, after)]
    assert longest(found) == min(map(longest, all_counts(len(costs), n)))


def test_what_rests_along_the_pipeline_beside_layers():
    """`vocab` may, as no stack has it; `embed` may not; and nothing may be taken for a stack that is stored
    unevenly."""
    for axis, cut, message in (
        ("embed", (2, 12), r"params.dense.v, in the params view: \('layers', 'ff', 'embed'\) puts two dimensions"),
        (
            "vocab",
            (2, 12),
            "puts axis 'vocab', of size 12, on the pipeline's axis 'pp', along which 12 layers are stored",
        ),
    ):
        with pytest.raises(ShardingError, match=message):
            on_mesh(Mesh(pp=2), Layout(layers="pp", params={axis: "pp"}), "1f1b", cut, dense=1, moe=12, mtp=1)
