"""The passes in order."""

from __future__ import annotations

from fmeg.lower.added import add_products
from fmeg.lower.behind import reduce_layers
from fmeg.lower.chunked_loss import chunked
from fmeg.lower.common import share
from fmeg.lower.experts import fuse_experts, join_casts
from fmeg.lower.hasten import hasten_gathers, hasten_reductions
from fmeg.lower.hoist import hoist_casts
from fmeg.lower.inline import inline
from fmeg.lower.late import delay
from fmeg.lower.lookups import exchange_lookups
from fmeg.lower.norms import add_residual, sum_cotangents
from fmeg.lower.quantised import quantise_once, quantise_stacks
from fmeg.lower.quantised_experts import (
    add_rows,
    quantise_matrices,
    quantise_turned,
    turn_ahead,
    turn_rows,
    widen_experts,
)
from fmeg.lower.rewrite import everywhere
from fmeg.lower.split import split_products
from fmeg.lower.wide import widen, widen_quantised
from fmeg.program.ir import Program

LOGITS, FUSED = 2**30, 2**24


def lower(program: Program, fused_fp8: bool = False) -> Program:
    """What runs where compiled code is asked for: the same results, fewer passes over memory, no full logits.

    `fused_fp8`: operands in FP8 are made by kernels of their own, in both orders at once, instead of by what the
    compiler fuses.
    """
    experts = (widen_experts, turn_rows, turn_ahead, quantise_turned, quantise_matrices, add_rows)
    quantised = (widen_quantised, quantise_stacks, quantise_once, *experts) if fused_fp8 else ()
    for step in (
        inline,
        reduce_layers,
        hoist_casts,
        delay,
        share,
        widen,
        split_products,
        fuse_experts,
        join_casts,
        *quantised,
        add_residual,
        add_products,
        sum_cotangents,
        chunked(LOGITS, FUSED),
        exchange_lookups,
        hasten_reductions,
        hasten_gathers,
    ):
        program = everywhere(step, program)
    return program
