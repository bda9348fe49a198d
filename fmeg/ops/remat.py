"""`remat`: do not keep a function's intermediate values for the backward pass; compute them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fmeg.program import recorder


@dataclass(frozen=True)
class Policy:
    """Which values inside a remat region are kept.

    kind    "full": none; "dots": results of matrix products and attention; "names": those tagged by `fmeg.name`
    names   the tags, for kind "names"
    """

    kind: str
    names: frozenset[str] = frozenset()


def save_names(*names: str) -> Policy:
    """Keep only the values tagged `fmeg.name(x, tag)` with one of these tags.

    >>> save_names("attn_out").kind
    'names'
    """
    return Policy("names", frozenset(names))


_BY_NAME = {"full": Policy("full"), "dots": Policy("dots"), "none": Policy("none")}


def policy(p: str | Policy) -> Policy:
    """A policy by name: "full", "dots", "none" (keep as usual)."""
    if isinstance(p, Policy):
        return p
    if p not in _BY_NAME:
        raise ValueError(f"remat: unknown policy {p!r}; expected one of {', '.join(_BY_NAME)} or fmeg.save_names(...)")
    return _BY_NAME[p]


def remat(fn: Callable[..., Any], policy: str | Policy = "full") -> Callable[..., Any]:
    """`fn` with the same results and gradients, whose inner values are recomputed in the backward pass.

    Of a scan inside, the carry of each step is kept. Eager, every policy but "none" keeps the arguments alone.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> remat(lambda t: (t * t).sin())(x).sum().backward()
    >>> torch.allclose(x.grad, 2 * torch.cos(torch.ones(3)))
    True
    """
    chosen = globals()["policy"](policy)

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if chosen.kind == "none":
            return fn(*args, **kwargs)
        rec = recorder.active()
        if rec is not None:
            rec.counter += 1
            region = (rec.counter, chosen)
            with rec.marking(remat=rec.tags.get("remat", region)):
                return fn(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped
