"""The gradient of a Program, node by node.

The program is replayed into a joint Program: forward nodes first (phase F), then, walking back, each node's cotangents
(phase B). A primitive gives its own `vjp`, an operation of another kind a method `backward`; an aten node goes through
torch's autograd; a scan becomes a ScanForward and a ScanBackward that share one joint body. Contributions to a value's
cotangent are added, latest use first, and the sum passes through a `MIRROR` node that remembers which value it is the
cotangent of: the partitioner places it there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.program.autocast import off
from fmeg.program.errors import TraceError
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.program.literal import constant
from fmeg.program.primitive import Primitive
from fmeg.program.recorder import Recorder, active
from fmeg.program.structured import Accumulate, Scan, ScanBackward, ScanForward, ScanPair


@dataclass(eq=False)
class _Mirror:
    """Identity on a cotangent; tag `primal` is the value (of the joint program) whose cotangent it is."""

    name: str = "mirror"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


MIRROR = _Mirror()
INHERITED = ("precision",)
"""Tags that the backward nodes of a node have too."""

_Contributions = dict[int, list[tuple[int, torch.Tensor]]]
"""By id of a value the contributions to its cotangent, each with the place of the node that made it."""


@dataclass(eq=False)
class _Step:
    """What the backward walk needs of a replayed node."""

    node: Node  # of the original program
    outs: list[torch.Tensor]  # fakes in the joint program
    inputs: list[torch.Tensor] = field(default_factory=list)
    leaves: list[torch.Tensor | None] = field(default_factory=list)  # autograd leaves, by operand
    graph_outs: list[torch.Tensor] = field(default_factory=list)
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    pair: ScanPair | None = None


def stops(node: Node) -> bool:
    """Whether a node's results have no gradient: `x.detach()`, and what was computed under `torch.no_grad()`."""
    return node.op is torch.ops.aten.detach.default or "no_grad" in node.tags


def active_values(program: Program, wrt: Sequence[int]) -> set[int]:
    """ids of the float values that depend on the inputs `wrt`."""
    on = {id(program.inputs[i]) for i in wrt if program.inputs[i].type.is_float}
    for node in program.nodes:
        if not stops(node) and any(id(v) in on for v in node.operands()):
            on.update(id(o) for o in node.outs if o.type.is_float)
    return on


@off()
def differentiate(
    program: Program,
    wrt: Sequence[int],
    outs: Sequence[int],
    mesh_sizes: dict[str, int] | None = None,
    uses: list[int] | None = None,
    order: Mapping[int, int] | None = None,
) -> Program:
    """The joint Program of `program` and its gradient.

    wrt    indices of the float inputs to differentiate by
    outs   indices of the float outputs that get a cotangent (a further input each, in this order)
    mesh_sizes  for local Programs: sizes of the mesh axes that its collectives name
    uses   a list to fill: then the contribution of each use of an input stays a gradient of its own, last use first,
           and
           `uses` says to which of `wrt` each belongs
    order  by id of each node its place among the uses of a value; default: where it stands
    Returns a Program with inputs (program.inputs…, cotangents…) and outputs (program.outputs…, gradients…); an input
    on which the outputs do not depend has a gradient of zeros.
    """
    rec = Recorder(active(), f"{program.name}.joint")
    rec.stopping = False
    rec.mesh_sizes = mesh_sizes if mesh_sizes is not None else rec.mesh_sizes
    on = active_values(program, wrt)
    with rec:
        env: dict[int, torch.Tensor] = {}
        names = program.names or [""] * len(program.inputs)
        for v, n in zip(program.inputs, names, strict=False):
            env[id(v)] = rec.new_input(v.type, n or v.name)
        for v in program.inputs[len(names) :]:
            env[id(v)] = rec.new_input(v.type, v.name)
        steps = [s for n in program.nodes if (s := _forward(rec, n, env, on)) is not None]
        cts: _Contributions = {}
        for i in outs:
            out = program.outputs[i]
            if not (isinstance(out, Value) and out.type.is_float):
                raise TraceError(
                    f"{program.name}: output {i} cannot be differentiated: it is {out!r}, expected a float tensor"
                )
            cts.setdefault(id(out), []).append((len(program.nodes), rec.new_input(out.type, f"ct{i}")))
        place = order or {id(n): i for i, n in enumerate(program.nodes)}
        for step in reversed(steps):
            _backward(rec, step, env, cts, on, place[id(step.node)])
        grads = []
        for k, i in enumerate(wrt):
            v = program.inputs[i]
            parts = _latest_first(cts.pop(id(v), []))
            groups = [[p] for p in parts] if uses is not None else [parts] if parts else []
            with rec.marking(source=f"gradient of {v.name}" if v.name else f"gradient of {program.name}"):
                got = [_total(rec, v, env, {id(v): g}) for g in groups] or [_zeros(rec, env[id(v)])]
            grads += got
            if uses is not None:
                uses += [k] * len(got)
        results = [env[id(o)] if isinstance(o, Value) else o for o in program.outputs]
    joint = rec.program([*results, *grads], [v.name for v in rec.inputs])
    joint.check()
    return joint


