"""`fmeg mutate`: every collective of a training step broken in turn; each must be noticed."""

from __future__ import annotations

import json
from typing import Annotated, Any

import torch
import tyro
from rich.table import Table

from fmeg.cli.console import out, progress
from fmeg.testing.matrix import Case
from fmeg.testing.mutate import LAYOUTS, Outcome, bench, known, table
from fmeg.testing.mutate import mutate as run

COLUMNS = {
    "collective": "collective",
    "mutation": "mutation",
    "mutants": "mutants",
    "killed": "killed",
    "crashed": "crashed",
    "survived": "survived",
    "by_loss": "loss alone",
    "by_gradients": "gradients alone",
    "by_parameters": "parameters alone",
    "least": "smallest error",
}


def mutate(
    layouts: tuple[str, ...] = LAYOUTS,
    markdown: bool = False,
    as_json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Drop, double or misdirect each collective of a training step in turn: the comparison with one device must notice.

    Exits with 1 if a mutant survives.

    Args:
        layouts: Rows of the matrix of `fmeg verify`, by name.
        markdown: Print tables in Markdown.
        as_json_: Print one JSON object and nothing else.
    """
    torch.set_num_threads(1)
    there = known()
    if unknown := [name for name in layouts if name not in there]:
        raise SystemExit(f"fmeg mutate: no layout {unknown[0]!r} in the matrix; `fmeg verify` lists them")
    found: dict[str, list[Outcome]] = {}
    with progress().status("") as status:
        for name in layouts:
            found[name] = []
            for outcome in run(bench(*there[name])):
                found[name].append(outcome)
                status.update(f"{name}: {len(found[name])} mutants, the last: {outcome.mutant}")
    tables = {name: table(outcomes) for name, outcomes in found.items()}
    alive = {name: [str(o.mutant) for o in outcomes if not o.killed()] for name, outcomes in found.items()}
    if as_json_:
        print(json.dumps({"layouts": tables, "survivors": alive, "ok": not any(alive.values())}))
    for name, rows in tables.items() if not as_json_ else ():
        print("\n".join(_markdown(there[name][0], rows))) if markdown else out().print(_table(name, rows))
        for mutant in alive[name]:
            out().print(f"survived: {mutant}", style="red", markup=False)
    return 1 if any(alive.values()) else 0


def _total(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = [c for c in COLUMNS if c not in ("collective", "mutation", "least")]
    least = min((r["least"] for r in rows if r["least"] is not None), default=None)
    return {"collective": "all", "mutation": "", **{c: sum(r[c] for r in rows) for c in counts}, "least": least}


def _cells(row: dict[str, Any]) -> list[str]:
    return [("" if v is None else f"{v:.0e}") if c == "least" else str(v) for c, v in ((c, row[c]) for c in COLUMNS)]


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    found = Table(title=name, title_justify="left", show_footer=True)
    for column, last in zip(COLUMNS.values(), _cells(_total(rows)), strict=True):
        found.add_column(column, footer=last, justify="left" if column in ("collective", "mutation") else "right")
    for row in rows:
        found.add_row(*_cells(row), style="red" if row["survived"] else None)
    return found


def _markdown(case: Case, rows: list[dict[str, Any]]) -> list[str]:
    line = lambda cells: "| " + " | ".join(cells) + " |"
    head = [f"## {case.name}", "", f"`{case.mesh}`, `{case.layout}`", ""]
    body = [line(COLUMNS.values()), line(["---"] * 2 + ["---:"] * (len(COLUMNS) - 2))]
    return [*head, *body, *(line(_cells(r)) for r in [*rows, _total(rows)]), ""]
