"""Pictures and traces: what is in them, and that there is no box on another."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET

import pytest

from fmeg.cli.draw_schedule import draw_schedule
from fmeg.pipeline import Action, Costs, Schedule, ScheduleError, by_name, chrome_trace, compare, draw, png, timeline
from tests.pipeline.every import small

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg: str) -> list[ET.Element]:
    """The rectangles of actions: those with a title."""
    return [r for r in ET.fromstring(svg).iter(f"{SVG}rect") if r.find(f"{SVG}title") is not None]


def test_every_action_is_a_box_and_none_lies_on_another():
    for schedule in small():
        svg = draw(schedule, Costs(F=1, B=2.5, I=1.5, hop=0.25), width=3000)
        found = boxes(svg)
        wanted = [f"{a._replace(pair=False)} on rank {r}" for r, line in enumerate(schedule.actions) for a in line]
        assert sorted(box.find(f"{SVG}title").text.split(",")[0] for box in found) == sorted(wanted)
        rows: dict[str, list[tuple[float, float]]] = {}
        for box in found:
            x, wide = float(box.get("x")), float(box.get("width"))
            rows.setdefault(box.get("y"), []).append((x, x + wide))
            assert 0 <= x and x + wide <= 3000
        assert len(rows) == schedule.ranks
        for row in rows.values():
            row.sort()
            assert all(b >= a - 0.02 for (_, a), (b, _) in zip(row, row[1:], strict=False))


def test_titles_and_peaks():
    texts = [t.text for t in ET.fromstring(draw(by_name("1f1b", ranks=4, microbatches=8))).iter(f"{SVG}text")]
    assert texts[0] == "1f1b: 4 ranks, 8 microbatches; bubble 27.3 %, time 33, peak 4"
    assert [t for t in texts if t.startswith("peak")] == ["peak 4", "peak 3", "peak 2", "peak 1"]
    assert texts[-2:] == ["F: forward", "B: backward"]


def test_a_name_cannot_break_the_picture():
    ET.fromstring(draw(Schedule.from_text("0F0 0B0", name="<&>")))


def test_large_schedules_are_paths():
    svg = draw(by_name("zb_v", ranks=32, microbatches=64))
    assert boxes(svg) == []
    drawn = sum(path.get("d").count("M") for path in ET.fromstring(svg).iter(f"{SVG}path"))
    assert drawn == 64 * 64 * 3
    assert len(svg) < 450_000


def test_measured_events_instead_of_costs():
    """Times in seconds since whenever."""
    schedule = by_name("1f1b", ranks=2, microbatches=2)
    events = [(r, a, 1e3 + 1e-3 * s, 1e3 + 1e-3 * e) for r, a, s, e in timeline(schedule).events]
    assert "bubble 33.3 %, time 0.009" in draw(schedule, events=[*events, (0, Action("SEND_F", 0, 0), 0.0, 9e9)])
    costs = Costs.measured(events, stages=2)
    assert costs.F == pytest.approx((1e-3, 1e-3)) and costs.B == pytest.approx((2e-3, 2e-3))
    assert timeline(schedule, costs).makespan == pytest.approx(9e-3)
    with pytest.raises(ScheduleError, match="nothing to draw"):
        draw(schedule, events=[])


def test_measured_costs_fill_in_what_was_not_seen():
    seen = [(0, Action("I", 0, m), 0.0, 1.0 + m) for m in range(2)] + [(0, Action("W", 0, 0), 0.0, 0.5)]
    costs = Costs.measured(seen, stages=2, hop=0.1)
    assert costs == Costs(F=(0.0, 0.0), B=(2.0, 0.0), I=(1.5, 0.0), W=(0.5, 0.0), hop=0.1)


def test_compare_has_one_scale():
    """A rank has the same work in each: boxes of a V's stages are half as wide."""
    svg = compare([by_name("zb_h1", ranks=2, microbatches=4), by_name("zb_v", ranks=2, microbatches=4)])
    width = {box.find(f"{SVG}title").text[:3]: float(box.get("width")) for box in boxes(svg)}
    assert width["3F0"] * 2 == pytest.approx(float(boxes(svg)[0].get("width")), abs=0.02)
    with pytest.raises(ScheduleError, match="at least one"):
        compare([])


def test_notebooks_show_schedules():
    schedule = by_name("gpipe", ranks=2, microbatches=2)
    assert schedule._repr_svg_() == schedule.draw()._repr_svg_() == str(draw(schedule))
    assert type(schedule._repr_svg_()) is str


def test_png(tmp_path):
    pytest.importorskip("matplotlib")
    png(by_name("dualpipe_v", ranks=2, microbatches=4), tmp_path / "a.png", Costs(F=2))
    assert (tmp_path / "a.png").read_bytes()[1:4] == b"PNG"


def test_chrome_trace():
    schedule = by_name("dualpipe_v", ranks=2, microbatches=4)
    events = timeline(schedule).events
    rows = json.loads(chrome_trace(events, unit=10))["traceEvents"]
    assert [(r["tid"], r["args"]["name"]) for r in rows if r["ph"] == "M"] == [(0, "rank 0"), (1, "rank 1")]
    slices = [r for r in rows if r["ph"] == "X"]
    assert [(r["tid"], r["name"], r["ts"], r["dur"]) for r in slices] == [
        (rank, str(a._replace(pair=False)), 10 * start, 10 * (end - start)) for rank, a, start, end in events
    ]
    assert slices[0]["args"] == {"stage": 0, "microbatch": 0} and slices[0]["cat"] == "F"


def test_command(tmp_path, capsys):
    assert draw_schedule(("1f1b", "zb_v"), out_=tmp_path / "a.svg") == 0
    assert len(boxes((tmp_path / "a.svg").read_text())) == 4 * 16 + 4 * 48
    shown = re.sub(r"[│┃]", "", capsys.readouterr().out)
    assert re.search(r"1f1b +4 +8 +27\.3 % +33 +9 +4 ", shown) and re.search(r"zb_v +8 +8 +5\.9 % +25\.5 +0 +4 ", shown)
    assert draw_schedule(("gpipe",), ranks=2, microbatches=2) == 0
    assert "rank 0  0 1       0   1\nrank 1    0 1 0   1\n" in re.sub(r" +\n", "\n", capsys.readouterr().out)
    assert draw_schedule(("gpipe",), ranks=64, microbatches=64) == 0  # too wide for characters
    assert "rank 0" not in capsys.readouterr().out


def test_command_reads_and_prints_schedules(tmp_path, capsys):
    made = by_name("dualpipe_v", ranks=2, microbatches=4)
    (tmp_path / "mine.csv").write_text(made.csv())
    (tmp_path / "mine.txt").write_text("# mine\n" + made.text())
    assert draw_schedule((str(tmp_path / "mine.csv"), str(tmp_path / "mine.txt"), "none"), text=True) == 0
    first, second, third = capsys.readouterr().out.strip().split("\n\n")
    assert first == second == made.text() and third.startswith("0F0 0B0 0F1")
    (tmp_path / "bad.txt").write_text("0F0")
    with pytest.raises(SystemExit, match="rank 0 has no 0B0"):
        draw_schedule((str(tmp_path / "bad.txt"),))
    with pytest.raises(SystemExit, match="no schedule is called 'x'"):
        draw_schedule(("x",))
    with pytest.raises(SystemExit, match="one schedule, given 2"):
        draw_schedule(("gpipe", "1f1b"), out_=tmp_path / "a.png")
