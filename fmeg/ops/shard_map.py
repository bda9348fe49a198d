"""`shard_map` as an operation: local code with explicit collectives, inside a global Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fmeg.program.errors import ShardingError
from fmeg.program.gradient import differentiate
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.recorder import Recorder
from fmeg.program.trace import record_flat

DimAxes = tuple[tuple[str, ...], ...]


@dataclass(eq=False)
class ShardMap:
    """A local Program with the specs of its inputs and outputs: mesh axes of each dimension.

    An output that a mesh axis does not shard is the same on all ranks of it, or, if `out_pending` says so, their sum.
    """

    body: Program
    in_specs: tuple[DimAxes, ...]
    out_specs: tuple[DimAxes, ...]
    out_pending: tuple[frozenset[str], ...]
    axis_sizes: dict[str, int]
    name: str = "shard_map"

    def backward(self, rec: Recorder, node: Node, inputs: list, cts: list, wanted: list[bool]) -> list:
        """The transpose: a replicated result is the mean of its copies, so each copy takes its share of the cotangent;
        a replicated input is one value used by many ranks, so its cotangent is a pending sum."""
        wrt = [i for i, w in enumerate(wanted) if w]
        outs = [i for i, c in enumerate(cts) if c is not None]
        joint = differentiate(self.body, wrt, outs, self.axis_sizes)
        body = Program(
            joint.inputs,
            joint.nodes,
            joint.outputs[len(self.body.outputs) :],
            joint.names,
            f"{self.body.name}.backward",
        )
        shares = [cts[i] / self._copies(self.out_specs[i]) for i in outs]
        specs = (*self.in_specs, *(self.out_specs[i] for i in outs))
        unseen = [frozenset(set(self.axis_sizes) - {a for d in self.in_specs[i] for a in d}) for i in wrt]
        op = ShardMap(
            body, specs, tuple(self.in_specs[i] for i in wrt), tuple(unseen), self.axis_sizes, "shard_map_backward"
        )
        values = rec.emit(
            op, tuple(rec.value(t) for t in (*inputs, *shares)), {}, [TensorType.of(inputs[i]) for i in wrt]
        )
        grads: list[Any] = [None] * len(inputs)
        for i, v in zip(wrt, values, strict=True):
            grads[i] = rec.bind(rec.fake_like(v.type), v)
        return grads

    def _copies(self, spec: DimAxes) -> int:
        n = 1
        for a, size in self.axis_sizes.items():
            n *= 1 if any(a in d for d in spec) else size
        return n


def local_shape(shape: Sequence[int], spec: DimAxes, sizes: Mapping[str, int], what: str) -> tuple[int, ...]:
    """Shape of a rank's block. ShardingError where a dimension does not divide.

    >>> local_shape((8, 3), (("dp",), ()), {"dp": 4}, "x")
    (2, 3)
    """
    out = []
    for d, (n, axes) in enumerate(zip(shape, spec, strict=True)):
        parts = 1
        for a in axes:
            parts *= sizes[a]
        if n % parts:
            raise ShardingError(
                f"shard_map: {what} of shape {tuple(shape)} has dimension {d} of size {n}, which its spec puts on "
                f"{axes} of size {parts}, but {parts} does not evenly divide {n}. "
                "Change the spec or the mesh, or pad the dimension"
            )
        out.append(n // parts)
    return tuple(out)


def record_shard_map(
    rec: Recorder,
    fn: Any,
    tensors: Sequence[torch.Tensor],
    in_specs: Sequence[DimAxes],
    out_specs: Any,
    sizes: dict[str, int],
    name: str,
    shown: Sequence[str],
) -> list[torch.Tensor]:
    """Trace `fn` (flat tensors -> flat tensors) at local shapes and record one node; `out_specs` maps results to
    specs."""
    types = [
        TensorType(local_shape(t.shape, s, sizes, what), t.dtype)
        for t, s, what in zip(tensors, in_specs, shown, strict=True)
    ]
    inner, outs = record_flat(fn, types, parent=rec, name=name, mesh_sizes=sizes)
    captured = [t for t, _ in inner.captured]
    body = inner.program(outs)
    specs = out_specs(body.outputs)
    for i, (v, spec) in enumerate(zip(body.outputs, specs, strict=True)):
        if not isinstance(v, Value) or len(spec) != v.ndim:
            raise ShardingError(
                f"shard_map: out_specs[{i}] is {spec}, but result {i} of {name} is {v!r}; give one entry a dimension "
                "of each tensor returned"
            )
    full = (*in_specs, *(((),) * t.ndim for t in captured))
    op = ShardMap(body, full, tuple(specs), (frozenset(),) * len(specs), dict(sizes))
    result_types = []
    for v, spec in zip(body.outputs, specs, strict=True):
        shape = []
        for n, axes in zip(v.shape, spec, strict=True):
            for a in axes:
                n *= sizes[a]
            shape.append(n)
        result_types.append(TensorType(tuple(shape), v.dtype))
    values = rec.emit(op, tuple(rec.value(t) for t in (*tensors, *captured)), {}, result_types)
    return [rec.bind(rec.fake_like(v.type), v) for v in values]
