"""Primitives: operations that carry all their rules with them.

A `Primitive` called on ordinary tensors runs its `reference`, plain torch, so autograd, double backward, `torch.func`
transforms all work. Called while `trace` records, it becomes one node of the Program. Everything that a later pass asks
is a field: its gradient (`vjp`), sharding rule, cost and lowerings.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.program.ir import Node
from fmeg.program.recorder import active
from fmeg.program.rule import Rule


@dataclass(eq=False)
class Primitive:
    """An operation with rules.

    name        as printed
    reference   (*args, **kwargs) -> tensor or tuple of tensors; plain torch; the meaning
    vjp         (args, kwargs, outs, cts) -> one cotangent (or None) per *tensor operand*, in operand order; torch and
                primitives only; `cts` has None for results without a cotangent. None: autograd through `reference`
    rule        (node) -> Rule; None: an error when it is partitioned
    flops       (node) -> int
    lowerings   name -> callable with the reference's signature; "default" replaces the reference when a Program runs;
                "into", of a node, gives what writes its result into given memory, (memory, *operands, add), or None
    cheap       recomputing it in the backward pass costs little (pointwise operations, norms)
    fake        shape function on fake tensors; None: the reference
    keep        results are small, and kept for the backward pass even inside a remat region
    """

    name: str
    reference: Callable[..., Any]
    vjp: Callable[..., Any] | None = None
    rule: Callable[[Node], Rule] | None = None
    flops: Callable[[Node], int] | None = None
    lowerings: dict[str, Callable[..., Any]] = field(default_factory=dict)
    cheap: bool = False
    fake: Callable[..., Any] | None = None
    keep: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rec = active()
        if rec is None or torch._C._functorch.peek_interpreter_stack() is not None or _needs_grad(args, kwargs):
            return self.reference(*args, **kwargs)
        return rec.record(self, args, kwargs)

    def __repr__(self) -> str:
        return f"<primitive {self.name}>"

    def run(self) -> Callable[..., Any]:
        """What a Program executes for this primitive."""
        return self.lowerings.get("default", self.reference)


def _needs_grad(args: Any, kwargs: Any) -> bool:
    if not torch.is_grad_enabled():
        return False
    flat = [*args, *kwargs.values()]
    flat = [y for x in flat for y in (x if isinstance(x, (tuple, list)) else (x,))]
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in flat)
