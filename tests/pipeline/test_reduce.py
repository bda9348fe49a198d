"""Gradients are reduced stage by stage, begun inside the pipeline: the same bits as after it, under every layout."""

from __future__ import annotations

import json

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, optim, tree
from fmeg.models import llama
from fmeg.pipeline import Costs, Schedule, by_name, record
from fmeg.pipeline.comms import with_parameters
from fmeg.pipeline.op import LocalPipeline, start_early
from fmeg.sharding.execute import Executable
from fmeg.step.lowered import _place
from tests.pipeline.test_runtime import batch, config, run, same

LAYOUTS = {
    "data parallel": (dict(dp=2, pp=2), Layout(layers="pp", batch="dp")),
    "ZeRO-1": (dict(pp=2, dp=2), Layout(layers="pp", batch="dp", opt=dict(embed="dp"))),
    "ZeRO-2": (dict(pp=2, dp=2), Layout(layers="pp", batch="dp", opt=dict(embed="dp"), grads=dict(embed="dp"))),
    "hybrid": (dict(r=2, pp=2, dp=2), Layout(layers="pp", batch=("r", "dp"), params=dict(embed="dp"))),
    "two moves": (dict(r=2, pp=2, dp=2), Layout(layers="pp", batch=("r", "dp"), opt=dict(embed="dp"))),
    "along the layers": (dict(pp=2, dp=2), Layout(layers="pp", batch="dp", opt=dict(layers=("pp", "dp")))),
}

LATE = ("ZeRO-2", "along the layers")  # summed in every microbatch; reduced across layers, of which stages have a few


def lowered(axes, layout, cfg, schedule, microbatches=4, stages="even"):
    def f(params, batch):
        loss = lambda p, b: llama.loss(p, b, cfg)
        return fmeg.value_and_grad(loss, microbatches=microbatches, schedule=schedule, stages=stages)(params, batch)

    step = fmeg.jit(f, mesh=Mesh(axes), layout=layout, axes={"params": llama.logical_axes(cfg)}, strict=True)
    return step.lower(llama.init(fmeg.random.key(0), cfg), batch(16))


def pipeline(program):
    (op,) = [n.op for n in program.nodes if isinstance(n.op, LocalPipeline)]
    return op


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits_as_reductions_after_the_pipeline(name, tied):
    axes, layout = LAYOUTS[name]
    cfg = config(4, tied=tied)
    for schedule, stages in (("1f1b", "even" if name == "along the layers" else (1, 3)), ("zb_v", "even")):
        low = lowered(axes, layout, cfg, schedule, stages=stages)
        early = start_early(low.program)
        early.check()
        moves, stacked = pipeline(early).reductions.moves, set(pipeline(low.program).stacked)
        assert set(moves) & stacked == (set() if name in LATE else stacked)
        params, backend = llama.init(fmeg.random.key(0), cfg), low.mesh.backend()
        leaves = [x for x in tree.leaves((params, batch(16))) if isinstance(x, torch.Tensor)]

        def values(low=low, backend=backend, leaves=leaves):
            edge = zip(leaves, low.inputs, low.blocks, low.stacks_in, strict=True)
            return [_place(x, p, low.mesh, b, low.order_of(p, layers)) for x, p, b, layers in edge]

        got, want = (Executable(p, backend)(values()) for p in (early, low.program))
        for x, y in zip(got, want, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(backend.local(x), backend.local(y), strict=True))


def test_only_sums_over_the_pipeline_and_of_several_uses_stay_behind():
    axes, layout = LAYOUTS["ZeRO-1"]
    early = start_early(lowered(axes, layout, config(4, embed=64, ff=256, vocab_size=700), "1f1b").program)
    kinds = [n.opname for n in early.nodes if n.tags.get("reason", "").startswith("gradient")]
    assert set(kinds) <= {"all_reduce", "reduce_scatter", "local_slice"}
    for n in early.nodes:
        if n.opname in ("all_reduce", "reduce_scatter") and "gradient" in n.tags["reason"]:
            assert "pp" in n.args[1] or n.operands()[0].shape[0] == 704  # the tied embedding has two uses
    assert all(m[0].kind == "reduce_scatter" for i, m in pipeline(early).reductions.moves.items())


@pytest.mark.parametrize("axes", [dict(dp=2, pp=2), dict(dp=1, pp=2), dict(dp=2, pp=4)])
def test_training_with_a_global_norm_equals_one_device(axes):
    cfg = config(4, tied=False)
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))

    def step(params, state, batch):
        loss = lambda p, b: llama.loss(p, b, cfg)
        (value, _), grads = fmeg.value_and_grad(loss, microbatches=4, schedule="zb_h1")(params, batch)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, value

    def train(mesh, layout):
        logical = llama.logical_axes(cfg)
        f = fmeg.jit(step, mesh=mesh, layout=layout, axes={"params": logical})
        params = llama.init(fmeg.random.key(0), cfg)
        state = opt.init(params)
        for _ in range(2):
            params, state, value = f(params, state, batch(16))
        return [value.global_value(), *(p.global_value() for p in tree.leaves(params))]

    want = train(Mesh(backend="loop"), None)
    for opt_view in ({}, dict(embed="dp")):
        got = train(Mesh(axes), Layout(layers="pp", batch="dp", opt=opt_view))
        assert all((a - b).abs().max() <= 1e-10 * b.abs().max() for a, b in zip(got, want, strict=True))


