"""Training speed on GPUs, beside peers, in one run on one machine.

    python -m benchmarks.gpu one D1 --mode inductor [--steps 14] [--profile trace.json]   # one model in this process
    python -m benchmarks.gpu suite D1/inductor D2/cudagraph D2/cudagraph/tensorwise --peers DIR --json results.json

Models: D1 = Llama of 1.50 B parameters (16 layers, 2048 wide, 128256 words), 8 x 4096 tokens; D2 = 8 layers of
Llama-3-8B's width, 2 x 8192 tokens; M1 = 4 layers of Qwen3-30B-A3B's width (128 experts, 8 a token), 32768 words,
8 x 4096 tokens, routed as its router says; M1-forced, each expert the same number of tokens. bf16 arithmetic, float32
parameters, moments and gradients; AdamW; clipping by the global norm. `DIR` holds programs that train the same models
with megatron-core and torchtitan; they are not part of this project.

tokens/s      median over the steps after the first five, the GPU synchronised at each step's end
mfu           model FLOPs (the model's `flops_per_token`) over 989 TFLOP/s
peak bytes    `torch.cuda.max_memory_allocated` over the whole run, beside what `Lowered.predicted_peak` says
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

import fmeg
from fmeg import Array, Layout, Mesh, TensorType, TrainState, ops, optim, tree
from fmeg.models import llama, model_of, moe
from fmeg.models.table import Param
from fmeg.step import Lowered

PEAK = 989e12
WARM = 5
Config = llama.Config | moe.Config
MIXTURE = moe.Config(
    vocab_size=32768, embed=2048, layers=4, heads=32, kv_heads=4, head_dim=128, experts=128, expert_ff=768,
    router=ops.Router(8, renormalize=True, batch_loss=1e-3), rope_base=500000.0, compute_dtype=torch.bfloat16,
)  # fmt: skip
BALANCED = replace(MIXTURE, router=replace(MIXTURE.router, select="balanced"))
MODELS: dict[str, tuple[Config, tuple[int, int]]] = {
    "D1": (
        llama.Config(
            vocab_size=128256, embed=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ff=8192, rope_base=500000.0,
            compute_dtype=torch.bfloat16,
        ),
        (8, 4096),
    ),
    "D2": (
        llama.Config(
            vocab_size=128256, embed=4096, layers=8, heads=32, kv_heads=8, head_dim=128, ff=14336, rope_base=500000.0,
            compute_dtype=torch.bfloat16,
        ),
        (2, 8192),
    ),
    "M1": (MIXTURE, (8, 4096)),
    "M1-forced": (BALANCED, (8, 4096)),
}  # fmt: skip
MCORE = (
    "mcore_bench.py --layers {layers} --hidden {embed} --heads {heads} --kv {kv_heads} --ffn {ff} --vocab {vocab_size} "
    "--seq {seq} --mbs {rows} --steps 14 --te --mcore-opt"
)
EXPERTS = " --moe-ffn {expert_ff} --experts {experts} --topk {top_k} --hd {head_dim} --grouped"
TITAN = (
    "tt_bench.py --model.flavor={flavor} --training.seq_len={seq} --training.local_batch_size={rows} "
    "--training.steps=20 --activation_checkpoint.mode=none --compile.enable"
)
FLAVORS = {"D1": "1B", "D2": "8BL8"}
OPTIONS = {"recipe": "--fp8", "lowering": "--lowering"}
STORAGE: dict[str, Any] = {"float32": lambda o: o, "split": optim.split_master, "random": optim.stochastic_rounding}


@dataclass
class Row:
    """One measurement."""

    model: str
    mode: str
    peer: str
    tokens_s: float
    mfu: float
    peak_bytes: int
    predicted_bytes: int = 0
    first_step_s: float = 0.0
    loss: float = 0.0
    ratio: float = 0.0  # tokens/s over the fastest peer's
    versions: str = ""


def make_step(cfg: Config, recipe: str | None = None, storage: str = "float32") -> tuple[Any, Any]:
    """(train step, optimizer). `recipe`: of FP8, for all layers. `storage`: of parameters, see `STORAGE`.

    The step takes, after state and batch, what delayed scaling knows (see `known_amax`), and returns it among the
    metrics.
    """
    wide: Any = dict(mu_dtype=torch.float32, nu_dtype=torch.float32)
    adamw = STORAGE[storage](optim.adamw(1e-3, b1=0.9, b2=0.95, weight_decay=0.1, **wide))
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), adamw)

    precision = fmeg.precision.fp8(recipe, skip_first=0, skip_last=0) if recipe else None

    grad = fmeg.value_and_grad(loss_of(cfg), precision=precision)

    def train_step(state: TrainState, batch: Any, amax: Any = None) -> tuple[TrainState, dict[str, Any]]:
        (loss, aux), grads = grad(state.params, batch, **(dict(amax=amax) if amax else {}))
        updates, opt = optimizer.update(grads, state.opt, state.params)
        metrics = {"loss": loss, "amax": aux["amax"]} if amax else {"loss": loss}
        return state.next(params=optim.apply_updates(state.params, updates), opt=opt), metrics

    return train_step, optimizer


def loss_of(cfg: Config) -> Any:
    """loss(params, batch) of a model."""
    return lambda params, batch: model_of(cfg).loss(params, batch, cfg)


def known_amax(cfg: Config, recipe: str | None, batch: Any) -> dict[str, torch.Tensor]:
    """What delayed scaling begins with: nothing known. Empty for other recipes."""
    if recipe != "delayed":
        return {}
    sizes, cpu = cfg.sizes, lambda x: x.cpu()
    with torch.device("meta"):
        params = tree.map(
            lambda p: torch.empty([sizes[a] for a in p.axes.split()]),
            model_of(cfg).parameters(cfg),
            is_leaf=lambda x: isinstance(x, Param),
        )
    with torch.device("cpu"):
        history = fmeg.amax_history(
            loss_of(cfg), fmeg.precision.fp8(recipe, skip_first=0, skip_last=0), params, tree.map(cpu, batch)
        )
    return {site: h.cuda() if torch.cuda.is_available() else h for site, h in history.items()}


def random_state(cfg: Config, optimizer: Any, mesh: Mesh, storage: str = "float32") -> TrainState:
    """Random parameters on the mesh's device; quicker than `llama.init`, whose values depend on the global index."""
    device = mesh.device
    generator = torch.Generator(device).manual_seed(0)
    sizes, dtype = cfg.sizes, torch.float32 if storage == "float32" else torch.bfloat16

    def make(p: Param) -> torch.Tensor:
        shape = [sizes[a] for a in p.axes.split()]
        if p.init == "ones":
            return torch.ones(shape, device=device, dtype=dtype)
        return (torch.randn(shape, device=device, generator=generator) * 0.02).to(dtype)

    params = tree.map(make, model_of(cfg).parameters(cfg), is_leaf=lambda x: isinstance(x, Param))
    state = TrainState.create(params, optimizer, model_of(cfg).logical_axes(cfg))

    def place(x: torch.Tensor) -> Array:
        array = Array.from_global(x, mesh)
        array.own = True
        return array

    return tree.map(place, state)


