"""What tracing, differentiating and partitioning cost: the same for any number of layers, and of ranks.

    python -m benchmarks.trace [--repeats 5] [--json out.json]

A whole training step (loss, gradient, clipping, AdamW) of Llama at its published widths; no tensor has data. Bars:
2, 32 and 96 layers cost the same and less than 5 s; a mesh of 8 and one of 16384 ranks cost the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import fmeg
from benchmarks.measure import Row, arguments, compare, finish, in_fresh_processes, rows_of
from fmeg import Layout, Mesh, TrainState, optim, tree
from fmeg.models import llama, presets
from fmeg.program.ir import TensorType, Value
from fmeg.program.trace import trace

LAYOUT = Layout(
    batch="dp",
    seq="cp",
    res_seq=("cp", "tp"),
    heads="tp",
    kv_heads="tp",
    ff="tp",
    vocab="tp",
    params=dict(embed="dp"),
)
SMALL, LARGE = Mesh(dp=2, cp=2, tp=2), Mesh(dp=128, cp=16, tp=8)
BATCH, SEQ = 256, 8192
FRESH = """
import time
from benchmarks import trace as t
wall, cpu = time.perf_counter(), time.process_time()
step, state, batch = t.problem({n})
t.fmeg.jit(step, mesh=t.{mesh}, layout=t.LAYOUT, strict=True).lower(state, batch)
print(time.perf_counter() - wall, time.process_time() - cpu)
"""


def make_step(cfg: llama.Config, optimizer: Any) -> Callable[..., Any]:
    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
        grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))
        (loss, _), grads = grad(state.params, batch)
        updates, opt = optimizer.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=opt), {"loss": loss}

    return train_step


def types_of(fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn` with a TensorType for each tensor."""
    traced = trace(fn, *args)
    outs = [v.type if isinstance(v, Value) else v for v in traced.program.outputs]
    return tree.unflatten(traced.out_tree, outs)


def problem(layers: int) -> tuple[Callable[..., Any], TrainState, Any]:
    """A training step and the types of its arguments."""
    cfg = replace(presets.get("llama3-8b"), layers=layers, embed=16384, ff=53248, heads=128)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
    axes = llama.logical_axes(cfg)
    state = types_of(lambda key: TrainState.create(llama.init(key, cfg), optimizer, axes), fmeg.random.key(0))
    ids = TensorType((BATCH, SEQ), torch.int64)
    batch = {"tokens": ids, "targets": ids, "mask": TensorType((BATCH, SEQ), torch.float32)}
    return make_step(cfg, optimizer), state, batch


def main() -> None:
    args = arguments("costs of tracing and partitioning", 5)
    problems = {n: problem(n) for n in (2, 32, 96)}
    rows: list[Row] = []

    def lower(n: int, mesh: Mesh) -> None:
        step, state, batch = problems[n]
        fmeg.jit(step, mesh=mesh, layout=LAYOUT, strict=True).lower(state, batch)

    def only_trace(n: int) -> None:
        step, state, batch = problems[n]
        trace(step, state, batch)

    fns = {f"{n} layers": lambda n=n: only_trace(n) for n in problems}
    rows += compare("trace and gradient", fns, "2 layers", args.repeats)
    fns = {f"{n} layers": lambda n=n: lower(n, SMALL) for n in problems}
    rows += compare("trace, gradient, partition for 8 ranks", fns, "2 layers", args.repeats)
    fns = {f"{m.size} ranks": lambda m=m: lower(32, m) for m in (SMALL, LARGE)}
    rows += compare("trace, gradient, partition 32 layers", fns, "8 ranks", args.repeats)
    code = {f"{n} layers": FRESH.format(n=n, mesh="SMALL") for n in problems}
    code["32 layers, 16384 ranks"] = FRESH.format(n=32, mesh="LARGE")
    times = in_fresh_processes(code, min(args.repeats, 3))
    rows += rows_of("trace init, then all of that, as a process's first", times, {}, "2 layers")
    finish(rows, args)


if __name__ == "__main__":
    main()
