"""Stages by measured cost: what layers, embedding and head cost is found from the stages' times, and cut again."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, tree
from fmeg.models import llama
from fmeg.pipeline import Costs, LayerCosts, Recording, Run, ScheduleError, by_name, record
from fmeg.pipeline.stages import by_cost, plan
from tests.pipeline.test_runtime import batch, config, run, same

TRUE = LayerCosts(before=0.5, layer=1.0, after=3.25)


def ran(name, counts, ranks, true=TRUE):
    """A run as it would be recorded if a model cost `true`: a third of it forward, two thirds back."""
    schedule = by_name(name, ranks=ranks, microbatches=8)
    total = [n * true.layer for n in counts]
    total[0] += true.before
    total[-1] += true.after
    F, B, half = ([c * k / 3 for c in total] for k in (1, 2, 1))
    events = list(schedule.timeline(Costs(F=F, B=B, I=half, W=half)).events)
    bounds = [sum(counts[:s]) for s in range(len(counts) + 1)]
    return Run(schedule, events, layers={s: (bounds[s], bounds[s + 1]) for s in range(len(counts))})


def near(got, want):
    return all(getattr(got, k) == pytest.approx(getattr(want, k), abs=1e-9) for k in ("before", "layer", "after"))


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "zb_v"])
def test_a_model_of_known_cost_is_found_and_cut_where_it_should_be(name):
    schedule = by_name(name, ranks=4, microbatches=8)
    counts = [3] * schedule.stages
    found = Recording([ran(name, counts, 4)]).layer_costs()
    assert near(found, TRUE)
    layers = sum(counts)
    spans = plan(schedule, layers, found).spans
    assert list(spans) == by_cost(layers, schedule.stages, 0.5, 1.0, 3.25)
    cost = lambda spans: max(
        (b - a) + (0.5 if i == 0 else 0) + (3.25 if i == len(spans) - 1 else 0) for i, (a, b) in enumerate(spans)
    )
    assert cost(spans) < cost(plan(schedule, layers, "even").spans)


def test_cut_again_the_predicted_step_is_shorter():
    even = ran("1f1b", [4, 4, 4, 4], 4)
    spans = plan(even.schedule, 16, Recording([even]).layer_costs()).spans
    again = ran("1f1b", [b - a for a, b in spans], 4)
    end = lambda r: max(end for *_, end in r.events)
    assert end(again) < 0.9 * end(even)


def test_two_stages_and_two_cuts():
    one, other = ran("1f1b", [4, 4], 2), ran("1f1b", [6, 2], 2)
    got = Recording([one]).layer_costs()
    assert got.before == 0 and 4 * got.layer == 4.5 and got.after == 3.25 - 0.5
    assert near(Recording([one, other]).layer_costs(), TRUE)


def test_nothing_is_negative_and_what_cannot_be_told_apart_is_said():
    noisy = LayerCosts.fitted([(2, True, False, 1.9), (2, False, False, 2.0), (2, False, True, 1.8)])
    assert noisy.before == noisy.after == 0 and noisy.layer == pytest.approx(5.7 / 6)
    with pytest.raises(ScheduleError, match="no stage has a layer"):
        LayerCosts.fitted([(0, True, False, 1.0), (0, False, True, 2.0)])
    with pytest.raises(ScheduleError, match="no pipeline ran inside the block"):
        Recording().layer_costs()


def test_a_recording_of_a_model_with_a_wide_head():
    """A vocabulary of 16384 against layers of width 16: the head costs more than the layers, and keeps one."""
    cfg = config(8, tied=False, vocab_size=16384)

    def f(stages):
        loss = lambda p, b: llama.loss(p, b, cfg)
        how = dict(microbatches=2, schedule="1f1b", stages=stages)
        grad = lambda params, batch: fmeg.value_and_grad(loss, **how)(params, batch)
        return fmeg.jit(grad, mesh=Mesh(pp=4), layout=Layout(layers="pp"), axes={"params": llama.logical_axes(cfg)})

    params, data = llama.init(fmeg.random.key(0), cfg), batch(4, seq=64)
    even = f("even")
    (loss, _), grads = even(params, data)
    with record() as recording:
        for _ in range(3):
            even(params, data)
    costs = recording.layer_costs()
    assert costs.after > 3 * costs.layer > 0
    cut = by_cost(8, 4, costs.before, costs.layer, costs.after)
    assert cut[-1] == (7, 8)
    step = f(costs)
    (again, _), more = step(params, data)
    assert torch.equal(again.global_value(), loss.global_value())
    for a, b in zip(tree.leaves(more), tree.leaves(grads), strict=True):
        assert torch.equal(a.global_value(), b.global_value())
    # what one cut returned goes into a step with another
    moved, plain = (step(g, data)[0][0] for g in (grads, tree.map(lambda g: g.global_value(), grads)))
    assert torch.equal(moved.global_value(), plain.global_value())


def test_any_cut_gives_the_same_bits():
    cfg = config(7)
    want = run(cfg, batch(), microbatches=4)
    how = dict(mesh=Mesh(pp=3), layout=Layout(layers="pp"), microbatches=4, schedule="1f1b")
    assert same(run(cfg, batch(), stages=LayerCosts(0.1, 1.0, 2.5), **how), want)
