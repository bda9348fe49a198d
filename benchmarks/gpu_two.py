"""Training on several GPUs of one machine: is it right, how fast is it, how much of its communication is hidden.

    torchrun --nproc_per_node=2 -m benchmarks.gpu_two check                        # against one device, in float64
    torchrun --nproc_per_node=2 -m benchmarks.gpu_two train fsdp tensor --mode inductor [--no-overlap] [--profile DIR]
    torchrun --nproc_per_node=2 -m benchmarks.gpu_two --ctas 8 [--high-priority] train fsdp        # SMs for NCCL
    torchrun --nproc_per_node=2 -m benchmarks.gpu_two --device cpu --tiny train fsdp                 # a rehearsal, Gloo
    python -m benchmarks.gpu_two --alone 2 [--link 230] train fsdp tensor experts     # one rank of two, on one GPU

Layouts, over all n GPUs: `fsdp` (parameters and optimizer sharded, gathered layer by layer), `tensor` (tensor and
sequence parallel), `tensor-beside` (that, with `overlap="tp"`: gathers and reductions by copies beside products),
`pipeline` (1F1B), `pipeline-zb` (ZB-H1) and `experts` or `experts-gathered` (FSDP, experts apart; tokens are exchanged,
or gathered everywhere: for `--model M1`). NVLink multicast stays off.
Models and arithmetic as in `benchmarks.gpu`; the global batch has `--rows` rows, in `--microbatches` microbatches where
there is a pipeline.

tokens/s      median over the steps after the first five, GPUs synchronised at each step's end; of all GPUs, and of one
peak bytes    `torch.cuda.max_memory_allocated` of the first GPU after the first step
nccl_s        with `--profile`: time of one step in which a communication kernel runs on the first GPU (it includes
              waiting for the others); hidden_s: the part of it in which another kernel runs too. Copies from another
              GPU's memory are no kernels and not in it

`--alone n`: what a rank of n would do if communication cost nothing or, with `--link`, as long as a wire of so many
GB/s takes (`benchmarks.alone`); the losses mean nothing, and tokens/s of all are n times those of the one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import fmeg
from benchmarks.alone import Link, alone
from benchmarks.gpu import MODELS, PEAK, WARM, Config, loss_of, model_of, random_state
from fmeg import Layout, Mesh, TrainState, optim, tree
from fmeg.mesh import init_distributed
from fmeg.models import llama, moe
from fmeg.ops import Router
from fmeg.testing import verify

Spans = list[tuple[float, float]]
TINY = (
    llama.Config(vocab_size=512, embed=64, layers=4, heads=4, kv_heads=2, head_dim=16, ff=128,
                 compute_dtype=torch.bfloat16),
    (2, 64),
)  # fmt: skip
TINY_MOE = (
    moe.Config(vocab_size=512, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, expert_ff=32,
               router=Router(2), compute_dtype=torch.bfloat16),
    (2, 64),
)  # fmt: skip
SEQUENCE = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp", res_seq="tp")
SHARDED: dict[str, Any] = dict(batch="dp", params=dict.fromkeys(("embed", "heads", "ff"), "dp"))
MOE: dict[str, Any] = dict(batch="dp", experts="dp", params=dict.fromkeys(("embed", "heads"), "dp"))
LAYOUTS: dict[str, tuple[str, Layout, str | None]] = {
    "experts": ("dp", Layout(**MOE), None),
    "experts-gathered": ("dp", Layout(**MOE, dispatch="all_gather"), None),
    "fsdp": ("dp", Layout(**SHARDED), None),
    "tensor": ("tp", Layout(**SEQUENCE), None),
    "tensor-beside": ("tp", Layout(**SEQUENCE), None),
    "pipeline": ("pp", Layout(layers="pp"), "1f1b"),
    "pipeline-zb": ("pp", Layout(layers="pp"), "zb_h1"),
}
CHECKS: dict[str, tuple[str, str, Layout, str | None]] = {
    "fsdp": (verify.DEFAULT, "dp", Layout(**SHARDED), None),
    "tensor": (verify.DEFAULT, "tp", Layout(heads="tp", kv_heads="tp", ff="tp", vocab="tp"), None),
    "tensor + sequence": (verify.DEFAULT, "tp", Layout(**SEQUENCE), None),
    "tensor + sequence, beside": (verify.DEFAULT, "tp", Layout(**SEQUENCE), None),
    "context, gathered": (verify.DEFAULT, "cp", Layout(seq="cp", res_seq="cp", attention="all_gather"), None),
    "context, ring": (verify.DEFAULT, "cp", Layout(seq="cp", res_seq="cp", attention="ring"), None),
    "context, ulysses": (verify.DEFAULT, "cp", Layout(seq="cp", res_seq="cp", attention="ulysses"), None),
    "pipeline 1f1b": (verify.DEFAULT, "pp", Layout(layers="pp"), "1f1b"),
    "pipeline zb_h1": (verify.DEFAULT, "pp", Layout(layers="pp"), "zb_h1"),
    "experts": ("mixtral-8x7b", "dp", Layout(**MOE), None),
    "experts-gathered": ("mixtral-8x7b", "dp", Layout(**MOE, dispatch="all_gather"), None),
}
ALONE = {"fsdp", "tensor", "experts", "experts-gathered"}
BESIDE = {"tensor-beside": "tp", "tensor + sequence, beside": "tp"}


@dataclass
class Row:
    """One measurement."""

    model: str
    layout: str
    mode: str
    overlap: bool
    gpus: int
    rows: int
    seq: int
    microbatches: int
    tokens_s: float
    tokens_s_gpu: float
    mfu: float
    peak_bytes: int
    first_step_s: float
    loss: float
    nccl_s: float = 0.0
    hidden_s: float = 0.0
    step_s: float = 0.0
    ctas: int | None = None
    alone: bool = False
    link: float = 0.0
    high_priority: bool = False
    versions: str = ""


def say(*what: Any) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*what, flush=True)


def synchronised(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def mesh_over(axis: str, overlap: bool, size: int | None = None, link: Link | None = None) -> Mesh:
    """All processes along one axis; `size`: one of so many, alone."""
    if size is not None:
        mesh = alone(axis, size, torch.device("cuda" if torch.cuda.is_available() else "cpu"), link)
    else:
        mesh = Mesh({axis: dist.get_world_size()})
    mesh.backend().overlap = overlap  # type: ignore[attr-defined]
    return mesh


def make_step(cfg: Config, **how: Any) -> tuple[Any, Any]:
    """(train step, optimizer). how: microbatches, schedule."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1))

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        grad = fmeg.value_and_grad(loss_of(cfg), **how)
        (loss, _), grads = grad(state.params, batch)
        updates, opt = optimizer.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=opt), {"loss": loss}

    return train_step, optimizer


