"""What FP8 is worth on one GPU: the gradient of a few layers of Llama-3-8B's width, in bf16 and by recipe.

    python -m benchmarks.fp8 --recipes bf16 tensorwise rowwise blockwise --mode inductor --layers 4 --rows 2 --seq 4096

One forward and backward pass (no optimizer), parameters in float32, arithmetic in bf16; every layer is rewritten.
TFLOP/s are those of the model (`llama.flops_per_token`). Times are medians over `--steps`, the GPU synchronised at each
step's end. `--small` runs everything at a size for any machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import torch

import fmeg
from fmeg import precision, tree
from fmeg.models import llama

WIDE = llama.Config(
    vocab_size=4096, embed=4096, layers=4, heads=32, kv_heads=8, head_dim=128, ff=14336, compute_dtype=torch.bfloat16
)
SMALL = replace(WIDE, vocab_size=128, embed=128, heads=2, kv_heads=2, head_dim=64, ff=256)
RECIPES: dict[str, Callable[..., precision.Recipe]] = {
    "tensorwise": precision.fp8,
    "rowwise": lambda **k: precision.fp8("rowwise", **k),
    "blockwise": lambda **k: precision.fp8("blockwise", power_of_two=True, **k),
    "mxfp8": precision.mxfp8,
    "nvfp4": precision.nvfp4,
}


def run(cfg: llama.Config, recipe: str, mode: Any, rows: int, seq: int, steps: int) -> tuple[float, int, float]:
    """(seconds a step, peak bytes, loss)."""
    gpu = torch.cuda.is_available()
    chosen = None if recipe == "bf16" else RECIPES[recipe](skip_first=0, skip_last=0)
    grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), precision=chosen)

    def step(params: Any, batch: Any) -> Any:
        (loss, _), grads = grad(params, batch)
        return loss, grads

    jitted = fmeg.jit(step, mode=mode)
    params = llama.init(fmeg.random.key(0), cfg)
    torch.manual_seed(0)
    tokens = torch.randint(0, cfg.vocab_size, (rows, seq + 1))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(rows, seq)}
    sync = torch.cuda.synchronize if gpu else lambda: None
    seconds, loss = [], 0.0
    for i in range(steps + 3):
        sync()
        begin = time.perf_counter()
        out, grads = jitted(params, batch)
        sync()
        seconds.append(time.perf_counter() - begin)
        loss = float(out.global_value())
        if i == 0:
            assert all(bool(g.global_value().isfinite().all()) for g in tree.leaves(grads)), "a gradient is not finite"
        del out, grads
    return median(seconds[3:]), torch.cuda.max_memory_allocated() if gpu else 0, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=["bf16", *RECIPES], choices=["bf16", *RECIPES])
    parser.add_argument("--mode", default="eager")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--small", action="store_true")
    a = parser.parse_args()
    cfg = replace(SMALL if a.small else WIDE, layers=a.layers)
    flops = llama.flops_per_token(cfg, a.seq) * a.rows * a.seq
    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{'recipe':12} {'ms':>9} {'TFLOP/s':>9} {'peak GiB':>9} {'loss':>9}")
    for recipe in a.recipes:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        s, peak, loss = run(cfg, recipe, a.mode, a.rows, a.seq, a.steps)
        print(f"{recipe:12} {s * 1e3:9.2f} {flops / s / 1e12:9.1f} {peak / 2**30:9.2f} {loss:9.4f}", flush=True)


if __name__ == "__main__":
    main()
