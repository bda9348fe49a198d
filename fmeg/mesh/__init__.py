"""Meshes: named axes over devices, virtual (one process) or real (`torch.distributed`), behind one protocol."""

from fmeg.mesh.backend import Backend
from fmeg.mesh.distributed import DistributedBackend, init_distributed
from fmeg.mesh.loop import LoopBackend
from fmeg.mesh.mesh import Mesh
from fmeg.mesh.single import SingleBackend
from fmeg.mesh.vmap import VmapBackend

__all__ = [
    "Backend",
    "DistributedBackend",
    "LoopBackend",
    "Mesh",
    "SingleBackend",
    "VmapBackend",
    "init_distributed",
]
