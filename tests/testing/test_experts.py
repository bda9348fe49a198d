"""The matrix of models with experts: what it has, what its rows put to the test, what a part of it covers."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fmeg import Layout, Mesh, jit, tree, value_and_grad
from fmeg.models import model_of
from fmeg.testing import experts, verify
from fmeg.testing.experts import ROUTINGS, expert_cases, sample, traits
from fmeg.testing.pipelines import PipelineCase
from fmeg.testing.verify import check, config, jobs, make_batch, make_params, problem, sizes_of

MOE, DEEPSEEK = config("tricky-moe"), config("tricky-deepseek")
FOUND = list(expert_cases(sizes_of(MOE)))
BESIDE = ("tp", "sp", "cp", "dp", "zero1", "zero2", "zero3", "pp")


def test_every_kind_of_parallelism_beside_experts_alone_in_pairs_by_every_way_to_travel():
    seen = Counter(t for case in FOUND for t in [traits(case)])
    for kind in BESIDE:
        assert any({"ep", kind} <= t for t in seen), kind
    assert {(a, b) for a in BESIDE for b in BESIDE if any({"ep", a, b} <= t for t in seen)} >= {
        *((a, "pp") for a in ("tp", "sp", "cp", "dp", "zero1", "zero2", "zero3")),
        *((a, b) for a in ("tp", "sp", "cp") for b in ("dp", "zero1", "zero2", "zero3")),
    }
    for way in ("all_to_all", "all_gather"):
        for bound in ("bound", "no bound"):
            for where in ("ep on tp", "ep on tokens", "etp", "pp"):
                assert any({way, bound, where} <= t for t in seen), (way, bound, where)
    assert len({c.name for c in FOUND}) == len(FOUND) > 300


def test_every_hard_routing_with_every_way_to_travel():
    for routing in ROUTINGS:
        mine = [c for c in FOUND if c.routing == routing]
        assert {(c.layout.dispatch, bool(c.layout.dispatch_bound)) for c in mine} == {
            (kind, bound) for kind in ("all_to_all", "all_gather") for bound in (False, True)
        }
    assert {c.mesh.size for c in FOUND if c.routing == "one token"} == {4}


def test_a_part_covers_what_the_whole_does_in_pairs_and_triples():
    part = [case for case, cfg in jobs() if cfg == MOE]
    assert len(part) <= verify.PART["tricky-moe"]
    tuples = lambda some: {t for case in some for t in experts._tuples(case) if case.routing or t[0] == "ep"}
    assert tuples(part) == tuples(FOUND)
    assert [c.name for c in sample(FOUND, 12)] == [c.name for c in sample(FOUND, 12)] and len(sample(FOUND, 12)) == 12
    assert sample(FOUND, 12, seed=1) != sample(FOUND, 12)
    assert {c.name for c, cfg in jobs(everything=True) if cfg == MOE} == {f"moe: {c.name}" for c in FOUND}


@pytest.mark.parametrize("routing", [name for name in ROUTINGS if name])
def test_routings_are_what_they_are_called(routing):
    cfg = ROUTINGS[routing].configured(MOE)
    state, batch = problem(cfg, routing=routing)
    pairs, aux = model_of(cfg).loss(state.params, batch, cfg)
    counts, tokens = aux["counts"], int(batch.get("real", torch.ones_like(batch["tokens"])).sum())
    assert (counts.sum(-1) == tokens * cfg.router.top_k).all()
    if routing == "unbalanced":
        assert (counts.amax(-1) > 2 * tokens * cfg.router.top_k / cfg.experts).all()
    elif routing == "an idle expert":
        assert not counts[:, 1].any()
    elif routing == "one expert":
        assert (counts[:, 2] == tokens).all()
    elif routing == "all experts":
        assert (counts == tokens).all()
    elif routing.startswith("drops"):
        free = replace(cfg, router=replace(cfg.router, capacity_factor=None))
        assert model_of(cfg).loss(state.params, batch, free)[0][0][0] != pairs[0][0]
    elif routing == "balance alone":
        assert pairs[0][1] == 0 and all(n > 0 and s > 0 for s, n in pairs[1:])
    elif routing == "padding":
        real = batch["real"]
        assert real.any(1).any() and not real.any(1).all() and not real[:, 0].all() and not real[:, -1].all()
    else:
        assert tokens == 1


def _one_of_each():
    """Each hard routing once, no two layouts or ways in a row alike."""
    hard = [c for c in FOUND if c.routing]
    return [[c for c in hard if c.routing == r][5 * i % 4 + (4 if i % 2 else 0)] for i, r in enumerate(ROUTINGS) if r]


@pytest.mark.parametrize("case", _one_of_each(), ids=lambda c: c.name)
def test_hard_routings(case):
    row = check(case, MOE, steps=2)
    assert row.ok and not row.error, row


@pytest.mark.slow
@pytest.mark.parametrize("job", [j for j in jobs(everything=True) if j[1] in (MOE, DEEPSEEK)], ids=lambda j: j[0].name)
def test_every_row(job):
    row = check(*job)
    assert row.ok and not row.error, row


# -- losses of the router alone ---------------------------------------------------------------------------------------
TP = dict(heads="tp", kv_heads="tp", vocab="tp", shared_ff="tp", res_seq="tp")
LAYOUTS = {
    "dp": (dict(dp=4), dict(batch="dp")),
    "tp+sp": (dict(tp=2), TP),
    "cp": (dict(cp=4), dict(seq="cp", res_seq="cp", attention="ring")),
    "ep": (dict(ep=4), dict(experts="ep")),
    "dp, ep folded": (dict(dp=2, tp=2), dict(batch="dp", experts=("tp", "dp"), **TP)),
    "pp": (dict(pp=2), dict(layers="pp")),
    "pp, ep=dp, cp": (dict(pp=2, dp=2, cp=2), dict(layers="pp", batch="dp", seq="cp", res_seq="cp", experts="dp")),
}


def balance(losses, microbatches=1, **how):
    """Gradients of the router's losses alone: no token's prediction counts."""
    cfg = replace(MOE, layers=4, router=replace(MOE.router, **{**dict.fromkeys(KINDS, 0.0), **losses}))
    params, batch = make_params(cfg), make_batch(cfg)
    batch["mask"] = torch.zeros_like(batch["mask"])
    model = model_of(cfg)

    def step(params, batch):
        return value_and_grad(lambda p, b: model.loss(p, b, cfg), microbatches=microbatches, schedule="1f1b")(
            params, batch
        )

    if how:
        step = jit(step, **how, axes={"params": model.logical_axes(cfg)}, strict=True)
    (loss, _), grads = step(params, batch)
    return [x.global_value() if how else x for x in (loss, *tree.leaves(grads))]


KINDS = ("sequence_loss", "batch_loss", "z_loss")


def same(got, want):
    assert want[0] > 0 and sum(bool(g.any()) for g in want) > 10
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12 * float(b.abs().max() + 1))


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_the_router_do_not_depend_on_the_layout(name):
    mesh, layout = LAYOUTS[name]
    losses = dict(sequence_loss=1.0, batch_loss=1.0, z_loss=1.0)
    many = 2 if "pp" in mesh else 1
    same(balance(losses, many, mesh=Mesh(mesh), layout=Layout(**layout)), balance(losses, many))


def test_a_loss_by_sequence_does_not_depend_on_microbatches_and_one_by_batch_does():
    by_sequence, by_batch = dict(sequence_loss=1.0), dict(batch_loss=1.0)
    for microbatches in (2, 8):
        same(balance(by_sequence, microbatches), balance(by_sequence))
    assert (balance(by_batch, 4)[0] - balance(by_batch)[0]).abs() > 1e-6
    layout = Layout(layers="pp", batch="dp", experts="dp")
    same(balance(by_sequence, 4, mesh=Mesh(pp=2, dp=2), layout=layout), balance(by_sequence))


def test_pipelines_have_the_counts_of_one_device():
    case = next(c for c in FOUND if isinstance(c, PipelineCase) and "interleaved" in c.name and "dp2" in c.name)
    row = check(case, MOE, steps=2)
    assert row.ok and not row.error and "experts" in case.layout.names(), row
