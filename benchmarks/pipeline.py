"""What running a pipeline costs beside what its pieces compute.

    python -m benchmarks.pipeline [--repeats 5] [--json out.json]

Three tables. Microseconds an action of the virtual runtime, and of four Gloo processes, with pieces that compute
nothing and hand on 16 numbers. Then pieces that sleep (F 16 ms, B 32, I and W 16, of a rank's share of the model, which
its stages divide), so that four processes are four devices even where they share cores: the bubble and the time that
`timeline` predicts, beside those recorded. Then `jit`: a pipelined step on a virtual mesh, which runs its ranks one
after the other, against the same accumulation on one device.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

import fmeg
from benchmarks.measure import Row, arguments, compare, finish
from fmeg import Layout, Mesh
from fmeg.models import llama
from fmeg.pipeline import Costs, Schedule, by_name, record
from fmeg.pipeline.runtime import run_real, run_virtual
from fmeg.pipeline.transport import RealRanks
from tests.mesh import processes

NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v")
SLEEP = Costs(F=16e-3, B=32e-3, I=16e-3, W=16e-3)
RESULTS = Path("pipeline-ranks.json")


class Stub:
    """A worker whose pieces take a given time and hand on the same carry."""

    def __init__(self, schedule: Schedule, costs: Costs | None, carry: torch.Tensor) -> None:
        self.schedule, self.costs, self.carry = schedule, costs, [carry]
        self.inputs: dict[int, Any] = {}
        self.kept: dict[Any, Any] = {}
        self.late: dict[Any, Any] = {}
        self.backend = SimpleNamespace(device=torch.device("cpu"))

    def _take(self, kind: str) -> list[torch.Tensor]:
        if self.costs is not None:
            time.sleep(getattr(self.costs, kind) / self.schedule.chunks)
        return self.carry

    def forward(self, s: int, j: int, message: Any) -> Any:
        return self._take("F")

    def backward(self, s: int, j: int, message: Any) -> Any:
        return self._take("B")

    def input_gradient(self, s: int, j: int, message: Any) -> Any:
        return self._take("I")

    def weight_gradient(self, s: int, j: int) -> None:
        self._take("W")

    def left(self) -> list[str]:
        return []


def virtual(repeats: int) -> dict[str, float]:
    """Microseconds an action, 4 ranks of 64 microbatches, nothing computed."""
    out = {}
    for name in NAMES:
        schedule = by_name(name, ranks=4, microbatches=64).compute()
        workers = [Stub(schedule, None, torch.zeros(16)) for _ in range(4)]
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run_virtual(schedule, workers)  # type: ignore[arg-type]
            times.append(time.perf_counter() - begin)
        out[name] = median(times) / sum(map(len, schedule.actions)) * 1e6
    return out


def on_ranks() -> None:
    """On each of four processes: microseconds an action, and predicted and recorded bubbles of pieces that sleep."""
    mesh = Mesh(pp=4, backend="distributed")
    ranks = RealRanks(mesh.backend(), "pp")
    carry, wait = torch.zeros(16), timedelta(seconds=30)
    found: dict[str, dict[str, float]] = {}
    for name in NAMES:
        row = found[name] = {}
        for costs, microbatches in ((None, 64), (SLEEP, 16)):
            schedule = by_name(name, ranks=4, microbatches=microbatches).compute()
            wired = schedule.with_messages()
            mine = len(wired.actions[ranks.mine[0]])
            times, cpu, bubbles = [], [], []
            for _ in range(3):
                dist.barrier()
                begin, used = time.perf_counter(), time.process_time()
                stub: Any = Stub(schedule, costs, carry)
                if costs is None:
                    run_real(wired, stub, ranks, {"F": [carry], "B": [carry]}, wait)
                else:
                    with record() as recording:
                        run_real(wired, stub, ranks, {"F": [carry], "B": [carry]}, wait)
                times.append(time.perf_counter() - begin)
                cpu.append(time.process_time() - used)
                if costs is not None:
                    events = recording.last().gathered().events
                    span = max(e for *_, e in events) - min(b for _, _, b, _ in events)
                    bubbles.append(1 - sum(e - b for _, _, b, e in events) / (4 * span))
            if costs is None:
                row |= dict(us_an_action=median(times) / mine * 1e6, cpu_us=median(cpu) / mine * 1e6)
            else:
                planned = schedule.timeline(costs.shared(schedule.chunks))
                row |= dict(predicted=planned.bubble, measured=median(bubbles))
                row |= dict(planned_ms=planned.makespan * 1e3, measured_ms=median(times) * 1e3)
    if dist.get_rank() == 0:
        RESULTS.write_text(json.dumps(found))


def steps(repeats: int) -> list[Row]:
    """A pipelined step on a virtual mesh against the same accumulation on one device."""
    cfg = llama.Config(vocab_size=64, embed=64, layers=8, heads=4, kv_heads=2, head_dim=16, ff=128, dtype=torch.float32)
    params, axes = llama.init(fmeg.random.key(0), cfg), {"params": llama.logical_axes(cfg)}
    tokens = torch.randint(0, 64, (32, 33))
    data = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(32, 32)}

    def step(mesh: Mesh, layout: Layout | None, **how: Any) -> Any:
        def f(params: Any, batch: Any) -> Any:
            return fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=8, **how)(params, batch)

        run = fmeg.jit(f, mesh=mesh, layout=layout, axes=axes)
        return lambda: run(params, data)

    fns = {"accumulation on one device": step(Mesh(backend="loop"), None)}
    for name in NAMES:
        fns[name] = step(Mesh(pp=4), Layout(layers="pp"), schedule=name)
    return compare("8 layers, 8 microbatches, pp=4, virtual", fns, "accumulation on one device", repeats)


def main() -> None:
    args = arguments("costs of running pipelines", 5)
    idle = virtual(args.repeats)
    failed = processes.run([on_ranks], 4)["on_ranks"]
    if failed:
        raise SystemExit(failed[0])
    real = json.loads(RESULTS.read_text())
    RESULTS.unlink()
    print("Microseconds an action; between processes sends and receives are actions as well.\n")
    print("| schedule | virtual | 4 Gloo processes, CPU of one | wall |\n|---|---|---|---|")
    for name in NAMES:
        print(f"| {name} | {idle[name]:.1f} | {real[name]['cpu_us']:.0f} | {real[name]['us_an_action']:.0f} |")
    print("\n| schedule | bubble predicted | recorded | step predicted, ms | measured, ms |\n|---|---|---|---|---|")
    for name, row in real.items():
        bubbles = f"{100 * row['predicted']:.1f} % | {100 * row['measured']:.1f} %"
        print(f"| {name} | {bubbles} | {row['planned_ms']:.1f} | {row['measured_ms']:.1f} |")
    print()
    finish(steps(args.repeats), args)


if __name__ == "__main__":
    main()
