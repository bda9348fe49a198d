"""Timelines as SVG: one row a rank, one box an action, the number in it its microbatch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from fmeg.pipeline.costs import Costs, Event
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.memory import peaks
from fmeg.pipeline.schedule import COMPUTE, PARAMETERS, Schedule
from fmeg.pipeline.simulate import timeline

COLORS = {"F": "#4c78a8", "B": "#54a24b", "I": "#439894", "W": "#f2a65a", "GATHER": "#9d755d", "REDUCE": "#b279a2"}
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
    "GATHER": "parameters brought together",
    "REDUCE": "sum of gradients over ranks",
}

STRIP = 4  # height of a GATHER or REDUCE, which goes on below what its rank computes
ROW, GAP, LEFT, RIGHT, HEAD, FOOT = 20, 3, 56, 64, 26, 26


class Svg(str):
    """SVG that a notebook shows."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self, encoding="utf-8")


@dataclass(frozen=True)
class Panel:
    """What is drawn of one schedule: boxes and strips (events from time 0 on), their end, and the numbers beside
    them."""

    schedule: Schedule
    boxes: tuple[Event, ...]
    strips: tuple[Event, ...]
    end: float
    bubble: float
    peak: tuple[float, ...]

    @classmethod
    def of(cls, schedule: Schedule, costs: Costs | None, events: Iterable[Event] | None, after_input: float) -> Panel:
        given = list(timeline(schedule, costs).events if events is None else events)
        boxes = [event for event in given if event[1].kind in COMPUTE]
        if not boxes:
            raise ScheduleError("draw: there is nothing to draw; events must have actions F, B, I or W")
        begin = min(start for _, _, start, _ in boxes)
        moved, strips = (
            tuple((rank, action, start - begin, end - begin) for rank, action, start, end in part)
            for part in (boxes, [event for event in given if event[1].kind in PARAMETERS])
        )
        last = max(end for _, _, _, end in (*moved, *strips))
        total = schedule.ranks * last
        busy = sum(end - start for _, _, start, end in moved)
        return cls(
            schedule, moved, strips, last, (total - busy) / total if total else 0.0, tuple(peaks(schedule, after_input))
        )

    @property
    def title(self) -> str:
        s = self.schedule
        stages = "" if s.stages == s.ranks else f"{s.stages} stages on "
        return (
            f"{s.name}: {stages}{s.ranks} ranks, {s.microbatches} microbatches; "
            f"bubble {100 * self.bubble:.1f} %, time {self.end:.4g}, peak {max(self.peak):.3g}"
        )

    def color(self, event: Event) -> str:
        """By kind; lighter for the later of a rank's stages."""
        rank, action = event[:2]
        mine = self.schedule.stages_of(rank)
        light = 0.5 * mine.index(action.stage) / (len(mine) - 1) if len(mine) > 1 else 0.0
        return "#" + bytes(round(c + (255 - c) * light) for c in bytes.fromhex(COLORS[action.kind][1:])).hex()


def ink(color: str) -> str:
    """White, or nearly black where that is easier to read.

    >>> ink("#4c78a8"), ink("#f9d2ac")
    ('#fff', '#222')
    """
    red, green, blue = bytes.fromhex(color[1:])
    return "#fff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#222"


def draw(
    schedule: Schedule,
    costs: Costs | None = None,
    events: Iterable[Event] | None = None,
    width: int = 960,
    after_input: float = 1.0,
) -> Svg:
    """The timeline of a schedule.

    costs        of the actions: see `Costs`
    events       what was measured instead: (rank, action, start, end), in any unit
    after_input  what a rank keeps between I and W, for the peaks: see `peaks`

    >>> from fmeg.pipeline.one_f_one_b import gpipe
    >>> draw(gpipe(2, 4)).count("<rect")        # 16 actions, and 2 in the legend
    18
    """
    return _svg([Panel.of(schedule, costs, events, after_input)], width)


