"""Attention's kernels on one GPU: cuDNN, torch's flash kernel and ours for any mask, forward and backward.

    python -m benchmarks.gpu_attention [--json attention.json]

bf16, at the sizes of D1 and D2 (see `benchmarks.gpu`). TFLOP/s count the pairs that causal order (or segments) leaves:
4 s² h e / 2 forward, 2.5 times that backward. "packed": rows of 8 equal segments; the formula is what ran before, at a
quarter of the rows, since it keeps every score. Medians, a cold level-2 cache at each run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median

import torch

from fmeg.kernels import attention, masked
from fmeg.ops.attention_math import Masking, math_backward, math_forward

SIZES = {"D1": (8, 4096, 32, 8, 64), "D2": (2, 8192, 32, 8, 128)}
PIECES = 8


def milliseconds(fn: Callable[[], object], runs: int = 12) -> float:
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(runs + 2):
        flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fn()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows = []
    for model, (b, s, h, kv, e) in SIZES.items():
        g = torch.Generator("cuda").manual_seed(0)
        make = lambda n, g=g, b=b, s=s, e=e: torch.randn(b, s, n, e, device="cuda", generator=g).bfloat16()
        q, k, v, do, scale = make(h), make(kv), make(kv), make(h), e**-0.5
        ids = (torch.arange(s, device="cuda") * PIECES // s).expand(b, s).contiguous()
        whole = 2 * b * h * s * s * e
        few = max(1, b // 4)
        m = Masking(ids[:few], ids[:few], None, True, None, scale)
        short = [x[:few] for x in (q, k, v, do)]
        ours = (None, None, None, 0, True, 0, scale)
        packed = (ids, ids, *ours[2:])
        backward = lambda o, lse, mask, x=(q, k, v), do=do: masked.backward(*x, o, lse, do, *mask)
        o, lse = masked.forward(q, k, v, *ours)
        po, plse = masked.forward(q, k, v, *packed)
        mo, mlse = math_forward(*short[:3], m)
        ways: dict[str, tuple[Callable[[], object], Callable[[], object], float]] = {
            "cuDNN": (
                lambda q=q, k=k, v=v, c=scale: attention.cudnn_forward(q, k, v, True, c),
                lambda q=q, k=k, v=v, o=o, lse=lse, do=do, c=scale: attention.cudnn_backward(
                    q, k, v, o, lse, do, True, c
                ),
                whole,
            ),
            "flash": (
                lambda q=q, k=k, v=v, c=scale: attention.flash_forward(q, k, v, True, None, c),
                lambda q=q, k=k, v=v, o=o, lse=lse, do=do, c=scale: attention.flash_backward(
                    q, k, v, o, lse, do, True, None, c
                ),
                whole,
            ),
            "ours": (
                lambda x=(q, k, v), a=ours: masked.forward(*x, *a),
                lambda f=backward, o=o, lse=lse, a=ours: f(o, lse, a),
                whole,
            ),
            "ours, packed": (
                lambda x=(q, k, v), a=packed: masked.forward(*x, *a),
                lambda f=backward, o=po, lse=plse, a=packed: f(o, lse, a),
                whole / PIECES,
            ),
            "formula, packed": (
                lambda x=short, m=m: math_forward(*x[:3], m),
                lambda x=short, m=m, o=mo, lse=mlse: math_backward(*x[:3], o, lse, x[3], m),
                whole / PIECES * few / b,
            ),
        }
        far = lambda a, b: float((a.float() - b.float()).norm() / b.float().norm())
        print(model, "ours to cuDNN", far(o, attention.cudnn_forward(q, k, v, True, scale)[0]),
              "packed to the formula", far(po[:few], mo), flush=True)  # fmt: skip
        for name, (forward, back, flops) in ways.items():
            one, two = milliseconds(forward), milliseconds(back)
            rows.append({"model": model, "how": name, "forward_ms": one, "backward_ms": two})
            print(f"{model} {name:16} forward {one:8.3f} ms {flops / one / 1e9:4.0f} TFLOP/s, "
                  f"backward {two:8.3f} ms {2.5 * flops / two / 1e9:4.0f}", flush=True)  # fmt: skip
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"torch": torch.__version__, "device": torch.cuda.get_device_name(), "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
