"""The passes in order."""

from __future__ import annotations

from fmeg.lower.added import add_products
from fmeg.lower.chunked_loss import chunked
from fmeg.lower.common import share
from fmeg.lower.experts import fuse_experts, join_casts
from fmeg.lower.hoist import hoist_casts
from fmeg.lower.late import delay
from fmeg.lower.norms import add_residual
from fmeg.lower.rewrite import everywhere
from fmeg.lower.split import split_products
from fmeg.lower.wide import widen
from fmeg.program.ir import Program

LOGITS = 2**30


def lower(program: Program) -> Program:
    """What runs where compiled code is asked for: the same results, fewer passes over memory, no full logits."""
    for step in (
        hoist_casts,
        delay,
        share,
        widen,
        split_products,
        fuse_experts,
        join_casts,
        add_residual,
        add_products,
        chunked(LOGITS),
    ):
        program = everywhere(step, program)
    return program
