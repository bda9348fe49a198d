"""The backward pass in two parts: I, what other stages wait for, and W, the gradients of weights, which nobody waits
for.

    I  everything that the cotangent which leaves depends on, and the gradients that cost little more (norms, biases)
    W  the rest; it repeats nothing of I: what it needs of I is handed over

Small gradients go to I because what they need is larger than they are: without that a stage would hold more after I
than before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fmeg.program.ir import Node, Program, Value
from fmeg.program.passes import ancestors, dce
from fmeg.program.primitive import Primitive
from fmeg.program.structured import Loop
from fmeg.sharding.buffers import Stack, Sum
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScanBackward

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
_HEAVY = {"einsum", "embedding_bwd", "scan_weights"}


@dataclass(eq=False)
class Halves:
    """I and W of one Program.

    first      inputs -> the outputs in `early`, in order, then what W needs of it
    second     inputs (all of the Program's), then what I hands over -> the outputs in `late`
    """

    first: Program
    second: Program
    early: tuple[int, ...]
    late: tuple[int, ...]


def halve(program: Program, waited: Sequence[int]) -> Halves:
    """Split a backward Program; `waited` are the indices of the outputs that others wait for.

    Invariant: no node is in both parts.
    """
    early = [ancestors(program, [program.outputs[i]]) for i in waited]
    mine = {id(n) for nodes in early for n in nodes}
    chosen = list(waited)
    for i, o in enumerate(program.outputs):
        if i in waited:
            continue
        own = [n for n in ancestors(program, [o]) if id(n) not in mine]
        if not any(_is_heavy(n) for n in own):
            chosen.append(i)
            mine.update(id(n) for n in own)
    chosen.sort()
    late = [i for i in range(len(program.outputs)) if i not in chosen]
    rest = dce(
        Program(
            program.inputs, [n for n in program.nodes if id(n) not in mine], tuple(program.outputs[i] for i in late)
        )
    )
    made = {id(o) for n in program.nodes if id(n) in mine for o in n.outs}
    used = {id(v): v for n in rest.nodes for v in n.operands() if id(v) in made}
    used.update({id(o): o for o in rest.outputs if isinstance(o, Value) and id(o) in made})
    handed = list(used.values())
    first = Program(
        program.inputs,
        [n for n in program.nodes if id(n) in mine],
        (*(program.outputs[i] for i in chosen), *handed),
        name=f"{program.name}.inputs",
    )
    second = Program((*program.inputs, *handed), rest.nodes, rest.outputs, name=f"{program.name}.weights")
    return Halves(first, second, tuple(chosen), tuple(late))


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

    def build(self, backend: Any) -> Callable[[Sequence[Any]], list[Any]]:
        b, op, halves = backend, self.scan, self.halves
        body = Executable(halves.first, b)
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

    def build(self, backend: Any) -> Callable[[Sequence[Any]], list[Any]]:
        b, op, halves = backend, self.scan, self.halves
        body = Executable(halves.second, b)
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
    """The same backward piece with its `LocalScanBackward` in two nodes."""
    nodes: list[Node] = []
    for n in program.nodes:
        if not isinstance(n.op, LocalScanBackward):
            nodes.append(n)
            continue
        halves = halve(n.op.body, range(n.op.n_carry))
        scan = replace(n.op)
        first = Node(ScanInputs(scan, halves), n.args, {}, source=n.source, phase="B", tags=n.tags)
        handle = Value(n.args[2].type, first, len(halves.early), name="handle")
        first.outs = (*(n.outs[i] for i in halves.early), handle)
        second = Node(ScanWeights(scan, halves), (handle,), {}, source=n.source, phase="B", tags=n.tags)
        second.outs = tuple(n.outs[i] for i in halves.late)
        nodes += [first, second]
    return Program(program.inputs, nodes, program.outputs, program.names, program.name)


def halve_stage(backward: Program, n_cts: int) -> Halves:
    """I and W of a stage's backward piece, whose first `n_cts` outputs are the cotangents that leave. The first stage,
    which none
    leaves, does in I what its layers' cotangents need all the same."""
    program = split_scan(backward)
    scan = next(n for n in program.nodes if isinstance(n.op, ScanInputs))
    through = scan.outs[: scan.op.scan.n_carry]
    if n_cts:
        return halve(program, range(n_cts))
    seen = Program(program.inputs, program.nodes, (*program.outputs, *through), name=program.name)
    n = len(program.outputs)
    halves = halve(seen, range(n, n + len(through)))
    early = tuple(i for i in halves.early if i < n)
    keep = [k for k, i in enumerate(halves.early) if i < n]
    outs = (*(halves.first.outputs[k] for k in keep), *halves.first.outputs[len(halves.early) :])
    return Halves(
        Program(halves.first.inputs, halves.first.nodes, outs, name=halves.first.name),
        halves.second,
        early,
        halves.late,
    )
