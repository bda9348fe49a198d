"""Partitioning of structured nodes: scans, their gradients, accumulation over microbatches, shard_map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from fmeg.ops.routing import Routed
from fmeg.ops.shard_map import ShardMap
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.structured import Accumulate, Gradient, Scan, ScanBackward, ScanForward, SplitRows
from fmeg.sharding.experts.handlers import partition_routed
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward
from fmeg.sharding.partition import Partitioner
from fmeg.sharding.residuals import rematerialise, split
from fmeg.sharding.value import Placed, Placement

HANDLE = TensorType((), torch.uint8)
SETTLE = (
    4  # rounds in which a carry may follow the body's placement; then it keeps what both agree on (carries that swap)
)


@dataclass
class _PairState:
    """A partitioned forward scan that waits for its backward one."""

    child: Partitioner
    inputs: list[Value]
    carries: list[Placement]
    outputs: list[Value]
    op: LocalScan
    handle: Value
    xs: list[Value]
    consts: list[Value]


def _common(a: Placement, b: Placement) -> Placement:
    """The axes on which two placements agree."""
    dims = []
    for x, y in zip(a.dims, b.dims, strict=True):
        n = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
        dims.append(x[:n])
    return Placement(tuple(dims))


def _stacked(p: Placement) -> Placement:
    return Placement(((), *p.dims), p.pending)


def _slice(part: Partitioner, p: Placed) -> tuple[Value, Placed]:
    """Outer local value of a scanned operand and the placement of its slice in the body."""
    home = Placement(((), *p.home.dims[1:]))
    local = part.get(p, home, "scanned layers must be whole" if p.home.dims[0] else "border")
    inner = Placed(TensorType(p.type.shape[1:], p.type.dtype), Placement(home.dims[1:]), weight=p.weight)
    if p.use is not None:
        inner.use = Placement(p.use.dims[1:])
    return local, inner


def _const(part: Partitioner, p: Placed) -> tuple[Value, Placed]:
    home = p.use if p.use is not None else p.home.whole()
    local = part.get(p, home, "parameter" if p.use is not None else "border")
    return local, Placed(p.type, home, weight=p.weight, use=home if p.use is not None else None)


def _scan_body(part: Partitioner, node: Node, scan: Scan, body: Program, forward: Sequence[Node]) -> _PairState:
    """Partition the forward nodes of a body to a fixpoint of the carry's placement."""
    operands = [part.placed(v) for v in node.operands()]
    n_c, n_x = scan.n_carry, scan.n_xs
    carries = [p.home.whole() for p in operands[:n_c]]
    slices = [_slice(part, p) for p in operands[n_c : n_c + n_x]]
    consts = [_const(part, p) for p in operands[n_c + n_x :]]
    for attempt in count():
        child = Partitioner(part.ctx, body.name)
        inputs = [child.input(v, Placed(v.type, home)) for v, home in zip(body.inputs, carries, strict=False)]
        rest = [_fresh(p) for _, p in (*slices, *consts)]
        inputs += [child.input(v, p) for v, p in zip(body.inputs[n_c : n_c + len(rest)], rest, strict=True)]
        child.run(forward)
        after = [child.placed(o).home.whole() for o in body.outputs[:n_c]]
        if attempt >= SETTLE:
            after = [_common(old, new) for old, new in zip(carries, after, strict=True)]
        if after == carries:
            break
        carries = after
    outs = [child.get(child.placed(o), home, "border") for o, home in zip(body.outputs[:n_c], carries, strict=True)]
    y_homes = [child.placed(o).home.whole() for o in body.outputs[n_c : n_c + scan.n_ys]]
    ys = [
        child.get(child.placed(o), home, "border")
        for o, home in zip(body.outputs[n_c : n_c + scan.n_ys], y_homes, strict=True)
    ]
    starts = [part.get(p, home, "border") for p, home in zip(operands, carries, strict=False)]
    op = LocalScan(Program((), [], (), name=body.name), scan.length, n_c, n_x, scan.n_ys)
    args = (*starts, *(v for v, _ in slices), *(v for v, _ in consts))
    types = [(o.type, home) for o, home in zip(node.outs, [*carries, *map(_stacked, y_homes)], strict=True)]
    locals_ = part.emit(op, args, {}, [*types, (HANDLE, Placement(()))])
    for o, (_, home), local in zip(node.outs, types, locals_, strict=False):
        part.define(o, home, local)
    xs, cs = [v for v, _ in slices], [v for v, _ in consts]
    return _PairState(child, inputs, carries, [*outs, *ys], op, locals_[-1], xs, cs)


