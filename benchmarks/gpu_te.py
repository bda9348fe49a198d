"""Our kernels beside TransformerEngine's, operation by operation, at the sizes of D1 and D2 (see `benchmarks.gpu`).

    python -m benchmarks.gpu_te [D1 D2] [--runs 15] [--json te.json]

Each line: milliseconds of ours and of theirs, which is faster and by how much, and the largest difference of the two
results over the largest result. What is timed is what a step runs: tensors to tensors, casts to FP8 and reductions
included; the host's work is hidden behind a full queue, except in grouped products, where theirs waits for sizes.
"ours" is what an uncompiled step runs. Norms forward are compiled, as a step compiles them. Medians, each run with a
cold level-2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import MODELS
from fmeg.kernels import grouped, rows, te
from fmeg.ops.attention import attention_bwd_p, attention_p
from fmeg.ops.einsum import einsum, einsum_matrices
from fmeg.ops.rms_norm import rms_norm
from fmeg.precision.formats import Format, amax, quantize
from fmeg.precision.scaled import scaled_einsum_p

BF16, E4M3 = torch.bfloat16, Format("e4m3")
EXPERTS, WIDE, INSIDE = 128, 2048, 768  # of Qwen3-30B-A3B
Fn = Callable[[], Any]


@dataclass
class Row:
    """One operation: milliseconds, and how far the results are apart."""

    model: str
    what: str
    ours: float
    theirs: float
    apart: float

    def __str__(self) -> str:
        fast, ratio = ("ours", self.theirs / self.ours) if self.ours < self.theirs else ("TE", self.ours / self.theirs)
        times = f"{self.ours:8.3f} ms {self.theirs:8.3f} ms"
        return f"{self.model} {self.what:34} {times}   {fast:>4} {ratio:5.2f}x   apart {self.apart:.1e}"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(BF16)


def milliseconds(fns: list[Fn], runs: int) -> list[float]:
    """Median of each, in turn; writing 256 MB before each run empties the cache and fills the queue."""
    for fn in fns * 3:
        fn()
    waste = torch.empty(2**28, dtype=torch.int8, device="cuda")
    times: list[list[float]] = [[] for _ in fns]
    for _ in range(runs):
        for fn, found in zip(fns, times, strict=True):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(4):
                waste.zero_()
            begin.record()
            fn()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end))
    return [statistics.median(t) for t in times]


def first(x: Any) -> Tensor:
    return x[0] if isinstance(x, tuple) else x


def attention(cfg: Any, b: int, s: int) -> Iterator[tuple[str, Fn, Fn]]:
    q, do = (normal(b, s, cfg.heads, cfg.head_dim, seed=i) for i in (0, 1))
    k, v = (normal(b, s, cfg.kv_heads, cfg.head_dim, seed=i) for i in (2, 3))
    scale = cfg.head_dim**-0.5
    options = dict(causal=True, window=None, scale=scale)
    yield "attention", lambda: attention_p(q, k, v, **options), lambda: te.attention(q, k, v, True, 0, scale)
    o, lse = attention_p(q, k, v, **options)
    mine = lambda: attention_bwd_p(q, k, v, o, lse, do, **options)
    yield "attention backward", mine, lambda: te.attention_backward(q, k, v, o, lse, do, True, 0, scale)


def norms(cfg: Any, b: int, s: int) -> Iterator[tuple[str, Fn, Fn]]:
    x, ct, w = normal(b, s, cfg.embed), normal(b, s, cfg.embed, seed=1), normal(cfg.embed, seed=2)
    compiled = torch.compile(lambda x, w: rms_norm(x, w, 1e-5), dynamic=False)
    yield "rms_norm", lambda: compiled(x, w), lambda: te.rms_norm(x, w, 1e-5)
    factors = torch.compile(lambda x: torch.rsqrt(x.float().square().mean(-1) + 1e-5), dynamic=False)
    mine = lambda: rows.rms_norm_backward(x, w, ct, None, 1e-5)
    yield "rms_norm backward", mine, lambda: te.rms_norm_backward(x, w, ct, factors(x))
    r = factors(x)
    yield "rms_norm backward, factors kept", mine, lambda: te.rms_norm_backward(x, w, ct, r)


def products(cfg: Any, b: int, s: int) -> Iterator[tuple[str, Fn, Fn]]:
    x, w, ct = normal(b, s, cfg.embed), normal(cfg.embed, cfg.ff, seed=1), normal(b, s, cfg.ff, seed=2)
    for what, equation, y, z in (
        ("product, forward", "b s d, d f -> b s f", x, w),
        ("product, gradient of x", "b s f, d f -> b s d", ct, w),
        ("product, gradient of w", "b s d, b s f -> d f", x, ct),
    ):
        m = einsum_matrices(equation, y.shape, z.shape)
        assert m is not None
        yield what, partial(einsum, equation, y, z), partial(te.product, *m.operands(y, z))


def fp8(cfg: Any, b: int, s: int) -> Iterator[tuple[str, Fn, Fn]]:
    """x wᵀ, casts of both included: with a scale a tensor, and by 1 x 128 and 128 x 128."""
    x, w = normal(b * s, cfg.embed), normal(cfg.ff, cfg.embed, seed=1)

    def ours(grids: Any, fast: bool) -> Fn:
        cast = [torch.compile(lambda t, g=g: quantize(t, amax(t, g), g, E4M3), dynamic=False) for g in grids]
        product = scaled_einsum_p.run()
        return lambda: product("b d, f d -> b f", *cast[0](x), *cast[1](w), grids, BF16, fast)

    def theirs(kinds: tuple[int, int], fast: bool) -> Tensor:
        return te.fp8_product(te.quantized(x, kinds[0]), te.quantized(w, kinds[1]), split=not fast)

    for what, grids, kinds, fast in (
        ("FP8 product, a scale a tensor", ((0, 0), (0, 0)), (0, 0), True),
        ("FP8 product, blocks", ((1, 128), (128, 128)), (1, 2), False),
    ):
        yield what, ours(grids, fast), partial(theirs, kinds, fast)


def experts(cfg: Any, b: int, s: int) -> Iterator[tuple[str, Fn, Fn]]:
    """8 experts a token, as many tokens as the model's batch has, uneven."""
    n = 8 * b * s
    sizes = torch.randint(0, 2 * n // EXPERTS, (EXPERTS,), generator=torch.Generator().manual_seed(0))
    ends = (sizes.double() / sizes.sum() * n).cumsum(0).floor().int().cuda()
    x, y, w = normal(n, WIDE), normal(n, INSIDE, seed=1), normal(EXPERTS, WIDE, INSIDE, seed=2)
    for what, args in (("forward", (x, w, ends, False)), ("gradient of x", (y, w, ends, True))):
        yield f"grouped product, {what}", partial(grouped.grouped_matmul, *args), partial(te.grouped_matmul, *args)
    mine = lambda: grouped.grouped_matmul_dw(x, y, ends, BF16)
    yield "grouped product, gradient of w", mine, lambda: te.grouped_matmul_dw(x, y, ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("models", nargs="*", default=["D1", "D2"], choices=list(MODELS))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json")
    args = parser.parse_args()
    import_module("transformer_engine.pytorch")  # before torch's cuDNN is loaded, which may be another version's
    found: list[Row] = []
    for model in args.models:
        cfg, (b, s) = MODELS[model]
        for group in (attention, norms, products, fp8, experts):
            try:
                for what, ours, theirs in group(cfg, b, s):
                    x, y = first(ours()).float(), first(theirs()).float()
                    apart = float((x - y.view(x.shape)).abs().max() / x.abs().max())
                    mine, other = milliseconds([ours, theirs], args.runs)
                    found.append(Row(model, what, mine, other, apart))
                    print(found[-1], flush=True)
            except Exception as e:  # one library's refusal shall not hide the other groups
                print(f"{model} {group.__name__}: {type(e).__name__}: {str(e)[:300]}", flush=True)
    if args.json:
        with open(args.json, "w") as f:
            json.dump([asdict(r) for r in found], f, indent=1)


if __name__ == "__main__":
    main()
