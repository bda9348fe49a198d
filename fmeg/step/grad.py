"""`value_and_grad`: the loss Σ sums / Σ counts over the whole global batch, and its gradient, microbatch by
microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmeg import tree
from fmeg.pipeline.op import Pipeline
from fmeg.pipeline.schedule import Schedule
from fmeg.pipeline.stages import Stages
from fmeg.pipeline.travel import carry_along
from fmeg.precision import Recipe, lower_precision, mark
from fmeg.precision.delayed import by_microbatch, history_of, largest_known, pushed
from fmeg.program import recorder
from fmeg.program.autocast import off
from fmeg.program.errors import ShardingError, TraceError
from fmeg.program.gradient import active_values, differentiate
from fmeg.program.ir import Program, TensorType, Value
from fmeg.program.passes import ancestors
from fmeg.program.recorder import Recorder
from fmeg.program.structured import GRADIENT, Accumulate, SplitRows
from fmeg.program.trace import argument_paths, record_flat, type_of
from fmeg.sharding.array import Array

LossFn = Callable[..., Any]
CONTRACT = (
    "a loss function must return (sum of losses, count), or ((sum, count), aux), or a list of (sum, count) pairs, or "
    "(list of pairs, aux), where sums and counts are "
    "0-d tensors (a count may be a number) and aux is a dict of tensors or numbers, which are summed; division "
    "happens once, over the whole batch"
)

DEPENDS = (
    "the count depends on the parameters; it must be a property of the batch (a number of tokens), since it is needed "
    "before the first "
    "backward pass: use detach(), or return one sum with the count 1"
)


@dataclass(frozen=True)
class _Result:
    sums: list[torch.Tensor]
    counts: list[Any]
    aux: dict[str, Any]


def _parse(out: Any, name: str) -> _Result:
    def is_pair(x: Any) -> bool:
        return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], torch.Tensor)

    aux: dict[str, Any] = {}
    if isinstance(out, tuple) and len(out) == 2 and isinstance(out[1], dict):
        out, aux = out
    pairs = [out] if is_pair(out) else list(out) if isinstance(out, (list, tuple)) else []
    if not pairs or not all(is_pair(p) for p in pairs):
        raise TraceError(f"{name}: {CONTRACT}; given {type(out).__name__}")
    for s, c in pairs:
        if s.ndim or not s.dtype.is_floating_point:
            raise TraceError(f"{name}: {CONTRACT}; the sum is {TensorType.of(s)}")
        if isinstance(c, torch.Tensor) and c.ndim:
            raise TraceError(f"{name}: {CONTRACT}; the count is {TensorType.of(c)}")
        if not isinstance(c, (torch.Tensor, int, float)):
            raise TraceError(f"{name}: {CONTRACT}; the count is {c!r}")
    like = pairs[0][0]

    def tensor(path: str, x: Any) -> torch.Tensor:
        if not isinstance(x, (torch.Tensor, int, float)):
            raise TraceError(f"{name}: {CONTRACT}; aux[{path!r}] is {x!r}")
        return x if isinstance(x, torch.Tensor) else torch.full((), x, dtype=like.dtype, device=like.device)

    return _Result([s for s, _ in pairs], [c for _, c in pairs], tree.map_with_path(tensor, aux))


def _inverse(count: torch.Tensor) -> torch.Tensor:
    """1/count; 0 where there is nothing to count: the sum over nothing is 0, and so is the loss."""
    return torch.where(count == 0, 0.0, torch.reciprocal(count))


def value_and_grad(
    loss_fn: LossFn,
    *,
    microbatches: int = 1,
    schedule: str | Schedule | None = None,
    stages: Stages = "even",
    precision: Recipe | None = None,
) -> Callable[..., Any]:
    """Loss and gradient of `loss_fn(params, batch, *rest)` by `params`.

        loss = Σ_j sum_j / Σ_j count_j,        grads = d loss / d params

    (summed over the pairs, if there are several) over microbatches j of the *global* batch: every tensor of `batch`
    with a dimension is cut along its first one, rows j·B/M … (j+1)·B/M; `rest` is passed whole. Returns a function
    `(params, batch, *rest) -> ((loss, aux), grads)`, with `aux["count"]` and the sums of the loss function's own aux.
    Leaves that are not float have the gradient None. A count of 0 (every token masked) gives loss 0 and gradients of
    zeros. A count may not depend on the parameters.

    `schedule` (a name such as "1f1b", see `fmeg.pipeline`, or a Schedule) says how the microbatches run where the
    layout puts `layers` on a mesh axis; elsewhere it changes nothing. `stages` cuts the layers: "even", "cost" (by
    FLOPs, the head counted), measured costs (`fmeg.pipeline.Recording.layer_costs`), numbers such as (3, 3, 2), or a
    drawing such as "Et*3|t*3|ttL"; layers are those of all scans over layers, one after the other.

    `precision` (see `fmeg.precision`) says which products run in FP8 or less; the loss function is as it was. With
    delayed scaling the returned function takes `amax=` too, what earlier steps saw (see `amax_history`), and
    `aux["amax"]` is what the next one is to be given.

    Eager, it is `torch.autograd.grad` over detached leaves (with `precision`, the traced program on one device); traced
    (under `fmeg.jit`), a node that is differentiated first and partitioned after. Under an outer `torch.func` transform
    it stays differentiable.

    >>> import torch
    >>> f = value_and_grad(lambda p, x: ((p * x).sum(), x.numel()))
    >>> (loss, aux), grad = f(torch.tensor(3.0), torch.tensor([1.0, 2.0]))
    >>> loss.item(), grad.item()
    (4.5, 1.5)
    """
    if microbatches < 1:
        raise ShardingError(f"value_and_grad: microbatches must be at least 1, given {microbatches}")
    counters: dict[Any, Program | None] = {}
    jitted: list[Any] = []

    def run(params: Any, batch: Any, *rest: Any, amax: Any = None) -> Any:
        rec = recorder.active()
        _refuse_arrays(loss_fn, (params, batch, *rest))
        if rec is not None and torch._C._functorch.peek_interpreter_stack() is None:
            return _traced(rec, loss_fn, microbatches, params, batch, rest, schedule, stages, precision, amax)
        if precision is not None:
            return _programmed(run, jitted, loss_fn, params, batch, rest, amax)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            return _transformed(loss_fn, microbatches, params, batch, rest)
        return _eager(loss_fn, microbatches, params, batch, rest, counters)

    return run


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def _refuse_arrays(loss_fn: LossFn, args: tuple) -> None:
    for i, x in enumerate(tree.leaves(args)):
        if not isinstance(x, torch.Tensor) and type_of(x) is not None:
            raise TypeError(
                f"value_and_grad({_name(loss_fn)}): {argument_paths(loss_fn, args)[i]} is of type {type(x).__name__}; "
                "expected a tensor. What lives on a mesh is for functions under fmeg.jit: call value_and_grad inside "
                "one, or pass global_value()"
            )


def _rows(batch: Any, steps: int, name: str) -> None:
    if steps == 1:
        return
    for path, x in zip(tree.paths(batch), tree.leaves(batch), strict=True):
        if isinstance(x, torch.Tensor) and x.ndim and x.shape[0] % steps:
            raise ShardingError(
                f"value_and_grad({name}): {steps} microbatches do not divide the {x.shape[0]} rows of "
                f"batch{'.' + path if path else ''}, shape "
                f"{tuple(x.shape)}; choose a divisor of {x.shape[0]}, or pad the batch (with a loss mask of zeros)"
            )


def _part(batch: Any, j: int, steps: int) -> Any:
    if steps == 1:
        return batch
    return tree.map(lambda x: x.unflatten(0, (steps, -1))[j] if isinstance(x, torch.Tensor) and x.ndim else x, batch)


# -- eager ------------------------------------------------------------------------------------------------------------
def _eager(loss_fn: LossFn, steps: int, params: Any, batch: Any, rest: tuple, counters: dict) -> Any:
    _rows(batch, steps, _name(loss_fn))
    leaves, treedef = tree.flatten(params)
    floats = [i for i, p in enumerate(leaves) if isinstance(p, torch.Tensor) and p.is_floating_point()]
    known = _count_first(loss_fn, steps, params, batch, rest, counters) if steps > 1 else None
    grads: list[torch.Tensor | None] = [None] * len(floats)
    sums: list[torch.Tensor] | None = None
    aux: dict[str, Any] | None = None
    inverse: list[torch.Tensor] = []
    counts: list[torch.Tensor] = []
    for j in range(steps):
        active = [p.detach() if isinstance(p, torch.Tensor) else p for p in leaves]
        for i in floats:
            active[i].requires_grad_(True)
        with torch.enable_grad():
            r = _parse(loss_fn(tree.unflatten(treedef, active), _part(batch, j, steps), *rest), _name(loss_fn))
        if not counts:
            counts = known or _counts(r, _name(loss_fn))
            inverse = [_inverse(c) for c in counts]
        reached = [(s, c) for s, c in zip(r.sums, inverse, strict=True) if s.requires_grad]
        got: Sequence[torch.Tensor | None] = [None] * len(floats)
        if reached:
            with off():  # the casts of the forward pass have gradients of their own
                got = torch.autograd.grad(
                    [s for s, _ in reached], [active[i] for i in floats], [c for _, c in reached], allow_unused=True
                )
        grads = [g if s is None else s if g is None else s + g for s, g in zip(grads, got, strict=True)]
        now = [s.detach() for s in r.sums]
        sums = now if sums is None else [a + b for a, b in zip(sums, now, strict=True)]
        new_aux = tree.map(lambda t: t.detach(), r.aux)
        aux = new_aux if aux is None else tree.map(torch.add, aux, new_aux)
    full: list[Any] = [None] * len(leaves)
    for i, g in zip(floats, grads, strict=True):
        full[i] = g if g is not None else torch.zeros_like(leaves[i])
    assert sums is not None
    loss = tree.sum([s * i for s, i in zip(sums, inverse, strict=True)])
    return (loss, {"count": counts[0], **(aux or {})}), tree.unflatten(treedef, full)


def _counts(r: _Result, name: str) -> list[torch.Tensor]:
    """The counts of one result, in the dtypes of their sums."""
    if any(isinstance(c, torch.Tensor) and c.requires_grad for c in r.counts):
        raise TraceError(f"{name}: {DEPENDS}")
    return [torch.as_tensor(c, dtype=s.dtype, device=s.device).detach() for s, c in zip(r.sums, r.counts, strict=True)]


def _count_first(
    loss_fn: LossFn, steps: int, params: Any, batch: Any, rest: tuple, counters: dict
) -> list[torch.Tensor]:
    """Counts of all microbatches, by the slice of the loss that computes them: needed before the first backward pass.

    A loss that cannot be traced (it is closed over tensors, or branches on data) is run forward instead.
    """
    from fmeg.mesh import Mesh
    from fmeg.sharding.execute import Executable

    parts = [_part(batch, j, steps) for j in range(steps)]
    leaves, structure = tree.flatten((params, parts[0], rest))
    key = (structure, *(TensorType.of(x) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves))
    if key not in counters:
        try:
            program, info = _loss_program(None, loss_fn, params, parts[0], rest)
        except TraceError:
            counters[key] = None
        else:
            n_params = len([p for p in tree.leaves(params) if isinstance(p, torch.Tensor)])
            counters[key] = _count_program(program, n_params, _name(loss_fn), info["n"])
    totals: list[Any] | None = None
    for p in parts:
        if counters[key] is None:
            with torch.no_grad():
                got = _counts(_parse(loss_fn(params, p, *rest), _name(loss_fn)), _name(loss_fn))
        else:
            run = Executable(counters[key], Mesh(backend="loop").backend())
            with off():
                got = run([x for x in tree.leaves((params, p, rest)) if isinstance(x, torch.Tensor)])
        totals = got if totals is None else [a + b for a, b in zip(totals, got, strict=True)]
    assert totals is not None
    return [torch.as_tensor(t) for t in totals]


def _transformed(loss_fn: LossFn, steps: int, params: Any, batch: Any, rest: tuple) -> Any:
    """Under an outer torch.func transform: torch.func.grad, differentiable again."""
    _rows(batch, steps, _name(loss_fn))
    leaves, treedef = tree.flatten(params)
    floats = [i for i, p in enumerate(leaves) if isinstance(p, torch.Tensor) and p.is_floating_point()]

    def whole(active: list[torch.Tensor]) -> tuple[torch.Tensor, Any]:
        full = list(leaves)
        for i, p in zip(floats, active, strict=True):
            full[i] = p
        p = tree.unflatten(treedef, full)
        results = [_parse(loss_fn(p, _part(batch, j, steps), *rest), _name(loss_fn)) for j in range(steps)]
        sums = [tree.sum([r.sums[i] for r in results]) for i in range(len(results[0].sums))]
        counts = [tree.sum([torch.as_tensor(r.counts[i]) for r in results]).to(s) for i, s in enumerate(sums)]
        aux = tree.map(lambda *t: tree.sum(list(t)), *(r.aux for r in results))
        loss = tree.sum([s * _inverse(c) for s, c in zip(sums, counts, strict=True)])
        return loss, (loss, {"count": counts[0], **aux})

    got, (loss, aux) = torch.func.grad(whole, has_aux=True)([leaves[i] for i in floats])
    grads: list[Any] = [None] * len(leaves)
    for i, g in zip(floats, got, strict=True):
        grads[i] = g
    return (loss, aux), tree.unflatten(treedef, grads)


def _programmed(
    run: LossFn, jitted: list[Any], loss_fn: LossFn, params: Any, batch: Any, rest: tuple, amax: Any
) -> Any:
    """The traced program on one device: what low precision means is said of a Program."""
    from fmeg.step.jit import jit

    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise TraceError(
            f"value_and_grad({_name(loss_fn)}): a product in low precision has no derivatives beyond its own gradient; "
            "under a torch.func transform leave `precision` out"
        )
    if not jitted:
        jitted.append(jit(lambda params, amax, batch, *rest: run(params, batch, *rest, amax=amax)))
    out = jitted[0](params, amax, batch, *rest)
    return tree.map(lambda x: x.global_value() if isinstance(x, Array) else x, out)


# -- traced -----------------------------------------------------------------------------------------------------------
def _loss_program(rec: Recorder | None, loss_fn: LossFn, params: Any, batch: Any, rest: tuple) -> tuple[Program, dict]:
    """The loss as a Program with outputs (sums…, counts…, aux…); info says how many of each, and what was captured."""
    leaves, treedef = tree.flatten((params, batch, rest))
    dynamic = [isinstance(x, torch.Tensor) for x in leaves]
    info: dict[str, Any] = {}

    def flat(*fakes: torch.Tensor) -> list[Any]:
        it = iter(fakes)
        full = [next(it) if d else x for x, d in zip(leaves, dynamic, strict=True)]
        r = _parse(loss_fn(*_unpack(tree.unflatten(treedef, full))), _name(loss_fn))
        counts = [
            c if isinstance(c, torch.Tensor) else torch.full((), float(c), dtype=s.dtype)
            for s, c in zip(r.sums, r.counts, strict=True)
        ]
        aux_leaves, info["aux_tree"] = tree.flatten(r.aux)
        info["n"] = len(r.sums)
        return [*r.sums, *(c.to(s.dtype) for s, c in zip(r.sums, counts, strict=True)), *aux_leaves]

    paths = argument_paths(loss_fn, (params, batch, *rest))
    names = [p for p, d in zip(paths, dynamic, strict=True) if d]
    inner, outs = record_flat(
        flat,
        [TensorType.of(x) for x, d in zip(leaves, dynamic, strict=True) if d],
        names,
        parent=rec,
        name=_name(loss_fn),
    )
    info["captured"] = [t for t, _ in inner.captured]
    program = inner.program(outs, names)
    program.check()
    return program, info


def _unpack(t: tuple) -> tuple:
    params, batch, rest = t
    return (params, batch, *rest)


def _count_program(program: Program, n_params: int, name: str, n: int) -> Program:
    """The slice of the loss that computes the counts; it must not depend on parameters."""
    counts = program.outputs[n : 2 * n]
    on = active_values(program, range(n_params))
    for c in counts:
        if isinstance(c, Value) and id(c) in on:
            raise TraceError(f"{name}: {DEPENDS}")
    return Program(program.inputs, ancestors(program, list(counts)), tuple(counts), program.names, f"{name}.count")


def _traced(
    rec: Recorder,
    loss_fn: LossFn,
    steps: int,
    params: Any,
    batch: Any,
    rest: tuple,
    schedule: str | Schedule | None,
    stages: Stages,
    precision: Recipe | None,
    amax: dict[str, torch.Tensor] | None,
) -> Any:
    name = _name(loss_fn)
    _rows(batch, steps, name)
    p_leaves, p_tree = tree.flatten(params)
    b_leaves = [x for x in tree.leaves(batch) if isinstance(x, torch.Tensor)]
    r_leaves = [x for x in tree.leaves(rest) if isinstance(x, torch.Tensor)]
    p_tensors = [p for p in p_leaves if isinstance(p, torch.Tensor)]
    part = tree.map(lambda x: _row_type(x, steps), batch) if steps > 1 else batch
    with rec.pause():
        sample = tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype) if isinstance(x, TensorType) else x, part)
    program, info = _loss_program(rec, loss_fn, params, sample, rest)
    history: dict[str, torch.Tensor] = {}
    if precision is not None:
        program, sites = mark(program, precision, _tensor_paths(params))
        history = history_of(sites, program.inputs[len(program.inputs) - len(sites) :], precision.history, amax)
    if history and schedule is not None:
        raise TraceError(
            f"value_and_grad({name}): delayed scaling does not run in a pipeline; take another recipe, or leave "
            "`schedule` out"
        )
    n = info["n"]
    split = [steps > 1 and x.ndim > 0 for x in b_leaves]
    b_values = [_split_rows(rec, x, steps) if s else rec.value(x) for x, s in zip(b_leaves, split, strict=True)]
    known = [largest_known(h) for h in history.values()]
    others = [*r_leaves, *info["captured"], *known]
    args = [*map(rec.value, p_tensors), *b_values, *map(rec.value, others)]
    batched = (*(False for _ in p_tensors), *split, *(False for _ in others))

    counter = _count_program(program, len(p_tensors), name, n)
    counts = _emit(rec, Accumulate(counter, steps, batched), args, [v.type for v in counter.outputs])
    inverse = [_inverse(c) for c in counts]

    sums_only = Program(
        program.inputs, program.nodes, (*program.outputs[:n], *program.outputs[2 * n :]), program.names, program.name
    )
    floats = [i for i, p in enumerate(p_tensors) if p.dtype.is_floating_point]
    wrt = [*floats, *range(len(args) - len(known), len(args))]
    order: dict[int, int] = {}
    if schedule is not None:
        sums_only, order = carry_along(sums_only, range(len(p_tensors)))
    uses: list[int] = []
    joint = differentiate(sums_only, wrt, list(range(n)), uses=uses, order=order)
    if precision is not None:
        joint = lower_precision(joint)
    n_aux = len(sums_only.outputs) - n
    everywhere = (*batched, *(False for _ in inverse))
    args += map(rec.value, inverse)
    if known and steps > 1:
        joint = by_microbatch(joint, [n + n_aux + i for i, k in enumerate(uses) if k >= len(floats)], steps)
        args.append(rec.value(torch.eye(steps)))
        everywhere = (*everywhere, True)
    owners = {n + n_aux + i: wrt[k] for i, k in enumerate(uses)}
    if schedule is None:
        op = Accumulate(joint, steps, everywhere, owners)
    else:
        op = Pipeline(joint, steps, everywhere, owners, schedule=schedule, stages=stages)
    outs = _emit(rec, op, args, [v.type for v in joint.outputs])
    loss = tree.sum([s * i for s, i in zip(outs[:n], inverse, strict=True)])
    aux = tree.unflatten(info["aux_tree"], outs[n : n + n_aux])
    by_use = list(zip(uses, outs[n + n_aux :], strict=True))
    with rec.marking(phase="B"):
        totals = [tree.sum([g for k, g in by_use if k == j]) for j in range(len(wrt))]
        whole = [
            _emit(rec, GRADIENT, [rec.value(g), rec.value(p_tensors[i])], [TensorType.of(g)])[0]
            for i, g in zip(floats, totals, strict=False)
        ]
    if history:
        seen = [s.amax(0) if steps > 1 else s for s in totals[len(floats) :]]
        aux["amax"] = {site: pushed(h, s) for (site, h), s in zip(history.items(), seen, strict=True)}
    by_index = dict(zip(floats, whole, strict=True))
    it = iter(range(len(p_tensors)))
    grads = [by_index.get(next(it)) if isinstance(p, torch.Tensor) else None for p in p_leaves]
    return (loss, {"count": counts[0], **aux}), tree.unflatten(p_tree, grads)


def _tensor_paths(params: Any) -> list[str]:
    return [p for p, x in zip(tree.paths(params), tree.leaves(params), strict=True) if type_of(x) is not None]


def amax_history(loss_fn: LossFn, precision: Recipe, params: Any, batch: Any, *rest: Any) -> dict[str, torch.Tensor]:
    """What delayed scaling knows before the first step: nothing (zeros, and so scales of 1), by site.

    The function that `value_and_grad(loss_fn, precision=fp8("delayed"))` returns takes it as `amax=`, and returns what
    it is afterwards as `aux["amax"]`. Arguments are those of that function.

    >>> from fmeg import einsum, precision
    >>> loss = lambda p, x: (einsum("b d, d f -> b f", x, p["layers"]).sum(), 1)
    >>> h = amax_history(loss, precision.fp8("delayed", history=4), {"layers": torch.ones(8, 8)}, torch.ones(2, 8))
    >>> {site: tuple(x.shape) for site, x in h.items()}
    {'layers': (3, 4)}
    """
    program, _ = _loss_program(None, loss_fn, params, batch, rest)
    program, sites = mark(program, precision, _tensor_paths(params))
    return history_of(sites, program.inputs[len(program.inputs) - len(sites) :], precision.history, None)


def _row_type(x: Any, steps: int) -> Any:
    if not (isinstance(x, torch.Tensor) and x.ndim):
        return x
    return TensorType((x.shape[0] // steps, *x.shape[1:]), x.dtype)


def _split_rows(rec: Recorder, x: torch.Tensor, steps: int) -> Value:
    t = TensorType((steps, x.shape[0] // steps, *x.shape[1:]), x.dtype)
    return rec.emit(SplitRows(steps), (rec.value(x),), {}, (t,))[0]


def _emit(rec: Recorder, op: Any, args: Sequence[Value], types: Sequence[TensorType]) -> list[torch.Tensor]:
    values = rec.emit(op, tuple(args), {}, types)
    return [rec.bind(rec.fake_like(v.type), v) for v in values]
