"""The table of docs/pipelines.md: its numbers are those that are computed, its formulas say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fmeg.pipeline import SCHEDULES, Costs, by_name

PAGE = Path(__file__).resolve().parents[2] / "docs" / "pipelines.md"
R, M = 4, 8
UNITS = dict(F=1.0, B=2.0, I=1.0, W=1.0)
ROWS = [
    [cell.strip().strip("`") for cell in line.strip("|\n").split("|")]
    for line in PAGE.read_text().splitlines()
    if re.match(r"\| `\w+`", line)
]


def test_every_schedule_has_a_row():
    assert {row[0].split("`")[0] for row in ROWS} == set(SCHEDULES) - {"none"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].split("`")[0])
def test_a_row_says_what_is_computed_and_so_do_the_papers(row):
    name, v, idle, by_formula, bubble, kept, peak = row
    schedule = by_name(name.split("`")[0], ranks=R, microbatches=M)
    report = schedule.verify(Costs(**UNITS).shared(schedule.chunks))
    assert int(v) == schedule.chunks
    assert bubble == f"{100 * report.bubble:.1f} %" and peak == f"{max(report.peak):g}"
    known = dict(UNITS, R=R, M=M, v=int(v))
    assert eval(kept, {}, known) == max(report.peak)
    if idle:
        time = eval(idle, {}, known)
        assert time / (time + M * (known["F"] + known["B"])) == pytest.approx(report.bubble, abs=1e-12)
        assert by_formula == bubble
