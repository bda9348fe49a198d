"""Attention with sinks: one more key a head, of a learned logit and of value 0, that takes up what no key deserves.

With (o, lse) of attention without it, the sink is merged in afterwards:

    lse' = log(exp(lse) + exp(sink)),   o' = o · exp(lse - lse')

and the backward pass of attention, given (o', lse'), is that of attention with the sink, so every kernel and every way
to share out the keys serves here too. The sink's own gradient is -Σ exp(sink - lse') · (o' · do).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fmeg.ops import attention_cp
from fmeg.ops._common import wide
from fmeg.ops._eager import Eager
from fmeg.ops.attention import attention_bwd_p, attention_p
from fmeg.ops.attention_math import Masking, scores, visible
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule

SinkGrads = tuple[Tensor, Tensor, Tensor, Tensor]


def _plain(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *masks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """By the definition: a softmax over the keys and the sink."""
    m = Masking(*(*masks, None, None, None)[:3], **options)
    x = scores(wide(q), wide(k), visible(q, k, m), m.scale)
    sink = wide(sinks).unflatten(0, (k.shape[2], -1))[None, :, :, None, None].expand(*x.shape[:-1], 1)
    x = torch.cat([x, sink.to(x.dtype)], dim=-1)
    lse = torch.logsumexp(x.detach(), dim=-1)
    o = torch.einsum("bkgst,btkf->bskgf", torch.softmax(x, dim=-1)[..., :-1], wide(v)).flatten(2, 3)
    return o.to(q.dtype), lse.permute(0, 3, 1, 2).flatten(2)


def _merge(o: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, wide(sinks).to(lse.dtype))
    return (wide(o) * torch.exp(lse - total).unsqueeze(-1)).to(o.dtype), total


def _sink_cotangent(sinks: Tensor, o: Tensor, lse: Tensor, do: Tensor) -> Tensor:
    delta = (wide(o) * wide(do)).sum(-1)
    return -(torch.exp(wide(sinks) - lse) * delta).sum((0, 1)).to(sinks.dtype)


def _kernel(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *masks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    o, lse = attention_p(q, k, v, *masks, **options)
    return _merge(o, lse, sinks)


def _reference_bwd(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, o: Tensor, lse: Tensor, do: Tensor, *masks: Any, **options: Any
) -> SinkGrads:
    return *attention_bwd_p(q, k, v, o, lse, do, *masks, **options), _sink_cotangent(sinks, o, lse, do)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, *masks = args
    if cts[1] is not None:
        raise NotImplementedError("attention: the log-sum-exp has no gradient; only the output does")
    grads = attention_sinks_bwd_p(q, k, v, sinks, *outs, cts[0], *masks, **kwargs)
    return *grads, *(None for m in masks if isinstance(m, Tensor))


def _fake(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *masks: Any, **options: Any) -> tuple[Tensor, Tensor]:
    assert attention_p.fake is not None
    return attention_p.fake(q, k, v, **options)


def _fake_bwd(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *rest: Any, **options: Any) -> SinkGrads:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), sinks.new_empty(sinks.shape)


def _local(
    info: Local, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, *masks: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    o, lse = attention_cp.forward(info, q, k, v, *masks, **options)
    return _merge(o, lse, sinks)


def _local_bwd(
    info: Local, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, o: Tensor, lse: Tensor, do: Tensor, *masks: Any,
    **options: Any,
) -> SinkGrads:  # fmt: skip
    grads = attention_cp.backward(info, q, k, v, o, lse, do, *masks, **options)
    return *grads, _sink_cotangent(sinks, o, lse, do)


_HEADS = (("h",),)


def _without_sinks(op: Primitive, node: Node) -> Rule:
    """The rule of attention, forward or backward, on the other operands."""
    assert op.rule is not None
    return op.rule(Node(op, (*node.args[:3], *node.args[4:]), node.kwargs))


def _rule(node: Node) -> Rule:
    plain = _without_sinks(attention_p, node)
    return replace(plain, ins=(*plain.ins[:3], _HEADS, *plain.ins[3:]), local=_local)


def _rule_bwd(node: Node) -> Rule:
    """The sinks' gradient is pending over the axes of b and of s."""
    plain = _without_sinks(attention_bwd_p, node)
    return replace(
        plain,
        ins=(*plain.ins[:3], _HEADS, *plain.ins[3:]),
        outs=(*plain.outs, _HEADS),
        linear=frozenset(i + 1 for i in plain.linear),
        local=_local_bwd,
    )


attention_sinks_p = Primitive(
    "attention_sinks",
    Eager(_plain, _vjp, _kernel, saves=(0, 1)),
    vjp=_vjp,
    rule=_rule,
    flops=attention_p.flops,
    fake=_fake,
)
attention_sinks_bwd_p = Primitive(
    "attention_sinks_bwd", _reference_bwd, rule=_rule_bwd, flops=attention_bwd_p.flops, fake=_fake_bwd
)
