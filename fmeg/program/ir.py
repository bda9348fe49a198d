"""The Program: a typed, ordered list of nodes over tensors.

A `Program` is what tracing yields and what every later pass consumes. It holds values (`Value`), each with a type
(`TensorType`) and one producing `Node` (or none, for inputs). Node arguments are nested tuples, lists and dicts in
which tensors appear as `Value`s and everything else as plain Python data.

Invariants (checked by `Program.check`): every value is defined before it is used; inputs are distinct; no node mutates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_SHORT = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
}


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype, as in `bf16`.

    >>> dtype_name(torch.bfloat16)
    'bf16'
    """
    return _SHORT.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a tensor.

    >>> TensorType((2, 3), torch.float32)
    f32[2, 3]
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorType:
        return cls(tuple(int(s) for s in tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_float(self) -> bool:
        """Whether it can have a gradient: a real or complex float."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def __repr__(self) -> str:
        return f"{dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass(eq=False)
class Value:
    """A tensor in a Program; compared by identity. `placement` is filled in local Programs, for printing."""

    type: TensorType
    node: Node | None = None
    index: int = 0
    name: str = ""
    placement: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.type.dtype

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    def __repr__(self) -> str:
        return f"Value({self.name or hex(id(self))}: {self.type})"


@dataclass(eq=False)
class Node:
    """One operation: `outs = op(*args, **kwargs)`.

    `op` is an aten `OpOverload`, a `Primitive`, or a structured operation (`Scan`, `Grad`, …). `source` is the
    user's line. `phase` is "F" or "B" in a joint Program; `tags` holds small facts by name (remat region, reason, …).
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[Value, ...] = ()
    source: str = ""
    phase: str = "F"
    tags: dict[str, Any] = field(default_factory=dict)

    def operands(self) -> list[Value]:
        """The tensor operands in order of appearance in `args`, then `kwargs`."""
        return list(values_in((self.args, self.kwargs)))

    @property
    def opname(self) -> str:
        return op_name(self.op)


def op_name(op: Any) -> str:
    """Printable name of an operation: `aten.add.Tensor`, `rms_norm`, `scan`."""
    name = getattr(op, "name", None)
    if isinstance(op, torch._ops.OpOverload):
        return str(op)
    if isinstance(name, str):
        return name
    return getattr(op, "__name__", repr(op))


def values_in(tree: Any) -> Iterator[Value]:
    """Yield the Values in nested args, in order."""
    if isinstance(tree, Value):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for t in tree:
            yield from values_in(t)
    elif isinstance(tree, dict):
        for t in tree.values():
            yield from values_in(t)


def map_values(fn: Callable[[Value], Any], tree: Any) -> Any:
    """Replace each Value in nested args by `fn(value)`."""
    if isinstance(tree, Value):
        return fn(tree)
    if isinstance(tree, tuple):
        return tuple(map_values(fn, t) for t in tree)
    if isinstance(tree, list):
        return [map_values(fn, t) for t in tree]
    if isinstance(tree, dict):
        return {k: map_values(fn, t) for k, t in tree.items()}
    return tree


@dataclass(eq=False)
class Program:
    """A traced function on flat tensors.

    `inputs` are distinct placeholders, `outputs` are Values (or None where a structured output is absent, or plain
    Python constants). `names` are the inputs' tree paths.
    """

    inputs: tuple[Value, ...]
    nodes: list[Node]
    outputs: tuple[Any, ...]
    names: tuple[str, ...] = ()
    name: str = "program"

    def check(self) -> None:
        """Raise AssertionError unless the invariants in the module docstring hold."""
        seen = set(map(id, self.inputs))
        assert len(seen) == len(self.inputs), f"{self.name}: inputs are not distinct"
        for node in self.nodes:
            for v in node.operands():
                assert id(v) in seen, f"{self.name}: {node.opname} uses a value before it is defined"
            if isinstance(node.op, torch._ops.OpOverload):
                assert not node.op._schema.is_mutable, f"{self.name}: {node.opname} mutates its input"
            for v in node.outs:
                assert id(v) not in seen, f"{self.name}: {node.opname} defines a value twice"
                seen.add(id(v))
        for v in values_in(self.outputs):
            assert id(v) in seen, f"{self.name}: an output is not defined"

    def same_as(self, other: Program) -> bool:
        """Whether two Programs are one but for the identity of their values (see fmeg.program.compare)."""
        from fmeg.program.compare import compare

        return not compare(self, other, limit=1)

    def __str__(self) -> str:
        from fmeg.program.printing import format_program

        return format_program(self)

    def __repr__(self) -> str:
        from fmeg.program.printing import summary

        return summary(self)
