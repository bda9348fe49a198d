"""The same numbers: loss curves of one training run, in float64 on a virtual mesh and in bfloat16 on GPUs.

    python -m benchmarks.curves reference                       float64 on a virtual dp=2, tp=2 mesh; once, on a CPU
    python -m benchmarks.curves one                             one GPU: float32, and bf16 in three modes
    torchrun --nproc-per-node 2 -m benchmarks.curves two        two GPUs: FSDP, tensor and sequence parallel, pipeline
    python -m benchmarks.curves plot                            the table again, and curves.png
    … --device cpu --tiny --modes eager                         any of them as a dry run of a few steps

A Llama of 1.4 M parameters learns Python's own source for 200 steps: float32 parameters and AdamW, one seed, the same
rows of text (`curves_tokens.npz`, made by `reference`). A bf16 curve differs from float64 by rounding, and so do two
bf16 curves whose sums have another order: those of one GPU with 1 and with 4 microbatches. A layout is fine if its
curve is no farther from float64 than twice what one of these two is, whichever is more. In FP8 (all four
layers) a curve is shown, and judged by its last tenth: within 1 % of bf16's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import torch.distributed as dist

import fmeg
from fmeg import Layout, Mesh, TrainState, data, optim, precision
from fmeg.data.tokenizer import train_bpe
from fmeg.models import llama

RESULTS = Path(__file__).parent / "results"
STEPS, ROWS, SEQ, VOCAB, RATE = 200, 8, 128, 2048, 1e-3
CONFIG = llama.Config(vocab_size=VOCAB, embed=128, layers=4, heads=4, kv_heads=4, head_dim=32, ff=384, tied=True)
TINY = dataclasses.replace(CONFIG, embed=32, layers=2, heads=2, kv_heads=2, head_dim=16, ff=64)
MEGATRON: Any = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp", res_seq="tp")


@dataclasses.dataclass(frozen=True)
class Run:
    """One curve: what is computed in which dtype, where and how."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    mesh: tuple[tuple[str, int], ...] = ()
    layout: Layout = Layout()
    mode: str = "eager"
    microbatches: int = 4
    schedule: str | None = None
    fp8: precision.Recipe | None = None
    lowering: str | None = None


REFERENCE = Run("float64", torch.float64, (("dp", 2), ("tp", 2)), Layout(batch="dp", opt=dict(embed="dp"), **MEGATRON))
EAGER, OTHER = Run("bf16 eager"), Run("bf16 eager, another order of sums", microbatches=1)
ALL: Any = dict(skip_first=0, skip_last=0)
ONE = [
    Run("float32 eager", torch.float32),
    EAGER,
    OTHER,
    *(Run(f"bf16 {m}", mode=m) for m in ("inductor", "cudagraph")),
    Run("FP8 tensorwise", fp8=precision.fp8(**ALL)),
    Run("FP8 tensorwise, fused", mode="inductor", fp8=precision.fp8(**ALL), lowering="fp8"),
    Run("FP8 rowwise", fp8=precision.fp8("rowwise", **ALL)),
    Run("FP8 blockwise", fp8=precision.fp8("blockwise", **ALL)),
]
TWO = [
    Run(f"bf16 {what}, {mode}", mesh=((axis, 2),), layout=layout, mode=mode, schedule=schedule)
    for mode in ("eager", "inductor")
    for what, axis, layout, schedule in (
        ("FSDP", "dp", Layout(batch="dp", params=dict(embed="dp")), None),
        ("TP + SP", "tp", Layout(**MEGATRON), None),
        ("PP", "pp", Layout(layers="pp"), "1f1b"),
    )
]


def rows_of_text(steps: int) -> np.ndarray:
    """Token ids [steps · ROWS, SEQ + 1]: rows of the standard library, in the loader's order."""
    bpe = train_bpe((corpus := data.load_corpus()).train, VOCAB)
    loader = data.Loader(bpe.encode_documents(corpus.train), bpe.separator, ROWS, SEQ, seed=0)
    batches = [loader(i) for i in range(steps)]
    return np.concatenate([np.c_[b["tokens"].numpy(), b["targets"].numpy()[:, -1:]] for b in batches]).astype(np.uint16)


def batches(tiny: bool, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """The batch of each step."""
    ids = torch.from_numpy(np.load(RESULTS / "curves_tokens.npz")["ids"].astype(np.int64)).unflatten(0, (STEPS, ROWS))
    for x in ids[: 6 if tiny else STEPS, :, : 33 if tiny else None].to(device):
        yield {
            "tokens": x[:, :-1].contiguous(),
            "targets": x[:, 1:].contiguous(),
            "mask": torch.ones_like(x[:, 1:]).float(),
        }


def train(run: Run, tiny: bool) -> list[float]:
    """The loss before each step."""
    wide = torch.promote_types(run.dtype, torch.float32)
    cfg = dataclasses.replace(TINY if tiny else CONFIG, dtype=wide, compute_dtype=run.dtype)
    mesh = Mesh(run.mesh)
    rate = optim.linear(RATE, STEPS, warmup=STEPS // 10)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(rate, b2=0.95, weight_decay=0.1))
    axes = llama.logical_axes(cfg)

    def create(key: torch.Tensor) -> TrainState:
        return TrainState.create(llama.init(key, cfg), opt, axes)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, torch.Tensor]:
        loss_fn = lambda p, b: llama.loss(p, b, cfg)
        grad_fn = fmeg.value_and_grad(loss_fn, microbatches=run.microbatches, schedule=run.schedule, precision=run.fp8)
        (loss, _), grads = grad_fn(state.params, batch)
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), loss

    state = fmeg.jit(create, mesh=mesh, layout=run.layout)(fmeg.random.key(0, mesh.device))
    options: Any = dict(donate="state", mode=run.mode, lowering=run.lowering)
    step = fmeg.jit(train_step, mesh=mesh, layout=run.layout, **options)
    losses = []
    for batch in batches(tiny, mesh.device):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses


