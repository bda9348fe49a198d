"""Experts in FP8 on one GPU, kernel by kernel, beside bf16 and beside torch's grouped product of scaled rows.

    python -m benchmarks.gpu_moe_fp8 [--tokens 32768 8192] [--json moe_fp8.json]

Sizes and routing are those of `benchmarks.gpu_moe`; so is how times are taken. Of rows: finding the largest value, and
quantising as they lie, turned, or both, with TB/s of the bytes that must move. Products in TFLOP/s: `fast` sums as the
hardware does, the others in float32 after every 128 products; `turned` reads what `turn` made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_moe import D, E, F, K, _routing, case, timed
from fmeg.kernels import grouped, rows_fp8

Part = tuple[str, Callable[[], Any], float, float]  # name, function, bytes, FLOPs
TILES = [
    dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=3),
    dict(BLOCK_M=128, BLOCK_N=256, BLOCK_K=128, num_warps=8, num_stages=4),
    dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=8, num_stages=4),
    dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=128, num_warps=4, num_stages=4),
]


def rows(x: Tensor, ends: Tensor) -> Iterator[Part]:
    """What makes operands of rows."""
    n = x.numel()
    one = torch.ones(len(ends), 1, device="cuda")
    make = lambda lies, turned: rows_fp8.quantize(x, one, ends, -1, 0, torch.float8_e4m3fn, 448.0, lies, turned)
    yield "largest of an expert", lambda: rows_fp8.amax(x, ends, -1, 0), 2 * n, 0
    yield "largest of a row", lambda: rows_fp8.amax(x, ends, 1, 0), 2 * n, 0
    yield "largest of 1 x 128", lambda: rows_fp8.amax(x, ends, 1, 128), 2 * n, 0
    yield "largest of 128 x 1", lambda: rows_fp8.amax(x, ends, 128, 1), 2 * n, 0
    yield "quantised", lambda: make(True, False), 3 * n, 0
    yield "quantised, turned", lambda: make(False, True), 3 * n, 0
    yield "quantised, both", lambda: make(True, True), 4 * n, 0
    q = make(True, False)[0]
    yield "turned", lambda: rows_fp8.turn(q, ends), 2 * n, 0


def products(n: int, k: int, m: int, ends: Tensor, x: Tensor) -> Iterator[Part]:
    """[n k] · [e m k]ᵀ in every way, and the gradient of the matrices."""
    flops, experts = 2 * n * k * m, len(ends)
    w = torch.randn(experts, m, k, device="cuda").to(torch.float8_e4m3fn)
    y = torch.randn(n, m, device="cuda").bfloat16()
    wide = torch.randn(experts, m, k, device="cuda").bfloat16()
    q, qy = x.to(torch.float8_e4m3fn), y.to(torch.float8_e5m2)
    ones = lambda *shape: torch.ones(shape, device="cuda")
    yield "bf16 product", lambda: grouped.grouped_matmul(x, wide, ends, True), 0, flops
    for name, sx, sw, grid, widths in (
        ("one scale an expert", ones(experts, 1), ones(experts, 1, 1), (-1, 0), (1, 0, 0)),
        ("rows", ones(n, 1), ones(experts, m, 1), (1, 0), (1, 1, 0)),
        ("blocks", ones(n, k // 128), ones(experts, m // 128, k // 128), (1, 128), (1, 128, 128)),
    ):
        for fast in (True, False) if grid[1] == 0 else (False,):
            for tiles in TILES:

                def run(args: tuple = (q, sx, w, sw, ends, list(grid), list(widths), torch.bfloat16, fast),
                        tiles: dict[str, int] = tiles) -> Tensor:  # fmt: skip
                    held = rows_fp8.WIDE, rows_fp8.NARROW
                    rows_fp8.WIDE = rows_fp8.NARROW = tiles
                    try:
                        return rows_fp8.product(*args)
                    finally:
                        rows_fp8.WIDE, rows_fp8.NARROW = held

                yield f"{name}{', fast' * fast}, {_name(tiles)}", run, 0, flops
    scales = ones(n), ones(experts, m)
    by_torch = lambda: torch._scaled_grouped_mm(
        q, w.transpose(1, 2), *scales, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    yield "torch, rows, fast", by_torch, 0, flops
    out = torch.empty(experts, k, m, device="cuda")
    yield "bf16 gradient", lambda: grouped.grouped_dw_into(out, x, y, ends, False), 0, flops
    tx, ty = rows_fp8.turn(q, ends), rows_fp8.turn(qy, ends)
    for name, share, sx, sy in (
        ("one scale an expert", -1, ones(experts, 1), ones(experts, 1)),
        ("columns of an expert", -1, ones(experts, k), ones(experts, m)),
        ("blocks", 128, ones(tx.shape[1] // 128, k), ones(tx.shape[1] // 128, m)),
    ):
        for tiles in TILES:

            def gradient(args: tuple = (out, tx, sx, ty, sy, ends, share, False),
                         tiles: dict[str, int] = tiles) -> None:  # fmt: skip
                held, rows_fp8.NARROW = rows_fp8.NARROW, tiles
                try:
                    rows_fp8.product_dw_into(*args)
                finally:
                    rows_fp8.NARROW = held

            yield f"gradient, {name}, {_name(tiles)}", gradient, 0, flops


def _name(t: dict[str, int]) -> str:
    return f"{t['BLOCK_M']}x{t['BLOCK_N']} w{t['num_warps']} s{t['num_stages']}"


def measure(tokens: int) -> dict[str, Any]:
    order, _, ends = _routing(c := case(tokens, "natural"))
    x = c.x[order // K]
    found: dict[str, Any] = {"tokens": tokens}
    for title, parts in (
        (f"rows of {D}", rows(x, ends)),
        (f"rows of {F}", rows(x[:, :F].contiguous(), ends)),
        (f"gate [{D} {F}]", products(len(x), D, F, ends, x)),
        (f"down [{F} {D}]", products(len(x), F, D, ends, x[:, :F].contiguous())),
    ):
        print(f"\n== {tokens} tokens, {len(x) // E} rows an expert, {title}", flush=True)
        found[title] = {}
        for name, fn, nbytes, flops in parts:
            try:
                s = timed(fn)
            except Exception as error:  # tiles may need more shared memory than there is; torch may not have it
                print(f"{name:44} {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            found[title][name] = s * 1e3
            rate = f"{flops / s / 1e12:6.0f} TFLOP/s" if flops else f"{nbytes / s / 1e12:6.2f} TB/s"
            print(f"{name:44} {s * 1e3:8.3f} ms {rate}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 8192])
    parser.add_argument("--json", default="moe_fp8.json")
    args = parser.parse_args()
    made = [measure(t) for t in args.tokens]
    with open(args.json, "w") as f:
        json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": made}, f, indent=1)


if __name__ == "__main__":
    main()
