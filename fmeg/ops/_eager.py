"""Eager operations that differentiate as a Program does: same gradient rule, same bits, same few saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmeg.ops._common import transformed


@dataclass(frozen=True)
class Eager:
    """A primitive's reference: plain torch whose first derivative is the primitive's own `vjp`.

    plain    (*args, **kwargs) -> tensor or tuple; plain torch. torch.func transforms, forward mode and higher
             derivatives go through it
    vjp      as in `Primitive`
    kernel   stands in for `plain` where nothing differentiates through it
    saves    the results, by index, that `vjp` reads; it gets None for the others, which need not be kept
    alone    (args, kwargs, cts, i) -> the cotangent of tensor i, where those of others may be unwanted and cost much
    """

    plain: Callable[..., Any]
    vjp: Callable[..., Any]
    kernel: Callable[..., Any] | None = None
    saves: tuple[int, ...] = ()
    alone: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if transformed():
            return self.plain(*args, **kwargs)
        if torch.is_grad_enabled():
            for x in args:
                if isinstance(x, Tensor) and x.requires_grad:
                    return _Function.apply(self, kwargs, *args)
        return (self.kernel or self.plain)(*args, **kwargs)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: Eager, kwargs: dict[str, Any], *args: Any) -> Any:
        result = (op.kernel or op.plain)(*args, **kwargs)
        outs = result if isinstance(result, tuple) else (result,)
        ctx.op, ctx.kwargs, ctx.n_outs = op, kwargs, len(outs)
        ctx.static = [None if isinstance(x, Tensor) else (x,) for x in args]
        ctx.save_for_backward(*[x for x in args if isinstance(x, Tensor)], *[outs[i] for i in op.saves])
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, *cts: Tensor | None) -> tuple[Tensor | None, ...]:
        op, static = ctx.op, ctx.static
        if all(ct is None for ct in cts):
            return (None,) * (2 + len(static))
        it = iter(ctx.saved_tensors)
        args = tuple([next(it) if s is None else s[0] for s in static])
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            grads = _again(op, args, ctx.kwargs, cts, needed)
        elif op.alone is not None:
            wanted = [n for n, s in zip(needed, static, strict=True) if s is None]
            grads = [op.alone(args, ctx.kwargs, cts, i) if w else None for i, w in enumerate(wanted)]
        else:
            outs: list[Tensor | None] = [None] * ctx.n_outs
            for i in op.saves:
                outs[i] = next(it)
            grads = op.vjp(args, ctx.kwargs, tuple(outs), cts)
        given = iter(grads)
        return None, None, *[next(given) if s is None else None for s in static]


def _again(op: Eager, args: tuple, kwargs: dict, cts: tuple, needed: tuple[bool, ...]) -> list[Tensor | None]:
    """Cotangents that are differentiable themselves: of the tensors in `args`, None where not needed."""
    args = tuple(x.view_as(x) if isinstance(x, Tensor) else x for x in args)  # one argument may depend on another
    result = op.plain(*args, **kwargs)
    pairs = [
        (o, c) for o, c in zip(result if isinstance(result, tuple) else (result,), cts, strict=True) if c is not None
    ]
    outs, given = zip(*pairs, strict=True)
    wanted = [x for x, n in zip(args, needed, strict=True) if n]
    found = iter(torch.autograd.grad(outs, wanted, given, create_graph=True, allow_unused=True))
    return [next(found) if n else None for x, n in zip(args, needed, strict=True) if isinstance(x, Tensor)]
