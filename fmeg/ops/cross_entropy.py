"""Cross entropy of integer targets, by token."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg.kernels import rows
from fmeg.ops._common import check_float, check_shape, differentiated, elements, row_names, wide
from fmeg.ops._eager import Eager
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule, rule


def _loss(lse: Tensor, picked: Tensor, total: Any, vocab: int, z_loss: float, label_smoothing: float) -> Tensor:
    """From log-sum-exp, the target's logit, and the sum of all logits (used when smoothing)."""
    loss = lse - picked
    if label_smoothing:
        loss = (1 - label_smoothing) * loss + label_smoothing * (lse - total / vocab)
    if z_loss:
        loss = loss + z_loss * lse * lse
    return loss


def _plain(
    logits: Tensor, targets: Tensor, *, z_loss: float, label_smoothing: float, vocab: int
) -> tuple[Tensor, Tensor]:
    x = wide(logits[..., :vocab])
    lse = torch.logsumexp(x, dim=-1)
    picked = x.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    total = x.sum(-1) if label_smoothing else 0.0
    return _loss(lse, picked, total, vocab, z_loss, label_smoothing), lse


def _reference_bwd(
    logits: Tensor, targets: Tensor, lse: Tensor, ct: Tensor, offset: int | Tensor = 0, **options: Any
) -> Tensor:
    """ct ((1 + 2 z lse) p - (1 - ε) onehot - ε / vocab), 0 on padding; the columns begin at global class `offset`."""
    run = _plain_bwd if differentiated(logits, lse, ct) else _kernel_bwd
    return run(logits, targets, lse, ct, offset, **options)


def _kernel_bwd(
    logits: Tensor, targets: Tensor, lse: Tensor, ct: Tensor, offset: int | Tensor,
    *, z_loss: float, label_smoothing: float, vocab: int,
) -> Tensor:  # fmt: skip
    """As `_plain_bwd`, bit for bit, in the memory of one tensor of the logits' size."""
    n, lse = logits.shape[-1], lse.unsqueeze(-1)
    dx = (wide(logits) - lse).exp_()
    dx.mul_(ct.unsqueeze(-1) * (1 + 2 * z_loss * lse) if z_loss else ct.unsqueeze(-1))
    index = targets.long() - offset
    hit = ct if not label_smoothing else ct * (1 - label_smoothing)
    hit = torch.where((index >= 0) & (index < n), hit, 0.0)
    index = index.clamp(0, n - 1).unsqueeze(-1)
    dx.scatter_(-1, index, dx.gather(-1, index) - hit.unsqueeze(-1))
    if label_smoothing:
        dx.sub_(ct.unsqueeze(-1) * (label_smoothing / vocab))
    if not isinstance(offset, int) or offset + n > vocab:
        dx.masked_fill_(torch.arange(n, device=logits.device) + offset >= vocab, 0.0)
    return dx.to(logits.dtype)


