"""Timelines for other programs: PNG by matplotlib, and Chrome's trace viewer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fmeg.pipeline.costs import Costs, Event
from fmeg.pipeline.draw import COLORS, NAMES, Panel, ink
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import PARAMETERS, Schedule


def png(
    schedule: Schedule,
    path: str | Path,
    costs: Costs | None = None,
    events: Iterable[Event] | None = None,
    after_input: float = 1.0,
    dpi: int = 150,
) -> None:
    """The timeline of `fmeg.pipeline.draw.draw` as a file that matplotlib writes, in the format of its name."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ScheduleError("png: needs matplotlib (pip install matplotlib); draw() makes SVG without it") from error
    panel = Panel.of(schedule, costs, events, after_input)
    figure = Figure(figsize=(12, 1.2 + 0.3 * schedule.ranks), layout="constrained")
    axes = figure.add_subplot()
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for event in panel.boxes:
        rank, action, start, end = event
        color = panel.color(event)
        bars.setdefault((rank, color), []).append((start, end - start))
        if (end - start) / panel.end > 0.012:
            middle, number = (start + end) / 2, str(action.microbatch)
            axes.text(middle, rank, number, color=ink(color), ha="center", va="center", size=7)
    for (rank, color), spans in bars.items():
        axes.broken_barh(spans, (rank - 0.45, 0.9), facecolors=color, edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(schedule.ranks), [f"rank {r}" for r in range(schedule.ranks)])
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(schedule.ranks), [f"peak {p:.3g}" for p in panel.peak])
    axes.invert_yaxis()
    axes.set(title=panel.title, xlim=(0, panel.end))
    for rank, action, start, end in panel.strips:
        span = (start, max(end - start, panel.end / 500))
        axes.broken_barh([span], (rank + 0.33, 0.17), facecolors=COLORS[action.kind])
    kinds = {event[1].kind for event in (*panel.boxes, *panel.strips)}
    legend = [Patch(color=color, label=f"{kind}: {NAMES[kind]}") for kind, color in COLORS.items() if kind in kinds]
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), frameon=False)
    figure.savefig(path, dpi=dpi)


def chrome_trace(events: Iterable[Event], unit: float = 1e6) -> str:
    """JSON for chrome://tracing or Perfetto: a row a rank, a slice an action; GATHER and REDUCE, which go on
    beside, in rows of their own.

    events  (rank, action, start, end), measured or `Timeline.events`
    unit    microseconds in one unit of their time: 1e6 for seconds

    >>> from fmeg.pipeline.one_f_one_b import gpipe
    >>> json.loads(chrome_trace(gpipe(1, 1).timeline().events))["traceEvents"][-1]["name"]
    '0B0'
    """
    rows, names = [], set()
    for rank, action, start, end in events:
        beside = action.kind in PARAMETERS
        args = {"stage": action.stage} if beside else {"stage": action.stage, "microbatch": action.microbatch}
        name = str(action._replace(pair=False))
        names.add((int(beside), rank))
        where = {"pid": int(beside), "tid": rank, "ts": start * unit, "dur": (end - start) * unit}
        rows.append({"name": name, "cat": action.kind, "ph": "X", **where, "args": args})
    heads = [
        {"name": "thread_name", "ph": "M", "pid": beside, "tid": rank, "args": {"name": f"rank {rank}"}}
        for beside, rank in sorted(names)
    ]
    if any(beside for beside, _ in names):
        heads.append({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "parameters and gradients"}})
    return json.dumps({"traceEvents": heads + rows})
