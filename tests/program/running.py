"""Running Programs on one device, to compare what they mean with plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fmeg import Mesh, trace, tree
from fmeg.program.ir import Program, Value
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable
from fmeg.sharding.partition import Context, Partitioner
from fmeg.sharding.value import Placed, Placement

X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).sin()


def run(program: Program, values: Sequence[Tensor]) -> list:
    """The outputs of a Program on one device."""
    part = Partitioner(Context({}, {}, {}), program.name)
    inputs = [part.input(v, Placed(v.type, Placement.replicated(v.ndim))) for v in program.inputs]
    part.run(program.nodes)
    outputs = [
        part.get(part.placed(o), part.placed(o).home, "output") if isinstance(o, Value) else o for o in program.outputs
    ]
    return Executable(part.finish(inputs, outputs), Mesh(backend="loop").backend())(values)


def names(program: Program) -> list[str]:
    """Names of the operations, those of bodies after the node that runs them."""
    return [node.opname for node, _, _ in walk(program)]


def same(fn: Any, *args: Any) -> None:
    """`fn` traced and run equals `fn`, bit for bit."""
    copies = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
    program = trace(fn, *args).program
    got, want = run(program, tree.leaves(args)), tree.leaves(fn(*copies))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), program