def loss_and_gradient(
    logits: Tensor, targets: Tensor, ct: Tensor, *, z_loss: float, label_smoothing: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its gradient times `ct`, which may lie where the logits lay: they are given up."""
    if rows.fits(logits) and logits.is_contiguous():
        return rows.cross_entropy_into(logits, targets, ct, vocab, z_loss, label_smoothing), logits
    options: dict[str, Any] = dict(z_loss=z_loss, label_smoothing=label_smoothing, vocab=vocab)
    loss, lse = _plain(logits, targets, **options)
    return loss, _kernel_bwd(logits, targets, lse, ct, 0, **options)


def gradient_of_part(
    logits: Tensor, targets: Tensor, lse: Tensor, ct: Tensor, offset: Tensor,
    *, z_loss: float, label_smoothing: float, vocab: int,
) -> Tensor:  # fmt: skip
    """As `cross_entropy_bwd_p`, perhaps where the logits lay: they are given up."""
    if rows.fits(logits) and logits.is_contiguous():
        rows.cross_entropy_gradient_into(logits, targets, lse, ct, offset, vocab, z_loss, label_smoothing)
        return logits
    options: dict[str, Any] = dict(z_loss=z_loss, label_smoothing=label_smoothing, vocab=vocab)
    return _kernel_bwd(logits, targets, lse, ct, offset, **options)


def _plain_bwd(
    logits: Tensor, targets: Tensor, lse: Tensor, ct: Tensor, offset: int | Tensor,
    *, z_loss: float, label_smoothing: float, vocab: int,
) -> Tensor:  # fmt: skip
    classes = torch.arange(logits.shape[-1], device=logits.device) + offset
    ct, lse = ct.unsqueeze(-1), lse.unsqueeze(-1)
    dlse = ct if not z_loss else ct * (1 + 2 * z_loss * lse)
    dx = dlse * torch.exp(wide(logits) - lse)
    hit = classes == targets.unsqueeze(-1)
    dx = dx - torch.where(hit, ct if not label_smoothing else ct * (1 - label_smoothing), 0.0)
    if label_smoothing:
        dx = dx - ct * (label_smoothing / vocab)
    return dx.masked_fill(classes >= vocab, 0.0).to(logits.dtype)


def _plain_part(
    logits: Tensor, targets: Tensor, offset: int | Tensor, *, vocab: int, label_smoothing: float
) -> tuple[Tensor, ...]:
    x, n = wide(logits), logits.shape[-1]
    padding = torch.arange(n, device=x.device) + offset >= vocab
    real = x.masked_fill(padding, -torch.inf)
    top = real.amax(-1)
    sumexp = torch.exp(real - top.masked_fill(top == -torch.inf, 0.0).unsqueeze(-1)).sum(-1)
    index = targets.long() - offset
    mine = (index >= 0) & (index < n)
    picked = torch.where(mine, x.gather(-1, index.clamp(0, n - 1).unsqueeze(-1)).squeeze(-1), 0.0)
    return (top, sumexp, picked, *([x.masked_fill(padding, 0.0).sum(-1)] if label_smoothing else []))


def _reference_part(
    logits: Tensor, targets: Tensor, offset: int | Tensor, *, vocab: int, label_smoothing: float
) -> tuple[Tensor, ...]:
    """What one shard of the classes, from class `offset` on, knows of each row: the largest logit m (-inf if none is
    real), Σ exp(x - m), the target's logit (0 if it lies elsewhere), and Σ x where that is needed for smoothing."""
    if isinstance(offset, Tensor) and rows.fits(logits) and logits.is_contiguous() and not differentiated(logits):
        found = rows.cross_entropy_part(logits, targets, offset, vocab, bool(label_smoothing))
        return found if label_smoothing else found[:3]
    return _plain_part(logits, targets, offset, vocab=vocab, label_smoothing=label_smoothing)


def _reference_join(
    top: Tensor, sumexp: Tensor, picked: Tensor, total: Any = 0.0,
    *, z_loss: float, label_smoothing: float, vocab: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, lse) from what the shards know together: sumexp is Σ exp(x - top) over all classes."""
    lse = top + torch.log(sumexp)
    return _loss(lse, picked, total, vocab, z_loss, label_smoothing), lse


def _local(
    info: Local, logits: Tensor, targets: Tensor, *, z_loss: float, label_smoothing: float, vocab: int
) -> tuple[Tensor, Tensor]:
    """Over a vocabulary shard: a max and a sum over the axes of v, of a few numbers a token; logits do not move."""
    axes = info.axes("v")
    if not axes:
        return cross_entropy_p(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing, vocab=vocab)
    from fmeg.ops.collectives import all_reduce

    part = cross_entropy_part_p(logits, targets, info.offset("v"), vocab=vocab, label_smoothing=label_smoothing)
    top, sumexp, *rest = part
    most = all_reduce(top, axes, op="max")
    sums = all_reduce([sumexp * torch.exp(top - most), *rest], axes)
    return cross_entropy_join_p(most, *sums, z_loss=z_loss, label_smoothing=label_smoothing, vocab=vocab)


def _local_bwd(info: Local, logits: Tensor, targets: Tensor, lse: Tensor, ct: Tensor, **options: Any) -> Tensor:
    offset = info.offset("v")
    offsets = () if isinstance(offset, int) and offset == 0 else (offset,)
    return cross_entropy_bwd_p(logits, targets, lse, ct, *offsets, **options)


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, None]:
    logits, targets = args
    _, lse = outs
    if cts[1] is not None:
        raise NotImplementedError("cross_entropy: the log-sum-exp has no gradient; only the loss does")
    return cross_entropy_bwd_p(logits, targets, lse, cts[0], **kwargs), None


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    names = row_names(len(shapes[1]))
    return rule(f"{names} v, {names} -> {names}, {names}", shapes, resolved=frozenset("v"), local=_local)


def _rule_bwd(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    names = row_names(len(shapes[1]))
    return rule(f"{names} v, {names}, {names}, {names} -> {names} v", shapes, linear=frozenset({3}), local=_local_bwd)


cross_entropy_p = Primitive(
    "cross_entropy", Eager(_plain, _vjp, saves=(1,)), vjp=_vjp, rule=_rule, flops=lambda n: 4 * elements(n)
)
cross_entropy_bwd_p = Primitive(
    "cross_entropy_bwd", _reference_bwd, rule=_rule_bwd, flops=lambda n: 5 * elements(n), cheap=True
)

cross_entropy_part_p = Primitive("cross_entropy_part", _reference_part, flops=lambda n: 4 * elements(n))
cross_entropy_join_p = Primitive("cross_entropy_join", _reference_join, cheap=True)


def cross_entropy(
    logits: Float[Tensor, "*rows v"],
    targets: Int[Tensor, "*rows"],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    vocab: int | None = None,
) -> Float[Tensor, "*rows"]:
    """The loss of each token, not summed: mask and sum it in the loss function, and divide once, by the global count.

        lse  = log Σ_j exp(x_j),   nll = lse - x_target
        loss = (1 - ε) nll + ε mean_j(lse - x_j) + z lse²

    logits              x, "… v"
    targets             class numbers in [0, vocab)
    z_loss              z, of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, §5)
    label_smoothing     ε (Szegedy et al. 2016, arXiv:1512.00567, §7)
    vocab               number of real classes; logits from there on are padding and are ignored. Default: v

    Computed and returned in float32 (float64 for float64). On a mesh with v sharded it costs two all-reduces forward,
    of one number a token and of two (three if smoothed), and none backward.

    >>> cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3])).exp()
    tensor([4., 4.])
    """
    check_float("cross_entropy", logits=logits)
    check_shape("cross_entropy", "targets", targets, logits.shape[:-1], "all but the last dimension of logits")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"cross_entropy: targets must be int64 or int32, given {targets.dtype}")
    v = logits.shape[-1]
    vocab = v if vocab is None else vocab
    if not 0 < vocab <= v:
        raise ValueError(f"cross_entropy: vocab must be in [1, {v}], the last dimension of logits, given {vocab}")
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"cross_entropy: label_smoothing must be in [0, 1), given {label_smoothing}")
    return cross_entropy_p(logits, targets, z_loss=z_loss, label_smoothing=label_smoothing, vocab=vocab)[0]
