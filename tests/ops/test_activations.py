from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.activations import geglu, geglu_bwd_p, geglu_p, gelu, gelu_bwd_p, gelu_p, swiglu, swiglu_bwd_p, swiglu_p
from tests.ops.checks import check_vjp, close, node_of, rand
from tests.ops.ranks import check_rule

GATED = [
    (swiglu, swiglu_p, swiglu_bwd_p, {}),
    (geglu, geglu_p, geglu_bwd_p, {"approximate": "tanh"}),
    (geglu, geglu_p, geglu_bwd_p, {"approximate": "none"}),
]


def _formula(op, x, approximate=None):
    if op is swiglu:
        return x * torch.sigmoid(x)
    if approximate == "tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


@pytest.mark.parametrize(("op", "prim", "bwd", "options"), GATED)
def test_gated(op, prim, bwd, options):
    gate, up, ct = rand(3, 7), rand(3, 7, seed=1), rand(3, 7, seed=2)
    close(op(gate, up, **options), _formula(op, gate, **options) * up)
    check_vjp(prim, gate, up, bits=True, **options)
    leaves = (gate.requires_grad_(), up.requires_grad_())
    assert gradcheck(lambda g, u: op(g, u, **options), leaves)
    assert gradgradcheck(lambda g, u: op(g, u, **options), leaves)
    assert gradcheck(lambda g, u, c: bwd(g, u, c, **options), (*leaves, ct.requires_grad_()))


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_gelu(approximate):
    x, ct = rand(3, 7), rand(3, 7, seed=2)
    close(gelu(x, approximate), _formula(gelu, x, approximate))
    check_vjp(gelu_p, x, bits=True, approximate=approximate)
    assert gradcheck(lambda x: gelu(x, approximate), x.requires_grad_())
    assert gradgradcheck(lambda x: gelu(x, approximate), x)
    assert gradcheck(lambda x, c: gelu_bwd_p(x, c, approximate=approximate), (x, ct.requires_grad_()))


def test_rules_under_every_placement():
    gate, up, ct = rand(4, 8), rand(4, 8, seed=1), rand(4, 8, seed=2)
    for _, prim, bwd, options in GATED:
        check_rule(prim, gate, up, **options)
        check_rule(bwd, gate, up, ct, **options)
        assert prim.rule(node_of(prim, gate, up, **options)).linear == {1}
        assert bwd.rule(node_of(bwd, gate, up, ct, **options)).linear == {2}
    check_rule(gelu_p, gate, approximate="tanh")
    check_rule(gelu_bwd_p, gate, ct, approximate="tanh")


def test_vmap_jvp_and_bfloat16():
    gate, up = rand(3, 7), rand(3, 7, seed=1)
    close(torch.func.vmap(swiglu)(gate, up), swiglu(gate, up))
    out, tangent = torch.func.jvp(lambda u: swiglu(gate, u), (up,), (up,))
    close(tangent, out)
    half = swiglu(gate.bfloat16(), up.bfloat16())
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, F.silu(gate.bfloat16()) * up.bfloat16())


def test_errors():
    with pytest.raises(ValueError, match=r"swiglu: up must have shape \(3, 7\) \(that of gate\), given \(7,\)"):
        swiglu(rand(3, 7), rand(7))
    with pytest.raises(ValueError, match="approximate must be 'tanh' or 'none', given 'erf'"):
        gelu(rand(3), "erf")
    with pytest.raises(TypeError, match="gate must be a floating-point tensor"):
        geglu(torch.arange(3), rand(3))
