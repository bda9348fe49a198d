"""Schedules as comma-separated values, in the dialect of `torch.distributed.pipelining`.

There, an overlapped pair is one cell, `(0F3;3B1)OVERLAP_F_B`, and GATHER and REDUCE are called UNSHARD and REDUCE_GRAD.
"""

from __future__ import annotations

import csv
import io
import re

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import Action, Schedule

_TORCH = {"GATHER": "UNSHARD", "REDUCE": "REDUCE_GRAD"}
_OURS = {theirs: ours for ours, theirs in _TORCH.items()}
_PAIR = re.compile(r"\(([^;)]*);([^;)]*)\)OVERLAP_F_B")
_RENAMED = re.compile(r"(\d+)(UNSHARD|REDUCE_GRAD)")


def to_csv(schedule: Schedule) -> str:
    """One row a rank; torch's `_load_csv` reads it.

    >>> to_csv(Schedule.from_text("0F0 0F1& 0B0 0B1 0REDUCE"))
    '0F0,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD\\n'
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for rank, line in enumerate(schedule.actions):
        cells, first = [], None
        for action in line:
            cell = f"{action.stage}{_TORCH[action.kind]}" if action.kind in _TORCH else str(action._replace(pair=False))
            if first is not None:
                cells.append(f"({first};{cell})OVERLAP_F_B")
                first = None
            elif action.pair:
                first = cell
            else:
                cells.append(cell)
        if first is not None:
            raise ScheduleError(f"csv: rank {rank} ends with {first}, which is marked as a pair with what follows it")
        writer.writerow(cells)
    return out.getvalue()


def csv_lists(text: str) -> list[list[Action]]:
    """One list of actions a row; empty cells and torch's RESHARD are skipped.

    >>> csv_lists("0F0,,(0F1;0B0)OVERLAP_F_B,0B1,0REDUCE_GRAD")
    [[0F0, 0F1&, 0B0, 0B1, 0REDUCE]]
    """
    lists = []
    for row in filter(None, csv.reader(io.StringIO(text))):
        line: list[Action] = []
        for cell in map(str.strip, row):
            if not cell or cell.endswith("RESHARD"):
                continue
            pair = _PAIR.fullmatch(cell)
            for half in pair.groups() if pair else (cell,):
                renamed = _RENAMED.fullmatch(half)
                line.append(Action.parse(renamed[1] + _OURS[renamed[2]] if renamed else half))
            if pair:
                line[-2] = line[-2]._replace(pair=True)
        lists.append(line)
    return lists