def _fresh(p: Placed) -> Placed:
    return Placed(p.type, p.home, {}, p.in_use, p.use, p.opt, p.weight)


def scan(part: Partitioner, node: Node) -> None:
    """A scan without a gradient."""
    st = _scan_body(part, node, node.op, node.op.body, node.op.body.nodes)
    st.op.body = st.child.finish(st.inputs, st.outputs)


def scan_forward(part: Partitioner, node: Node) -> None:
    """The forward half; its body is completed when the backward half says what it needs."""
    pair = node.op.pair
    st = _scan_body(part, node, pair.scan, pair.joint, pair.phase("F"))
    st.op.body = st.child.finish(st.inputs, st.outputs)
    part.pairs[id(pair)] = st


def scan_backward(part: Partitioner, node: Node) -> None:
    """The backward half: cotangents of the carry in the carry's placement, parameter gradients pending."""
    pair = node.op.pair
    scan_op: Scan = pair.scan
    st: _PairState = part.pairs[id(pair)]
    child, joint = st.child, pair.joint
    n_c = scan_op.n_carry
    n_in, n_out = len(scan_op.body.inputs), n_c + scan_op.n_ys
    ct_carries, ct_ys = node.args[0], node.args[1]
    homes = [st.carries[i] for i in pair.carries] + [child.placed(joint.outputs[n_c + i]).home.whole() for i in pair.ys]
    outer_homes = [*homes[: len(ct_carries)], *map(_stacked, homes[len(ct_carries) :])]
    cts = [part.get(part.placed(v), home, "mirror") for v, home in zip((*ct_carries, *ct_ys), outer_homes, strict=True)]
    ct_inputs = [child.input(v, Placed(v.type, home)) for v, home in zip(joint.inputs[n_in:], homes, strict=True)]
    child.run([n for n in joint.nodes if n.phase == "B"])
    child.phase = "B"
    grads = joint.outputs[n_out:]
    out_homes = [st.carries[i] for i in pair.carries] + [child.placed(v).home for v in grads[len(pair.carries) :]]
    grad_locals = [child.get(child.placed(v), h, "mirror") for v, h in zip(grads, out_homes, strict=True)]
    whole = child.finish((*st.inputs, *ct_inputs), (*st.outputs, *grad_locals))
    forward, backward, n_res, host = split(whole, len(st.inputs), len(st.outputs), n_c)
    st.op.body, st.op.keeps, st.op.host = forward, True, host
    n_x = len(pair.xs)
    op = LocalScanBackward(backward, scan_op.length, len(pair.carries), len(pair.ys), n_res, scan_op.n_xs, n_x)
    k = len(ct_carries)
    args = (cts[:k], cts[k:], st.handle, st.xs, st.consts)
    placements = [*out_homes[:k], *map(_stacked, out_homes[k : k + n_x]), *out_homes[k + n_x :]]
    locals_ = part.emit(op, args, {}, [(o.type, p) for o, p in zip(node.outs, placements, strict=True)])
    for o, p, local in zip(node.outs, placements, locals_, strict=True):
        part.define(o, p, local)


