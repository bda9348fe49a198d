"""Bubbles, idle times and peaks that can be computed by hand or were published, and Megatron's counts."""

from __future__ import annotations

from math import inf

import pytest

from fmeg.pipeline import Costs, DeadlockError, by_name, capacity_needed, peaks, timeline

# name: bubble; idle in a rank's own span; bubble with a hop of 0.25; with F, I, W = 2, 2, 1; peaks; the highest peak
# where I leaves 0.71 and 1.06 of the residuals; bubble with 16 microbatches
FOUR_BY_EIGHT = {
    "gpipe": (0.273, (9, 6, 3, 0), 0.304, 0.273, (8, 8, 8, 8), 8, 8, 0.158),
    "1f1b": (0.273, (9, 6, 3, 0), 0.351, 0.273, (4, 3, 2, 1), 4, 4, 0.158),
    "interleaved_1f1b": (0.158, (9, 6, 3, 0), 0.207, 0.158, (5.5, 4.5, 3.5, 2.5), 5.5, 5.5, 0.086),
    "zb_h1": (0.111, (3, 2, 1, 0), 0.200, 0.184, (4, 4, 4, 4), 4, 4.24, 0.059),
    "zb_v": (0.059, (0, 0, 0, 0), 0.115, 0.070, (4, 4, 4, 4), 4, 4.03, 0.030),
    "dualpipe_v": (0.059, (3, 2, 1, 0), 0.119, 0.101, (4.5, 4.5, 4.5, 4.5), 4.5, 4.5, 0.030),
}


@pytest.mark.parametrize("name", FOUR_BY_EIGHT)
def test_four_ranks(name):
    bubble, idle, slow, uneven, peak, light, heavy, longer = FOUR_BY_EIGHT[name]
    made = by_name(name, ranks=4, microbatches=8)
    times = timeline(made)
    assert times.bubble == pytest.approx(bubble, abs=5e-4)
    assert times.idle == idle
    assert timeline(made, Costs(hop=0.25)).bubble == pytest.approx(slow, abs=5e-4)
    assert timeline(made, Costs(F=2, B=3, I=2, W=1)).bubble == pytest.approx(uneven, abs=5e-4)
    assert peaks(made) == list(peak)
    assert max(peaks(made, 0.71)) == pytest.approx(light)
    assert max(peaks(made, 1.06)) == pytest.approx(heavy)
    assert timeline(by_name(name, ranks=4, microbatches=16)).bubble == pytest.approx(longer, abs=5e-4)


@pytest.mark.parametrize(
    ("name", "bubble"), [("1f1b", 0.110), ("interleaved_1f1b", 0.058), ("zb_h1", 0.039), ("zb_v", 0.020)]
)
def test_sixty_four_ranks(name, bubble):
    assert by_name(name, ranks=64, microbatches=512).timeline(events=False).bubble == pytest.approx(bubble, abs=5e-4)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 15])
@pytest.mark.parametrize(("forward", "backward"), [(1, 2), (3, 2)])
def test_makespans_in_closed_form(ranks, microbatches, forward, backward):
    costs = Costs(F=forward, B=backward)
    for name in ("gpipe", "1f1b", "eager_1f1b"):
        makespan = timeline(by_name(name, ranks=ranks, microbatches=microbatches), costs).makespan
        if microbatches >= ranks or name != "eager_1f1b":
            assert makespan == (microbatches + ranks - 1) * (forward + backward)
    if microbatches % ranks == 0:
        for chunks in (2, 3):
            made = by_name("interleaved_1f1b", ranks=ranks, microbatches=microbatches, chunks=chunks)
            assert timeline(made, costs).makespan == (microbatches * chunks + ranks - 1) * (forward + backward)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zero_bubbles_in_closed_form(ranks):
    """arXiv:2401.10241: (R - 1)(F + I - W) for ZB-H1, and none inside a rank's span for ZB-V, with F = I = W."""
    microbatches = 3 * ranks
    assert timeline(by_name("zb_h1", ranks=ranks, microbatches=microbatches)).makespan == 3 * microbatches + ranks - 1
    assert timeline(by_name("zb_v", ranks=ranks, microbatches=microbatches)).idle == (0,) * ranks


@pytest.mark.parametrize(("ranks", "microbatches", "chunks", "group"), [(4, 8, 2, 4), (4, 12, 3, 6), (2, 7, 2, 4)])
@pytest.mark.parametrize("overlap", [False, True])
def test_megatrons_warm_up(ranks, microbatches, chunks, group, overlap):
    """min(2 (R - r - 1) + (v - 1) g [+ 1 to overlap], M v) forwards before the first F that a B follows."""
    options = dict(chunks=chunks, group=group, overlap=overlap)
    made = by_name("interleaved_1f1b", ranks=ranks, microbatches=microbatches, **options)
    for rank, line in enumerate(made.actions):
        kinds = "".join(a.kind for a in line)
        warm = min(2 * (ranks - rank - 1) + (chunks - 1) * group + overlap, microbatches * chunks)
        steady = microbatches * chunks - warm
        assert kinds == "F" * warm + "FB" * steady + "B" * warm
        in_pair = [overlap and warm <= i < warm + 2 * steady and (i - warm) % 2 == 0 for i in range(len(line))]
        assert [a.pair for a in line] == in_pair


