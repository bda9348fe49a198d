from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.cross_entropy import cross_entropy, cross_entropy_bwd_p, cross_entropy_p
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
