"""The runner: a row says what was compared, and a fault makes it fail."""

from __future__ import annotations

import math

import torch

from fmeg import Layout, Mesh, optim, tree
from fmeg.models import presets
from fmeg.testing import Case, cases
from fmeg.testing.verify import (
    as_json,
    check,
    config,
    keep_gradients,
    make_batch,
    make_params,
    make_state,
    make_step,
    shrink,
    sizes_of,
    verify,
)

CFG = config()


def test_the_matrix_has_every_pair_and_triple():
    found = list(cases(sizes_of(CFG)))
    names = [c.name for c in found]
    assert len({repr((c.mesh, c.layout, c.microbatches)) for c in found}) == len(found) >= 100
    assert len(list(cases(sizes_of(CFG), devices=8))) >= 60
    assert max(c.mesh.size for c in found) == 16
    for name in ("tp2", "tp2+sp", "gather2", "ring2", "ulysses2", "dp2", "zero1", "zero3", "hsdp"):
        assert name in names
    for pair in ("ring2 tp2+sp", "ulysses2 tp2", "zero1 ring4", "zero3 m2 tp2+sp", "hsdp gather2", "dp2 tk2,tr2+sp"):
        assert pair in names
    for triple in ("hsdp ring2 tp2+sp", "zero3 ulysses2 tp2", "zero1 gather2 tp4+sp"):
        assert triple in names


def test_the_matrix_names_only_axes_of_the_model():
    found = list(cases(dict(batch=8, embed=16)))
    assert {name for c in found for name in c.layout.names()} == {"batch", "embed"}


def test_every_preset_shrinks_to_something_with_its_traits():
    for name in presets.PRESETS:
        cfg, full = shrink(presets.get(name)), presets.get(name)
        assert cfg.dtype == torch.float64 and cfg.padded_vocab > cfg.vocab_size == 61
        for trait in ("tied", "qkv_bias", "qk_norm", "rope_base"):
            assert getattr(cfg, trait, None) == getattr(full, trait, None)
        assert len(list(cases(sizes_of(cfg)))) >= 60


def test_experts_lie_everywhere_by_turns():
    """On no axis, on those of tokens, on those of tensor parallelism, on both; never twice on one, at rest either."""
    sizes = sizes_of(config("deepseek-v3"))
    found = list(cases(sizes))
    assert len(found) == len(list(cases({k: v for k, v in sizes.items() if k != "experts"})))
    seen = set()
    for case in found:
        view, rest = case.layout.view("compute"), case.layout.view("params")
        experts, inner, left = view["experts"], view["expert_ff"], rest.get("expert_embed", ())
        assert len({*experts, *inner, *left}) == len(experts) + len(inner) + len(left)
        assert view["shared_ff"] == view.get("heads", ()) and sizes["experts"] % case.mesh.axis_size(experts) == 0
        seen |= {("tp" in experts, "dp" in experts), ("inner", bool(inner)), ("left", bool(left))}
    assert len(seen) == 8


def test_rows_of_a_mixture_with_further_predictions():
    cfg = config("deepseek-v3")
    assert cfg.router.groups == 4 and cfg.mtp_layers == 1 and cfg.router_bias
    wanted = {"zero3 tp2+sp", "dp2 m2 tp2"}
    rows = list(verify(cfg, [c for c in cases(sizes_of(cfg), 4) if c.name in wanted], steps=2))
    assert len(rows) == 2 and all(row.ok for row in rows), rows
    assert any(row.collectives.get("exchange_rows") for row in rows)


def test_gradients_are_kept_and_passed_on():
    opt = keep_gradients()
    g = {"w": torch.ones(2)}
    updates, state = opt.update(g, opt.init(g))
    assert updates is g and state is g


def test_parameters_and_masks_are_in_general_position():
    params = make_params(CFG)
    assert all(len(p.unique()) == p.numel() for p in tree.leaves(params))
    counts = make_batch(CFG)["mask"].unflatten(0, (4, 2)).unflatten(2, (2, 8)).sum((1, 3)).flatten()
    assert len(counts.unique()) > 3


def test_a_row_says_what_was_compared():
    row = check(Case("name", Mesh(dp=2), Layout(batch="dp"), 2), CFG, steps=2)
    assert row.ok and row.worst <= 1e-12
    assert (row.name, row.mesh, row.microbatches, row.schedule) == ("name", {"dp": 2}, 2, None)
    assert set(row.collectives) == {"all_reduce"}
    assert row.worst_grad in tree.paths(make_params(CFG))


def test_a_fault_is_a_failure(monkeypatch):
    """One device is given another learning rate: parameters differ, loss of the first step and gradients do not."""
    opt = lambda rate: optim.chain(keep_gradients(), optim.sgd(rate))
    state, step = make_state(CFG, opt(0.1)), make_step(CFG, opt(0.1))
    after, metrics = step(state, make_batch(CFG))
    monkeypatch.setattr("fmeg.testing.verify.on_one_device", lambda *case: [(after, metrics)])
    monkeypatch.setattr("fmeg.testing.verify.optimizer_under_test", lambda: opt(0.1 + 1e-7))
    row = check(Case("", Mesh(dp=2), Layout(batch="dp")), CFG, steps=1)
    assert not row.ok
    assert row.loss_error < 1e-12 and row.grad_error < 1e-12
    assert 1e-10 < row.params_error < 1e-6


def test_an_exception_is_a_failure_that_says_what_happened():
    row = check(Case("", Mesh(dp=3), Layout(batch="dp")), CFG)
    assert not row.ok and row.worst == math.inf
    assert "ShardingError" in row.error and "3 does not evenly divide 8" in row.error


def test_processes_give_the_same_rows_in_order():
    matrix = [c for c in cases(sizes_of(CFG)) if c.name in ("dp2", "tp2", "zero3")]
    alone = list(verify(CFG, matrix, steps=1))
    assert list(verify(CFG, matrix, steps=1, workers=2)) == alone
    result = as_json(alone)
    assert result["ok"] and [r["name"] for r in result["rows"]] == ["tp2", "dp2", "zero3"]
    assert result["worst"]["error"] == max(r.worst for r in alone)
