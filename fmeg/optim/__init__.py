"""Optimizers as pairs of pure functions, in optax's contract.

    init(params) -> state          update(grads, state, params) -> (updates, state)

base           the contract, apply_updates, chain, identity, freeze
rules          one value a parameter: a function of (path, leaf), or a tree
masks          masked, partition, which weights decay
matrix         which dimensions of a parameter are a matrix
adamw sgd lion adafactor muon    one optimizer a file; newton_schulz is Muon's primitive
clip finite    clipping by global norm, skipping steps that are not finite
storage        bfloat16 parameters, with the rest of their bits beside them or rounded at random
schedules      learning rates and other numbers as functions of the step
"""

from fmeg.optim.adafactor import AdafactorState, adafactor
from fmeg.optim.adamw import AdamWState, adamw
from fmeg.optim.base import Optimizer, Rate, Schedule, apply_updates, chain, freeze, identity
from fmeg.optim.clip import clip_by_global_norm, global_norm
from fmeg.optim.finite import FiniteState, skip_nonfinite
from fmeg.optim.lion import LionState, lion
from fmeg.optim.masks import decay_by_axes, decay_matrices, masked, partition
from fmeg.optim.matrix import matrices
from fmeg.optim.muon import MuonState, muon, stacked_matrices
from fmeg.optim.newton_schulz import newton_schulz
from fmeg.optim.schedules import constant, cosine, inverse_sqrt, join, linear, with_warmup, wsd
from fmeg.optim.sgd import SGDState, sgd
from fmeg.optim.storage import RoundingState, SplitState, from_halves, split_master, stochastic_rounding, to_halves

__all__ = [
    "AdafactorState",
    "AdamWState",
    "FiniteState",
    "LionState",
    "MuonState",
    "Optimizer",
    "Rate",
    "RoundingState",
    "SGDState",
    "Schedule",
    "SplitState",
    "adafactor",
    "adamw",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "decay_by_axes",
    "decay_matrices",
    "freeze",
    "from_halves",
    "global_norm",
    "identity",
    "inverse_sqrt",
    "join",
    "linear",
    "lion",
    "masked",
    "matrices",
    "muon",
    "newton_schulz",
    "partition",
    "sgd",
    "skip_nonfinite",
    "split_master",
    "stacked_matrices",
    "stochastic_rounding",
    "to_halves",
    "with_warmup",
    "wsd",
]
