"""fmeg: Megatron as functions, on PyTorch.

Write a model as a pure function over a tree of parameters, say which dimension is which, give a layout, and `jit` runs
the training step on a mesh: differentiated first, partitioned after, equal to one device.
"""

from fmeg import ops, precision, random, tree
from fmeg.mesh import Mesh
from fmeg.ops import einsum
from fmeg.ops.remat import budget, min_cut, offload, recompute, region, remat, save_names
from fmeg.ops.scan import scan
from fmeg.ops.shard import name, shard
from fmeg.program.ir import TensorType
from fmeg.program.trace import trace
from fmeg.sharding.array import Array
from fmeg.sharding.spec import Layout, P
from fmeg.step import TrainState, amax_history, check_finite, jit, shard_map, value_and_grad

from fmeg import data, models, optim  # isort: skip  (these are written in the vocabulary above)

__version__ = "0.1.0"

__all__ = [
    "Array",
    "Layout",
    "Mesh",
    "P",
    "TensorType",
    "TrainState",
    "amax_history",
    "budget",
    "check_finite",
    "data",
    "einsum",
    "jit",
    "min_cut",
    "models",
    "name",
    "offload",
    "ops",
    "optim",
    "precision",
    "random",
    "recompute",
    "region",
    "remat",
    "save_names",
    "scan",
    "shard",
    "shard_map",
    "trace",
    "tree",
    "value_and_grad",
]
