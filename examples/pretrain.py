"""Train a small Llama from scratch on Python's own source, on a mesh, and see how well it compresses what it never saw.

    python examples/pretrain.py                                  a virtual dp=2, tp=2 mesh, in one process
    python examples/pretrain.py --mesh dp=2,tp=4 --layout fsdp   another mesh, another layout, the same losses
    torchrun --nproc-per-node 4 examples/pretrain.py             the same on real processes
    python examples/pretrain.py --text ~/notes --steps 100       other text: a folder, or a file
    python examples/pretrain.py --model moe-tiny --layout ep     experts for the MLP, spread over the whole mesh

The text is the standard library of the Python that runs this, without its tests. Some files are held out. Bits per byte
is what an arithmetic coder would need for those files with this model; gzip and xz compress the same files, as one
archive. Ctrl-C finishes the step, writes everything and stops. Output: metrics.jsonl, loss.png, sample.py, config.json,
and with experts also experts.png: the share of tokens that each one gets, by layer and step.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read once, by torch: spinning is slow on a busy machine

import torch
import torch.distributed as dist
import tyro
from report import Report
from torch import Tensor

import fmeg
from fmeg import Layout, Mesh, TrainState, data, models, ops, optim, tree
from fmeg.data.tokenizer import Bpe, train_bpe
from fmeg.models import llama, moe

SMALL = llama.Config(
    vocab_size=4096, embed=128, layers=4, heads=4, kv_heads=4, head_dim=32, ff=384, tied=True, max_seq=1024
)
# A token meets as much as in SMALL: three MLPs a third as wide, one that all tokens share and 2 of 16. Weights sum to
# 2,
# so that together they begin as the MLP does. No loss keeps experts busy, a bias does.
MOE_TINY = moe.Config(
    vocab_size=4096,
    embed=128,
    layers=4,
    heads=4,
    kv_heads=4,
    head_dim=32,
    experts=16,
    expert_ff=128,
    shared_ff=128,
    router=ops.Router(2, "sigmoid", renormalize=True, scale=2.0),
    router_bias=True,
    rope_base=SMALL.rope_base,
    norm_eps=SMALL.norm_eps,
    tied=True,
    max_seq=1024,
)
OWN: dict[str, Any] = {"small": SMALL, "moe-tiny": MOE_TINY}


@dataclass(frozen=True)
class Args:
    """Train a small language model on a mesh."""

    mesh: str = "dp=2,tp=2"
    """Axes and sizes. Virtual in one process; real under torchrun."""
    layout: Literal["megatron", "ep", "fsdp", "hsdp", "single"] = "megatron"
    """Where dimensions live; see `layouts`. The losses are the same in each."""
    model: str = "small"
    """`small`, `moe-tiny`, or the name of a preset, such as qwen3-0.6b; its vocabulary becomes `vocab`."""
    text: Path | None = None
    """A folder or a file to train on instead of Python's standard library."""
    steps: int = 600
    batch: int = 8
    """Sequences a step, over the whole mesh."""
    seq: int = 256
    """Tokens a sequence."""
    vocab: int = 4096
    """Size of the byte-pair encoding that is trained first."""
    lr: float = 0.012
    """Peak learning rate of Muon and AdamW; linear warm-up over a twentieth of the steps, then linear to 0."""
    bias_rate: float = 0.01
    """How far a step moves the routers' biases towards equal use of experts; 0: nothing balances them."""
    microbatches: int = 1
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """What the model computes in. Parameters are float32, or float64."""
    seed: int = 0
    eval_every: int = 100
    prompt: str = "class "
    """How the sample at the end begins."""
    sample: int = 200
    """Its length in tokens."""
    out: Path = Path("runs/pretrain")
    beside: Path | None = None
    """The folder of another run, whose curves are drawn beside these."""