def compare(
    schedules: Sequence[Schedule], costs: Costs | None = None, width: int = 960, after_input: float = 1.0
) -> Svg:
    """Several schedules below each other, in one scale of time.

    They may have different numbers of stages: costs are of a rank's share of the model, which its stages divide.

    >>> from fmeg.pipeline.names import by_name
    >>> svg = compare([by_name(n, ranks=4, microbatches=8) for n in ("1f1b", "zb_v")])
    >>> "bubble 27.3 %, time 33," in svg, "bubble 5.9 %, time 25.5," in svg
    (True, True)
    """
    if not schedules:
        raise ScheduleError("compare: give at least one schedule")
    shared = [(costs or Costs()).shared(s.chunks) for s in schedules]
    return _svg([Panel.of(s, c, None, after_input) for s, c in zip(schedules, shared, strict=True)], width)


def _svg(panels: Sequence[Panel], width: int) -> Svg:
    longest = max(panel.end for panel in panels)
    scale = (width - LEFT - RIGHT) / longest if longest else 0.0
    out: list[str] = []
    top = 0.0
    for panel in panels:
        out.append(f'<text x="4" y="{top + 17:g}" font-weight="bold">{escape(panel.title)}</text>')
        top += HEAD
        out += _rows(panel, top, scale, width)
        top += panel.schedule.ranks * (ROW + GAP) + 8
    kinds = {event[1].kind for panel in panels for event in (*panel.boxes, *panel.strips)}
    for i, kind in enumerate(kind for kind in COLORS if kind in kinds):
        x = LEFT + 140 * i
        out.append(f'<rect x="{x}" y="{top + 2:g}" width="12" height="12" fill="{COLORS[kind]}"/>')
        out.append(f'<text x="{x + 18}" y="{top + 12:g}">{kind}: {NAMES[kind]}</text>')
    size = f'width="{width}" height="{top + FOOT:g}" viewBox="0 0 {width} {top + FOOT:g}"'
    style = 'font-family="sans-serif" font-size="11" fill="#777"'
    return Svg(f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>' + "\n".join(out) + "</svg>")


def _rows(panel: Panel, top: float, scale: float, width: int) -> list[str]:
    """Boxes; those too narrow for a number are one path a color, so that large schedules stay small."""
    out: list[str] = []
    paths: dict[str, list[str]] = {}
    for rank, peak in enumerate(panel.peak):
        y = top + rank * (ROW + GAP)
        out.append(f'<text x="4" y="{y + 14:g}">rank {rank}</text>')
        out.append(f'<text x="{width - RIGHT + 6}" y="{y + 14:g}">peak {peak:.3g}</text>')
    colors: dict[tuple[str, int], str] = {}
    for event in panel.boxes:
        rank, action, start, end = event
        x, y, wide = LEFT + start * scale, top + rank * (ROW + GAP), (end - start) * scale
        if (action.kind, action.stage) not in colors:
            colors[action.kind, action.stage] = panel.color(event)
        color, number = colors[action.kind, action.stage], str(action.microbatch)
        if wide < 5 + 6 * len(number):
            paths.setdefault(color, []).append(f"M{x:.2f} {y:g}h{wide:.2f}v{ROW}h{-wide:.2f}z")
            continue
        out.append(
            f'<rect x="{x:.2f}" y="{y:g}" width="{wide:.2f}" height="{ROW}" fill="{color}" stroke="#fff">'
            f"<title>{action._replace(pair=False)} on rank {rank}, {start:.4g} to {end:.4g}</title></rect>"
            f'<text x="{x + wide / 2:.2f}" y="{y + 14:g}" fill="{ink(color)}" text-anchor="middle">{number}</text>'
        )
    for rank, action, start, end in panel.strips:
        y, wide = top + rank * (ROW + GAP) + ROW - STRIP + GAP, max(1.5, (end - start) * scale)
        out.append(
            f'<rect x="{LEFT + start * scale:.2f}" y="{y:g}" width="{wide:.2f}" height="{STRIP}" '
            f'fill="{COLORS[action.kind]}"><title>{action} on rank {rank}, {start:.4g} to {end:.4g}</title></rect>'
        )
    out += [f'<path fill="{color}" d="{"".join(boxes)}"/>' for color, boxes in paths.items()]
    return out
