"""Placements: where a value's dimensions live, and over which mesh axes it is still to be summed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fmeg.program.errors import ShardingError
from fmeg.program.ir import TensorType, Value, dtype_name

DimAxes = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Placement:
    """dims: mesh axes (major first) of each dimension; pending: axes over which the value is a partial sum.

    >>> p = Placement((("dp",), ()), frozenset({"tp"}))
    >>> p.local_shape((8, 4), {"dp": 2, "tp": 2})
    (4, 4)
    """

    dims: DimAxes
    pending: frozenset[str] = frozenset()

    @classmethod
    def replicated(cls, ndim: int) -> Placement:
        return cls(((),) * ndim)

    @property
    def used(self) -> set[str]:
        """Mesh axes on which the value differs between ranks."""
        return {a for d in self.dims for a in d} | self.pending

    def whole(self) -> Placement:
        """The same without pending sums."""
        return Placement(self.dims)

    def local_shape(self, shape: tuple[int, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
        out = []
        for n, axes in zip(shape, self.dims, strict=True):
            local = local_size(n, axes, sizes)
            if local is None:
                raise ShardingError(
                    f"a dimension of size {n} does not divide by {count(axes, sizes)}, the size of {axes}"
                )
            out.append(local)
        return tuple(out)

    def local_type(self, t: TensorType, sizes: Mapping[str, int]) -> TensorType:
        return TensorType(self.local_shape(t.shape, sizes), t.dtype)

    def describe(self, t: TensorType) -> str:
        """As in `f32[8@dp, 16]{P:tp}` (global sizes)."""
        dims = ", ".join(f"{n}@{'+'.join(a)}" if a else str(n) for n, a in zip(t.shape, self.dims, strict=True))
        tail = f"{{P:{','.join(sorted(self.pending))}}}" if self.pending else ""
        return f"{dtype_name(t.dtype)}[{dims}]{tail}"


def count(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    """Number of parts that a tuple of mesh axes makes."""
    n = 1
    for a in axes:
        n *= sizes[a]
    return n


class Sizes(dict[str, int]):
    """Sizes of mesh axes; `stored`: layers -> rows of stacks that a pipeline along `axis` stores unevenly, as `rows` on
    each rank."""

    def __init__(self, sizes: Mapping[str, int], axis: str = "", stored: Mapping[int, int] | None = None) -> None:
        super().__init__(sizes)
        self.axis, self.stored = axis, dict(stored or {})


def local_size(n: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> int | None:
    """Size of one part of a dimension; None if it does not divide.

    >>> local_size(8, ("dp",), {"dp": 2}), local_size(7, ("dp",), {"dp": 2})
    (4, None)
    >>> local_size(7, ("pp",), Sizes({"pp": 2}, "pp", {7: 4}))
    4
    """
    if isinstance(sizes, Sizes) and axes == (sizes.axis,) and n in sizes.stored:
        return sizes.stored[n]
    parts = count(axes, sizes)
    return None if n % parts else n // parts


@dataclass(eq=False)
class Placed:
    """A global value while it is partitioned: its home placement, and every placement in which a local value exists.

    in_use   for parameters: the placement in which they are used (the compute view); None otherwise
    use      `in_use` where parameters are in use: inside a differentiated function, or a program without one
    grads    for parameters: the placement of their gradient's sum between microbatches; None: whatever is pending stays
             so
    opt      for parameters: the placement that their gradient is reduced to
    weight   computed from parameters alone: activations move to it, not it to them
    blocks   rows of a batch are held as `blocks` microbatches, each sharded like the batch
    layers   its first dimension is the stack of layers
    reduced  its pending sum comes from a reduction that the program wrote (`x.sum(0)`), not from a contraction
    derived  an elementwise function (a cast) of a parameter at rest: its cotangent is reduced after that function's, in
             the
             parameter's own dtype
    guest    where it lies is where a primitive needed it whole (`Rule.prefer`), not where it belongs
    ragged   for rows sorted by expert: what routed them. Their number is known only as the program runs (see
             fmeg.sharding.ragged)
    make     for creation operations: builds the local value directly in a placement
    """

    type: TensorType
    home: Placement
    copies: dict[Placement, Value] = field(default_factory=dict)
    in_use: Placement | None = None
    use: Placement | None = None
    opt: Placement | None = None
    weight: bool = False
    make: Callable[[Placement], Value] | None = None
    name: str = ""
    blocks: int = 1
    layers: bool = False
    reduced: bool = False
    derived: bool = False
    guest: bool = False
    grads: Placement | None = None
    ragged: object = None