def accumulate(part: Partitioner, node: Node) -> None:
    """The body once a microbatch; every result is a sum and may stay pending."""
    acc: Accumulate = node.op
    operands = [part.placed(v) for v in node.operands()]
    child = Partitioner(part.ctx, acc.body.name)
    inputs, args = [], []
    for v, p, batched in zip(acc.body.inputs, operands, acc.batched, strict=True):
        if batched:
            home = Placement(((), *p.home.dims[1:]))
            args.append(part.get(p, home, "microbatches must be whole" if p.home.dims[0] else "border"))
            inner = Placed(v.type, Placement(home.dims[1:]))
        else:
            home = p.home.whole()
            args.append(part.get(p, home, "border"))
            inner = Placed(p.type, home, {}, p.in_use, p.in_use, p.opt, p.in_use is not None)
        inputs.append(child.input(v, inner))
    child.run(acc.body.nodes)
    child.phase = "B"
    homes, outs = [], []
    for i, o in enumerate(acc.body.outputs):
        placed = child.placed(o)
        owner = operands[acc.owners[i]] if i in acc.owners else None
        home = placed.home if owner is None or owner.grads is None else sum_home(placed.home, owner.grads)
        homes.append(home)
        outs.append(child.get(placed, home, "gradient"))
    body = rematerialise(child.finish(inputs, outs, acc.body.names))
    op = LocalAccumulate(body, acc.steps, acc.batched)
    locals_ = part.emit(op, tuple(args), {}, [(o.type, h) for o, h in zip(node.outs, homes, strict=True)])
    for o, inner, home, local in zip(node.outs, acc.body.outputs, homes, locals_, strict=True):
        part.define(o, home, local, reduced=child.placed(inner).reduced)


def sum_home(home: Placement, grads: Placement) -> Placement:
    """Where a gradient is summed over microbatches: as `grads` says; what that does not shard stays pending."""
    return Placement(grads.dims, home.pending - {a for d in grads.dims for a in d})


def gradient(part: Partitioner, node: Node) -> None:
    """The last reduction of a gradient goes straight into the optimizer's placement."""
    g, p = part.placed(node.args[0]), part.placed(node.args[1])
    target = p.opt if p.opt is not None else p.home.whole()
    g.name = f"gradient of {p.name}"
    part.define(node.outs[0], target, part.get(g, target, "gradient"))


def split_rows(part: Partitioner, node: Node) -> None:
    """Free where the edge placed the batch in blocks; else the rows are brought together first."""
    p, out, steps = part.placed(node.args[0]), node.outs[0], node.op.steps
    if p.blocks == steps:
        home = Placement(((), *p.home.dims))
        part.define(out, home, next(iter(p.copies.values())))
        return
    home = Placement(((), *p.home.dims[1:]))
    local = part.get(p, home, "rows of a microbatch lie on several ranks")
    part.define(out, _stacked(home), part.emit(node.op, (local,), {}, [(out.type, _stacked(home))])[0])


def shard_map(part: Partitioner, node: Node) -> None:
    """The local body as it is, between the given specs."""
    op: ShardMap = node.op
    if dict(op.axis_sizes) != dict(part.ctx.all_sizes):
        raise ShardingError(
            f"shard_map at {node.source} was traced for a mesh of {op.axis_sizes}, but the program runs on "
            f"{dict(part.ctx.all_sizes)}"
        )

    def placement(spec: Any, pending: frozenset[str] = frozenset()) -> Placement:
        big = part.ctx.sizes
        return Placement(
            tuple(tuple(a for a in axes if a in big) for axes in spec), frozenset(a for a in pending if a in big)
        )

    child = Partitioner(replace(part.ctx, sizes={}, table={}, strict=False), op.body.name)  # local code is one device's
    for inner, v, spec in zip(op.body.inputs, node.operands(), op.in_specs, strict=True):
        child.define(inner, Placement.replicated(inner.ndim), part.get(part.placed(v), placement(spec), "shard_map"))
    child.run(op.body.nodes)
    outs = [child.get(child.placed(v), Placement.replicated(v.ndim), "border") for v in op.body.outputs]
    for n in child.nodes:
        n.phase, n.tags = part.phase, {**part.tags, **n.tags}
        for v in n.outs:
            v.placement = None
    part.nodes += child.nodes
    for o, local, spec, pending in zip(node.outs, outs, op.out_specs, op.out_pending, strict=True):
        part.define(o, placement(spec, pending), local)


HANDLERS = {
    Scan: scan,
    ScanForward: scan_forward,
    ScanBackward: scan_backward,
    Accumulate: accumulate,
    SplitRows: split_rows,
    Gradient: gradient,
    ShardMap: shard_map,
    Routed: partition_routed,
}