def train(name: str, args: argparse.Namespace) -> Row:
    """Some steps with one layout."""
    cfg, (_, seq) = (TINY_MOE if args.model.startswith("M") else TINY) if args.tiny else MODELS[args.model]
    axis, layout, schedule = LAYOUTS[name]
    mesh = mesh_over(axis, not args.no_overlap, args.alone, args.link)
    device = mesh.device
    torch.set_default_device(device)
    how = dict(microbatches=args.microbatches, schedule=schedule) if schedule else {}
    step, optimizer = make_step(cfg, **how)
    rows = args.rows
    ids = torch.randint(0, cfg.vocab_size, (rows, seq + 1), generator=torch.Generator(device).manual_seed(0))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "mask": torch.ones(rows, seq)}
    beside = BESIDE.get(name, ())
    run = fmeg.jit(step, mesh=mesh, layout=layout, donate="state", mode=args.mode, overlap=beside)
    state = random_state(cfg, optimizer, mesh)
    times: list[float] = []
    for i in range(args.steps):
        begin = synchronised(device)
        state, metrics = run(state, batch)
        loss = float(metrics["loss"].global_value())
        times.append(synchronised(device) - begin)
        say(f"{name} step {i} loss {loss:.4f} {times[-1] * 1e3:.1f} ms")
        if i == 0 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    median = statistics.median(times[min(WARM, args.steps - 1) :])
    tokens, n = rows * seq / median, mesh.size
    model, microbatches = "tiny" if args.tiny else args.model, args.microbatches if schedule else 1
    mfu = tokens / n * model_of(cfg).flops_per_token(cfg, seq) / PEAK
    row = Row(
        model, name, args.mode, not args.no_overlap, n, rows, seq, microbatches,
        tokens, tokens / n, mfu, peak, times[0], loss, step_s=median,
        ctas=args.ctas, high_priority=args.high_priority,
        alone=args.alone is not None, link=args.link.bytes_s if args.link else 0.0,
        versions=f"torch {torch.__version__}" + (f", {torch.cuda.get_device_name()}" if device.type == "cuda" else ""),
    )  # fmt: skip
    if args.profile:
        path = os.path.join(
            args.profile, f"{name}{'' if row.overlap else '-no-overlap'}-rank{mesh.backend().ranks[0]}.json"
        )
        nccl, hidden = profiled(lambda: run(state, batch), path, device)
        row = replace(row, nccl_s=nccl, hidden_s=hidden)
    return row


