"""What pipeline schedules cost before anything runs: 64 stages of 512 microbatches, some 65 to 100 thousand actions.

    python -m benchmarks.schedules [--repeats 5] [--json out.json]

Bar: making and verifying a schedule takes less than 2 s. Where torch.distributed.pipelining has the same table, that is
made as well, with its messages, and not checked.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.measure import Row, arguments, compare, finish
from fmeg.pipeline import Schedule, by_name, capacity_needed, timeline

STAGES, MICROBATCHES = 64, 512
NAMES = {
    "gpipe": None,
    "1f1b": None,
    "interleaved_1f1b": "Interleaved1F1B",
    "zb_h1": None,
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
    "greedy": None,
}


def by_torch(name: str, schedule: Schedule) -> Callable[[], Any]:
    """A function that makes torch's schedule of the same size, from stages with no model and no process group."""
    ranks = schedule.ranks

    def stage(index: int) -> Any:
        place = dict(stage_index=index, num_stages=schedule.stages, group_rank=0, group_size=ranks)
        last = index == schedule.stages - 1
        return SimpleNamespace(**place, is_first=index == 0, is_last=last, submod=torch.nn.Identity())

    stages = [stage(index) for index in range(0, schedule.stages, ranks)]
    return lambda: get_schedule_class(name)(stages, schedule.microbatches, loss_fn=lambda *args: 0)


def main() -> None:
    args = arguments("costs of pipeline schedules", 5)
    rows: list[Row] = []
    for name, theirs in NAMES.items():
        if args.only and args.only not in name:
            continue
        make = lambda name=name: by_name(name, stages=STAGES, microbatches=MICROBATCHES)
        schedule = make()
        fns: dict[str, Callable[[], Any]] = {
            "make and verify": lambda make=make: make().verify(),
            "make": make,
            "send and receive": lambda s=schedule: s.with_messages(),
            "timeline": lambda s=schedule: timeline(s, events=False),
            "shortest channels": lambda s=schedule: capacity_needed(s),
        }
        if theirs is not None:
            fns["torch: make, send and receive"] = by_torch(theirs, schedule)
        rows += compare(f"{name}, {schedule.ranks} ranks", fns, "make and verify", args.repeats)
    finish(rows, args)


if __name__ == "__main__":
    main()
