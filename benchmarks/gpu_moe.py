"""A layer of experts alone on one GPU, part by part, and the products of rows by torch's kernel and by Triton's.

    python -m benchmarks.gpu_moe [--tokens 4096 8192 16384 32768] [--routing natural balanced] [--json moe.json]
    python -m benchmarks.gpu_moe --check                      # small sizes: every way against torch's, no times

Sizes are those of Qwen3-30B-A3B: 128 experts, 8 a token, 2048 wide, 768 inside; bf16, gradients of weights in float32.

parts       each in ms, with TB/s of the bytes it must move, or TFLOP/s for products; `layer` is the sum over one
            forward and one backward pass, `fwd` and `bwd` in TFLOP/s of the six products (18 · tokens · k · d · f)
products    forward (x w, [d, f] and the pair [d, 2f]), gradient of x (transposed), gradient of w: `torch` is
            `torch._grouped_mm` in bf16, with a cast to float32 for weights; others are tiles M x N x K, warps, stages
router      the library's as plain operations, forward and backward, with its logits in float32

Times are medians over runs that each begin with a cold cache of level 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmeg import ops
from fmeg.kernels import experts as kernels
from fmeg.kernels import grouped

E, K, D, F = 128, 8, 2048, 768
RUNS = 15


@dataclass
class Case:
    """The tensors of one layer."""

    x: Tensor  # t d
    indices: Tensor  # t k
    weights: Tensor  # t k
    w_gate: Tensor  # e d f, a half of `pair`
    w_up: Tensor
    pair: Tensor  # e d 2f
    w_down: Tensor  # e f d

    @property
    def rows(self) -> int:
        return self.indices.numel()


def case(tokens: int, routing: str, sizes: tuple[int, int, int, int] = (E, K, D, F)) -> Case:
    e, k, d, f = sizes
    g = torch.Generator("cuda").manual_seed(0)
    normal = lambda *shape: torch.randn(shape, device="cuda", generator=g)
    if routing == "balanced":
        indices = (torch.arange(tokens * k, device="cuda") % e).view(tokens, k)
    else:
        indices = (normal(tokens, e) + 0.5 * normal(e)).topk(k).indices
    pair = (normal(e, d, 2 * f) / d**0.5).bfloat16()
    down = (normal(e, f, d) / f**0.5).bfloat16()
    x, weights = normal(tokens, d).bfloat16(), normal(tokens, k).softmax(-1)
    return Case(x, indices, weights, pair[..., :f], pair[..., f:], pair, down)


_FLUSH: list[Tensor] = []


def timed(fn: Callable[[], Any], runs: int = RUNS) -> float:
    """Median seconds."""
    if not _FLUSH:
        _FLUSH.append(torch.empty(2**26, device="cuda"))
    for _ in range(3):
        fn()
    pairs = []
    for _ in range(runs):
        _FLUSH[0].zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        fn()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) / 1e3


def candidates(x: Tensor, w: Tensor, ends: Tensor, transposed: bool) -> dict[str, Callable[[], Tensor]]:
    """Ways to multiply rows by their experts' matrices."""
    from fmeg.kernels import _triton_grouped as triton_

    right = w.transpose(1, 2) if transposed else w
    found: dict[str, Callable[[], Tensor]] = {"torch": lambda: torch._grouped_mm(x, right, offs=ends)}
    for tiles in triton_.CONFIGS:
        found[_name(tiles)] = lambda tiles=tiles: triton_.matmul(x, w, ends, transposed, tiles=tiles)  # type: ignore[misc]
    return found


