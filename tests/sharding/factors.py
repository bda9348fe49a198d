"""What a rule says of its factors."""

from __future__ import annotations

from fmeg.program.rule import Rule


def contracted(rule: Rule) -> set[str]:
    """Factors of the operands that no result has."""
    ins, outs = ({f for dims in side for d in dims for f in d} for side in (rule.ins, rule.outs))
    return ins - outs
