"""Action for action the tables of torch.distributed.pipelining.

Not its table of 1F1B, whose last rank has no forward of microbatch 0. Its interleaved schedules with one chunk are
others of ours, and its breadth-first backwards begin with the last microbatch, where ours add in ascending order.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from fmeg.pipeline import Action, Schedule, by_name

SIZES = [(4, 8), (4, 16), (2, 8), (1, 3), (3, 9), (5, 10), (8, 16), (8, 24), (4, 10)]


def stage(index: int, stages: int, ranks: int) -> Any:
    """What a schedule's constructor asks of its stages; no process group, no model."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=stages,
        group_rank=0,
        group_size=ranks,
        is_first=index == 0,
        is_last=index == stages - 1,
        has_backward=True,
        submod=torch.nn.Identity(),
    )


def table(name: str, ranks: int, microbatches: int, chunks: int) -> list[list[Any]]:
    """torch's actions of each rank, without the empty slots."""
    cls = torch_schedules.get_schedule_class(name)
    if issubclass(cls, torch_schedules.PipelineScheduleSingle):
        order = cls(stage(0, ranks, ranks), microbatches)._get_pipeline_order()
    else:
        stages = [stage(chunk * ranks, ranks * chunks, ranks) for chunk in range(chunks)]
        order = cls(stages, microbatches, loss_fn=lambda *args: 0).pipeline_order
    return [[action for action in order[rank] if action is not None] for rank in range(ranks)]


def computed(rows: list[list[Any]]) -> list[list[str]]:
    """The text of what is computed, pairs apart."""
    flat = [[part for action in row for part in action.sub_actions or (action,)] for row in rows]
    return [[str(action) for action in row if action.computation_type.value in ("F", "B", "I", "W")] for row in flat]


def texts(schedule: Schedule) -> list[list[str]]:
    return [[str(action._replace(pair=False)) for action in line] for line in schedule.actions]


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
@pytest.mark.parametrize(
    ("theirs", "ours", "chunks"),
    [
        ("GPipe", "gpipe", 1),
        ("Interleaved1F1B", "interleaved_1f1b", 2),
        ("Interleaved1F1B", "interleaved_1f1b", 3),
        ("Interleaved1F1B", "eager_1f1b", 1),
        ("InterleavedZeroBubble", "interleaved_zero_bubble", 2),
        ("InterleavedZeroBubble", "interleaved_zero_bubble", 3),
        ("InterleavedZeroBubble", "zb_h1", 1),
        ("ZBVZeroBubble", "zb_v", 2),
        ("DualPipeV", "dualpipe_v", 2),
    ],
)
def test_equals_torch(theirs, ours, chunks, ranks, microbatches):
    if theirs == "DualPipeV" and microbatches < 2 * ranks:
        pytest.skip("both refuse")
    made = by_name(ours, ranks=ranks, microbatches=microbatches, chunks=chunks)
    rows = table(theirs, ranks, microbatches, chunks)
    assert texts(made) == computed(rows)
    pairs = [[str(part) for action in row if action.sub_actions for part in action.sub_actions] for row in rows]
    marked = [
        [str(a._replace(pair=False)) for i, a in enumerate(line) if a.pair or (i and line[i - 1].pair)]
        for line in made.actions
    ]
    assert marked == pairs


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_breadth_first_is_torchs_with_backwards_in_ascending_order(ranks, microbatches):
    rows = computed(table("LoopedBFS", ranks, microbatches, 2))
    for row in rows:
        backwards = [i for i, text in enumerate(row) if "B" in text]
        for i in range(0, len(backwards), microbatches):
            span = slice(backwards[i], backwards[i] + microbatches)
            row[span] = row[span][::-1]
    assert texts(by_name("breadth_first", ranks=ranks, microbatches=microbatches)) == rows


def test_torchs_own_1f1b_table_is_refused_for_what_it_lacks():
    """Its last rank begins with microbatch 1 of four and ends with microbatch 4."""
    rows = computed(table("1F1B", 2, 4, 1))
    with pytest.raises(ValueError, match="rank 0 has no 0F4"):
        Schedule.from_lists(rows).verify()


@pytest.mark.parametrize("name", ["gpipe", "zb_v", "dualpipe_v"])
def test_csv_is_torchs(name):
    """torch reads every cell that we write, and we read a table that torch wrote."""
    made = by_name(name, ranks=4, microbatches=8)
    cells = [row.split(",") for row in made.csv().splitlines()]
    read = [[torch_schedules._Action.from_str(cell) for cell in row] for row in cells]
    assert computed(read) == texts(made)
    assert [[str(action) for action in row] for row in read] == cells
    theirs = {"gpipe": "GPipe", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV"}[name]
    written = "\n".join(",".join(map(str, row)) for row in table(theirs, 4, 8, 1 if name == "gpipe" else 2))
    assert Schedule.from_csv(written).compute() == made


def test_messages_are_those_of_torch():
    """The same sends and receives, in the same order in each channel, though not all in the same places."""
    ranks, microbatches = 4, 8
    made = by_name("zb_v", ranks=ranks, microbatches=microbatches)
    rows = dict(enumerate(table("ZBVZeroBubble", ranks, microbatches, 2)))
    theirs = torch_schedules._add_send_recv(rows, lambda s: made.rank_of[s], made.stages)
    for rank, line in enumerate(made.with_messages().actions):
        ours, torchs = list(map(str, line)), list(map(str, theirs[rank]))
        for kind in ("SEND", "RECV"):
            for peer in range(ranks):
                here = [text for text in ours if kind in text and made.rank_of[_other(text)] == peer]
                assert here == [text for text in torchs if kind in text and made.rank_of[_other(text)] == peer]


def _other(text: str) -> int:
    """The stage at the other end of a SEND or RECV."""
    action = Action.parse(text)
    return action.stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1)
