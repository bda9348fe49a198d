from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.layer_norm import layer_norm, layer_norm_bwd_p, layer_norm_p
from tests.ops.checks import check_vjp, close, rand
from tests.ops.ranks import check_rule

PARAMS = [(True, True), (True, False), (False, False)]


def _inputs(shape, params):
    w, b = (rand(shape[-1], seed=i + 1) if p else None for i, p in enumerate(params))
    return rand(*shape), w, b


@pytest.mark.parametrize("shape", [(5,), (3, 7), (2, 3, 8)])
@pytest.mark.parametrize("params", PARAMS)
def test_value_and_gradients(shape, params):
    x, w, b = _inputs(shape, params)
    mean, var = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, correction=0)
    expected = (x - mean) / (var + 1e-5).sqrt() * (1 if w is None else w) + (0 if b is None else b)
    close(layer_norm(x, w, b), expected)
    check_vjp(layer_norm_p, x, w, b, eps=1e-5)
    leaves = [t.requires_grad_() for t in (x, w, b) if t is not None]
    assert gradcheck(layer_norm, leaves)
    assert gradgradcheck(layer_norm, leaves)


def test_gradients_have_the_bits_of_autograd():
    check_vjp(layer_norm_p, *_inputs((2, 64, 96), (True, True)), bits=True, eps=1e-5)


def test_the_backward_primitive_is_differentiable():
    x, w, b = _inputs((3, 5), (True, True))
    leaves = tuple(t.requires_grad_() for t in (x, w, rand(3, 5, seed=9)))
    assert gradcheck(lambda x, w, ct: layer_norm_bwd_p(x, w, b, ct, eps=1e-5)[:2], leaves)


def test_vmap_and_low_precision():
    x, w, b = _inputs((4, 3, 6), (True, True))
    close(torch.func.vmap(layer_norm, in_dims=(0, None, None))(x, w, b), layer_norm(x, w, b))
    half = [t.bfloat16() for t in (x, w, b)]
    out = layer_norm(*half)
    assert torch.equal(out, F.layer_norm(half[0].float(), (6,), half[1].float(), half[2].float()).bfloat16())


@pytest.mark.parametrize("params", PARAMS)
def test_rules_under_every_placement(params):
    x, w, b = _inputs((4, 8, 6), params)
    check_rule(layer_norm_p, x, w, b, eps=1e-5)
    check_rule(layer_norm_bwd_p, x, w, b, rand(4, 8, 6, seed=5), eps=1e-5)


def test_errors():
    with pytest.raises(ValueError, match=r"b must have shape \(4,\) .* given \(5,\)"):
        layer_norm(rand(2, 4), rand(4), rand(5))
