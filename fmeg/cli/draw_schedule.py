"""`fmeg draw-schedule`: pipeline schedules as pictures and numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table
from rich.text import Text

from fmeg.cli.console import out
from fmeg.pipeline import Costs, Schedule, ScheduleError, by_name, compare, peaks, png, timeline
from fmeg.pipeline.draw import COLORS

WIDTH = 150


def draw_schedule(
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ("1f1b",),
    ranks: int = 4,
    microbatches: int = 8,
    chunks: int | None = None,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
    hop: float = 0.0,
    out_: Annotated[Path | None, tyro.conf.arg(name="out", help="File to write: .svg, or one .png.")] = None,
    text: bool = False,
) -> int:
    """Draw pipeline schedules, below each other, with their bubbles and peaks.

    Costs are of a rank's share of the model; a whole backward is its two parts.

    Args:
        names: Schedules by name, such as 1f1b or zb_v, or files with one: .csv, or .txt with a line a rank.
        ranks: Pipeline ranks.
        microbatches: Microbatches a step.
        chunks: Stages a rank, where the schedule lets one choose.
        forward: Cost of a forward.
        input_gradient: Cost of the backward of the inputs.
        weight_gradient: Cost of the backward of the weights.
        hop: Cost of a message between ranks.
        text: Print the actions, a line a rank, and nothing else.
    """
    costs = Costs(forward, input_gradient + weight_gradient, input_gradient, weight_gradient, hop)
    try:
        made = [_schedule(name, ranks, microbatches, chunks) for name in names]
    except (ScheduleError, OSError) as error:
        raise SystemExit(f"fmeg draw-schedule: {error}") from None
    if text:
        print("\n\n".join(map(str, made)))
        return 0
    if out_ is not None and out_.suffix == ".png":
        if len(made) != 1:
            raise SystemExit(f"fmeg draw-schedule: a .png shows one schedule, given {len(made)}; write an .svg")
        png(made[0], out_, costs.shared(made[0].chunks))
    elif out_ is not None:
        compare(made, costs).save(out_)
    else:
        for schedule in made:
            picture = _picture(schedule, costs.shared(schedule.chunks))
            if picture is not None:
                out().print(picture)
    out().print(_table(made, costs))
    return 0


def _schedule(name: str, ranks: int, microbatches: int, chunks: int | None) -> Schedule:
    path = Path(name)
    if path.suffix in (".csv", ".txt"):
        read = Schedule.from_csv if path.suffix == ".csv" else Schedule.from_text
        schedule = read(path.read_text(), path.stem)
    elif name == "none":
        schedule = by_name(name, microbatches=microbatches, stages=chunks or 1)
    else:
        schedule = by_name(name, ranks=ranks, microbatches=microbatches, chunks=chunks)
    schedule.verify()
    return schedule


def _picture(schedule: Schedule, costs: Costs) -> Text | None:
    """The timeline in characters, to the nearest column; None where it would be too wide to read."""
    times = timeline(schedule, costs)
    shortest = min((end - start for _, _, start, end in times.events if end > start), default=0.0)
    cell = len(str(schedule.microbatches - 1)) + 1
    if not shortest or times.makespan / shortest * cell > WIDTH:
        return None
    rows: list[Text] = [Text() for _ in range(schedule.ranks)]
    column = lambda time: round(time / shortest * cell)
    for rank, action, start, end in times.events:
        row = rows[rank]
        row.append(" " * (column(start) - len(row)))
        number = str(action.microbatch)[: column(end) - len(row)]
        row.append(number.ljust(column(end) - len(row)), style=f"white on {COLORS[action.kind]}")
    label = len(str(schedule.ranks - 1))
    lines = [Text(f"rank {r:>{label}}  ") + row for r, row in enumerate(rows)]
    return Text("\n").join([Text(schedule.name, style="bold"), *lines, Text()])


def _table(schedules: list[Schedule], costs: Costs) -> Table:
    table = Table(title="a step of each", title_justify="left")
    for name in ("schedule", "stages", "microbatches", "bubble", "time", "idle in a rank's span", "peak"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    for s in schedules:
        times = timeline(s, costs.shared(s.chunks), events=False)
        most = f"{max(peaks(s)):.3g}"
        idle = f"{max(times.idle):.4g}"
        table.add_row(
            s.name,
            str(s.stages),
            str(s.microbatches),
            f"{100 * times.bubble:.1f} %",
            f"{times.makespan:.4g}",
            idle,
            most,
        )
    return table
