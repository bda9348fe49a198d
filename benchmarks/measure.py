"""Times and memory of functions that are to be compared: interleaved repeats, medians, a table and JSON."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Thunk = Callable[[], Any]
EMPTY: Mapping[str, Thunk] = MappingProxyType({})


@dataclass(frozen=True)
class Times:
    """Seconds of each repeat: wall clock, and CPU time of this process, which other processes disturb less."""

    wall: tuple[float, ...]
    cpu: tuple[float, ...]


def interleave(fns: Mapping[str, Thunk], repeats: int, warmup: int = 1) -> dict[str, Times]:
    """Run all functions in turn, `repeats` times over, each time another first: what disturbs one disturbs all."""
    for _ in range(warmup):
        for fn in fns.values():
            fn()
    wall: dict[str, list[float]] = {name: [] for name in fns}
    cpu: dict[str, list[float]] = {name: [] for name in fns}
    gc.collect()
    gc.disable()
    try:
        for i in range(repeats):
            names = list(fns)
            for name in names[i % len(names) :] + names[: i % len(names)]:
                fn = fns[name]
                w, c = time.perf_counter(), time.process_time()
                fn()
                cpu[name].append(time.process_time() - c)
                wall[name].append(time.perf_counter() - w)
                gc.collect()
    finally:
        gc.enable()
    return {name: Times(tuple(wall[name]), tuple(cpu[name])) for name in fns}


def ratio(a: Times, b: Times, kind: str = "cpu") -> float:
    """Median over the repeats of a's time to b's in the same round."""
    return median(x / y for x, y in zip(getattr(a, kind), getattr(b, kind), strict=True))


def peak_bytes(fn: Thunk) -> int:
    """The most bytes that torch's allocator held of those that `fn` asked for, temporaries of kernels included.

    What was allocated before is not counted, neither held nor freed.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        kept = fn()
    del kept
    events = [(e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = top = 0
    for _, nbytes in sorted(events, key=lambda e: e[0]):
        held += nbytes
        top = max(top, held)
    return top


@dataclass(frozen=True)
class Row:
    """One line of a report: medians in seconds, bytes, and how it compares with `against`."""

    case: str
    name: str
    wall: float
    cpu: float
    wall_ratio: float
    cpu_ratio: float
    peak: int | None = None
    peak_ratio: float | None = None


def compare(
    case: str,
    fns: Mapping[str, Thunk],
    against: str,
    repeats: int,
    memory: Mapping[str, Thunk] = EMPTY,
    warmup: int = 1,
) -> list[Row]:
    """A row for each function, with ratios to the one named `against`. `memory`: what to run for the peaks."""
    times = interleave(fns, repeats, warmup)
    return rows_of(case, times, {name: peak_bytes(fn) for name, fn in memory.items()}, against)


def in_fresh_processes(code: Mapping[str, str], repeats: int) -> dict[str, Times]:
    """Times that snippets print as their last words, wall and CPU seconds; each run in a new process."""
    wall: dict[str, list[float]] = {name: [] for name in code}
    cpu: dict[str, list[float]] = {name: [] for name in code}
    for _ in range(repeats):
        for name, text in code.items():
            done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
            w, c = done.stdout.split()[-2:]
            wall[name].append(float(w))
            cpu[name].append(float(c))
    return {name: Times(tuple(wall[name]), tuple(cpu[name])) for name in code}


def rows_of(case: str, times: Mapping[str, Times], peaks: Mapping[str, int], against: str) -> list[Row]:
    """The rows of one comparison."""
    rows = []
    for name, t in times.items():
        base = times[against]
        peak = peaks.get(name)
        rows.append(
            Row(
                case,
                name,
                median(t.wall),
                median(t.cpu),
                ratio(t, base, "wall"),
                ratio(t, base, "cpu"),
                peak,
                peak / peaks[against] if peak is not None else None,
            )
        )
    return rows


def report(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    memory = any(r.peak is not None for r in rows)
    head = [
        "case",
        "what",
        "wall ms",
        "CPU ms",
        "wall ratio",
        "CPU ratio",
        *(["peak MiB", "peak ratio"] if memory else []),
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for r in rows:
        cells = [
            r.case,
            r.name,
            f"{r.wall * 1e3:.1f}",
            f"{r.cpu * 1e3:.1f}",
            f"{r.wall_ratio:.2f}",
            f"{r.cpu_ratio:.2f}",
        ]
        if memory:
            cells += [f"{r.peak / 2**20:.2f}", f"{r.peak_ratio:.3f}"] if r.peak is not None else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def arguments(description: str, repeats: int) -> argparse.Namespace:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run only cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    return args


def finish(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """Print the table, and write the JSON if asked."""
    print(report(rows))
    if args.json:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
        args.json.write_text(json.dumps({**facts, "rows": [asdict(r) for r in rows]}, indent=1) + "\n")