def test_reduce_is_an_action_between_others():
    axes, layout = LAYOUTS["data parallel"]
    with record() as recording:
        run(config(8), batch(16), mesh=Mesh(axes), layout=layout, microbatches=4, schedule="interleaved_1f1b")
    schedule = recording.last().schedule
    assert schedule == with_parameters(by_name("interleaved_1f1b", ranks=2, microbatches=4), ["REDUCE"])
    schedule.verify()
    for rank, line in enumerate(schedule.actions):
        assert [a for r, a, *_ in recording.events if r == rank] == list(line)
        assert [a.kind for a in line].index("REDUCE") < len(line) - 2
    rows = json.loads(recording.chrome_trace())["traceEvents"]
    assert sum(r.get("cat") == "REDUCE" and r["pid"] == 1 for r in rows) == 4
    assert str(recording.draw()).count("REDUCE on rank") == 4


def test_a_place_of_ones_own_for_reduce_is_kept():
    text = "0F0 0F1 0B0 0B1 0REDUCE\n1F0 1B0 1F1 1B1 1REDUCE"
    mine = Schedule.from_text(text)
    late = Schedule.from_text(text.replace("1REDUCE", "").strip() + " 1REDUCE")
    cfg, (axes, layout) = config(2), LAYOUTS["data parallel"]
    want = run(cfg, batch(8), mesh=Mesh(axes), layout=layout, microbatches=2, schedule="1f1b")
    for schedule in (mine, late):
        assert str(schedule.with_messages()).count("REDUCE") == 2
        assert same(run(cfg, batch(8), mesh=Mesh(axes), layout=layout, microbatches=2, schedule=schedule), want)


def test_what_a_reduction_costs_goes_on_beside_and_may_end_last():
    plain = by_name("1f1b", ranks=2, microbatches=4)
    schedule = with_parameters(plain, ["REDUCE"])
    base = plain.timeline().makespan
    assert schedule.timeline().makespan == base
    one = schedule.timeline(Costs(REDUCE=1.5))
    assert one.makespan == base + 1.5 and one.busy == plain.timeline().busy
    # the last stage is done earlier: its reduction is hidden
    assert schedule.timeline(Costs(REDUCE=(0.0, 1.5))).makespan == base
    two = with_parameters(by_name("interleaved_1f1b", ranks=2, microbatches=4), ["REDUCE"]).timeline(Costs(REDUCE=50.0))
    sums = [(start, end) for r, a, start, end in two.events if r == 0 and a.kind == "REDUCE"]
    assert sums[0][1] == sums[1][0] and two.makespan == sums[1][1]
    assert str(schedule.draw(Costs(REDUCE=1.5))).count("REDUCE on rank") == 2


ZERO3 = {
    "ZeRO-3": (dict(pp=2, dp=2), Layout(layers="pp", batch="dp", params=dict(embed="dp"))),
    "hybrid": (dict(r=2, pp=2, dp=2), Layout(layers="pp", batch=("r", "dp"), params=dict(embed="dp"))),
    "embedding along the pipeline": (
        dict(pp=2, dp=2),
        Layout(layers="pp", batch="dp", params=dict(embed="dp", vocab="pp")),
    ),
}


@pytest.mark.parametrize(("name", "schedule"), list(zip(ZERO3, ["1f1b", "zb_v", "interleaved_1f1b"], strict=True)))
def test_gathered_once_a_step_where_the_schedule_says(name, schedule):
    axes, layout = ZERO3[name]
    cfg = config(4, tied=schedule == "1f1b")
    want = run(cfg, batch(16), microbatches=4)
    mine = by_name(schedule, ranks=2, microbatches=4).with_messages(parameters=True)
    for s in (mine, mine.without_messages()):
        with record() as recording:
            got = run(cfg, batch(16), mesh=Mesh(axes), layout=layout, microbatches=4, schedule=s)
        worst = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(got[1], want[1], strict=True))
        assert worst <= 1e-10 and abs(got[0] - want[0]) <= 1e-10
    kinds = [a.kind for _, a, *_ in recording.events]
    assert kinds.count("GATHER") == kinds.count("REDUCE") == mine.stages
    low = lowered(axes, layout, cfg, mine)
    assert "all_gather" not in low.explain().counts(segment="scan body")
    assert "all_gather" not in low.explain().counts(segment="microbatch")
    early = pipeline(start_early(low.program))
    assert set(early.staged) <= set(early.gathers)
    assert set(early.stacked) <= set(early.reductions.moves)
    each = lowered(axes, layout, cfg, schedule).explain()
    once, often = (sum(r.total for r in e.select(kind="all_gather").rows) for e in (low.explain(), each))
    assert once * 4 < often  # microbatches
