"""What the rules share: arguments by name, dimensions by name, and local calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fmeg.program.ir import Node, Value, op_name, values_in
from fmeg.program.rule import Dims, Local, Rule

FLOATS = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128})


class Call:
    """A node's arguments by the names that its schema gives them, and where each stands among the operands."""

    def __init__(self, node: Node) -> None:
        self.op, self.node = node.op, node
        self.given = named(node.op, node.args, node.kwargs)
        self.values = {a.name: a.default_value for a in node.op._schema.arguments if a.has_default_value()} | self.given
        self.index: dict[str, tuple[int, ...]] = {}
        count = 0
        for name, arg in self.given.items():
            n = sum(1 for _ in values_in(arg))
            self.index[name] = tuple(range(count, count + n))
            count += n

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a tensor argument."""
        return self.values[name].shape

    def at(self, *names: str) -> frozenset[int]:
        """Positions among the operands of the tensors in the named arguments."""
        return frozenset(i for n in names for i in self.index.get(n, ()))

    def ins(self, /, **dims: Any) -> tuple[Dims, ...]:
        """Dims of every operand in order, from dims (or a list of dims, for a list of tensors) by argument name."""
        out: list[Dims] = []
        for name, positions in self.index.items():
            if positions:
                out.extend(dims[name] if isinstance(dims[name], list) else [dims[name]])
        return tuple(out)

    def kept(self, *dims: Dims) -> tuple[Dims, ...]:
        """Of all results' dims, those of the results that the node has (an operation may return None for some)."""
        which = self.node.tags.get("results", range(len(dims)))
        return tuple(dims[i] for i in which)


