from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.rms_norm import rms_norm, rms_norm_bwd_p, rms_norm_p
from tests.ops.checks import check_vjp, close, node_of, rand
from tests.ops.ranks import check_rule


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 8)])
@pytest.mark.parametrize("weighted", [True, False])
def test_value_and_gradients(shape, weighted):
    x, w = rand(*shape), rand(shape[-1], seed=1) if weighted else None
    close(rms_norm(x, w, eps=1e-5), F.rms_norm(x, shape[-1:], w, 1e-5))
    check_vjp(rms_norm_p, x, w, eps=1e-5)
    leaves = [t.requires_grad_() for t in (x, w) if t is not None]
    assert gradcheck(rms_norm, leaves)
    assert gradgradcheck(rms_norm, leaves)


def test_the_backward_primitive_is_differentiable():
    x, w, ct = (rand(*s, seed=i).requires_grad_() for i, s in enumerate([(3, 5), (5,), (3, 5)]))
    assert gradcheck(lambda *a: rms_norm_bwd_p(*a, eps=1e-6), (x, w, ct))


def test_vmap_and_jvp():
    x, w = rand(4, 3, 6), rand(6, seed=1)
    close(torch.func.vmap(rms_norm, in_dims=(0, None))(x, w), rms_norm(x, w))
    _, by_jvp = torch.func.jvp(lambda x: rms_norm(x, w), (x,), (x,))
    step = 1e-6
    torch.testing.assert_close(
        by_jvp, (rms_norm(x + step * x, w) - rms_norm(x - step * x, w)) / (2 * step), atol=1e-8, rtol=1e-8
    )


def test_low_precision_is_computed_in_float32():
    x, w = rand(3, 100, dtype=torch.bfloat16), rand(100, seed=1, dtype=torch.bfloat16)
    out = rms_norm(x, w)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, rms_norm(x.float(), w.float()).bfloat16())
    dx, dw = rms_norm_bwd_p(x, w, torch.ones_like(x), eps=1e-6)
    assert dx.dtype == dw.dtype == torch.bfloat16


@pytest.mark.parametrize("weighted", [True, False])
def test_rules_under_every_placement(weighted):
    x, w, ct = rand(4, 8, 6), rand(6, seed=1) if weighted else None, rand(4, 8, 6, seed=2)
    check_rule(rms_norm_p, x, w, eps=1e-6)
    check_rule(rms_norm_bwd_p, x, w, ct, eps=1e-6)


def test_rules_keep_the_last_dimension_whole():
    x, w = rand(2, 3, 4), rand(4)
    assert rms_norm_p.rule(node_of(rms_norm_p, x, w, eps=1e-6)).whole == {"d"}
    assert rms_norm_bwd_p.rule(node_of(rms_norm_bwd_p, x, w, x, eps=1e-6)).whole == {"d"}


def test_errors():
    with pytest.raises(TypeError, match="x must be a floating-point tensor, given torch.int64"):
        rms_norm(torch.arange(3))
    with pytest.raises(ValueError, match=r"w must have shape \(4,\) .* given \(3,\)"):
        rms_norm(rand(2, 4), rand(3))