def lowered(model: str, **changes: Any) -> Lowered:
    """The step of a model, `changes` made to its config, traced for one device; nothing is allocated."""
    cfg, (rows, seq) = MODELS[model]
    cfg = replace(cfg, **changes)
    step, optimizer = make_step(cfg)
    with torch.device("meta"):
        params = tree.map(
            lambda p: torch.empty([cfg.sizes[a] for a in p.axes.split()]),
            model_of(cfg).parameters(cfg),
            is_leaf=lambda x: isinstance(x, Param),
        )
        state = TrainState.create(params, optimizer, model_of(cfg).logical_axes(cfg))
    types = tree.map(lambda x: TensorType.of(x), state)
    ids, mask = TensorType((rows, seq), torch.int64), TensorType((rows, seq), torch.float32)
    batch = {"tokens": ids, "targets": ids, "mask": mask}
    return fmeg.jit(step, mesh=Mesh(), layout=Layout(), donate="state").lower(types, batch)


def one(
    model: str, mode: str, steps: int, profile: str | None, recipe: str | None = None, storage: str = "float32",
    lowering: str | None = None,
) -> Row:  # fmt: skip
    """Train for some steps in this process."""
    cfg, (rows, seq) = MODELS[model]
    mesh = Mesh()
    predicted = lowered(model).predicted_peak(mode) if storage == "float32" else 0  # type: ignore[arg-type]
    torch.set_default_device("cuda")
    step, optimizer = make_step(cfg, recipe, storage)
    state = random_state(cfg, optimizer, mesh, storage)
    ids = torch.randint(0, cfg.vocab_size, (rows, seq + 1), generator=torch.Generator("cuda").manual_seed(0))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "mask": torch.ones(rows, seq)}
    options: Any = dict(donate="state", mode=mode, lowering=lowering)
    run = fmeg.jit(step, mesh=mesh, layout=Layout(), **options)
    amax: Any = known_amax(cfg, recipe, batch)
    more = (amax,) if amax else ()
    torch.cuda.reset_peak_memory_stats()
    times, loss = [], 0.0
    for i in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        state, metrics = run(state, batch, *more)
        more = (metrics["amax"],) if more else ()
        loss = float(metrics["loss"].global_value())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        print(f"step {i} loss {loss:.4f} {times[-1] * 1e3:.1f} ms", flush=True)
    if profile:
        profiled(lambda: run(state, batch, *more), profile)
    median = statistics.median(times[min(WARM, steps - 1) :])
    tokens = rows * seq / median
    flops = model_of(cfg).flops_per_token(cfg, seq)
    versions = f"torch {torch.__version__}, {torch.cuda.get_device_name()}"
    name = f"{mode}, fp8 {recipe}" if recipe else mode
    name += "".join(f", {x}" for x in (storage, lowering) if x not in ("float32", None))
    return Row(
        model, name, "fmeg", tokens, tokens * flops / PEAK, torch.cuda.max_memory_allocated(), predicted,
        first_step_s=times[0], loss=loss, versions=versions,
    )  # fmt: skip