def layouts(mesh: Mesh, axes: Any) -> dict[str, Layout]:
    """A few layouts by name, for whatever axes the mesh and the model (`axes`: of its parameters) have."""
    has = lambda *names: tuple(n for n in names if n in mesh.axes)
    dp, tp, cp, everything = has("dp"), has("tp"), has("cp"), mesh.axes
    known = {"batch", "seq", "res_seq"}.union(*(a.split() for a in tree.leaves(axes)))
    keep = lambda table: {name: where for name, where in table.items() if name in known}
    layout = lambda params=(), opt=(), **compute: Layout(
        params=keep(dict(params)), opt=keep(dict(opt)), **keep(compute)
    )
    tensor = dict(heads=tp, kv_heads=tp, ff=tp, shared_ff=tp, vocab=tp)
    megatron = dict(batch=dp, seq=cp, res_seq=cp + tp, **tensor, opt=dict(embed=dp))
    return {
        # Tensor and sequence parallel, context parallel, and ZeRO-1 over the data-parallel axis, which has the experts.
        "megatron": layout(**megatron, experts=dp, expert_ff=tp),
        # The same, but experts whole, and spread over all axes.
        "ep": layout(**megatron, experts=dp + cp + tp),
        # Every device has rows of the batch; parameters rest in pieces and are gathered layer by layer.
        "fsdp": layout(batch=everything, params=dict(embed=everything, expert_embed=everything)),
        # The same within groups along the last axis; whole copies along the others.
        "hsdp": layout(batch=everything, params=dict(embed=everything[-1:], expert_embed=everything[-1:])),
        "single": Layout(),
    }


def config(args: Args, vocab_size: int) -> Any:
    """The model's config, with the tokenizer's vocabulary and the chosen precision."""
    cfg: Any = OWN[args.model] if args.model in OWN else models.presets.get(args.model)
    wide = torch.float64 if args.dtype == "float64" else torch.float32
    compute = torch.bfloat16 if args.dtype == "bfloat16" else None
    return dataclasses.replace(cfg, vocab_size=vocab_size, dtype=wide, compute_dtype=compute)


def optimizer(args: Args, axes: Any) -> tuple[optim.Optimizer, optim.Schedule]:
    """Muon for the matrices, AdamW for the rest, after clipping; and their learning rate."""
    rate = optim.linear(args.lr, args.steps, warmup=args.steps // 20)
    decay = optim.decay_by_axes(axes)
    muon = optim.muon(rate, optim.matrices(axes), mask=decay)
    return optim.chain(optim.clip_by_global_norm(1.0), muon), rate


class Stop:
    """Ctrl-C asks for a stop after the step, a second one stops at once. Processes agree: none is left waiting.

    Under torchrun one Ctrl-C reaches a process twice, from the terminal and from torchrun; the second is ignored.
    """

    asked = False

    def __enter__(self) -> Stop:
        self.before = {sig: signal.signal(sig, self._ask) for sig in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: Any) -> None:
        for sig, handler in self.before.items():
            signal.signal(sig, handler)

    def _ask(self, *_: Any) -> None:
        if self.asked and not dist.is_initialized():
            raise KeyboardInterrupt
        self.asked = True

    def __call__(self, device: torch.device) -> bool:
        if dist.is_initialized():
            flag = torch.tensor(int(self.asked), device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            self.asked = bool(flag)
        return self.asked


def main(args: Args) -> int:
    """Train; returns the exit status: 0, or 130 after Ctrl-C."""
    with Stop() as stop:
        train(args, stop)
    return 130 if stop.asked else 0


def train(args: Args, stop: Stop) -> None:
    """The whole run: text, tokens, a step and a score on the mesh, the loop, what it leaves behind."""
    mesh = Mesh() if args.layout == "single" else Mesh.from_string(args.mesh)
    device = mesh.device  # under torchrun this joins the process group
    first = int(os.environ.get("RANK", "0")) == 0

    corpus = data.load_corpus(args.text)
    bpe = train_bpe(corpus.train, args.vocab)
    documents, unseen = bpe.encode_documents(corpus.train), bpe.encode_documents(corpus.held_out)
    loader = data.Loader(documents, bpe.separator, args.batch, args.seq, args.seed)
    held_out = data.held_out_batches(unseen, bpe.separator, args.batch, args.seq)
    some_held_out = held_out[::4]

    cfg = config(args, bpe.vocab_size)
    model = models.model_of(cfg)
    axes = model.logical_axes(cfg)
    opt, rate = optimizer(args, axes)

    def create(key: Tensor) -> TrainState:
        return TrainState.create(model.init(key, cfg), opt, axes)

    def loss_fn(params: Any, batch: Any) -> tuple[Any, dict[str, Tensor]]:
        """What is minimized, one (sum, count) or several; and of it the cross entropy, which is what we look at."""
        pairs, aux = with_aux(model.loss(params, batch, cfg))
        return pairs, {"nats": pairs[0][0], **aux}

    def nats(params: Any, batch: Any) -> Tensor:
        return loss_fn(params, batch)[1]["nats"]

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Tensor]]:
        grad_fn = fmeg.value_and_grad(loss_fn, microbatches=args.microbatches)
        (_, aux), grads = grad_fn(state.params, batch)
        updates, opt_state = opt.update(grads, state.opt, state.params)
        params = optim.apply_updates(state.params, updates)
        if getattr(cfg, "router_bias", False):
            params = model.update_bias(params, aux["counts"], cfg, args.bias_rate)
        metrics = {"loss": aux["nats"] / aux["count"], "grad_norm": optim.global_norm(grads)}
        return state.next(params=params, opt=opt_state), metrics | {k: aux[k] for k in aux if k == "counts"}

    on_mesh: Any = dict(mesh=mesh, layout=layouts(mesh, axes)[args.layout])
    step = fmeg.jit(train_step, **on_mesh)
    score = fmeg.jit(nats, axes={"params": axes}, **on_mesh)

    def bits_per_byte(params: Any, batches: Sequence[data.Batch]) -> float:
        total = sum(number(score(params, b)) for b in batches)
        return data.bits_per_byte(total, sum(int(bpe.token_bytes[b["targets"][b["mask"] > 0]].sum()) for b in batches))

    report = Report(
        args.out,
        steps=args.steps,
        title=f"{args.model}: {parameters(cfg)}, {args.layout} on {mesh}",
        config=dataclasses.asdict(args) | {"config": dataclasses.asdict(cfg)},
        baselines=data.compressed_bits_per_byte(corpus.held_out),
        beside=args.beside,
        quiet=not first,
    )
    epochs = args.steps * args.batch * args.seq / loader.tokens_per_epoch
    report.note(
        f"train {size(corpus.train)}, held out {size(corpus.held_out)}; {args.steps} steps: {epochs:.2f} epochs"
    )
    state = fmeg.jit(create, **on_mesh)(fmeg.random.key(args.seed, device))
    with report:
        for i in range(args.steps):
            begin = time.perf_counter()
            state, metrics = step(state, loader(i))
            counts = metrics.pop("counts", None)
            values = {name: number(x) for name, x in metrics.items()}
            if counts is not None:
                values["max_load"] = report.load(whole(counts))
            report.step(
                i + 1, lr=float(rate(i)), tokens=args.batch * args.seq, seconds=time.perf_counter() - begin, **values
            )
            if stop(device):
                break
            if (i + 1) % args.eval_every == 0 and i + 1 < args.steps:
                report.held_out(i + 1, bits_per_byte(state.params, some_held_out))
        report.held_out(i + 1, bits_per_byte(state.params, some_held_out if stop.asked else held_out), final=True)
    params = fmeg.tree.map(whole, state.params)  # every process takes part
    if first:
        report.summary()
        report.sample(sample(params, cfg, bpe, args))
    if dist.is_initialized():
        dist.destroy_process_group()


