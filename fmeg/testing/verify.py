"""Every layout of a matrix against one device: loss, gradients, and parameters after optimizer steps, in float64."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, partial
from typing import Any

import torch

from fmeg import optim, random, tree
from fmeg.mesh import Mesh
from fmeg.models import model_of, presets
from fmeg.sharding.array import Array
from fmeg.step import TrainState, jit, value_and_grad
from fmeg.testing.equivalent import errors
from fmeg.testing.experts import ROUTINGS, expert_cases, sample
from fmeg.testing.matrix import Case, cases
from fmeg.testing.pipelines import PipelineCase, configured, pipeline_cases

BATCH, SEQ, STEPS, TOLERANCE = 8, 16, 3, 1e-10
DEFAULT = "tricky-llama"
TRICKY = (DEFAULT, "tricky-moe", "tricky-deepseek")
PART = {"tricky-moe": 40, "tricky-deepseek": 6}  # at most so many rows of models with experts, unless all are wanted
BIAS_RATE = 0.01

Job = tuple[Case, Any]


@dataclass(frozen=True)
class Row:
    """What a case gave. Errors are relative: of the loss at any step, of the worst gradient leaf of the first step, of
    the worst parameter after all steps. `error` is the text of an exception, which counts as a failure."""

    name: str
    mesh: dict[str, int]
    layout: str
    microbatches: int
    schedule: str | None
    collectives: dict[str, int]
    loss_error: float
    grad_error: float
    params_error: float
    worst_grad: str
    ok: bool
    error: str = ""

    @property
    def worst(self) -> float:
        return max(self.loss_error, self.grad_error, self.params_error)


def shrink(cfg: Any) -> Any:
    """A preset's config at the size of a test, in float64: its traits stay, its sizes go.

    Grouped-query attention keeps its kind with 8 query heads and 4 key heads; the vocabulary becomes prime, and padded;
    a window becomes 5; weights start larger, so that no gradient is lost in the embedding's. A mixture has 8 experts,
    in 4 groups if in any.

    >>> shrink(presets.get("mistral-7b")).window
    5
    """
    new: dict[str, Any] = dict(embed=16, layers=2, heads=8, head_dim=4, ff=32, max_seq=SEQ, vocab_size=61)
    new |= dict(vocab_multiple=8, dtype=torch.float64, compute_dtype=None, init_std=0.3)
    new |= dict(experts=8, expert_ff=8, dense_layers=1, q_latent=12, kv_latent=8, nope_dim=6, rope_dim=4, v_dim=4)
    have = {f.name for f in fields(cfg)}
    if "kv_heads" in have:
        new["kv_heads"] = 8 if cfg.kv_heads == cfg.heads else 4
    if getattr(cfg, "window", None) is not None:
        new["window"] = 5
    if getattr(cfg, "q_latent", 0) is None:
        new["q_latent"] = None
    if "router" in have:
        grouped = dict(groups=4, top_groups=2) if cfg.router.groups > 1 else {}
        new["router"] = replace(cfg.router, top_k=min(cfg.router.top_k, 3), **grouped)
        new["shared_ff"] = 8 if cfg.shared_ff else 0
    return replace(cfg, **{name: value for name, value in new.items() if name in have})


def config(name: str = DEFAULT) -> Any:
    """The shrunk preset of that name; by default a Llama with all that is easy to get wrong.

    tricky-llama      grouped-query attention, norms on queries and keys, a z-loss, a padded prime vocabulary, an untied
                      head
    tricky-moe        that with experts for the MLP, one shared behind a gate; every loss that a router has, a bias
    tricky-deepseek   latent attention, a dense layer before those with experts, a further prediction after them
    """
    if name == DEFAULT:
        return replace(shrink(presets.get("tiny")), qk_norm=True, z_loss=1e-3)
    if name == "tricky-moe":
        cfg = replace(presets.get("tiny-moe"), qk_norm=True, router_bias=True, shared_ff=8, shared_gate=True)
        losses = dict(sequence_loss=0.3, batch_loss=0.2, z_loss=0.01)
        return shrink(replace(cfg, router=replace(cfg.router, score="sigmoid", **losses)))
    if name == "tricky-deepseek":
        cfg = presets.get("tiny-deepseek")
        return shrink(replace(cfg, router=replace(cfg.router, sequence_loss=0.3)))
    return shrink(presets.get(name))


def sizes_of(cfg: Any) -> dict[str, int]:
    """Sizes of the logical axes of a model and its batch."""
    return {**cfg.sizes, "batch": BATCH, "seq": SEQ, "res_seq": SEQ}


def make_batch(cfg: Any, rows: int = BATCH, seq: int = SEQ, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens and targets, and a mask that leaves out some, so that no two ranks count the same."""
    g = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(cfg.vocab_size, (rows, seq), generator=g) for _ in range(2))
    return {"tokens": tokens, "targets": targets, "mask": (torch.rand(rows, seq, generator=g) < 0.7).double()}