def profiled(run: Any, path: str, device: torch.device) -> tuple[float, float]:
    """A Chrome trace of one step; seconds in which communication kernels run, and in which others run beside them."""
    kind = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kind.CUDA if device.type == "cuda" else kind.CPU]) as p:
        run()
        synchronised(device)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    p.export_chrome_trace(path)
    nccl: Spans = []
    others: Spans = []
    for e in p.events():
        if e.device_type == torch.autograd.DeviceType.CUDA and not e.name.startswith(("nccl:", "ProfilerStep")):
            (nccl if e.name.startswith("nccl") else others).append((e.time_range.start, e.time_range.end))
    say(p.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=80))
    alone, beside = union(nccl), union(others)
    return length(alone) * 1e-6, (length(alone) + length(beside) - length(union([*alone, *beside]))) * 1e-6


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same points in time, in spans that do not overlap.

    >>> union([(3, 4), (0, 2), (1, 2.5)])
    [(0, 2.5), (3, 4)]
    """
    out: Spans = []
    for a, b in sorted(spans):
        if out and a <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], b)
        else:
            out.append((a, b))
    return out


def length(spans: Spans) -> float:
    return sum(b - a for a, b in spans)


def check(name: str, overlap: bool, mode: str) -> bool:
    """Two steps of a tiny model in float64 on all processes, against one device, eagerly: loss and every gradient."""
    preset, axis, layout, schedule = CHECKS[name]
    cfg = verify.config(preset)
    microbatches = 4 if schedule else 1
    keep = verify.optimizer_under_test()
    state, batch = verify.make_state(cfg, keep), verify.make_batch(cfg)
    want = verify.run_steps(verify.make_step(cfg, keep, microbatches), state, batch, 2)
    how = {"schedule": schedule} if schedule else {}
    mesh = mesh_over(axis, overlap)
    step = verify.make_step(cfg, keep, microbatches, **how)
    step = fmeg.jit(step, mesh=mesh, layout=layout, mode=mode, overlap=BESIDE.get(name, ()))
    here = tree.map(lambda x: x.to(mesh.device), (state, batch))
    got = verify.run_steps(step, *here, 2)
    worst = 0.0
    for (mine, metrics), (theirs, expected) in zip(got, want, strict=True):
        for g, w in zip(tree.leaves((mine, metrics)), tree.leaves((theirs, expected)), strict=True):
            g = (g.global_value() if isinstance(g, fmeg.Array) else torch.as_tensor(g)).cpu()
            w = torch.as_tensor(w)
            scale = w.abs().max().clamp(min=1e-3) if w.is_floating_point() else 1
            worst = max(worst, float((g - w).abs().max() / scale) if w.numel() else 0.0)
    say(f"check {name}, {mode}, overlap {overlap}: worst relative error {worst:.2e}")
    return worst < 1e-10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ctas", type=int, help="multiprocessors that a collective of NCCL may take at most")
    parser.add_argument("--high-priority", action="store_true", help="NCCL's kernels start before others")
    parser.add_argument("--alone", type=int, help="one rank of so many, in this process, without the others")
    parser.add_argument("--link", type=lambda x: Link(float(x) * 1e9), help="with --alone: GB/s that a rank receives")
    commands = parser.add_subparsers(dest="command", required=True)
    a = commands.add_parser("check")
    a.add_argument("names", nargs="*")
    a.add_argument("--mode", default="eager")
    b = commands.add_parser("train")
    b.add_argument("layouts", nargs="+", choices=LAYOUTS)
    b.add_argument("--model", choices=MODELS, default="D2")
    b.add_argument("--mode", default="inductor")
    b.add_argument("--steps", type=int, default=12)
    b.add_argument("--rows", type=int, default=4)
    b.add_argument("--microbatches", type=int, default=4)
    b.add_argument("--no-overlap", action="store_true")
    b.add_argument("--profile", help="folder for Chrome traces")
    args = parser.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    if args.alone is None:
        init_distributed(ctas=args.ctas, high_priority=args.high_priority)
    elif args.command != "train" or not {*args.layouts} <= ALONE:
        parser.error(f"--alone trains {', '.join(sorted(ALONE))}; other layouts need the other processes")
    failed: list[str] = []
    if args.command == "train":
        for name in args.layouts:
            say("ROW " + json.dumps(asdict(train(name, args))))
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    else:
        failed = [
            f"{name}, overlap {overlap}"
            for name in args.names or CHECKS
            for overlap in (True, False)
            if not check(name, overlap, args.mode)
        ]
        say("CHECK " + (f"failed: {'; '.join(failed)}" if failed else "all equal"))
    if dist.is_initialized():
        dist.destroy_process_group()
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
