"""Structured operations of local Programs: what the executor loops over."""

from __future__ import annotations

from dataclasses import dataclass

from fmeg.program.ir import Program
from fmeg.program.structured import Loop


@dataclass(eq=False)
class LocalScan:
    """body: carries, xs slices, consts -> carries, ys slices, residuals. Node results: carries, stacked ys, and, where
    `keeps` is true, one handle that holds every step's residuals until the backward pass; those numbered in `host` wait
    in the host's memory."""

    body: Program
    length: int
    n_carry: int
    n_xs: int
    n_ys: int
    keeps: bool = False
    host: tuple[int, ...] = ()
    name: str = "scan"

    def loop(self) -> Loop:
        kept = len(self.body.outputs) - self.n_carry - self.n_ys
        return Loop(self.body, self.length, "scan body", self.n_carry, self.n_ys, kept, host=self.host)


@dataclass(eq=False)
class LocalScanBackward:
    """body: cotangents of carries, of ys slices, residuals, xs slices, consts -> cotangents of carries, xs slices,
    consts.
    Node args: (ct_carries, ct_ys, handle, xs, consts), and where it `adds`, for each stacked result None or a stack of
    its type that is given up: this step's slices are added to it, and it is the result. Steps run last to first; each
    step's residuals are dropped on use."""

    body: Program
    length: int
    n_carry: int
    n_ys: int
    n_residuals: int
    n_xs: int
    n_ct_xs: int
    adds: bool = False
    name: str = "scan_backward"

    def loop(self) -> Loop:
        first = self.n_carry + self.n_ys
        summed = len(self.body.outputs) - self.n_carry - self.n_ct_xs
        residuals = (first, first + self.n_residuals)
        return Loop(self.body, self.length, "scan body backward", self.n_carry, self.n_ct_xs, 0, summed, residuals)


@dataclass(eq=False)
class LocalAccumulate:
    """body: inputs as `batched` says, sliced along dimension 0 for each of `steps` microbatches; every result is
    summed."""

    body: Program
    steps: int
    batched: tuple[bool, ...]
    name: str = "accumulate"

    def loop(self) -> Loop:
        return Loop(self.body, self.steps, "microbatch", summed=len(self.body.outputs))