def keep_gradients() -> optim.Optimizer:
    """Passes gradients through and keeps them as its state: what a step's gradient was can be read off the new state.

    They lie where the optimizer's state lies, so reading them adds no collective.
    """
    return optim.Optimizer(lambda params: tree.map(torch.zeros_like, params), lambda g, state, params=None: (g, g))


def make_params(cfg: Any, seed: int = 0) -> Any:
    """Initial parameters with noise on each: norms of ones and biases of zeros would hide what goes wrong."""
    key = random.key(seed)
    noise = lambda path, p: p + 0.1 * random.normal(random.fold_in(key, f"noise on {path}"), p.shape, dtype=p.dtype)
    return tree.map_with_path(noise, model_of(cfg).init(key, cfg))


def make_state(cfg: Any, optimizer: optim.Optimizer, seed: int = 0, routing: str = "") -> TrainState:
    params = tree.map_with_path(ROUTINGS[routing].biased, make_params(cfg, seed))
    return TrainState.create(params, optimizer, model_of(cfg).logical_axes(cfg))


def make_step(cfg: Any, optimizer: optim.Optimizer, microbatches: int = 1, **how: Any) -> Any:
    """`(state, batch) -> (state, {"loss", "count", …})`: one optimizer step of a model of the library, and where
    routers have biases a move of these.

    how   more of `value_and_grad`: schedule, stages
    """
    model = model_of(cfg)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        grad = value_and_grad(lambda params, part: model.loss(params, part, cfg), microbatches=microbatches, **how)
        (loss, aux), grads = grad(state.params, batch)
        updates, opt = optimizer.update(grads, state.opt, state.params)
        new = optim.apply_updates(state.params, updates)
        if getattr(cfg, "router_bias", False):
            new = model.update_bias(new, aux["counts"], cfg, BIAS_RATE)
        return state.next(params=new, opt=opt), {"loss": loss, **aux}

    return step


def optimizer_under_test() -> optim.Optimizer:
    """Gradients as they come, then clipping that is always active, then AdamW."""
    return optim.chain(keep_gradients(), optim.clip_by_global_norm(0.1), optim.adamw(3e-3))


def run_steps(step: Any, state: TrainState, batch: Any, steps: int) -> list[tuple[TrainState, dict[str, Any]]]:
    """States and metrics after each step."""
    out = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        out.append((state, metrics))
    return out


def problem(cfg: Any, rows: int = BATCH, routing: str = "") -> tuple[TrainState, dict[str, torch.Tensor]]:
    """The state and the batch that a case starts from."""
    about = ROUTINGS[routing]
    batch = about.batch(make_batch(cfg, about.rows or rows, about.seq or SEQ))
    return make_state(cfg, optimizer_under_test(), routing=routing), batch


@cache
def on_one_device(
    cfg: Any, microbatches: int, steps: int, rows: int = BATCH, routing: str = ""
) -> list[tuple[TrainState, dict[str, Any]]]:
    """What a case must equal: `steps` steps eagerly. Computed once."""
    step = make_step(cfg, optimizer_under_test(), microbatches)
    return run_steps(step, *problem(cfg, rows, routing), steps)


@cache
def accumulated(cfg: Any, microbatches: int, rows: int, routing: str = "") -> tuple[TrainState, dict[str, Any]]:
    """One step, traced, on one device: where a parameter is used more than once, each use's gradients are added up over
    the microbatches first, which eagerly they are not; with several losses, what they give to one value is added in
    another order."""
    step = jit(make_step(cfg, optimizer_under_test(), microbatches), mesh=Mesh(backend="loop"))
    done = run_steps(step, *problem(cfg, rows, routing), 1)[0]
    return tree.map(lambda x: x.global_value() if isinstance(x, Array) else x, done)


