"""Running Programs on one device: what they mean, to compare with plain torch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fmeg import Mesh
from fmeg.program.ir import Program, Value
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable
from fmeg.sharding.partition import Context, Partitioner
from fmeg.sharding.value import Placed, Placement


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
