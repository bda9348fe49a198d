"""`remat`: what of a function's intermediate values the backward pass keeps, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from fmeg.program import recorder


@dataclass(frozen=True)
class Policy:
    """Which values inside a remat region are kept, and where.

    kind       "full": none; "dots": results of matrix products and attention; "names": those tagged by `fmeg.name`;
               "none": as without remat; "min_cut", "budget": chosen by bytes and cost (see the functions of that name)
    names      tags of values that are kept whatever the kind
    regions    names of regions of which nothing is kept
    host       tags of kept values that wait in the host's memory; empty: of every kept value; None: of none
    limit      bytes that a layer may keep, for kind "budget"
    per_byte   what moving a byte to compute a value again counts, in bytes kept, for kind "min_cut"
    flops, bandwidth   rates of arithmetic and memory, a second, for kind "budget"
    """

    kind: str
    names: frozenset[str] = frozenset()
    regions: frozenset[str] = frozenset()
    host: frozenset[str] | None = None
    limit: int = 0
    per_byte: float = 0.0
    flops: float = 0.0
    bandwidth: float = 0.0

    def __str__(self) -> str:
        parts = [*sorted(self.names), *(f"again {r}" for r in sorted(self.regions))]
        parts += [f"{self.limit} bytes"] if self.kind == "budget" else []
        host = [] if self.host is None else [f"host {', '.join(sorted(self.host)) or 'all'}"]
        return f"{self.kind}({', '.join([*parts, *host])})" if parts or host else self.kind


FULL = Policy("full")
_BY_NAME = {p.kind: p for p in (FULL, Policy("dots"), Policy("none"), Policy("min_cut"))}


def save_names(*names: str) -> Policy:
    """Keep only the values tagged `fmeg.name(x, tag)` with one of these tags.

    >>> save_names("attn_out").kind
    'names'
    """
    return Policy("names", frozenset(names))


def recompute(*regions: str) -> Policy:
    """Keep as without remat, but nothing of these regions (`fmeg.region`): they are computed again from their inputs.

    >>> str(recompute("mlp", "norm"))
    'none(again mlp, again norm)'
    """
    if not regions:
        raise ValueError("recompute: expected names of regions, given none; to keep nothing at all use policy='full'")
    return Policy("none", regions=frozenset(regions))


def min_cut(per_byte: float = 0.0) -> Policy:
    """Keep the fewest bytes from which the rest follows by cheap operations: a minimum cut of the forward graph.

        minimise  Σ bytes of kept values + per_byte · Σ bytes read and written to compute others again

    Products, attention and collectives are never done again (gathers of what is smaller before are, as always).
    The policy "min_cut" is `min_cut()`. Idea: He & Yu 2023, "Transcending Runtime-Memory Tradeoffs in Checkpointing by
    being Fusion Aware" (MLSys), §3.

    >>> min_cut(0.1).per_byte
    0.1
    """
    if not per_byte >= 0:
        raise ValueError(f"min_cut: per_byte must be at least 0, given {per_byte}")
    return Policy("min_cut", per_byte=per_byte)


def budget(limit: int, *, flops: float = 600e12, bandwidth: float = 4e12) -> Policy:
    """Keep at most `limit` bytes a layer and rank, so that what is computed again takes the least time.

        time of an operation = FLOPs / flops + bytes read and written / bandwidth

    Anything but a collective may be done again. The choice is the best of the minimum cuts of bytes + λ · time over λ
    that fits; what then is left of the budget goes, greedily, to the values that save most time a byte. Raises
    ValueError at partitioning where no choice fits, with the least that does.

    limit             bytes of the values that one layer (or one body without a scan) hands to its backward pass
    flops, bandwidth  FLOPs and bytes a second; as measured on one H200 unless said otherwise

    >>> budget(2**30).limit
    1073741824
    """
    for what, x in (("limit", limit), ("flops", flops), ("bandwidth", bandwidth)):
        if not x > 0:
            raise ValueError(f"budget: {what} must be positive, given {x}")
    return Policy("budget", limit=int(limit), flops=float(flops), bandwidth=float(bandwidth))


def offload(*names: str, rest: str | Policy = "none") -> Policy:
    """Kept values with these tags wait for the backward pass in the host's memory; without tags all kept values do.

    They leave after their layer has run and come back one layer ahead, on a stream of their own. Those of the last
    layer, which is the first to go back, stay. Values with these tags are kept even where others of their kind would
    be computed again. Only what a scan's layers keep leaves, and in a pipeline nothing does.

    rest   the policy by which the other values are kept

    >>> str(offload("ff")), str(offload(rest="full"))
    ('none(ff, host ff)', 'full(host all)')
    """
    base = policy(rest)
    return replace(base, names=base.names | set(names), host=frozenset(names))


def policy(p: str | Policy) -> Policy:
    """A policy by name: "full", "dots", "none" (keep as usual), "min_cut"."""
    if isinstance(p, Policy):
        return p
    if p not in _BY_NAME:
        raise ValueError(
            f"remat: unknown policy {p!r}; expected one of {', '.join(_BY_NAME)}, or fmeg.save_names, recompute, "
            "min_cut, "
            "budget or offload called with their arguments"
        )
    return _BY_NAME[p]


def remat(fn: Callable[..., Any], policy: str | Policy = "full") -> Callable[..., Any]:
    """`fn` with the same results and gradients, whose inner values are recomputed in the backward pass.

    Of a scan inside, the carry of each step is kept. Eager, the policies "full", "dots" and `save_names` keep the
    arguments alone, all others everything.

    >>> import torch
    >>> x = torch.ones(3, requires_grad=True)
    >>> remat(lambda t: (t * t).sin())(x).sum().backward()
    >>> torch.allclose(x.grad, 2 * torch.cos(torch.ones(3)))
    True
    """
    chosen = globals()["policy"](policy)

    @wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if chosen == _BY_NAME["none"]:
            return fn(*args, **kwargs)
        rec = recorder.active()
        if rec is not None:
            rec.counter += 1
            with rec.marking(remat=rec.tags.get("remat", (rec.counter, chosen))):
                return fn(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        if chosen.kind not in ("full", "dots", "names"):
            return fn(*args, **kwargs)
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return wrapped


@contextmanager
def region(tag: str) -> Iterator[None]:
    """Names a part of a model, for `recompute`. Does nothing outside `remat` and in eager code.

    >>> import torch
    >>> with region("norm"):
    ...     y = torch.ones(2) * 2
    """
    rec = recorder.active()
    _, outer = rec.tags.get("remat", (0, FULL)) if rec is not None else (0, FULL)
    if rec is None or tag not in outer.regions:
        yield
        return
    rec.counter += 1
    with rec.marking(remat=(rec.counter, replace(FULL, names=outer.names, host=outer.host))):
        yield
