"""Recordings of real runs: what ran, in which order, what it cost, how much each rank kept."""

from __future__ import annotations

import json

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh
from fmeg.models import llama
from fmeg.pipeline import ScheduleError, by_name, peaks, record
from tests.pipeline.test_runtime import SCHEDULES, batch, config


def recorded(schedule, layers=4, microbatches=8, axes=None, view=None, steps=1, backend="loop", **how):
    cfg = config(layers)

    def f(params, batch):
        loss = lambda p, b: llama.loss(p, b, cfg)
        return fmeg.value_and_grad(loss, microbatches=microbatches, schedule=schedule, **how)(params, batch)

    mesh, layout = Mesh(axes or dict(pp=2), backend=backend), Layout(layers="pp", **(view or {}))
    step = fmeg.jit(f, mesh=mesh, layout=layout, axes={"params": llama.logical_axes(cfg)})
    params, data = llama.init(fmeg.random.key(0), cfg), batch(16)
    with record() as recording:
        for _ in range(steps):
            step(params, data)
    step(params, data)
    assert len(recording.runs) == steps
    return recording


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_in_its_ranks_order_and_the_peaks_that_were_predicted(name):
    run = recorded(name).last()
    assert run.schedule == by_name(name, ranks=2, microbatches=8).compute()
    for rank, line in enumerate(run.schedule.actions):
        mine = [e for e in run.events if e[0] == rank]
        assert tuple(a for _, a, _, _ in mine) == line
        assert all(start < end for _, _, start, end in mine)
        assert all(a[3] <= b[2] for a, b in zip(mine, mine[1:], strict=False))
    assert [run.peak[r] for r in range(2)] == peaks(run.schedule)


@pytest.mark.parametrize("view", [{}, dict(batch="dp", params=dict(embed="dp"))])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_bytes_are_as_many_as_microbatches(view, backend):
    axes = dict(pp=2, dp=2) if view else dict(pp=2)
    one, few, all_ = (
        recorded(name, microbatches=m, axes=axes, view=view, backend=backend).last()
        for name, m in (("gpipe", 1), ("1f1b", 8), ("gpipe", 8))
    )
    for rank in range(2):
        # microbatches are an eighth as large, but for what does not depend on their rows: a table of positions
        assert one.peak_bytes[rank] <= all_.peak_bytes[rank] <= 1.02 * one.peak_bytes[rank]
        assert few.peak_bytes[rank] * 8 == all_.peak_bytes[rank] * peaks(few.schedule)[rank] > 0


def test_bytes_of_a_residual_are_those_of_what_backward_reads():
    """One linear layer with a tanh a stage: its input and its output are kept, a carry of 4 x 6 numbers each."""
    params = {"w": torch.randn(2, 6, 6, dtype=torch.float64)}

    def loss(p, b):
        y, _ = fmeg.scan(lambda x, w: (torch.tanh(fmeg.einsum("b d, d k -> b k", x, w)), None), b["x"], p["w"])
        return y.sum(), 1

    def f(params, batch):
        return fmeg.value_and_grad(loss, microbatches=2, schedule="gpipe")(params, batch)

    axes = {"params": {"w": "layers d k"}, "batch": {"x": "batch d"}}
    with record() as recording:
        fmeg.jit(f, mesh=Mesh(pp=2), layout=Layout(layers="pp"), axes=axes)(
            params, {"x": torch.randn(8, 6, dtype=torch.float64)}
        )
    output = 4 * 6 * 8
    # the first stage's input is the batch, which is there anyway
    assert recording.last().peak_bytes == {0: 2 * output, 1: 2 * 2 * output}


def test_bytes_of_schedules_that_split_backward_are_those_that_were_predicted():
    run = recorded("zb_h1").last()
    assert run.after_input is not None and 0.5 < run.after_input < 2
    for rank, (before, after) in run.split_bytes.items():
        assert run.peak_bytes[rank] == pytest.approx(before * peaks(run.schedule, after / before)[rank], rel=1e-12)
    assert recorded("1f1b").last().after_input is None


def test_costs_are_medians_and_draw():
    recording = recorded("interleaved_1f1b", steps=3)
    schedule = recording.last().schedule
    costs = recording.costs(hop=1e-6)
    for s in range(4):
        times = sorted(e - b for _, a, b, e in recording.events if a.kind == "F" and a.stage == s)
        assert len(times) == 24 and costs.F[s] == pytest.approx((times[11] + times[12]) / 2)
    assert costs.hop == 1e-6 and 0 < schedule.timeline(costs).bubble < 1
    assert "4 stages on 2 ranks" in schedule.draw(costs=costs)
    assert recording.draw().count("<rect") + recording.draw().count("h") > 64
    rows = [e for e in json.loads(recording.chrome_trace())["traceEvents"] if e["ph"] == "X"]
    assert len(rows) == 3 * 2 * 32 and {r["tid"] for r in rows} == {0, 1}
    run = recording.last()
    assert run.gathered() is run


def test_nothing_ran():
    with record() as recording:
        pass
    with pytest.raises(ScheduleError, match="no pipeline ran inside the block"):
        recording.draw()
