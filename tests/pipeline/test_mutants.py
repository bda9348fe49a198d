"""Every action dropped, doubled, or swapped with its neighbour: the verifier notices, or running it shows no harm.

And the verifier refuses nothing for fun: what it refuses cannot run, or sums gradients in another order.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from fmeg.pipeline import Schedule, ScheduleError, by_name
from tests.pipeline.interpreter import Stuck, expected, run

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v", "interleaved_zero_bubble", "greedy"]
CAPACITY = 2


ORIGINALS = [by_name(name, ranks=3, microbatches=6) for name in NAMES]


def replaced(schedule: Schedule, rank: int, line: list) -> Schedule:
    lines = list(schedule.actions)
    lines[rank] = tuple(line)
    return Schedule(tuple(lines), schedule.rank_of, schedule.microbatches, schedule.name)


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    for rank, line in enumerate(schedule.actions):
        for i, action in enumerate(line):
            yield "drop", replaced(schedule, rank, [*line[:i], *line[i + 1 :]])
            yield "double", replaced(schedule, rank, [*line[:i], action, *line[i:]])
            if i:
                yield "swap", replaced(schedule, rank, [*line[: i - 1], action, line[i - 1], *line[i + 1 :]])
        draw = random.Random(rank)
        for _ in range(10):
            i, j = sorted(draw.sample(range(len(line)), 2))
            far = list(line)
            far[i], far[j] = far[j], far[i]
            yield "far swap", replaced(schedule, rank, far)


def accepted(schedule: Schedule) -> bool:
    try:
        schedule.verify(capacity=CAPACITY)
    except ScheduleError:
        return False
    return True


def runs(schedule: Schedule, reference: Schedule) -> bool:
    """Whether it comes to the same gradients, sums in the same order, in two interleavings."""
    try:
        wired = schedule if schedule.has_messages else schedule.with_messages()
        return all(run(wired, CAPACITY, seed) == expected(reference) for seed in (0, 1))
    except (Stuck, KeyError, ScheduleError):
        return False


@pytest.mark.parametrize("original", ORIGINALS, ids=NAMES)
def test_mutants_of_what_is_computed(original):
    seen = Counter()
    for kind, mutant in mutants(original):
        good = accepted(mutant)
        seen[kind, good] += 1
        if good:
            assert runs(mutant, original), mutant.text()
        elif kind != "double":  # a doubled F is harmless when run, and still a mistake
            marked = any(a.pair for line in mutant.actions for a in line)  # a pair torn apart runs as well
            assert marked or not runs(mutant, original), mutant.text()
    assert seen["drop", True] == seen["double", True] == 0
    assert seen["swap", False] > 0


@pytest.mark.parametrize("original", ORIGINALS, ids=NAMES)
def test_mutants_of_messages(original):
    wired = original.with_messages()
    seen = Counter()
    for kind, mutant in mutants(wired):
        if mutant.compute() != original:
            continue
        good = accepted(mutant)
        seen[kind, good] += 1
        assert good == runs(mutant, original) or kind == "double", (kind, good, mutant.text())
    assert seen["drop", True] == seen["double", True] == 0
    assert seen["swap", True] > 0 and seen["swap", False] + seen["far swap", False] > 0


def test_a_random_order_of_each_rank_is_judged_as_the_interpreter_judges_it():
    """Far from any schedule that was meant: compute actions in random order, kept in order within a stage."""
    draw = random.Random(0)
    verdicts = Counter()
    for _ in range(400):
        ranks, chunks, microbatches = draw.randint(1, 3), draw.randint(1, 2), draw.randint(1, 3)
        lines = []
        for rank in range(ranks):
            queues = [
                [f"{c * ranks + rank}{kind}{m}" for kind in "FB" for m in range(microbatches)] for c in range(chunks)
            ]
            line: list[str] = []
            while any(queues):
                queue = draw.choice([q for q in queues if q])
                late = min(len(queue) - 1, draw.choice([0] * 9 + [1, microbatches]))
                line.append(queue.pop(late))
            lines.append(line)
        schedule = Schedule.from_lists(lines)
        good = accepted(schedule)
        verdicts[good] += 1
        assert good == runs(schedule, schedule), schedule.text()
    assert min(verdicts.values()) > 40


def test_tags_forgive_what_channels_do_not():
    """Two receives of one channel swapped: refused without tags, fine with them."""
    found = 0
    for original in ORIGINALS:
        wired = original.with_messages(ahead=2)
        for rank, line in enumerate(wired.actions):
            for i in range(1, len(line)):
                a, b = line[i - 1], line[i]
                if a.kind == b.kind == "RECV_F" and a.stage == b.stage:
                    found += 1
                    mutant = replaced(wired, rank, [*line[: i - 1], b, a, *line[i + 1 :]])
                    mutant.verify(transport="tags")
                    with pytest.raises(ScheduleError, match="in the other order"):
                        mutant.verify()
    assert found > 20