def _zeros(rec: Recorder, like: torch.Tensor) -> torch.Tensor:
    with rec.marking(phase="B"):
        return torch.zeros(like.shape, dtype=like.dtype)


def _latest_first(parts: list[tuple[int, torch.Tensor]]) -> list[tuple[int, torch.Tensor]]:
    return sorted(parts, key=lambda part: -part[0])


def _total(rec: Recorder, v: Value, env: dict, cts: _Contributions) -> torch.Tensor | None:
    """The accumulated cotangent of a value, mirrored; None if nothing contributed."""
    parts = [g for _, g in _latest_first(cts.pop(id(v), []))]
    if not parts:
        return None
    primal = rec.value(env[id(v)])
    with rec.marking(phase="B", primal=primal, accumulate=True):
        total = parts[0]
        for p in parts[1:]:
            total = total + p
    with rec.marking(phase="B", primal=primal):
        out = rec.emit(MIRROR, (rec.value(total),), {}, (TensorType.of(total),))[0]
    return rec.bind(rec.fake_like(out.type), out)


# -- forward ----------------------------------------------------------------------------------------------------------
def _forward(rec: Recorder, node: Node, env: dict, on: set[int]) -> _Step | None:
    def lookup(v: Value) -> torch.Tensor:
        return env[id(v)]

    tags = {k: v for k, v in node.tags.items() if k not in ("primal", "no_grad")}
    with rec.marking(phase="F", source=node.source, **tags):
        args, kwargs = map_values(lookup, node.args), map_values(lookup, node.kwargs)
        reached = any(id(v) in on for v in node.operands())
        if reached and "custom" in node.tags:
            raise TraceError(
                f"{rec.name}: the gradient of {node.tags['custom']}, a torch.autograd.Function, at {node.source} is "
                "not seen by tracing. Write it as a "
                "fmeg.program.primitive.Primitive with a vjp, or with detach(): x + (f(x) - x).detach() has the value "
                "of f and the gradient of x"
            )
        needs = reached and not stops(node)
        if isinstance(node.op, torch._ops.OpOverload):
            step = _aten_forward(rec, node, args, kwargs, on) if needs else None
            outs = step.outs if step else _listed(_kept(node, node.op(*args, **kwargs)))
        elif isinstance(node.op, Scan) and needs:
            step = _scan_forward(rec, node, args, on)
            outs = step.outs
        else:
            outs = _copy(rec, node, args, kwargs)
            step = _Step(node, outs, _tensors((args, kwargs)), args=args, kwargs=kwargs) if needs else None
    for v, t in zip(node.outs, outs, strict=True):
        env[id(v)] = t
    return step