def with_aux(out: Any) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """What a model's loss returns, in one form: a list of (sum, count), cross entropy first, and counts of experts."""
    pairs, aux = out if isinstance(out[1], dict) else (out, {})
    return (pairs if isinstance(pairs, list) else [pairs]), aux


def parameters(cfg: Any) -> str:
    """How many there are, and how many of them a token meets."""
    n = models.model_of(cfg).num_params(cfg)
    if not hasattr(cfg, "experts"):
        return f"{n / 1e6:.2f} M parameters"
    layers = cfg.layers + getattr(cfg, "mtp_layers", 0)
    idle = 3 * layers * cfg.embed * cfg.expert_ff * (cfg.experts - cfg.router.top_k)
    return f"{n / 1e6:.2f} M parameters ({(n - idle) / 1e6:.2f} M active)"


def whole(x: Any) -> Tensor:
    """An array on the mesh as a plain tensor."""
    return x.global_value() if isinstance(x, fmeg.Array) else x


def size(documents: Sequence[data.Document]) -> str:
    return f"{len(documents)} files, {sum(d.num_bytes for d in documents) / 1e6:.2f} MB"


def number(x: Any) -> float:
    return float(whole(x))


def sample(params: Any, cfg: Any, bpe: Bpe, args: Args) -> str:
    """A document that begins with the prompt, up to its end or `args.sample` tokens."""
    start = torch.tensor([[bpe.separator, *bpe.encode(args.prompt)]], device=params["embed"].device)
    key = fmeg.random.key(args.seed, start.device)
    ids = models.generate(params, start, cfg, args.sample, temperature=0.7, key=key)[0, 1:].tolist()
    return bpe.decode(ids[: ids.index(bpe.separator)] if bpe.separator in ids else ids)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
