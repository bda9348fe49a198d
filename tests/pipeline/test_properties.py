"""All generators at all sizes: valid, and when run the gradients of gradient accumulation, in any interleaving."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmeg.pipeline import Costs, Schedule, by_name, capacity_needed, timeline
from tests.pipeline.every import MAKERS, can, small
from tests.pipeline.interpreter import Stuck, expected, run


@pytest.mark.parametrize("name", MAKERS)
def test_every_size_is_valid(name):
    for ranks in range(1, 9):
        for microbatches in range(1, 21):
            if can(name, ranks, microbatches):
                report = MAKERS[name](ranks, microbatches).verify()
                assert 0 <= report.bubble < 1
                assert min(report.idle) > -1e-9
                assert max(report.peak) <= microbatches


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(list(MAKERS)))
    ranks = draw(st.integers(1, 8))
    microbatches = draw(st.integers(2 * ranks if name == "dualpipe_v" else 1, 20))
    return MAKERS[name](ranks, microbatches)


@settings(max_examples=60)
@given(schedules(), st.integers(0, 3), st.booleans(), st.integers(0, 2**32))
def test_runs_in_any_interleaving(schedule, ahead, parameters, seed):
    """With receives posted ahead, with GATHER and REDUCE, with channels as short as the graph says."""
    wired = schedule.with_messages(ahead=ahead, parameters=parameters)
    wired.verify()
    capacity = capacity_needed(wired)
    assert run(wired, capacity, seed) == expected(schedule)
    if capacity:
        with pytest.raises(Stuck):
            run(wired, capacity - 1, seed)


@settings(max_examples=60)
@given(schedules(), st.data())
def test_time(schedule, data):
    """No rank's work overlaps, inputs are there, and nothing waits without a reason: what a longest path is."""
    cost = st.floats(0.25, 4)
    F, B, I, W, hop = (data.draw(cost) for _ in range(5))
    costs = Costs(F=F, B=B, I=I, W=W, hop=hop)
    events = timeline(schedule, costs).events
    end = {(a.kind, a.stage, a.microbatch): e for _, a, _, e in events}
    busy: dict[int, float] = {}
    for rank, action, start, stop in events:
        kind, stage, m, _ = action
        assert stop - start == pytest.approx(costs.of(action))
        free = busy.get(rank, 0.0)
        neighbour = stage - 1 if kind == "F" else stage + 1
        arrives = 0.0
        if kind != "W" and 0 <= neighbour < schedule.stages:
            done = max(end.get((k, neighbour, m), 0.0) for k in ("F" if kind == "F" else "BI"))
            arrives = done + (hop if schedule.rank_of[neighbour] != rank else 0.0)
        assert start == pytest.approx(max(free, arrives))
        busy[rank] = stop


@settings(max_examples=40)
@given(schedules())
def test_text_and_csv_round_trip(schedule):
    wired = schedule.with_messages(parameters=True)
    for made in (schedule, wired):
        for again in (Schedule.from_text(made.text()), Schedule.from_csv(made.csv())):
            assert again == made
            assert (again.rank_of, again.stages, again.microbatches) == (made.rank_of, made.stages, made.microbatches)
    assert wired.compute() == schedule
    assert wired.with_messages(parameters=True) == wired


def test_messages_are_one_send_and_one_receive_a_border():
    for schedule in small():
        wired = schedule.with_messages()
        borders = sum(a != b for a, b in zip(schedule.rank_of, schedule.rank_of[1:], strict=False))
        kinds = [action.kind for line in wired.actions for action in line]
        for kind in ("SEND_F", "RECV_F", "SEND_B", "RECV_B"):
            assert kinds.count(kind) == borders * schedule.microbatches


def test_parameters_are_gathered_and_reduced_once():
    for schedule in small():
        for line in schedule.with_messages(parameters=True).actions:
            for stage in {a.stage for a in line}:
                mine = [a.kind for a in line if a.stage == stage and "_" not in a.kind]
                assert (
                    mine[0] == "GATHER" and mine[-1] == "REDUCE" and mine.count("GATHER") == mine.count("REDUCE") == 1
                )


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 16), st.integers(1, 3), st.integers(1, 6), st.booleans(), st.data())
def test_greedy_keeps_its_limit(ranks, microbatches, chunks, limit, split, data):
    cost = st.floats(0.0, 4)
    costs = Costs(*(data.draw(cost) for _ in range(5)))
    shape = data.draw(st.sampled_from(["cyclic", "vee", "contiguous"]))
    options = dict(chunks=chunks, limit=limit, split=split, costs=costs, shape=shape)
    report = by_name("greedy", ranks=ranks, microbatches=microbatches, **options).verify(costs)
    assert max(report.peak) <= min(limit, microbatches)


@pytest.mark.parametrize("W", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("hop", [0.0, 0.25])
def test_greedy_with_the_memory_of_zb_h2_beats_zb_h1(W, hop):
    costs = Costs(F=1, I=1.3, W=W, hop=hop)
    best, h1 = (by_name(n, ranks=4, microbatches=12, **o) for n, o in (("greedy", dict(costs=costs)), ("zb_h1", {})))
    assert timeline(best, costs).makespan < timeline(h1, costs).makespan
