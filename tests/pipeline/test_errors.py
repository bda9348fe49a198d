"""What one reads when a schedule is wrong."""

from __future__ import annotations

import re

import pytest

from fmeg.pipeline import Action, Schedule, ScheduleError, by_name, stage_map, timeline, verify
from fmeg.pipeline.one_f_one_b import gpipe
from fmeg.program.errors import FmegError

TWO = "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"


def says(text: str, made: Schedule | str, **options: object) -> None:
    with pytest.raises(ScheduleError, match=re.escape(text)):
        (Schedule.from_text(made) if isinstance(made, str) else made).verify(**options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("0F0 0F1 0B0\n1F0 1B0 1F1 1B1", "rank 0 has no 0B1, and no 0I1 and 0W1"),
        ("0F0 0F1 0B0 0I1\n1F0 1B0 1F1 1B1", "rank 0 has no 0W1"),
        ("0F0 0F1 0B0 0W1\n1F0 1B0 1F1 1B1", "rank 0 has no 0I1"),
        ("0F0 0F1 0B0 0B1\n1F0 1B0 1B1", "rank 1 has no 1F1"),
        ("0F0 0F1 0B0 0B1 0B0\n1F0 1B0 1F1 1B1", "rank 0 has 0B0 twice, the second as action 4"),
        ("0F0 0F1 0B0 0I0 0B1\n1F0 1B0 1F1 1B1", "rank 0 has 0I0 twice, the second as action 3; a backward is one B"),
        ("0F0 0F1 0B0 0W0 0B1\n1F0 1B0 1F1 1B1", "rank 0 has 0W0 twice"),
        ("0F0 0F1 0F0 0B0 0B1\n1F0 1B0 1F1 1B1", "rank 0 has 0F0 twice, the second as action 2"),
        ("0F0 0F1 0B0 1B1\n1F0 1B0 1F1 0B1", "rank 0 has 1B1, but stage 1 is on rank 1"),
        ("0F0 0F1 0B0 2B1\n1F0 1B0 1F1 1B1", "rank 0 has 2B1, but stage 2 does not exist: there are 2"),
        ("0B0 0F0 0F1 0B1\n1F0 1B0 1F1 1B1", "rank 0 runs 0B0 (action 0) before 0F0 (action 1): a backward needs"),
        (
            "0F0 0W0 0I0 0F1 0B1\n1F0 1B0 1F1 1B1",
            "rank 0 runs 0W0 (action 1) before 0I0 (action 2): W needs",
        ),
        (
            "0F0 0F1 0B1 0B0\n1F0 1B0 1F1 1B1",
            "rank 0 runs 0B1 (action 2) before 0B0 (action 3): gradients are summed in",
        ),
        ("1F0 0F0 1B0 0B0", "rank 0 runs 1F0 (action 0) before 0F0 (action 1): which feeds it"),
        ("0F0 1F0 0B0 1B0", "rank 0 runs 0B0 (action 2) before 1B0 (action 3): which feeds it"),
        ("0F0& 0F1 0B0 0B1\n1F0 1B0 1F1 1B1", "rank 0 marks 0F0& as a pair with 0F1; a pair is an F and a B"),
        ("0F0 0F1 0B0 0B1&\n1F0 1B0 1F1 1B1", "rank 0 marks 0B1& as a pair with what follows it, but nothing does"),
        ("0F0 0GATHER 0B0 0REDUCE", "rank 0 runs 0F0 (action 0) before 0GATHER (action 1): a forward needs"),
        ("0GATHER 0F0 0REDUCE 0B0", "rank 0 runs 0REDUCE (action 2) before 0B0 (action 3): gradients are summed over"),
        ("0GATHER 0F0 1F0 1B0 0B0", "rank 0 has 0 of 1GATHER; one for each stage, or none"),
        ("0F0 0B0 0REDUCE 0REDUCE", "rank 0 has 2 of 0REDUCE; one for each stage, or none"),
    ],
)
def test_what_is_computed(given, text):
    says(text, given)


def test_kinds_and_ranges():
    wrong = lambda action: Schedule(((*gpipe(1, 2).actions[0], action),), (0,), 2)
    says("rank 0 has a 'G'; there are F B I W", wrong(Action("G", 0, 0)))
    says("rank 0 has 0F2, but there are 2 microbatches", wrong(Action("F", 0, 2)))


@pytest.mark.parametrize(
    ("find", "put", "text"),
    [
        (" 0SEND_F1", "", "rank 0 has no 0SEND_F1, but 0F1 (action 2) of rank 0 makes what 1F1 of rank 1 consumes"),
        ("1RECV_F1 ", "", "rank 1 has no 1RECV_F1, but 0F1 (action 2) of rank 0 makes what 1F1 of rank 1 consumes"),
        (" 1SEND_B0", "", "rank 1 has no 1SEND_B0, but 1B0 (action 2) of rank 1 makes what 0B0 of rank 0 consumes"),
        ("0RECV_B0", "0RECV_B0 0RECV_B0", "rank 0 has 0RECV_B0 twice, the second as action 5"),
        ("1SEND_B0", "1SEND_F0 1SEND_B0", "rank 1 has 1SEND_F0 (action 3), but no other rank makes or consumes that"),
        (
            "0F0 0SEND_F0",
            "0SEND_F0 0F0",
            "rank 0 runs 0SEND_F0 (action 0) before 0F0 (action 1), which",
        ),
        (
            "1RECV_F0 1F0",
            "1F0 1RECV_F0",
            "rank 1 runs 1F0 (action 0) before 1RECV_F0 (action 1), which brings its input",
        ),
        (
            "0F0 0SEND_F0 0F1 0SEND_F1",
            "0F0 0F1 0SEND_F1 0SEND_F0",
            "rank 1 has 1RECV_F0 (action 0) before 1RECV_F1 (action 4), but rank 0 sends what they receive in the "
            "other order: without tags each gets the other's data",
        ),
    ],
)
def test_messages(find, put, text):
    wired = Schedule.from_text(TWO).with_messages().text()
    Schedule.from_text(wired).verify()
    assert find in wired
    says(text, wired.replace(find, put))