def candidates_dw(x: Tensor, y: Tensor, ends: Tensor, out: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Ways to multiply xᵀ y over experts' rows, into float32."""
    from fmeg.kernels import _triton_grouped as triton_

    def by_torch() -> Tensor:
        return out.copy_(torch._grouped_mm(x.t(), y, offs=ends))

    found: dict[str, Callable[[], Tensor]] = {"torch": by_torch}
    for tiles in triton_.CONFIGS:

        def by_triton(tiles: Any = tiles) -> Tensor:
            triton_.matmul_dw_into(out, x, y, ends, False, tiles)
            return out

        found[_name(tiles)] = by_triton
    return found


def _name(t: dict[str, Any]) -> str:
    return f"{t['BLOCK_M']}x{t['BLOCK_N']}x{t['BLOCK_K']} w{t['num_warps']} s{t['num_stages']}"


def products(c: Case) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """Every product of the layer, each in every way."""
    order, _, ends = _routing(c)
    d, f = c.x.shape[1], c.w_down.shape[1]
    rows = c.x[order // c.indices.shape[1]]
    inner, both = torch.randn(2, c.rows, 2 * f, device="cuda").bfloat16()
    h = inner[:, :f].contiguous()
    e = c.pair.shape[0]
    into = lambda a, b: torch.empty(e, a, b, device="cuda")
    return {
        "fwd pair [d 2f]": candidates(rows, c.pair, ends, False),
        "fwd half [d f]": candidates(rows, c.w_gate.contiguous(), ends, False),
        "fwd down [f d]": candidates(h, c.w_down, ends, False),
        "dx pair [2f d]": candidates(both, c.pair, ends, True),
        "dx down [d f]": candidates(rows, c.w_down, ends, True),
        "dw half [d f]": candidates_dw(rows, both[:, :f], ends, into(d, f)),
        "dw down [f d]": candidates_dw(h, rows, ends, into(f, d)),
    }


FLOPS = {"pair": 2, "half": 1, "down": 1}


def _routing(c: Case) -> tuple[Tensor, Tensor, Tensor]:
    order, inverse, counts = kernels.sort_slots(c.indices.flatten(), c.pair.shape[0])
    return order, inverse, counts.cumsum(0).to(torch.int32)


def parts(c: Case) -> dict[str, tuple[Callable[[], Any], float, float]]:
    """What a layer runs, as the library runs it: function, bytes, FLOPs."""
    (t, d), k, f, r = c.x.shape, c.indices.shape[1], c.w_down.shape[1], c.rows
    order, inverse, ends = _routing(c)
    total = ends[-1:]
    weights = c.weights.flatten()[order].unsqueeze(1)
    rows = kernels.pack(c.x, order, total, k, r)
    pair = grouped.grouped_pair(rows, c.w_gate, c.w_up, ends, False)
    gate, up = pair[:, :f], pair[:, f:]
    h = kernels.gated(gate, up, weights)
    out = grouped.grouped_matmul(h, c.w_down, ends, False)
    ct = torch.randn_like(c.x)
    dh = grouped.grouped_matmul(out, c.w_down, ends, True)
    _, dpair, _ = kernels.gated_bwd(gate, up, weights, dh)
    halves = dpair[:, :f], dpair[:, f:]
    dw = torch.empty(c.pair.shape[0], d, f, device="cuda")
    dw_down = torch.empty_like(c.w_down, dtype=torch.float32)
    one = 2 * r * d * f
    logits = torch.randn(t, c.pair.shape[0], device="cuda")

    def sort() -> Any:
        return _routing(c)

    def into(to: Tensor, a: Tensor, b: Tensor) -> Callable[[], Any]:
        return lambda: grouped.grouped_dw_into(to, a, b, ends, False)

    return {
        "top-k": (lambda: kernels.top_k(logits, k), logits.numel() * 4 + r * 8, 0),
        "sort": (sort, r * 8 * 4, 0),
        "dispatch": (lambda: kernels.pack(c.x, order, total, k, r), 4 * r * d, 0),
        "gate up": (lambda: grouped.grouped_pair(rows, c.w_gate, c.w_up, ends, False), 0, 2 * one),
        "swiglu": (lambda: kernels.gated(gate, up, weights), 6 * r * f, 0),
        "down": (lambda: grouped.grouped_matmul(h, c.w_down, ends, False), 0, one),
        "combine": (lambda: kernels.weigh(out, inverse, total, None, k), 2 * r * d + 2 * t * d, 0),
        "bwd dispatch": (lambda: kernels.pack(ct, order, total, k, r), 4 * r * d, 0),
        "bwd dh": (lambda: grouped.grouped_matmul(rows, c.w_down, ends, True), 0, one),
        "bwd swiglu": (lambda: kernels.gated_bwd(gate, up, weights, dh), 12 * r * f, 0),
        "bwd dw down": (into(dw_down, h, rows), 0, one),
        "bwd dw gate": (into(dw, rows, halves[0]), 0, one),
        "bwd dw up": (into(dw, rows, halves[1]), 0, one),
        "bwd dx": (lambda: grouped.grouped_pair(dpair, c.w_gate, c.w_up, ends, True), 0, 2 * one),
        "bwd combine": (lambda: kernels.weigh(out, inverse, total, None, k), 2 * r * d + 2 * t * d, 0),
    }


def router_ms(tokens: int) -> dict[str, float]:
    """The router's logits, choice and losses, and their gradient."""
    cfg = ops.Router(K, renormalize=True, batch_loss=1e-3)
    x = torch.randn(1, tokens, D, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(D, E, device="cuda") * 0.02).requires_grad_()

    def forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        r = ops.router(x, w, cfg)
        return r.weights, r.losses["batch"]

    def both() -> Any:
        weights, loss = forward(x, w)
        return torch.autograd.grad((weights, loss), (x, w), (torch.ones_like(weights), torch.ones_like(loss)))

    with torch.no_grad():
        plain = timed(lambda: forward(x, w))
    return {"router eager fwd": plain * 1e3, "router eager fwd+bwd": timed(both) * 1e3}


def measure(tokens: int, routing: str) -> dict[str, Any]:
    c = case(tokens, routing)
    one = 2 * c.rows * D * F
    print(f"\n== {tokens} tokens, {routing} routing, {c.rows // E} rows an expert", flush=True)
    row: dict[str, Any] = {"tokens": tokens, "routing": routing, "parts": {}, "products": {}}
    for name, (fn, nbytes, flops) in parts(c).items():
        s = timed(fn)
        rate = f"{flops / s / 1e12:6.0f} TFLOP/s" if flops else f"{nbytes / s / 1e12:6.2f} TB/s"
        print(f"{name:14} {s * 1e3:8.3f} ms {rate}", flush=True)
        row["parts"][name] = s * 1e3
    fwd = sum(s for n, s in row["parts"].items() if not n.startswith("bwd"))
    bwd = sum(row["parts"].values()) - fwd
    print(
        f"{'layer':14} {fwd:8.3f} ms fwd {3 * one / fwd / 1e9:.0f} TFLOP/s, {bwd:.3f} ms bwd {6 * one / bwd / 1e9:.0f}"
    )
    row |= {"fwd_ms": fwd, "bwd_ms": bwd}
    for name, ways in products(c).items():
        flops = FLOPS[name.split()[1]] * one
        row["products"][name] = {}
        for way, fn in ways.items():
            try:
                s = timed(fn, 10)
            except Exception as error:  # tiles may need more shared memory than there is
                print(f"{name:16} {way:24} {type(error).__name__}: {str(error)[:80]}", flush=True)
                continue
            row["products"][name][way] = s * 1e3
            print(f"{name:16} {way:24} {s * 1e3:8.3f} ms {flops / s / 1e12:6.0f} TFLOP/s", flush=True)
    if routing == "natural":
        row["router"] = router_ms(tokens)
        print(row["router"], flush=True)
    return row


def check() -> None:
    """Every way of every product against torch's."""
    c = case(96, "natural", (8, 2, 256, 256))
    order, _, ends = _routing(c)
    for name, ways in products(c).items():
        outs = {way: fn().double().clone() for way, fn in ways.items()}
        first = outs["torch"]
        for way, got in outs.items():
            error = float((got - first).norm() / first.norm())
            assert error < 1e-2, (name, way, error)
    print("check: every way gives what torch's gives", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32768, 16384, 8192, 4096])
    parser.add_argument("--routing", nargs="+", default=["natural"], choices=["natural", "balanced"])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", default="moe.json")
    args = parser.parse_args()
    torch.set_grad_enabled(True)
    check()
    if args.check:
        return
    rows = [measure(t, r) for r in args.routing for t in args.tokens]
    with open(args.json, "w") as f:
        json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