def check(case: Case, cfg: Any, steps: int = STEPS, tolerance: float = TOLERANCE) -> Row:
    """Run a case: `steps` optimizer steps on the mesh under strict, against the same steps eagerly on one device.

    A pipeline alone must give the first step's loss and gradients bit for bit; where the model uses parameters more
    than once, or has experts and so several losses, those of the same step traced on one device.
    """
    about: dict[str, Any] = dict(name=case.name, mesh=dict(case.mesh.sizes), layout=repr(case.layout))
    about |= dict(microbatches=case.microbatches, schedule=case.schedule)
    how: dict[str, Any] = {}
    rows, exact, preset = BATCH, False, ""
    if isinstance(case, PipelineCase):
        preset, rows, how, exact = case.preset, case.rows, dict(schedule=case.schedule, stages=case.stages), case.exact
    try:
        cfg = ROUTINGS[case.routing].configured(configured(case, config(preset) if preset else cfg))
        want = on_one_device(cfg, case.microbatches, steps, rows, case.routing)
        state, batch = problem(cfg, rows, case.routing)
        one = make_step(cfg, optimizer_under_test(), case.microbatches, **how)
        step = jit(one, mesh=case.mesh, layout=case.layout, strict=True)
        lowered = step.lower(state, batch)
        run = lowered.compile()
        got = run_steps(lambda *args: run(tree.leaves(args)), state, batch, steps)
    except Exception as e:
        failed: dict[str, Any] = dict.fromkeys(("loss_error", "grad_error", "params_error"), math.inf)
        return Row(**about, **failed, collectives={}, worst_grad="", ok=False, error=f"{type(e).__name__}: {e}")
    loss = max(max(errors(g[1], w[1]).values()) for g, w in zip(got, want, strict=True))
    grads = errors(got[0][0].opt[0], want[0][0].opt[0])
    worst = max(grads, key=lambda path: grads[path])
    params = max(errors(got[-1][0].params, want[-1][0].params).values())
    found: dict[str, Any] = dict(loss_error=loss, grad_error=grads[worst], params_error=params)
    ok = max(found.values()) <= tolerance
    if exact and ok:
        traced = preset or hasattr(cfg, "router")
        same = accumulated(cfg, case.microbatches, rows, case.routing) if traced else want[0]
        ok = not any((*errors(got[0][0].opt[0], same[0].opt[0]).values(), *errors(got[0][1], same[1]).values()))
    return Row(**about, **found, collectives=lowered.explain().executed(), worst_grad=worst, ok=ok)


def _work(job: Job, steps: int, tolerance: float) -> Row:
    torch.set_num_threads(1)
    return check(*job, steps, tolerance)


def jobs(model: str | None = None, devices: int = 16, everything: bool = False) -> list[Job]:
    """What `fmeg verify` checks: cases, each with the config of its model.

    model        a name that `config` knows: its whole matrix. None: that of a Llama, and for the two models with
                 experts a part of theirs, chosen so that pairs and triples of kinds of parallelism occur
    everything   those of the models with experts whole

    >>> len(jobs()) < 400 < 1000 < len(jobs(everything=True))
    True
    """
    found: list[Job] = []
    for name in TRICKY if model is None else (model,):
        cfg = config(name)
        sizes, prefix = sizes_of(cfg), f"{name.removeprefix('tricky-')}: " if name in PART else ""
        if name in PART:
            matrix = list(expert_cases(sizes, devices))
            matrix = matrix if everything or model is not None else sample(matrix, PART[name])
        else:
            matrix = [*cases(sizes, devices), *pipeline_cases(sizes, devices)]
        found += [(replace(case, name=prefix + case.name), cfg) for case in matrix]
    return found


def verify(
    cfg: Any,
    matrix: Sequence[Case] | None = None,
    *,
    devices: int = 16,
    steps: int = STEPS,
    tolerance: float = TOLERANCE,
    workers: int = 1,
) -> Iterator[Row]:
    """Check every case of a matrix (default: `cases` and `pipeline_cases` of the model's sizes, on meshes up to
    `devices`), in order.

    workers   processes; 1 runs here

    >>> row, = verify(config("tiny"), list(cases(sizes_of(config("tiny"))))[:1], steps=1)
    >>> row.name, row.ok
    ('one device', True)
    """
    sizes = sizes_of(cfg)
    todo = (*cases(sizes, devices), *pipeline_cases(sizes, devices)) if matrix is None else matrix
    yield from verify_all([(case, cfg) for case in todo], steps=steps, tolerance=tolerance, workers=workers)


def verify_all(
    todo: Sequence[Job], *, steps: int = STEPS, tolerance: float = TOLERANCE, workers: int = 1
) -> Iterator[Row]:
    """Check `jobs`, in order."""
    if workers == 1:
        yield from (check(case, cfg, steps, tolerance) for case, cfg in todo)
        return
    one = partial(_work, steps=steps, tolerance=tolerance)
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(one, todo)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """One object: every row, and the largest error of all with the row it is in."""
    worst = max(rows, key=lambda row: row.worst, default=None)
    return {
        "rows": [asdict(row) for row in rows],
        "worst": None if worst is None else {"name": worst.name, "error": worst.worst},
        "ok": all(row.ok for row in rows),
    }
