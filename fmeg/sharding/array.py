"""`Array`: a global tensor that lives on a mesh, at the edge of `jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from fmeg.mesh import Mesh
from fmeg.mesh.blocks import global_shape
from fmeg.mesh.index import RankIndex
from fmeg.program.errors import ShardingError
from fmeg.program.ir import TensorType
from fmeg.sharding.spec import DimAxes, Entry
from fmeg.sharding.value import Placement

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SMALL = 64  # elements up to which repr shows values


@dataclass(frozen=True)
class Shard:
    """The block of an Array that a rank holds: `data` is `global_value()[index]`."""

    rank: int
    index: tuple[slice, ...]
    data: Tensor


class Array:
    """A global tensor in blocks: dimension d is cut over the mesh axes `spec[d]`, major first; over others, replicas.

    value       the backend's own representation of the blocks (see `fmeg.mesh.Backend`)
    spec        mesh axes of each dimension; () is whole
    order       where dimension 0 is stored in another order (layers by pipeline stage): the global index of each stored
                row,
                -1 for padding
    own         whether nothing else is known to refer to this memory: a step that is given it may write there. Not so
                once a tensor that shares it has been handed out, except as `value`

    An Array is a leaf of a pytree. It does no arithmetic: pass it to a jitted function, or take its `global_value`.

    >>> a = Array.from_global(torch.arange(4.0), Mesh(dp=2, tp=2), ("dp",))
    >>> a
    Array(f32[4@dp], mesh=Mesh(dp=2, tp=2), [0., 1., 2., 3.])
    >>> a.addressable_shards[3]
    Shard(rank=3, index=(slice(2, 4, None),), data=tensor([2., 3.]))
    """

    __slots__ = ("__weakref__", "_taker", "_value", "dtype", "mesh", "order", "own", "shape", "spec")

    def __init__(
        self,
        value: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        spec: Sequence[Entry],
        mesh: Mesh,
        order: tuple[int, ...] | None = None,
        own: bool = False,
    ) -> None:
        self._value = value
        self._taker = ""
        self.shape = tuple(shape)
        self.dtype = dtype
        self.spec = _normal(spec, len(self.shape))
        self.mesh = mesh
        self.order = order
        self.own = own

    @property
    def value(self) -> Any:
        if self._taker:
            raise ShardingError(
                f"this Array, {self.type}, was donated to {self._taker}: its memory is no longer its own. Use what "
                f"{self._taker} returned, or leave the argument out of donate="
            )
        return self._value

    def __copy__(self) -> Array:
        """Another Array of the same blocks: neither owns them."""
        self.own = False
        return Array(self.value, self.shape, self.dtype, self.spec, self.mesh, self.order)

    def give(self, taker: str) -> None:
        """Give up the blocks, so that their memory is free once `taker` is done with them; using them is an error."""
        self._value, self._taker = None, taker

    @classmethod
    def from_global(cls, tensor: Shaped[Tensor, "..."], mesh: Mesh, spec: Sequence[Entry] = ()) -> Array:
        """Place a global tensor. On a real mesh every process passes the same one and keeps its block.

        `spec` has one entry a dimension: a mesh axis, a tuple of them, or None; missing ones are None.
        Raises ShardingError for unknown or repeated axes and for dimensions that do not divide.
        """
        axes = _normal(spec, tensor.ndim)
        return cls(mesh.backend().scatter(tensor, axes), tensor.shape, tensor.dtype, axes, mesh)

    @classmethod
    def from_callback(
        cls,
        read: Callable[[tuple[slice, ...]], Tensor],
        shape: Sequence[int],
        mesh: Mesh,
        spec: Sequence[Entry] = (),
    ) -> Array:
        """Place a global tensor that is read block by block: `read(slices)` returns that block of it.

        Only blocks that this process holds are read, each once: the way to load what does not fit one device.

        >>> whole = torch.arange(8.0)
        >>> Array.from_callback(lambda where: whole[where], (8,), Mesh(dp=4), ("dp",)).addressable_shards[1].data
        tensor([2., 3.])
        """
        axes = _normal(spec, len(shape))
        backend = mesh.backend()
        value = backend.scatter(read, axes, shape)
        return cls(value, shape, backend.local(value)[0].dtype, axes, mesh)

    @classmethod
    def from_local(cls, local: Tensor | Sequence[Tensor], mesh: Mesh, spec: Sequence[Entry] = ()) -> Array:
        """Put local blocks together: on a real mesh this process's own tensor, on a virtual one a list of one a rank.

        Ranks that hold the same block are trusted to pass equal tensors.

        >>> Array.from_local([torch.tensor([0, 1]), torch.tensor([2, 3])], Mesh(dp=2), ("dp",)).shape
        (4,)
        """
        tensors = [local] if isinstance(local, Tensor) else list(local)
        axes = _normal(spec, tensors[0].ndim if tensors else 0)
        value = mesh.backend().from_local(tensors, axes)
        return cls(value, global_shape(mesh, tensors[0].shape, axes), tensors[0].dtype, axes, mesh)

    @classmethod
    def from_dtensor(cls, dtensor: DTensor, mesh: Mesh) -> Array:
        """The Array with a DTensor's local blocks. See `fmeg.sharding.dtensor`."""
        from fmeg.sharding.dtensor import from_dtensor

        return from_dtensor(dtensor, mesh)

    def to_dtensor(self) -> DTensor:
        """The DTensor with this Array's local blocks (no copy, no communication). Real meshes only."""
        from fmeg.sharding.dtensor import to_dtensor

        if self.order is not None:
            raise ShardingError(
                "Array.to_dtensor: its rows are stored by pipeline stage, which a DTensor cannot say; take "
                "global_value()"
            )
        self.own = False
        return to_dtensor(self)

    @property
    def type(self) -> TensorType:
        """Global shape and dtype."""
        return TensorType(self.shape, self.dtype)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.type.nbytes

    @property
    def addressable_shards(self) -> list[Shard]:
        """The block of each rank that this process runs; with an `order`, the index counts stored rows."""
        self.own = False
        backend, index = self.mesh.backend(), RankIndex(self.mesh)
        stored = self.shape if self.order is None else (len(self.order), *self.shape[1:])
        return [
            Shard(rank, index.block(rank, stored, self.spec), data)
            for rank, data in zip(backend.ranks, backend.local(self.value), strict=True)
        ]

    def global_value(self) -> Tensor:
        """The whole tensor. On a real mesh a collective that every process must join, unless nothing is cut."""
        stored = self.mesh.backend().gather(self.value, self.spec)
        if self.own and _same_memory(stored, self._value):
            self.own = False
        if self.order is None:
            return stored
        where = {row: i for i, row in enumerate(self.order)}
        return stored[torch.tensor([where[row] for row in range(self.shape[0])], device=stored.device)]

    def numpy(self) -> np.ndarray:
        """The whole tensor as a numpy array (on a real mesh: see `global_value`)."""
        return self.global_value().detach().cpu().numpy()

    def item(self) -> bool | int | float:
        """The value of an Array of one element."""
        if self.type.numel != 1:
            raise ShardingError(f"Array.item: expected one element, got {self.type}. Try .numpy() or .global_value()")
        return self.global_value().item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        out = self.numpy()
        return out if dtype is None else out.astype(dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d Array")
        return self.shape[0]

    def __repr__(self) -> str:
        head = f"Array({Placement(self.spec).describe(self.type)}, mesh={self.mesh}"
        if self._taker:
            return f"{head}, donated to {self._taker})"
        # Printing must not communicate: one process may print alone.
        if self.type.numel > SMALL or (len(self.mesh.backend().ranks) < self.mesh.size and any(self.spec)):
            return head + ")"
        whole = self.global_value().detach().cpu()
        if self.dtype.is_floating_point:  # numpy has no bfloat16
            whole = whole.double()
        values = np.array2string(whole.numpy(), separator=", ", precision=4)
        return f"{head}, {values})"


def _same_memory(x: Tensor, value: Any) -> bool:
    return isinstance(value, Tensor) and x.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def _normal(spec: Sequence[Entry], ndim: int) -> DimAxes:
    """One tuple of mesh axes a dimension."""
    if isinstance(spec, str) or len(spec) > ndim:
        raise ShardingError(
            f"Array: spec must be a sequence of at most {ndim} entries, one a dimension, got {spec!r}. Try ('dp', None)"
        )
    axes = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    return axes + ((),) * (ndim - len(axes))