def _listed(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def _kept(node: Node, out: Any) -> Any:
    results = node.tags.get("results")
    return out if results is None else tuple(out[i] for i in results)


def _copy(rec: Recorder, node: Node, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    vals = rec.emit(node.op, rec.to_values(args), rec.to_values(kwargs), [o.type for o in node.outs])
    return [rec.bind(rec.fake_like(v.type), v) for v in vals]


def _tensors(nested: Any) -> list[torch.Tensor]:
    if isinstance(nested, torch.Tensor):
        return [nested]
    if isinstance(nested, (tuple, list)):
        return [t for x in nested for t in _tensors(x)]
    if isinstance(nested, dict):
        return [t for x in nested.values() for t in _tensors(x)]
    return []


def _aten_forward(rec: Recorder, node: Node, args: tuple, kwargs: dict, on: set[int]) -> _Step:
    flat = _tensors((args, kwargs))
    leaves: list[torch.Tensor | None] = []
    for v, t in zip(node.operands(), flat, strict=True):
        if id(v) in on:
            with rec.pause():
                leaf = t.detach().requires_grad_(True)
            leaves.append(rec.alias(leaf, t))
        else:
            leaves.append(None)
    it = iter([leaf if leaf is not None else t for leaf, t in zip(leaves, flat, strict=True)])
    with torch.enable_grad():
        graph_outs = _listed(_kept(node, node.op(*_refill(args, it), **_refill(kwargs, it))))
    outs = []
    for o in graph_outs:
        with rec.pause():
            d = o.detach()
        outs.append(rec.alias(d, o))
    return _Step(node, outs, flat, leaves, graph_outs)


def _refill(nested: Any, it: Any) -> Any:
    if isinstance(nested, torch.Tensor):
        return next(it)
    if isinstance(nested, (tuple, list)):
        return type(nested)(_refill(x, it) for x in nested)
    if isinstance(nested, dict):
        return {k: _refill(v, it) for k, v in nested.items()}
    return nested


# -- backward ---------------------------------------------------------------------------------------------------------
def _backward(rec: Recorder, step: _Step, env: dict, cts: _Contributions, on: set[int], place: int) -> None:
    node = step.node
    source = f"bwd of {node.source}" if node.source else ""
    with rec.marking(source=source):
        out_cts = [_total(rec, o, env, cts) if id(o) in on else None for o in node.outs]
    if all(c is None for c in out_cts):
        return
    operands = node.operands()
    wanted = [id(v) in on for v in operands]
    inherited = {k: node.tags[k] for k in INHERITED if k in node.tags}
    with rec.marking(phase="B", source=source, **inherited):
        if step.pair is not None:
            grads = _scan_backward(rec, step, out_cts)
        elif step.leaves:
            grads = _aten_backward(step, out_cts)
        else:
            grads = _primitive_backward(rec, step, out_cts, wanted)
    for v, g, w in zip(operands, grads, wanted, strict=True):
        if w and g is not None:
            if tuple(g.shape) != v.shape:
                raise TraceError(
                    f"vjp of {node.opname}: a cotangent of shape {tuple(g.shape)} for an operand of shape {v.shape}"
                )
            if g.dtype != v.dtype:
                with rec.marking(phase="B", source=source):
                    g = g.to(v.dtype)
            cts.setdefault(id(v), []).append((place, g))
            _hint(rec, g, env[id(v)])


def _hint(rec: Recorder, g: torch.Tensor, primal: torch.Tensor) -> None:
    """Note on the node that makes a contribution which value it is a cotangent of."""
    producer = rec.value(g).node
    if producer is not None and producer.phase == "B" and producer.op is not MIRROR:
        hints = producer.tags.setdefault("hints", {})
        hints.setdefault(rec.value(g).index, rec.value(primal))


def _aten_backward(step: _Step, out_cts: list) -> list[torch.Tensor | None]:
    pairs = [(o, c) for o, c in zip(step.graph_outs, out_cts, strict=True) if c is not None and o.requires_grad]
    leaves = [leaf for leaf in step.leaves if leaf is not None]
    if not pairs:
        return [None] * len(step.leaves)
    got = iter(torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True))
    return [next(got) if leaf is not None else None for leaf in step.leaves]


def _primitive_backward(rec: Recorder, step: _Step, out_cts: list, wanted: list[bool]) -> list[torch.Tensor | None]:
    op = step.node.op
    if op is constant or op is MIRROR:
        return [out_cts[0]] * len(step.inputs)
    if hasattr(op, "backward"):
        return op.backward(rec, step.node, step.inputs, out_cts, wanted)
    if isinstance(op, Accumulate):
        raise TraceError(
            "value_and_grad inside a differentiated function is not supported; differentiate the inner loss with "
            "torch.func there"
        )
    assert isinstance(op, Primitive), f"no gradient for {step.node.opname}"
    if op.vjp is not None:
        outs = step.outs if len(step.outs) > 1 else step.outs[0]
        return list(op.vjp(step.args, step.kwargs, outs, tuple(out_cts)))
    return _reference_vjp(rec, op, step, out_cts, wanted)


def _reference_vjp(
    rec: Recorder, op: Primitive, step: _Step, out_cts: list, wanted: list[bool]
) -> list[torch.Tensor | None]:
    """Autograd through the reference, recorded as aten nodes."""
    leaves = []
    for t, w in zip(step.inputs, wanted, strict=True):
        with rec.pause():
            leaf = t.detach().requires_grad_(w)
        leaves.append(rec.alias(leaf, t))
    it = iter(leaves)
    with torch.enable_grad():
        outs = _listed(op.reference(*_refill(step.args, it), **_refill(step.kwargs, it)))
    pairs = [(o, c) for o, c in zip(outs, out_cts, strict=True) if c is not None and o.requires_grad]
    targets = [leaf for leaf, w in zip(leaves, wanted, strict=True) if w]
    got = iter(torch.autograd.grad([o for o, _ in pairs], targets, [c for _, c in pairs], allow_unused=True))
    return [next(got) if w else None for w in wanted]


# -- scan -------------------------------------------------------------------------------------------------------------
def _scan_activity(scan: Scan, inputs_on: list[bool]) -> tuple[set[int], set[int]]:
    """Indices of the body's inputs, and ids of its values, that are active, to a fixpoint over the carry."""
    body = scan.body
    wrt = {i for i, o in enumerate(inputs_on) if o and body.inputs[i].type.is_float}
    while True:
        on = active_values(body, sorted(wrt))
        grown = wrt | {
            i for i in range(scan.n_carry) if isinstance(body.outputs[i], Value) and id(body.outputs[i]) in on
        }
        if grown == wrt:
            return wrt, on
        wrt = grown


def _scan_forward(rec: Recorder, node: Node, args: tuple, on: set[int]) -> _Step:
    scan: Scan = node.op
    wrt, body_on = _scan_activity(scan, [id(v) in on for v in node.operands()])
    n_c, n_x = scan.n_carry, scan.n_xs
    carries = tuple(i for i in range(n_c) if i in wrt)
    ys = tuple(i for i in range(scan.n_ys) if id(scan.body.outputs[n_c + i]) in body_on)
    joint = differentiate(scan.body, sorted(wrt), [*carries, *(n_c + i for i in ys)])
    xs = tuple(i - n_c for i in sorted(wrt) if n_c <= i < n_c + n_x)
    consts = tuple(i - n_c - n_x for i in sorted(wrt) if i >= n_c + n_x)
    pair = ScanPair(joint, scan, carries, ys, xs, consts)
    values = rec.emit(ScanForward(pair), rec.to_values(args), {}, [o.type for o in node.outs])
    outs = [rec.bind(rec.fake_like(v.type), v) for v in values]
    return _Step(node, outs, list(args), pair=pair)


def _scan_backward(rec: Recorder, step: _Step, out_cts: list) -> list[torch.Tensor | None]:
    pair, scan = step.pair, step.node.op
    assert pair is not None
    n_c, n_x = scan.n_carry, scan.n_xs

    def given(i: int) -> torch.Tensor:
        ct = out_cts[i]
        return ct if ct is not None else torch.zeros(step.outs[i].shape, dtype=step.outs[i].dtype)

    ct_carries = [given(i) for i in pair.carries]
    ct_ys = [given(n_c + i) for i in pair.ys]
    inputs = step.inputs
    carries, xs, consts = inputs[:n_c], inputs[n_c : n_c + n_x], inputs[n_c + n_x :]
    args = rec.to_values((ct_carries, ct_ys, list(carries), list(xs), list(consts)))
    active_inputs = [*pair.carries, *(n_c + i for i in pair.xs), *(n_c + n_x + i for i in pair.consts)]
    types = [TensorType.of(inputs[i]) for i in active_inputs]
    values = rec.emit(ScanBackward(pair), args, {}, types)
    grads: list[torch.Tensor | None] = [None] * len(inputs)
    for i, v in zip(active_inputs, values, strict=True):
        grads[i] = rec.bind(rec.fake_like(v.type), v)
    return grads
