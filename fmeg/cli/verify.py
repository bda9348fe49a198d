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
from fmeg.testing.matrix import cases
from fmeg.testing.pipelines import pipeline_cases
from fmeg.testing.verify import DEFAULT, STEPS, TOLERANCE, Row, as_json, config, sizes_of
from fmeg.testing.verify import verify as run


def verify(
    model: str = DEFAULT,
    devices: int = 16,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    workers: int | None = None,
    only: str = "",
    as_json_: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> int:
    """Check that every layout of a matrix trains a model as one device does, in float64 on virtual devices.

    For each layout: the loss of every step, every gradient leaf of the first, every parameter after the last of `steps`
    steps of AdamW behind an active clip, under strict. Exits with 1 if any relative error is above the tolerance, or a
    pipeline alone does not give loss and gradients of the first step bit for bit.

    Args:
        model: Preset whose traits are tested at a small size.
        devices: Largest mesh; 32 has larger pipelines than the 16 of the default.
        steps: Optimizer steps.
        tolerance: Largest relative error allowed.
        workers: Processes; by default one a core, at most 4.
        only: Only layouts whose name contains this, such as "zero3", "ring2 tp2", "pp2" or "zb_v".
        as_json_: Print one JSON object and nothing else.
    """
    if model != DEFAULT and model not in presets.PRESETS:
        raise SystemExit(f"fmeg verify: no preset {model!r}; there are {', '.join(presets.PRESETS)}")
    torch.set_num_threads(1)
    cfg = config(model)
    sizes = sizes_of(cfg)
    matrix = [case for case in (*cases(sizes, devices), *pipeline_cases(sizes, devices)) if only in case.name]
    if not matrix:
        raise SystemExit(f"fmeg verify: no layout's name contains {only!r}")
    begin, rows = time.perf_counter(), []
    with progress().status(f"{len(matrix)} layouts") as status:
        for row in run(cfg, matrix, steps=steps, tolerance=tolerance, workers=workers or min(4, os.cpu_count() or 1)):
            rows.append(row)
            status.update(f"{len(rows)} of {len(matrix)} layouts, the last: {row.name}")
    result = as_json(rows)
    if as_json_:
        print(json.dumps(result))
    else:
        out().print(_table(model, rows))
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
