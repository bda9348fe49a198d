"""Schedules by name."""

from __future__ import annotations

import pytest

from fmeg.pipeline import SCHEDULES, Schedule, by_name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("1F1B", "1f1b"),
        ("GPipe", "gpipe"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("LoopedBFS", "breadth_first"),
        ("ZB-H1", "zb_h1"),
        ("ZBVZeroBubble", "zb_v"),
        ("InterleavedZeroBubble", "interleaved_zero_bubble"),
        ("DualPipeV", "dualpipe_v"),
    ],
)
def test_other_spellings(given, name):
    assert by_name(given, ranks=2, microbatches=4).name == name


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_and_ranks_say_the_same(name):
    made = by_name(name, stages=4, microbatches=8)
    assert (made.stages, made.microbatches, made.name) == (4, 8, name)
    if name != "none":
        assert by_name(name, ranks=made.ranks, microbatches=8) == made
        assert made.chunks == (2 if name in ("breadth_first", "zb_v", "dualpipe_v") or "interleaved" in name else 1)
    assert made.ranks == (1 if name == "none" else 4 // made.chunks)


def test_none_is_gradient_accumulation():
    assert by_name("none", stages=1, microbatches=2).text() == "0F0 0B0 0F1 0B1"
    assert by_name("none", ranks=1, microbatches=2, chunks=2) == by_name("none", stages=2, microbatches=2)


def test_from_a_function():
    def mine(rank: int) -> list[str]:
        return [f"{rank}F{m}" for m in range(3)] + [f"{rank}B{m}" for m in range(3)]

    assert Schedule.from_function(mine, ranks=4) == by_name("gpipe", ranks=4, microbatches=3)
    assert Schedule.from_function(mine, ranks=4).name == "mine"


def test_text_may_have_comments():
    assert Schedule.from_text("# one rank\n\n  0F0   0B0\n") == by_name("none", stages=1, microbatches=1)
