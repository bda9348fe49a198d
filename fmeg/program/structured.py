"""Structured operations: nodes that carry Programs.

Scan            carry, xs, consts -> carry, ys            the body once, run `length` times
ScanForward     the same, keeping per-step residuals for its ScanBackward
ScanBackward    cotangents -> cotangents, walking the steps back
Accumulate      consts, batch -> sums                     the body once a microbatch, every result summed in order
ShardMap        local code inside a global Program
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fmeg.program.ir import Program


@dataclass(eq=False)
class Scan:
    """`body` inputs: carries, then one slice of each xs, then consts; outputs: carries, then one slice of each ys."""

    body: Program
    length: int
    n_carry: int
    n_xs: int
    name: str = "scan"

    @property
    def n_consts(self) -> int:
        return len(self.body.inputs) - self.n_carry - self.n_xs

    @property
    def n_ys(self) -> int:
        return len(self.body.outputs) - self.n_carry


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


@dataclass(eq=False)
class ScanForward:
    pair: ScanPair
    name: str = "scan_forward"


@dataclass(eq=False)
class ScanBackward:
    """args: (ct_carries, ct_ys, carries0, xs, consts); results: ct_carries, ct_xs, ct_consts (active ones)."""

    pair: ScanPair
    name: str = "scan_backward"


@dataclass(eq=False)
class Accumulate:
    """`body` inputs: consts and batch values as `batched` says; every output is summed over the microbatches.

    A batch value has a leading dimension of `steps * rows`; microbatch j holds rows j*rows … (j+1)*rows.
    `grads` maps outputs that are gradients to the index of the input they belong to.
    """

    body: Program
    steps: int
    batched: tuple[bool, ...]
    grads: dict[int, int] = field(default_factory=dict)
    differentiated: bool = False
    name: str = "accumulate"


@dataclass(eq=False)
class ShardMap:
    """A local Program with the specs of its inputs and outputs (tuples of mesh axes a dimension)."""

    body: Program
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    axis_sizes: dict[str, int]
    name: str = "shard_map"


@dataclass(eq=False)
class SplitRows:
    """[B, …] -> [steps, B/steps, …]: the microbatches of a batch. The edge of `jit` places batches so that this is free."""

    steps: int
    name: str = "split_rows"

    def __call__(self, x: Any) -> Any:
        return x.reshape(self.steps, x.shape[0] // self.steps, *x.shape[1:])
