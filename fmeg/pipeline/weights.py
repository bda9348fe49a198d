"""The backward pass in two parts: I, what other stages wait for, and W, the gradients of weights, which nobody waits
for.

    I  everything that the cotangent which leaves depends on, and the gradients that cost little more (norms, biases)
    W  the rest. What it needs of I is handed over, in the fewest bytes (`fmeg.pipeline.handover`); it does again of I
       only what costs little, where that saves bytes

Small gradients go to I because what they need is larger than they are. Where W's products would need more bytes than
the backward pass was given, those whose operands weigh most for what they cost are done in I as well, until they do
not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmeg.ops.collectives import Collective
from fmeg.pipeline.cut import Stage
from fmeg.pipeline.handover import Handover, bytes_of, handover
from fmeg.program.cost import node_flops
from fmeg.program.ir import Node, Program, Value
from fmeg.program.passes import ancestors, dce
from fmeg.program.primitive import Primitive
from fmeg.program.structured import Loop
from fmeg.sharding.buffers import Stack, Sum
from fmeg.sharding.coalesce import apart, together
from fmeg.sharding.execute import Executable, Mode
from fmeg.sharding.local import LocalScanBackward

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
_HEAVY = {"einsum", "grouped_matmul", "grouped_matmul_dw", "embedding_bwd", "scan_weights"}
_HEAVY |= {"scaled_einsum", "scaled_grouped", "scaled_grouped_dw"}

PART = 0.7  # of all that a backward pass uses of its forward pass may be held between I and W


@dataclass(eq=False)
class Halves:
    """I and W of one Program.

    first      inputs -> the outputs in `early`, in order, then what W needs of it
    second     inputs (all of the Program's), then what I hands over -> the outputs in `late`
    before     bytes that the backward pass is given, without what weighs nothing
    after      bytes that are held between I and W
    limit      bytes that were allowed for that
    """

    first: Program
    second: Program
    early: tuple[int, ...]
    late: tuple[int, ...]
    before: int = 0
    after: int = 0
    limit: int = 0


def halve(
    program: Program, waited: Sequence[int], free: Collection[int], given: Sequence[Value], room: int = 0
) -> Halves:
    """Split a backward Program.

    waited  indices of the outputs that others wait for
    free    ids of the inputs that weigh nothing: parameters and the batch
    given   the inputs that the forward pass kept for it; those left are cotangents
    room    bytes that may be held after I beyond the limit: the larger of what was given, and `PART` of what would have
            been given if nothing was done again

    Invariant: what both parts do is cheap.
    """
    program = apart(program)
    mine = {id(n) for i in waited for n in ancestors(program, [program.outputs[i]])}
    chosen = set(waited)
    own: dict[int, list[Node]] = {}  # of each output that W could make: the nodes that I does not need
    for i, o in enumerate(program.outputs):
        if i not in chosen:
            own[i] = [n for n in ancestors(program, [o]) if id(n) not in mine]
            if not any(map(_is_heavy, own[i])):
                chosen.add(i)
                mine.update(id(n) for n in own.pop(i))
    before = bytes_of(program, given)
    limit = max(before, int(PART * bytes_of(program, _forward(program, free, given))))

    def cut(*moved: int) -> Handover:
        done = mine | {id(n) for i in moved for n in own[i]}
        return handover(program, done, _products([own[i] for i in own if i not in moved], done), free)

    left = cut()
    if left.nbytes > limit + room:
        saves = {i: (left.nbytes - cut(i).nbytes) / (1 + sum(map(node_flops, own[i]))) for i in own}
        for i in sorted(saves, key=lambda i: -saves[i]):
            if i not in own or left.nbytes <= limit + room:
                continue
            mine.update(id(n) for n in own[i])
            for k in [k for k in own if not _products([own[k]], mine)]:  # several may share a product
                chosen.add(k)
                mine.update(id(n) for n in own.pop(k))
            left = cut()
    early = sorted(chosen)
    second = {id(n) for n in _products(own.values(), mine)} | left.again
    inputs = {id(v) for v in program.inputs}
    handed = [v for v in left.values if id(v) not in inputs]
    results = (*(program.outputs[i] for i in early), *handed)
    rest = Program(
        (*program.inputs, *handed),
        [n for n in program.nodes if id(n) in second],
        tuple(program.outputs[i] for i in own),
        name=f"{program.name}.weights",
    )
    return Halves(
        together(dce(Program(program.inputs, list(program.nodes), results, name=f"{program.name}.inputs"))),
        together(rest),
        tuple(early),
        tuple(own),
        before,
        left.nbytes,
        limit,
    )


def _products(own: Iterable[list[Node]], done: Collection[int]) -> list[Node]:
    """Of nodes that lead to gradients, those that are left: products and what follows from them."""
    found: dict[int, Node] = {}
    made: set[int] = set()
    for nodes in own:
        for n in nodes:
            if id(n) not in done and (_is_heavy(n) or any(id(v) in made for v in n.operands())):
                found[id(n)] = n
                made.update(id(o) for o in n.outs)
    return list(found.values())


def _forward(program: Program, free: Collection[int], given: Sequence[Value]) -> list[Value]:
    """What the backward pass uses of the forward one, whether it was given or is made again; but not what follows from
    parameters and the batch alone, and of what is gathered the part that a rank has."""
    again = {id(v) for v in given}
    nothing = set(free)
    for n in program.nodes:
        if all(id(v) in nothing for v in n.operands()):
            nothing.update(id(o) for o in n.outs)
        elif n.tags.get("again") and not isinstance(n.op, Collective):
            again.update(id(o) for o in n.outs)
    used = [v for n in program.nodes if not n.tags.get("again") or isinstance(n.op, Collective) for v in n.operands()]
    return list({id(v): v for v in used if id(v) in again}.values())


def _is_heavy(n: Node) -> bool:
    return n.op in _PRODUCTS or (isinstance(n.op, Primitive | ScanWeights) and n.op.name in _HEAVY)


@dataclass(eq=False)
class ScanInputs:
    """The I part of a `LocalScanBackward`: args as it has; results: its `early` outputs, and a handle for
    `ScanWeights`."""

    scan: LocalScanBackward
    halves: Halves
    name: str = "scan_inputs"

    def loop(self) -> Loop:
        return Loop(self.halves.first, self.scan.length, "scan body backward", self.scan.n_carry)

    def build(self, backend: Any, mode: Mode) -> Callable[[Sequence[Any]], list[Any]]:
        b, op, halves = backend, self.scan, self.halves
        body = Executable(halves.first, b, mode=mode)
        keep = used_inputs(halves.second, len(halves.first.inputs))
        n_c, early = op.n_carry, halves.early

        def run(args: Sequence[Any]) -> list[Any]:
            ct_carries, ct_ys, handle, xs, consts = args
            cts = list(ct_carries)
            y_slices = [b.call(torch.unbind, (y,)) for y in ct_ys]
            x_slices = [b.call(torch.unbind, (x,)) for x in xs]
            collected: dict[int, Any] = {
                i: Stack(b, op.length) if i < n_c + op.n_ct_xs else Sum(b) for i in early if i >= n_c
            }
            kept: list[tuple[list[Any], list[Any]]] = []
            for i in reversed(range(op.length)):
                inputs = [*cts, *(y[i] for y in y_slices), *handle.pop(), *(x[i] for x in x_slices), *consts]
                held = [inputs[k] for k in keep]
                got = body.run(inputs)
                cts = got[:n_c]
                for k, value in zip(early[n_c:], got[n_c : len(early)], strict=True):
                    collected[k].put(i, value) if isinstance(collected[k], Stack) else collected[k].add(value)
                kept.append((held, got[len(early) :]))
            return [*cts, *(collected[k].result() for k in early[n_c:]), kept]

        return run


@dataclass(eq=False)
class ScanWeights:
    """The W part: args (handle of `ScanInputs`,); results: the `late` outputs of the scan."""

    scan: LocalScanBackward
    halves: Halves
    name: str = "scan_weights"

    def loop(self) -> Loop:
        return Loop(self.halves.second, self.scan.length, "scan body backward")

    def build(self, backend: Any, mode: Mode) -> Callable[[Sequence[Any]], list[Any]]:
        b, op, halves = backend, self.scan, self.halves
        body = Executable(halves.second, b, mode=mode)
        n_in = len(halves.first.inputs)
        keep, stacked = used_inputs(halves.second, n_in), op.n_carry + op.n_ct_xs

        def run(args: Sequence[Any]) -> list[Any]:
            (kept,) = args
            collected: list[Any] = [Stack(b, op.length) if k < stacked else Sum(b) for k in halves.late]
            kept.reverse()
            for i in reversed(range(op.length)):
                held, handed = kept.pop()
                inputs: list[Any] = [None] * n_in
                for k, value in zip(keep, held, strict=True):
                    inputs[k] = value
                for c, value in zip(collected, body.run([*inputs, *handed]), strict=True):
                    c.put(i, value) if isinstance(c, Stack) else c.add(value)
            return [c.result() for c in collected]

        return run


def used_inputs(program: Program, n: int) -> tuple[int, ...]:
    """Which of the first n inputs a Program uses."""
    used = {id(v) for node in program.nodes for v in node.operands()} | {id(o) for o in program.outputs}
    return tuple(i for i, v in enumerate(program.inputs[:n]) if id(v) in used)


def split_scan(program: Program) -> Program:
    """The same backward piece with each `LocalScanBackward` over its layers in two nodes."""
    nodes: list[Node] = []
    for n in program.nodes:
        if not isinstance(n.op, LocalScanBackward) or "layers" not in n.tags:
            nodes.append(n)
            continue
        body, loop = n.op.body, n.op.loop()
        start, past = loop.residuals
        free = {id(v) for v in body.inputs[past:]}
        halves = halve(body, range(n.op.n_carry), free, body.inputs[start:past])
        scan = replace(n.op)
        first = Node(ScanInputs(scan, halves), n.args, {}, source=n.source, phase="B", tags=n.tags)
        handle = Value(n.args[2].type, first, len(halves.early), name="handle")
        first.outs = (*(n.outs[i] for i in halves.early), handle)
        second = Node(ScanWeights(scan, halves), (handle,), {}, source=n.source, phase="B", tags=n.tags)
        second.outs = tuple(n.outs[i] for i in halves.late)
        nodes += [first, second]
    return Program(program.inputs, nodes, program.outputs, program.names, program.name)


def halve_stage(stage: Stage, n_given: int) -> Halves:
    """I and W of a stage's backward piece. The first stage, which no cotangent leaves, does in I what its layers'
    cotangents need all the same. The limit on bytes is one for the stage and all its layers.

    n_given  how many of the piece's inputs are those of the body (parameters, the batch), which weigh nothing
    """
    program = split_scan(stage.backward)
    scans = [n for n in program.nodes if isinstance(n.op, ScanInputs)]
    through = [o for n in scans for o in n.outs[: n.op.scan.n_carry]]
    n_cts, n_in = stage.n_cts, len(stage.arriving["B"])
    free = {id(v) for v in program.inputs[:n_given]}
    given = program.inputs[n_given : len(program.inputs) - n_in]
    room = sum(max(0, n.op.scan.length * (n.op.halves.limit - n.op.halves.after)) for n in scans)
    if n_cts:
        return halve(program, range(n_cts), free, given, room)
    seen = Program(program.inputs, program.nodes, (*program.outputs, *through), name=program.name)
    n = len(program.outputs)
    halves = halve(seen, range(n, n + len(through)), free, given, room)
    early = tuple(i for i in halves.early if i < n)
    keep = [k for k, i in enumerate(halves.early) if i < n]
    outs = (*(halves.first.outputs[k] for k in keep), *halves.first.outputs[len(halves.early) :])
    first = Program(halves.first.inputs, halves.first.nodes, outs, name=halves.first.name)
    return replace(halves, first=first, early=early)
