"""Delayed scaling: what a scale is made of was seen in earlier steps, and what is seen now is handed on.

A *site* is a product by its parameter. For each, three largest values are known from before: of its activation, its
parameter and its result's cotangent. They enter the loss's Program as one more input a site (a row a layer), and those
of this step leave it in that input's cotangent: `tap` puts both into the Program before it is differentiated, so that
scans carry them along like any parameter of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from fmeg.ops._common import row_names
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule, rule

ROLES = 3  # activation, parameter, cotangent


def _tap_vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, Tensor]:
    return cts[0], seen_p(args[1], args[2])


def _tap_rule(node: Node) -> Rule:
    y, amax, _ = node.args
    names = row_names(y.ndim)
    return rule(f"{names}, role -> {names}", [y.shape, amax.shape], whole=frozenset({"role"}), linear=frozenset({0}))


def _known_rule(node: Node) -> Rule:
    return Rule(((("role",),),), (((),) * node.args[2],), {"role": ROLES}, whole=frozenset({"role"}))


def _seen_rule(node: Node) -> Rule:
    values = node.operands()
    return Rule(tuple(((),) * v.ndim for v in values), ((("role",),),), {"role": ROLES}, whole=frozenset({"role"}))


tap_p = Primitive("tap", lambda y, amax, site: y, vjp=_tap_vjp, rule=_tap_rule, cheap=True)
seen_p = Primitive("seen", lambda amax, site: torch.zeros_like(amax), rule=lambda n: rule("r -> r", [n.args[0].shape]))
known_p = Primitive("known", lambda amax, role, ndim: amax[role].reshape((1,) * ndim), rule=_known_rule, cheap=True)
collect_p = Primitive("collect", lambda values: torch.stack([v.reshape(()) for v in values]), rule=_seen_rule)


def largest_known(history: Float[Tensor, "*rows roles steps"]) -> Float[Tensor, "*rows roles"]:
    """The largest finite value of the history. A step that saw NaN or infinity, and whose update was perhaps left out,
    says nothing of the next one's scales, which would be NaN as long as it is remembered, and so would what they see.

    >>> largest_known(torch.tensor([[torch.inf, 2.0, 3.0], [torch.nan, torch.nan, torch.nan]])).tolist()
    [3.0, 0.0]
    """
    return torch.where(history.isfinite(), history, 0.0).amax(-1)


def pushed(history: Float[Tensor, "*rows roles steps"], seen: Float[Tensor, "*rows roles"]) -> Tensor:
    """The history after a step in which `seen` was seen, newest first.

    >>> pushed(torch.tensor([[3.0, 2.0, 1.0]]), torch.tensor([4.0])).tolist()
    [[4.0, 3.0, 2.0]]
    """
    return torch.cat([seen.unsqueeze(-1), history[..., :-1]], -1)


def _slots_rule(node: Node) -> Rule:
    return rule(
        "m, d0 d1 -> m d0 d1" if node.args[1].ndim == 2 else "m, d0 -> m d0", [v.shape for v in node.operands()]
    )


def _slots(which: Tensor, seen: Tensor) -> Tensor:
    return torch.where(which.reshape(-1, *[1] * seen.ndim) > 0, seen, 0.0)


slots_p = Primitive("slots", _slots, rule=_slots_rule)


def by_microbatch(joint: Program, outputs: Sequence[int], steps: int) -> Program:
    """`joint` with one more input, f32[steps], a 1 at the microbatch that runs, and with what it saw (those outputs) in
    a slot of its own, so that the sum over microbatches keeps them apart and the largest can be taken afterwards."""
    which = Value(TensorType((steps,), torch.float32), name="microbatch")
    nodes, outs = list(joint.nodes), list(joint.outputs)
    for i in outputs:
        v = outs[i]
        node = Node(slots_p, (which, v), {}, source="", phase="B")
        node.outs = (Value(TensorType((steps, *v.shape), v.dtype), node),)
        nodes.append(node)
        outs[i] = node.outs[0]
    return Program((*joint.inputs, which), nodes, tuple(outs), joint.names, joint.name)


def history_of(
    sites: Sequence[str], inputs: Sequence[Value], steps: int, given: Mapping[str, Tensor] | None
) -> dict[str, Tensor]:
    """What is known of each site, f32[…, 3, steps]: as given, or nothing yet. ValueError for what does not fit."""
    shapes = {s: (*v.shape, steps) for s, v in zip(sites, inputs, strict=True)}
    if given is None:
        return {s: torch.zeros(shape, dtype=torch.float32) for s, shape in shapes.items()}
    found = {s: tuple(t.shape) for s, t in given.items()}
    if found != shapes:
        raise ValueError(
            f"precision: amax must have the entries {shapes}, given {found}; begin with fmeg.amax_history, and hand on "
            'aux["amax"]'
        )
    return {s: given[s] for s in sites}