@pytest.mark.parametrize(("name", "factor"), [("1f1b", 1), ("eager_1f1b", 2)])
def test_warm_up_of_one_chunk(name, factor):
    for rank, line in enumerate(by_name(name, ranks=5, microbatches=7).actions):
        warm = min(factor * (5 - rank - 1), 7)
        assert "".join(a.kind for a in line) == "F" * warm + "FB" * (7 - warm) + "B" * warm


def test_megatrons_order_of_visits():
    """Five microbatches, two chunks, groups of three: (microbatch, chunk) of Megatron's own table."""
    line = by_name("interleaved_1f1b", ranks=2, microbatches=5, chunks=2, group=3).actions[1]
    visits = [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]
    assert [(a.microbatch, a.stage // 2) for a in line if a.kind == "F"] == visits
    assert [(a.microbatch, 1 - a.stage // 2) for a in line if a.kind == "B"] == visits


def test_groups_where_the_ranks_do_not_divide_the_microbatches():
    made = by_name("interleaved_1f1b", ranks=4, microbatches=11)
    assert [(a.microbatch) for a in made.actions[0] if a.kind == "F" and a.stage == 0] == list(range(11))
    first = [a.stage for a in made.actions[0] if a.kind == "F"]
    assert first == [0] * 6 + [4] * 6 + [0] * 5 + [4] * 5  # groups of 6 and 5: at least the four ranks


def test_an_overlapped_pair_takes_part_of_its_sum():
    made = by_name("dualpipe_v", ranks=4, microbatches=16)
    apart, joint, half = (timeline(made, Costs(pair=p)) for p in (None, 1.0, 0.5))
    assert apart.makespan < joint.makespan  # as one, a pair starts when both can and gives when both have ended
    assert half.makespan < 0.7 * joint.makespan
    paired = sum(3 for line in made.actions for a in line if a.pair)
    assert sum(joint.busy) - sum(half.busy) == pytest.approx(paired / 2)


@pytest.mark.parametrize(
    ("name", "capacity"),
    [("gpipe", 0), ("1f1b", 1), ("eager_1f1b", 1), ("interleaved_1f1b", 1), ("zb_h1", 1)]
    + [("zb_v", 2), ("dualpipe_v", 2)],
)
@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (4, 16), (8, 32)])
def test_buffers(name, capacity, ranks, microbatches):
    assert capacity_needed(by_name(name, ranks=ranks, microbatches=microbatches)) == capacity


def test_one_stream_a_pair_of_ranks_deadlocks_all_but_gpipe():
    stuck = lambda made: capacity_needed(made, "pair") is None
    for name in FOUR_BY_EIGHT:
        assert stuck(by_name(name, ranks=4, microbatches=8)) == (name != "gpipe")
    ahead = {name: by_name(name, ranks=4, microbatches=8).with_messages(ahead=1) for name in FOUR_BY_EIGHT}
    assert [name for name, made in ahead.items() if not stuck(made)] == ["interleaved_1f1b"]


def test_costs_by_stage():
    made = by_name("1f1b", ranks=2, microbatches=1)
    assert timeline(made, Costs(F=[1, 10], B=[100, 1000], hop=0.5)).makespan == 1112
    with pytest.raises(ValueError, match="F must be a number or have one a stage, 2; given 3"):
        timeline(made, Costs(F=[1, 2, 3]))


def test_a_channel_carries_one_message_at_a_time():
    """Four activations in a row, each two units on the wire: the second stage waits for the wire, not for the first."""
    made = by_name("gpipe", ranks=2, microbatches=4)
    costs = Costs(F=1, B=0, hop=2)
    assert timeline(made, costs).makespan == 4 + 2 + 1 + 2
    assert timeline(made, costs, transport="directed").makespan == 1 + 4 * 2 + 1 + 4 * 2


def test_an_empty_bubble_and_infinite_costs():
    assert timeline(by_name("none", stages=1, microbatches=1)).bubble == 0
    assert timeline(by_name("none", stages=1, microbatches=1), Costs(F=0, B=0)).bubble == 0
    assert timeline(by_name("gpipe", ranks=2, microbatches=1), Costs(hop=inf)).makespan == inf


def test_deadlocks_name_the_cycle():
    with pytest.raises(DeadlockError) as error:
        by_name("1f1b", ranks=2, microbatches=4).verify(capacity=0)
    assert error.value.cycle == (
        "rank 0: 0SEND_F1 waits for room until rank 1 posts 1RECV_F1",
        "rank 1: 1RECV_F1 comes after 1SEND_B0",
        "rank 1: 1SEND_B0 waits for room until rank 0 posts 0RECV_B0",
        "rank 0: 0RECV_B0 comes after 0SEND_F1",
    )
    assert "this schedule needs capacity=1, given capacity=0" in str(error.value)