def named(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by schema name, in order of appearance."""
    return {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}


def local_call(op: Any, fn: Callable[[Local, dict[str, Any]], Any]) -> Callable[..., Any]:
    """A rule's `local` that gets its arguments by name: `fn(info, a)`; absent ones have the schema's default."""
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}

    def local(info: Local, *args: Any, **kwargs: Any) -> Any:
        return fn(info, defaults | named(op, args, kwargs))

    return local


def changed(op: Any, **new: Callable[[Local], Any]) -> Callable[..., Any]:
    """A rule's `local`: the same operation, with some arguments computed from the local sizes."""

    def local(info: Local, *args: Any, **kwargs: Any) -> Any:
        return op(**(named(op, args, kwargs) | {name: f(info) for name, f in new.items()}))

    return local


def dims_of(shape: Sequence[int], prefix: str = "d", start: int = 0) -> Dims:
    """One factor a dimension, none where the size is 1.

    >>> dims_of((2, 1, 3))
    (('d0',), (), ('d2',))
    """
    return tuple(() if n == 1 else (f"{prefix}{i + start}",) for i, n in enumerate(shape))


def aligned(shape: Sequence[int], out: Sequence[int], prefix: str = "d") -> Dims:
    """Dims of an operand that broadcasts to `out`, aligned on the right.

    >>> aligned((3, 1), (2, 3, 4))
    (('d1',), ())
    """
    return dims_of(shape, prefix, len(out) - len(shape))


def sizes_of(*pairs: tuple[Dims, Sequence[int]]) -> dict[str, int]:
    """Sizes of the factors that stand alone in a dimension."""
    sizes: dict[str, int] = {}
    for dims, shape in pairs:
        for d, n in zip(dims, shape, strict=True):
            if len(d) == 1 and sizes.setdefault(d[0], n) != n:
                raise ValueError(f"factor {d[0]} has sizes {sizes[d[0]]} and {n}")
    return sizes


def node_rule(node: Node, ins: tuple[Dims, ...], outs: tuple[Dims, ...], **kw: Any) -> Rule:
    """A Rule of single factors, sizes read off the node's shapes."""
    sizes = sizes_of(
        *zip(ins, (v.shape for v in node.operands()), strict=True),
        *zip(outs, (v.shape for v in node.outs), strict=True),
    )
    return Rule(ins, outs, sizes, **kw)


def factors(*dims: Dims) -> frozenset[str]:
    """All factors in some dims."""
    return frozenset(f for ds in dims for d in ds for f in d)


def local_shape(info: Local, dims: Dims) -> list[int]:
    """Sizes of a local block."""
    return [prod(info.size(f) for f in d) for d in dims]


def split(info: Local, names: Iterable[str]) -> list[str]:
    """Those factors that are sharded."""
    return [f for f in names if info.parts(f) > 1]


def axes_of(info: Local, names: Iterable[str]) -> tuple[str, ...]:
    """Mesh axes that shard any of the factors."""
    return tuple(a for f in names for a in info.axes(f))


def only(mask: Tensor, x: Tensor) -> Tensor:
    """`x` where the mask holds, zero (or False) elsewhere."""
    return torch.where(mask, x, False if x.dtype == torch.bool else 0)


def no_sum(value: Value, *dims: tuple[str, ...]) -> frozenset[str]:
    """The factors that must be whole for a value that cannot be a pending sum: of bools."""
    return factors(dims) if value.dtype == torch.bool else frozenset()


def given_results(node: Node, results: Sequence[Any]) -> tuple[Any, ...]:
    """Of all results of an operation, those that the node has (the others are None)."""
    return tuple(results[i] for i in node.tags.get("results", range(len(results))))


def once(info: Local, x: Any, names: Iterable[str]) -> Any:
    """`x` on the first shard of the factors, zero on the others, so that a pending sum counts it once."""
    for f in split(info, names):
        x = only(info.offset(f) == 0, x)
    return x


def in_shard(info: Local, index: Tensor, factor: str, size: int) -> tuple[Tensor, Tensor]:
    """Indices into a sharded dimension of global `size` as local ones, and which are local (the others become 0)."""
    index = torch.where(index < 0, index + size, index) - info.offset(factor)
    here = (index >= 0) & (index < info.size(factor))
    return torch.where(here, index, 0), here


_ZEROS = {"aten.zeros", "aten.zeros_like", "aten.new_zeros"}
_VALUE = {
    "aten.full": "fill_value",
    "aten.full_like": "fill_value",
    "aten.new_full": "fill_value",
    "aten.scalar_tensor": "s",
}
_KEEPS_ZERO = {
    "aten.expand",
    "aten.view",
    "aten._unsafe_view",
    "aten.clone",
    "aten._to_copy",
    "aten.unsqueeze",
    "aten.squeeze",
    "aten.permute",
}


def is_zero(value: Any) -> bool:
    """Whether an argument is 0, or a tensor made of zeros: adding those to a pending sum changes nothing."""
    if not isinstance(value, Value):
        return isinstance(value, (int, float)) and value == 0
    if value.node is None:
        return False
    name = op_name(value.node.op)
    packet = name.rpartition(".")[0]
    if packet in _VALUE:
        return is_zero(Call(value.node)[_VALUE[packet]])
    if packet in _KEEPS_ZERO:
        return is_zero(value.node.args[0])
    if name == "constant":
        return not bool(value.node.args[0].tensor.any())
    return packet in _ZEROS


def additive(call: Call, *names: str) -> dict[str, Any]:
    """`linear` and `joint` of a rule that adds the named arguments: all must be pending together, but for zeros."""
    terms = [
        (name, arg) for name in names for arg in (call[name] if isinstance(call[name], (list, tuple)) else [call[name]])
    ]
    if any(not isinstance(arg, Value) and not is_zero(arg) for _, arg in terms):
        return {}
    positions = [i for name in names for i in call.index.get(name, ())]
    tensors = [arg for _, arg in terms if isinstance(arg, Value)]
    linear = frozenset(i for i, arg in zip(positions, tensors, strict=True) if not is_zero(arg))
    return {"linear": linear, "joint": len(linear) > 1}
