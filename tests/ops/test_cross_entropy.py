from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.cross_entropy import (
    cross_entropy,
    cross_entropy_bwd_p,
    cross_entropy_join_p,
    cross_entropy_p,
    cross_entropy_part_p,
)
from tests.ops.checks import check_vjp, close, ints, node_of, rand
from tests.ops.ranks import check_rule, spmd

OPTIONS = [
    {"z_loss": z, "label_smoothing": ls, "vocab": v} for z, ls, v in itertools.product([0.0, 0.1], [0.0, 0.2], [8, 5])
]
PLAIN = {"z_loss": 0.0, "label_smoothing": 0.0, "vocab": 8}


def _inputs(vocab=8, rows=(2, 3)):
    return 3 * rand(*rows, 8), ints(vocab, *rows)


@pytest.mark.parametrize("options", OPTIONS)
def test_value_equals_torch(options):
    x, y = _inputs(options["vocab"])
    real = x[..., : options["vocab"]]
    expected = F.cross_entropy(
        real.flatten(0, 1), y.flatten(), reduction="none", label_smoothing=options["label_smoothing"]
    )
    expected = expected.view_as(y) + options["z_loss"] * torch.logsumexp(real, -1) ** 2
    close(cross_entropy(x, y, **options), expected)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients(options):
    x, y = _inputs(options["vocab"])
    check_vjp(cross_entropy_p, x, y, **options)
    loss = lambda x: cross_entropy(x, y, **options)
    assert gradcheck(loss, x.requires_grad_())
    assert gradgradcheck(loss, x)
    (dx,) = torch.autograd.grad(loss(x).sum(), x)
    assert (dx[..., options["vocab"] :] == 0).all()


def test_gradient_has_the_bits_of_autograd():
    x, y = 3 * rand(2, 9, 40), ints(40, 2, 9)
    check_vjp(cross_entropy_p, x, y, bits=True, **PLAIN | {"vocab": 40})


def test_the_backward_primitive_is_differentiable():
    x, y = _inputs()
    lse, ct = torch.logsumexp(x, -1), rand(2, 3)
    f = lambda x, lse, ct: cross_entropy_bwd_p(x, y, lse, ct, **OPTIONS[-2])
    assert gradcheck(f, tuple(t.requires_grad_() for t in (x, lse, ct)))


@pytest.mark.parametrize("options", OPTIONS)
def test_rules_under_every_placement(options):
    """The vocabulary too: with 5 real classes of 8 on 4 ranks, one rank has a mixed shard and one padding alone."""
    x, y = _inputs(options["vocab"], rows=(4, 4))
    check_rule(cross_entropy_p, x, y, **options)
    lse, ct = torch.logsumexp(x[..., : options["vocab"]], -1), rand(4, 4)
    check_rule(cross_entropy_bwd_p, x, y, lse, ct, **options)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_two_reductions_forward_and_none_backward(smoothing):
    x, y = _inputs(rows=(4, 4))
    options = PLAIN | {"label_smoothing": smoothing}
    _, counts = spmd(cross_entropy_p, (x, y), options, {"v": ("x",)}, {"x": 4})
    assert counts == {"all_reduce": 2}
    lse = torch.logsumexp(x, -1)
    _, counts = spmd(cross_entropy_bwd_p, (x, y, lse, lse), options, {"v": ("x",)}, {"x": 4})
    assert counts == {}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_what_a_shard_knows(smoothing):
    """Classes 6 … 11 of 9 real ones; by numbers."""
    x, offset = torch.arange(24.0, dtype=torch.float64).view(4, 6).flip(1) / 8, torch.tensor(6)
    y = torch.tensor([5, 6, 8, 3])
    found = cross_entropy_part_p(x, y, offset, vocab=9, label_smoothing=smoothing)
    assert len(found) == (4 if smoothing else 3)
    real = x[:, :3]
    close(found[0], real.amax(1))
    close(found[1], (real - real.amax(1, keepdim=True)).exp().sum(1))
    close(found[2], torch.stack([torch.zeros(()), x[1, 0], x[2, 2], torch.zeros(())]))
    if smoothing:
        close(found[3], real.sum(1))
    top, sumexp, *_ = cross_entropy_part_p(x, y, torch.tensor(12), vocab=9, label_smoothing=smoothing)
    assert (top == -torch.inf).all() and (sumexp == 0).all()


def test_joined_parts_are_the_loss():
    x, y = _inputs(vocab=5)
    options = {"z_loss": 0.1, "label_smoothing": 0.2, "vocab": 5}
    top, *sums = cross_entropy_part_p(x, y, 0, vocab=5, label_smoothing=0.2)
    for a, b in zip(cross_entropy_join_p(top, *sums, **options), cross_entropy_p(x, y, **options), strict=True):
        close(a, b)


def test_logits_that_are_not_finite_on_a_sharded_vocabulary():
    """-inf is a class of probability 0, wherever it lies, and where a shard has no other; nothing hides inf or NaN."""
    x, y = _inputs(rows=(4, 4))
    x[0, 0, 1:] = -torch.inf
    x[0, 1, 4:6] = -torch.inf
    x[0, 2, 5], x[0, 3, 5] = torch.inf, torch.nan
    y[0] = 0
    got, _ = spmd(cross_entropy_p, (x, y), PLAIN, {"v": ("x",)}, {"x": 4})
    want = cross_entropy(x, y)
    assert got[0][0, 0] == 0 and got[0][0, 2:].isnan().all()
    got[0][0, 2:] = want[0, 2:] = 0.0
    close(got[0], want)


def test_rule():
    x, y = _inputs()
    r = cross_entropy_p.rule(node_of(cross_entropy_p, x, y, **PLAIN))
    assert r.resolved == {"v"} and not r.linear
    lse = torch.logsumexp(x, -1)
    assert cross_entropy_bwd_p.rule(node_of(cross_entropy_bwd_p, x, y, lse, lse, **PLAIN)).linear == {3}


def test_low_precision_large_logits_and_vmap():
    x, y = _inputs()
    out = cross_entropy(x.bfloat16(), y)
    assert out.dtype == torch.float32
    assert torch.equal(out, cross_entropy(x.bfloat16().float(), y))
    assert torch.isfinite(cross_entropy(x * 1e4, y)).all()
    close(torch.func.vmap(cross_entropy)(x, y), cross_entropy(x, y))


def test_errors():
    x, y = _inputs()
    with pytest.raises(ValueError, match=r"targets must have shape \(2, 3\)"):
        cross_entropy(x, y[0])
    with pytest.raises(TypeError, match="targets must be int64 or int32"):
        cross_entropy(x, y.double())
    with pytest.raises(ValueError, match=r"vocab must be in \[1, 8\].* given 9"):
        cross_entropy(x, y, vocab=9)
    with pytest.raises(ValueError, match="label_smoothing"):
        cross_entropy(x, y, label_smoothing=1.0)
