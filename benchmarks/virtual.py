"""What a step on a virtual mesh of 8 ranks costs, against the same step on one device.

    python -m benchmarks.virtual [--repeats 9] [--json out.json]

A whole training step (loss, gradient, clipping, AdamW) of a small Llama on one global batch: the arithmetic is the
same, cut into eight. Bar: at most 3 times the time of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fmeg
from benchmarks.measure import Row, arguments, compare, finish
from benchmarks.trace import make_step
from fmeg import Layout, Mesh, TrainState, optim
from fmeg.models import llama

TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
LAYOUTS = {
    "dp8": (Mesh(dp=8), Layout(batch="dp")),
    "fsdp8": (Mesh(dp=8), Layout(batch="dp", params=dict(embed="dp"))),
    "tp8": (Mesh(tp=8), Layout(**TP)),
    "tp8 sp": (Mesh(tp=8), Layout(res_seq="tp", **TP)),
    "cp8": (Mesh(cp=8), Layout(seq="cp", res_seq="cp")),
    "dp2 cp2 tp2 sp zero3": (
        Mesh(dp=2, cp=2, tp=2),
        Layout(batch="dp", seq="cp", res_seq=("cp", "tp"), **TP, params=dict(embed="dp")),
    ),
}
SIZES = {
    "tiny": (
        llama.Config(vocab_size=256, embed=64, layers=2, heads=8, kv_heads=8, head_dim=8, ff=128),
        (8, 32),
    ),
    "small": (
        llama.Config(vocab_size=1024, embed=128, layers=4, heads=8, kv_heads=8, head_dim=16, ff=384),
        (8, 128),
    ),
}


def main() -> None:
    args = arguments("costs of a virtual mesh", 9)
    rows: list[Row] = []
    for size, (cfg, (b, s)) in SIZES.items():
        if args.only and args.only not in size:
            continue
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
        axes = llama.logical_axes(cfg)
        torch.manual_seed(0)
        ids = torch.randint(0, cfg.vocab_size, (2, b, s))
        batch = {"tokens": ids[0], "targets": ids[1], "mask": torch.ones(b, s)}
        train_step = make_step(cfg, optimizer)

        def init(key: Any, cfg: Any = cfg, optimizer: Any = optimizer, axes: Any = axes) -> TrainState:
            return TrainState.create(llama.init(key, cfg), optimizer, axes)

        def on(
            mesh: Mesh, layout: Layout, init: Any = init, step: Any = train_step, batch: Any = batch
        ) -> Callable[[], Any]:
            state = fmeg.jit(init, mesh=mesh, layout=layout)(fmeg.random.key(0))
            run = fmeg.jit(step, mesh=mesh, layout=layout)
            return lambda: run(state, batch)

        fns: dict[str, Callable[[], Any]] = {"one device": on(Mesh(), Layout())}
        eager_state = init(fmeg.random.key(0))
        fns["eager"] = lambda state=eager_state, step=train_step, batch=batch: step(state, batch)
        fns |= {name: on(mesh, layout) for name, (mesh, layout) in LAYOUTS.items()}
        rows += compare(size, fns, "one device", args.repeats)
    finish(rows, args)


if __name__ == "__main__":
    main()