def profiled(run: Any, path: str) -> None:
    """A Chrome trace of one step, and a table of its kernels on stdout."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as p:
        run()
        torch.cuda.synchronize()
    print(p.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90))
    p.export_chrome_trace(path)


def peer(name: str, model: str, folder: str, low: bool) -> Row | None:
    """Run a peer's program for the same model, in FP8 if `low`, and read what it printed. Its packages:
    `folder`/site."""
    cfg, (rows, seq) = MODELS[model]
    if name == "torchtitan" and (low or model not in FLAVORS):
        return None
    text = MCORE if name == "megatron-core" else TITAN
    fields = {**vars(cfg), "seq": seq, "rows": rows, "flavor": FLAVORS.get(model)}
    if isinstance(cfg, moe.Config):
        fields |= {"ff": cfg.expert_ff, "top_k": cfg.router.top_k}
        text += EXPERTS + (" --force-balance" if cfg.router.select == "balanced" else "")
    program, *arguments = (text + (" --fp8 tensorwise" if low else "")).format(**fields).split()
    command = [sys.executable, os.path.join(folder, program), *arguments]
    env = {**os.environ, "PYTHONPATH": os.path.join(folder, "site"), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    out = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    titan = name == "torchtitan"
    rates = [float(x.replace(",", "")) for x in re.findall(r"tps: ([\d,]+)" if titan else r"([\d.]+) tok/s", out)]
    peaks = [float(x) for x in re.findall(r"memory: *([\d.]+)GiB" if titan else r"peak ([\d.]+) GiB", out)]
    if not rates or not peaks:
        print(f"{name} {model} failed:\n{out[-2000:]}", flush=True)
        return None
    tokens = statistics.median(rates[-2:] if titan else rates[WARM:])
    mfu = tokens * model_of(cfg).flops_per_token(cfg, seq) / PEAK
    mode = "compiled" if titan else "TE, fp8 tensorwise" if low else "TE"
    return Row(model, mode, name, tokens, mfu, int(peaks[-1] * 2**30))


@dataclass(frozen=True)
class Case:
    """What one process of fmeg's measures: "model/mode", "model/mode/recipe" in FP8, or
    "model/mode/recipe/lowering"."""

    model: str
    mode: str
    recipe: str = ""
    lowering: str = ""

    @classmethod
    def parse(cls, text: str) -> Case:
        case = cls(*text.split("/"))
        if case.model not in MODELS:
            raise argparse.ArgumentTypeError(f"{text!r}: the model must be one of {', '.join(MODELS)}")
        return case

    def run(self) -> Row | None:
        options = [w for k in ("recipe", "lowering") if (v := getattr(self, k)) for w in (OPTIONS[k], v)]
        command = [sys.executable, "-m", "benchmarks.gpu", "one", self.model, "--mode", self.mode, *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        found = re.findall(r"^ROW (.*)$", done.stdout, re.M)
        if not found:
            print(f"{self} failed:\n{done.stdout[-1500:]}", flush=True)
            return None
        return Row(**json.loads(found[0]))


def suite(cases: list[Case], names: list[str], folder: str | None, path: str) -> None:
    """fmeg's cases, each in a process of its own, after the peers for the same work; ratios to the fastest peer."""
    rows: list[Row] = []
    for model, low in dict.fromkeys((c.model, bool(c.recipe)) for c in cases):
        peers = [p for n in names if folder and (p := peer(n, model, folder, low)) is not None]
        best = max((p.tokens_s for p in peers), default=0.0)
        ours = [r for c in cases if (c.model, bool(c.recipe)) == (model, low) and (r := c.run()) is not None]
        here = [replace(r, ratio=r.tokens_s / best if best else 0.0) for r in (*peers, *ours)]
        for r in here:
            gib = f"{r.peak_bytes / 2**30:.1f} GiB (predicted {r.predicted_bytes / 2**30:.1f})"
            print(f"{r.model} {r.peer} {r.mode}: {r.tokens_s:.0f} tokens/s, mfu {r.mfu:.3f}, {gib}, "
                  f"ratio {r.ratio:.3f}, first step {r.first_step_s:.1f} s", flush=True)  # fmt: skip
        rows += here
        with open(path, "w") as f:
            json.dump([asdict(r) for r in rows], f, indent=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    a = commands.add_parser("one")
    a.add_argument("model", choices=MODELS)
    a.add_argument("--mode", default="inductor")
    a.add_argument("--steps", type=int, default=14)
    a.add_argument("--profile")
    a.add_argument("--fp8", help="recipe")
    a.add_argument("--storage", choices=STORAGE, default="float32", help="parameters: float32, or bf16 and how")
    a.add_argument("--lowering", help="te: TransformerEngine's kernels")
    b = commands.add_parser("suite")
    b.add_argument("cases", nargs="+", type=Case.parse, help="model/mode[/recipe[/lowering]]")
    b.add_argument("--peers", help="folder with the peers' programs")
    b.add_argument("--names", nargs="+", default=["megatron-core", "torchtitan"], help="which peers")
    b.add_argument("--json", default="gpu.json")
    args = parser.parse_args()
    if args.command == "one":
        print(
            "ROW "
            + json.dumps(
                asdict(one(args.model, args.mode, args.steps, args.profile, args.fp8, args.storage, args.lowering))
            )
        )
    else:
        suite(args.cases, args.names, args.peers, args.json)


if __name__ == "__main__":
    main()