def test_a_deadlock_shows_its_cycle():
    crossed = "0F0 0F1 0B0 0B1\n1F1 1F0 1B0 1B1\n2F0 2F1 2B0 2B1"
    Schedule.from_text(crossed).verify()  # another order of forwards is slow, and harmless
    stuck = "0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1"
    says(
        "deadlock, a cycle of waits:\n"
        "  rank 0: 0B0 waits for 1B0 of rank 1\n"
        "  rank 1: 1B0 comes after 1F1\n"
        "  rank 1: 1F1 waits for 0F1 of rank 0\n"
        "  rank 0: 0F1 comes after 0B0",
        stuck,
    )


def test_channels_that_are_too_short():
    text = "channels hold too few messages: this schedule needs capacity=2, given capacity=1"
    says(text, by_name("zb_v", ranks=4, microbatches=8), capacity=1)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: by_name("1f2b", ranks=2, microbatches=2), "no schedule is called '1f2b'; there are none, gpipe"),
        (lambda: by_name("zbv1", ranks=2, microbatches=2), "did you mean 'zb_"),
        (lambda: by_name("gpipe", microbatches=2), "give either stages (of the model) or ranks"),
        (lambda: by_name("gpipe", stages=2, ranks=2, microbatches=2), "give either stages (of the model) or ranks"),
        (lambda: by_name("gpipe", ranks=2, microbatches=2, chunks=2), "has 1 stage a rank, given chunks=2; inter"),
        (lambda: by_name("zb_v", stages=7, microbatches=2), "stages=7 must divide by the 2 chunks of each rank"),
        (lambda: by_name("zb_v", ranks=2, microbatches=2, chunks=3), "has 2 stages a rank, given chunks=3"),
        (lambda: by_name("gpipe", ranks=2, microbatches=2, group=2), "no option 'group'; it has none"),
        (lambda: by_name("interleaved_1f1b", ranks=2, microbatches=2, grup=2), "no option 'grup'; it has group,"),
        (lambda: by_name("none", ranks=2, microbatches=2), "has one rank, given ranks=2; use gpipe or 1f1b"),
        (lambda: by_name("gpipe", ranks=2, microbatches=0), "microbatches must be at least 1, given 0"),
        (lambda: by_name("interleaved_1f1b", ranks=0, microbatches=1), "ranks must be at least 1, given 0"),
        (lambda: by_name("dualpipe_v", ranks=4, microbatches=7), "= 8, given 7; use more microbatches, or zb_v"),
        (lambda: by_name("interleaved_1f1b", ranks=4, microbatches=10, group=4), "so must the last, which has 2"),
        (lambda: by_name("interleaved_1f1b", ranks=4, microbatches=8, group=3), "groups of 3 microbatches must have"),
        (lambda: by_name("interleaved_1f1b", ranks=4, microbatches=8, group=9), "at most 8, all"),
        (lambda: by_name("interleaved_1f1b", ranks=4, microbatches=8, group=0), "groups of 0 microbatches"),
        (lambda: by_name("greedy", ranks=4, microbatches=8, limit=0), "must be at least 1, given 4, 8, 1 and 0"),
        (lambda: stage_map("zigzag", 2), "kind must be 'contiguous', 'cyclic' or 'vee', given 'zigzag'"),
        (lambda: Action.parse("2G0"), "such as 2F0, 3SEND_F1, or 2REDUCE and 2GATHER without one; given '2G0'"),
        (lambda: Action.parse("2F"), "given '2F'"),
        (lambda: Action.parse("2REDUCE0"), "given '2REDUCE0'"),
        (lambda: Schedule.from_text("0F0 0B0\n0F1 0B1"), "stage 0 has forwards on ranks 0 and 1 (0F1)"),
        (lambda: Schedule.from_text("0F0 2F0"), "no rank runs a forward of stage 1"),
        (lambda: Schedule.from_text(""), "no rank runs a forward of stage 0"),
        (lambda: Schedule.from_text("0F0&").csv(), "rank 0 ends with 0F0, which is marked as a pair"),
        (lambda: Schedule.from_text("0F0 0B0\n1F0").with_messages(), "a message from rank 1, which has no 1B0"),
        (lambda: timeline(Schedule.from_text("0F0 0B0\n1F0")), "0B0 on rank 0 waits for a message that nobody sends"),
        (lambda: timeline(gpipe(2, 2), transport="carrier pigeon"), "one of tags, directed, pair, rank, given 'carr"),
        (lambda: verify(gpipe(2, 2), capacity=-1), "capacity must be None or at least 0, given -1"),
    ],
)  # fmt: skip
def test_arguments(make, text):
    with pytest.raises(ScheduleError, match=re.escape(text)):
        make()


def test_errors_are_value_errors_of_fmeg():
    assert issubclass(ScheduleError, FmegError) and issubclass(ScheduleError, ValueError)
