"""Structured operations: nodes that carry Programs.

Scan            carry, xs, consts -> carry, ys            the body once, run `length` times
ScanForward     the same, keeping per-step residuals for its ScanBackward
ScanBackward    cotangents -> cotangents, walking the steps back
Accumulate      consts, batch -> sums                     the body once a microbatch, every result summed in order
SplitRows       a batch as microbatches
Gradient        a parameter's gradient, complete: where its last reduction leads to the optimizer's placement
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fmeg.program.ir import Node, Program, Value


@dataclass(frozen=True)
class Loop:
    """How a structured operation runs its body; what printing, counting and explaining need to know.

    body        inputs as the operation says; outputs: carried, stacked, kept, summed, in this order
    times       how often it runs
    label       what a report calls the place: "scan body", "scan body backward", "microbatch", "shard_map"
    carried     outputs handed to the next run (the first inputs)
    stacked     outputs of which every run's is a result
    kept        residuals: outputs of which every run's is held until the backward loop has used it
    summed      outputs added over the runs
    residuals   indices (from, to) of the inputs that a forward loop kept
    pair        what a forward and a backward loop share when no value of the Program ties them
    host        those of `kept`, by number, that wait in the host's memory
    """

    body: Program
    times: int
    label: str
    carried: int = 0
    stacked: int = 0
    kept: int = 0
    summed: int = 0
    residuals: tuple[int, int] = (0, 0)
    pair: Any = None
    host: tuple[int, ...] = ()


def loop_of(node: Node) -> Loop | None:
    """How a structured node runs its body; None for every other node."""
    loop = getattr(node.op, "loop", None)
    return loop() if loop is not None else None


def walk(program: Program, times: int = 1, path: tuple[str, ...] = ()) -> Iterator[tuple[Node, int, tuple[str, ...]]]:
    """Every node, those of nested bodies after the node that runs them: (node, executions, labels of the bodies)."""
    for node in program.nodes:
        yield node, times, path
        if (loop := loop_of(node)) is not None:
            yield from walk(loop.body, times * loop.times, (*path, loop.label))


@dataclass(eq=False)
class Scan:
    """`body` inputs: carries, then one slice of each xs, then consts; outputs: carries, then one slice of each ys."""

    body: Program
    length: int
    n_carry: int
    n_xs: int
    name: str = "scan"

    @property
    def n_ys(self) -> int:
        return len(self.body.outputs) - self.n_carry

    def loop(self) -> Loop:
        return Loop(self.body, self.length, "scan body", self.n_carry, self.n_ys)


@dataclass(eq=False)
class ScanPair:
    """A scan and its gradient. `joint` inputs: those of the body, then cotangents of the active carries and ys;
    outputs: those of the body, then cotangents of the active carries, xs and consts (indices into each kind)."""

    joint: Program
    scan: Scan
    carries: tuple[int, ...]
    ys: tuple[int, ...]
    xs: tuple[int, ...]
    consts: tuple[int, ...]

    def phase(self, phase: str) -> list[Node]:
        """The nodes of the joint body that belong to one phase."""
        return [n for n in self.joint.nodes if n.phase == phase]

    def residuals(self) -> list[Value]:
        """What the backward phase uses of the forward one, all of it: which to redo is chosen after partitioning."""
        inside = {id(v) for v in self.joint.inputs[: self.scan.n_carry]}
        inside |= {id(o) for n in self.phase("F") for o in n.outs}
        used = (v for n in self.phase("B") for v in n.operands() if id(v) in inside)
        return list({id(v): v for v in used}.values())


@dataclass(eq=False)
class ScanForward:
    pair: ScanPair
    name: str = "scan_forward"

    def loop(self) -> Loop:
        joint, scan, kept = self.pair.joint, self.pair.scan, self.pair.residuals()
        n_in, n_out = len(scan.body.inputs), len(scan.body.outputs)
        body = Program(joint.inputs[:n_in], self.pair.phase("F"), (*joint.outputs[:n_out], *kept), name=joint.name)
        return Loop(body, scan.length, "scan body", scan.n_carry, scan.n_ys, len(kept), pair=self.pair)


@dataclass(eq=False)
class ScanBackward:
    """args: (ct_carries, ct_ys, carries0, xs, consts); results: ct_carries, ct_xs, ct_consts (active ones)."""

    pair: ScanPair
    name: str = "scan_backward"

    def loop(self) -> Loop:
        pair, joint, kept = self.pair, self.pair.joint, self.pair.residuals()
        n_in, n_out, n_cts = len(pair.scan.body.inputs), len(pair.scan.body.outputs), len(pair.carries) + len(pair.ys)
        inputs = (*joint.inputs[n_in:], *kept, *joint.inputs[pair.scan.n_carry : n_in])
        body = Program(inputs, pair.phase("B"), joint.outputs[n_out:], name=f"{joint.name}.backward")
        counts = (len(pair.carries), len(pair.xs), 0, len(pair.consts))
        return Loop(body, pair.scan.length, "scan body backward", *counts, (n_cts, n_cts + len(kept)), pair)


@dataclass(eq=False)
class Accumulate:
    """`body` inputs: consts and batch values as `batched` says; every output is summed over the microbatches.

    A batch value has a leading dimension of `steps * rows`; microbatch j holds rows j*rows … (j+1)*rows.
    """

    body: Program
    steps: int
    batched: tuple[bool, ...]
    owners: dict[int, int] = field(default_factory=dict)
    name: str = "accumulate"

    def loop(self) -> Loop:
        return Loop(self.body, self.steps, "microbatch", summed=len(self.body.outputs))


@dataclass(eq=False)
class SplitRows:
    """[B, …] -> [steps, B/steps, …]: the microbatches of a batch. The edge of `jit` places batches so that this is
    free."""

    steps: int
    name: str = "split_rows"

    def __call__(self, x: Any) -> Any:
        return x.reshape(self.steps, x.shape[0] // self.steps, *x.shape[1:])


@dataclass(eq=False)
class Gradient:
    """args: (gradient, parameter). The identity on the gradient; on a mesh it is brought to the parameter's `opt`
    placement."""

    name: str = "gradient"

    def __call__(self, gradient: Any, parameter: Any) -> Any:
        return gradient

    def backward(self, rec: Any, node: Node, inputs: list, cts: list, wanted: list[bool]) -> list:
        return [cts[0], None]


GRADIENT = Gradient()
