"""`fmeg verify`: every layout of the matrix, and pipelines over them, against one device."""

from __future__ import annotations

import json
import os
import time
from typing import Annotated

import torch
import tyro
from rich.table import Table

from fmeg.cli.console import out, progress
from fmeg.models import presets
from fmeg.testing.verify import STEPS, TOLERANCE, TRICKY, Row, as_json, jobs
from fmeg.testing.verify import verify_all as run


def verify(
    model: str | None = None,
    devices: int = 16,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    workers: int | None = None,
    only: str = "",
    everything: Annotated[bool, tyro.conf.arg(name="all")] = False,
    as_json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Check that every layout of a matrix trains models as one device does, in float64 on virtual devices.

    For each layout: the loss of every step, every gradient leaf of the first, every parameter after the last of `steps`
    steps of AdamW behind an active clip, under strict. Exits with 1 if any relative error is above the tolerance, or a
    pipeline alone does not give loss and gradients of the first step bit for bit.

    Args:
        model: Preset whose traits are tested at a small size, or tricky-llama, tricky-moe, tricky-deepseek. By default
            the first of these, and a part of the rows of the others.
        devices: Largest mesh; 32 has larger pipelines than the 16 of the default.
        steps: Optimizer steps.
        tolerance: Largest relative error allowed.
        workers: Processes; by default one a core, at most 4.
        only: Only layouts whose name contains this, such as "zero3", "ring2 tp2", "pp2", "zb_v" or "moe:".
        everything: All rows of the models with experts: every layout, dispatcher, bound and hard routing.
        as_json_: Print one JSON object and nothing else.
    """
    if model is not None and model not in (*TRICKY, *presets.PRESETS):
        raise SystemExit(f"fmeg verify: no preset {model!r}; there are {', '.join(presets.PRESETS)}")
    torch.set_num_threads(1)
    todo = [job for job in jobs(model, devices, everything) if only in job[0].name]
    if not todo:
        raise SystemExit(f"fmeg verify: no layout's name contains {only!r}")
    begin, rows = time.perf_counter(), []
    with progress().status(f"{len(todo)} layouts") as status:
        for row in run(todo, steps=steps, tolerance=tolerance, workers=workers or min(4, os.cpu_count() or 1)):
            rows.append(row)
            status.update(f"{len(rows)} of {len(todo)} layouts, the last: {row.name}")
    result = as_json(rows)
    if as_json_:
        print(json.dumps(result))
    else:
        out().print(_table(model or "all models", rows))
        for row in rows:
            if row.error:
                out().print(f"{row.name}: {row.error}", style="red", markup=False)
        failed = sum(not row.ok for row in rows)
        worst = result["worst"]
        took = f"{time.perf_counter() - begin:.0f} s"
        out().print(
            f"{len(rows) - failed} of {len(rows)} layouts equal one device to {tolerance:g}; "
            f"the largest relative error is {worst['error']:.1e} ({worst['name']}); {took}"
        )
    return 0 if result["ok"] else 1


def _table(model: str, rows: list[Row]) -> Table:
    table = Table(title=f"{model}: layouts against one device, float64", title_justify="left")
    for name in ("layout", "mesh", "schedule", "collectives", "loss", "gradient", "parameters", ""):
        table.add_column(name, justify="right" if name in ("loss", "gradient", "parameters") else "left")
    for row in rows:
        mesh = " ".join(f"{axis}={n}" for axis, n in row.mesh.items())
        moves = ", ".join(f"{n} {kind}" for kind, n in row.collectives.items())
        numbers = [f"{e:.1e}" for e in (row.loss_error, row.grad_error, row.params_error)]
        table.add_row(
            row.name,
            mesh,
            row.schedule or "",
            moves,
            *numbers,
            "ok" if row.ok else "FAILED",
            style=None if row.ok else "red",
        )
    return table
