"""Arrays to and from `torch.distributed.tensor.DTensor`: how checkpoints (DCP) and other libraries meet them.

A DTensor cuts a dimension over the axes of its DeviceMesh from left to right, an Array in the order that its spec says.
So the DeviceMesh of an Array has its dimensions in an order that suits the spec: the mesh's own whenever that does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fmeg.mesh import DistributedBackend, Mesh
from fmeg.program.errors import MeshError, ShardingError
from fmeg.sharding.array import Array
from fmeg.sharding.spec import DimAxes

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


def to_dtensor(array: Array) -> DTensor:
    """The DTensor with an Array's local blocks: no copy, no communication.

    Raises MeshError on a virtual mesh.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    backend = _distributed(array.mesh, "to_dtensor")
    order = axis_order(array.mesh.axes, array.spec)
    dims = {axis: d for d, axes in enumerate(array.spec) for axis in axes}
    placements = [Shard(dims[a]) if a in dims else Replicate() for a in order]
    stride = torch.empty(array.shape, device="meta").stride()
    return DTensor.from_local(
        backend.local(array.value)[0],
        backend.device_mesh(order),
        placements,
        run_check=False,
        shape=torch.Size(array.shape),
        stride=stride,
    )


def from_dtensor(dtensor: DTensor, mesh: Mesh) -> Array:
    """The Array with a DTensor's local blocks, on a Mesh of the same devices and axis names (in any order).

    Raises MeshError when the meshes do not match, ShardingError for pending sums, strided shards and dimensions that do
    not divide.
    """
    from torch.distributed.tensor import Replicate, Shard

    backend = _distributed(mesh, "from_dtensor")
    names = dtensor.device_mesh.mesh_dim_names
    if names is None or set(names) != set(mesh.axes):
        raise MeshError(f"from_dtensor: the DTensor's mesh has axes {names}, expected those of {mesh}")
    if not torch.equal(dtensor.device_mesh.mesh.cpu(), backend.rank_tensor(names)):
        raise MeshError(f"from_dtensor: the DTensor's mesh {dtensor.device_mesh} orders devices unlike {mesh}")
    spec: list[tuple[str, ...]] = [() for _ in dtensor.shape]
    for name, placement in zip(names, dtensor.placements, strict=True):
        if type(placement) is Shard:
            spec[placement.dim] += (name,)
        elif type(placement) is not Replicate:
            raise ShardingError(
                f"from_dtensor: placement {placement} on axis {name!r} is neither Shard nor Replicate. "
                f"Try dtensor.redistribute(placements={_plain(dtensor.placements)})"
            )
    for d, axes in enumerate(spec):
        if dtensor.shape[d] % mesh.axis_size(axes):
            raise ShardingError(
                f"from_dtensor: dimension {d} of shape {tuple(dtensor.shape)} is cut over {axes} into "
                f"{mesh.axis_size(axes)} unequal blocks. Redistribute the DTensor so that its dimensions divide"
            )
    return Array.from_local(dtensor.to_local().detach(), mesh, spec)


def axis_order(axes: tuple[str, ...], spec: DimAxes) -> tuple[str, ...]:
    """An order of the mesh axes in which every dimension's axes appear as its spec has them: mesh order if it suits.

    >>> axis_order(("dp", "cp", "tp"), (("tp", "dp"), ("cp",)))
    ('cp', 'tp', 'dp')
    """
    left, out = list(axes), []
    while left:
        # An axis is ready when no axis that must come before it is left.
        ready = next(a for a in left if not any(a in dim and set(dim[: dim.index(a)]) & set(left) for dim in spec))
        out.append(ready)
        left.remove(ready)
    return tuple(out)


def _plain(placements: tuple[Placement, ...]) -> list[str]:
    from torch.distributed.tensor import Replicate, Shard

    return [str(p if type(p) in (Shard, Replicate) else Replicate()) for p in placements]


def _distributed(mesh: Mesh, what: str) -> DistributedBackend:
    backend = mesh.backend()
    if not isinstance(backend, DistributedBackend):
        raise MeshError(
            f"{what}: {mesh} is virtual ({backend.name} backend), a DTensor needs one process a device. "
            "Launch with torchrun, or use Array.global_value()"
        )
    return backend
