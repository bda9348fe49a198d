"""Training steps: the loss and its gradient, the state, and the function that runs on a mesh."""

from fmeg.step.finite import check_finite
from fmeg.step.grad import amax_history, value_and_grad
from fmeg.step.jit import Jitted, jit
from fmeg.step.lowered import Lowered
from fmeg.step.shard_map import shard_map
from fmeg.step.state import Axes, TrainState

__all__ = [
    "Axes",
    "Jitted",
    "Lowered",
    "TrainState",
    "amax_history",
    "check_finite",
    "jit",
    "shard_map",
    "value_and_grad",
]