def curves(what: str, runs: list[Run], tiny: bool, out: Path) -> None:
    """Train each run and write its curve, on the first process."""
    path = out / _file(what, tiny)
    found = json.loads(path.read_text())["curves"] if path.exists() else {}
    for run in runs:
        begin = time.perf_counter()
        losses = train(run, tiny)
        found[run.name] = {"losses": losses, "seconds": time.perf_counter() - begin}
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"{run.name}: {losses[0]:.6f} … {losses[-1]:.6f} in {found[run.name]['seconds']:.1f} s", flush=True)
            facts = {"torch": torch.__version__, "device": str(torch.get_default_device())}
            out.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**facts, "curves": found}, indent=1) + "\n")


def _file(what: str, tiny: bool) -> str:
    return f"curves_{what}{'_tiny' if tiny else ''}.json"


def load(tiny: bool, *folders: Path) -> dict[str, np.ndarray]:
    """All curves in the folders, by name; the later ones count."""
    found = {}
    for what in ("reference", "one", "two"):
        for path in (f / _file(what, tiny) for f in folders):
            if path.exists():
                found.update({k: np.array(c["losses"]) for k, c in json.loads(path.read_text())["curves"].items()})
    return found


def table(found: dict[str, np.ndarray]) -> str:
    """Largest difference to float64 and to one GPU's bf16, with a verdict on each bf16 curve."""
    exact, eager, other = (found.get(r.name) for r in (REFERENCE, EAGER, OTHER))
    if exact is None or eager is None:
        return "the curves of float64 and of one GPU's bf16 are needed for a comparison"
    far = lambda a, b: float(np.abs(a - b).max())
    explained = 2 * max(far(eager, exact), far(eager, other) if other is not None else 0.0)
    lines = ["| curve | last loss | largest difference to float64 | to bf16 eager | |", "|---|---|---|---|---|"]
    for name, x in found.items():
        bad = not np.isfinite(x).all() or far(x, exact) > explained
        if name.startswith("FP8"):
            last = len(x) // 10 or 1
            bad = not abs(x[-last:].mean() / eager[-last:].mean() - 1) < 0.01
        fine = "near bf16" if name.startswith("FP8") else "explained"
        verdict = "" if name in (REFERENCE.name, EAGER.name, OTHER.name) else "too far" if bad else fine
        lines.append(f"| {name} | {x[-1]:.4f} | {far(x, exact):.2e} | {far(x, eager):.2e} | {verdict} |")
    return "\n".join([*lines, f"bf16 explains {explained:.2e}"])


def plot(found: dict[str, np.ndarray], path: Path) -> None:
    """All curves over each other, and their distances to float64 below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    exact = found[REFERENCE.name]
    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=(3, 2))
    for i, (name, x) in enumerate(found.items()):
        first, colour = name == REFERENCE.name, f"C{i - 1}"
        above.plot(x, label=name, color="black" if first else colour, lw=2.5 if first else 0.8)
        if not first:
            far = np.abs(x - exact)
            below.semilogy(far + 1e-12, label=f"{name}: at most {far.max():.1e}", color=colour, lw=0.8)
    above.set(ylabel="loss", title="One training run, everywhere the same")
    below.set(xlabel="step", ylabel="distance to float64", ylim=(1e-8, None))
    for ax in (above, below):
        ax.legend(fontsize=7)
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("command", choices=["reference", "one", "two", "plot"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="6 steps of a smaller model")
    parser.add_argument("--modes", nargs="+", default=["eager", "inductor", "cudagraph"])
    parser.add_argument("--only", default="", help="runs whose name contains this; curves that are in --out stay")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.command == "reference":
        if not (RESULTS / "curves_tokens.npz").exists():
            RESULTS.mkdir(exist_ok=True)
            np.savez_compressed(RESULTS / "curves_tokens.npz", ids=rows_of_text(STEPS))
        torch.set_num_threads(1)
        curves("reference", [REFERENCE], args.tiny, args.out)
    elif args.command in ("one", "two"):
        if args.device == "cuda":
            torch.set_default_device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        else:
            torch.set_num_threads(1)
        runs = [r for r in (ONE if args.command == "one" else TWO) if r.mode in args.modes and args.only in r.name]
        curves(args.command, runs, args.tiny, args.out)
        if dist.is_initialized():
            dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        found = load(args.tiny, RESULTS, args.out)
        print(table(found))
        if args.command == "plot":
            plot(found, args.out / "curves.png")


if __name__ == "__main__":
    main()
