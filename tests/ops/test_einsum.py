from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.einsum import einsum, einsum_p, format_equation, parse_equation
from tests.ops.checks import check_vjp, close, node_of, rand
from tests.ops.ranks import check_rule
from tests.sharding.factors import contracted

CASES = [
    ("b s d, d h e -> b s h e", [(2, 3, 4), (4, 5, 6)]),
    ("b s h e, h e d -> b s d", [(2, 3, 5, 2), (5, 2, 4)]),
    ("i j -> j i", [(3, 4)]),
    ("i j -> i", [(3, 4)]),
    ("i j -> ", [(3, 4)]),
    ("i, j -> i j", [(3,), (4,)]),
    ("i j, j k, k -> i", [(3, 4), (4, 5), (5,)]),
    ("batch seq embed, other embed -> batch seq", [(2, 3, 4), (5, 4)]),
    (", i -> i", [(), (3,)]),
    ("a b, a b -> a b", [(2, 3), (2, 3)]),
]


def _operands(shapes):
    return [rand(*s, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize(("equation", "shapes"), CASES)
def test_value_and_vjp(equation, shapes):
    xs = _operands(shapes)
    ins, out = parse_equation(equation)
    index = {n: i for i, n in enumerate(sorted({n for names in ins for n in names}))}
    sublists = [y for x, names in zip(xs, ins, strict=True) for y in (x, [index[n] for n in names])]
    check_vjp(einsum_p, equation, *xs)
    for x in xs:
        x.requires_grad_()
    given, expected = einsum(equation, *xs), torch.einsum(*sublists, [index[n] for n in out])
    close(given, expected)
    ct = rand(*given.shape, seed=9)
    for g, e in zip(torch.autograd.grad(given, xs, ct), torch.autograd.grad(expected, xs, ct), strict=True):
        close(g, e)
    assert gradcheck(lambda *a: einsum(equation, *a), xs)
    assert gradgradcheck(lambda *a: einsum(equation, *a), xs)


def test_double_backward_vmap_and_jvp():
    x, w = rand(2, 3, 4), rand(4, 5)
    f = lambda x, w: einsum("b s d, d f -> b s f", x, w)
    assert gradgradcheck(f, (x.requires_grad_(), w.requires_grad_()))
    x, w = x.detach(), w.detach()
    xs = torch.stack([x, 2 * x])
    close(torch.func.vmap(f, in_dims=(0, None))(xs, w), torch.stack([f(x, w), f(2 * x, w)]))
    out, tangent = torch.func.jvp(f, (x, w), (x, w))
    close(tangent, 2 * out)


def test_gradients_lie_in_memory_as_their_operands_do():
    x, head = rand(2, 5, 4).requires_grad_(), rand(7, 4).requires_grad_()
    out = einsum("b s d, v d -> b s v", x, head)
    assert all(g.is_contiguous() for g in torch.autograd.grad(out.sum(), (x, head)))
    (only,) = torch.autograd.grad(einsum("b s d, v d -> b s v", x, head.detach()).sum(), (x,))
    close(only, head.sum(0).expand(2, 5, 4).detach())


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("b s d, d f -> b s f", [(4, 4, 4), (4, 8)]),
        ("i j, j k, k -> i", [(4, 8), (8, 4), (4,)]),
        ("i j -> i", [(4, 8)]),
    ],
)
def test_rule_under_every_placement(equation, shapes):
    xs = _operands(shapes)
    check_rule(einsum_p, equation, *xs)


def test_rule_is_linear_and_contracts():
    r = einsum_p.rule(node_of(einsum_p, "b s d, d f -> b s f", rand(2, 3, 4), rand(4, 5)))
    assert r.linear == {0, 1} and not r.joint and contracted(r) == {"d"}
    assert r.sizes == {"b": 2, "s": 3, "d": 4, "f": 5}


def test_flops():
    assert einsum_p.flops(node_of(einsum_p, "b s d, d f -> b s f", rand(2, 3, 4), rand(4, 5))) == 2 * 2 * 3 * 4 * 5
    # left to right: (i j, j k -> i k), then (i k, k -> i)
    three = node_of(einsum_p, "i j, j k, k -> i", rand(3, 4), rand(4, 5), rand(5))
    assert einsum_p.flops(three) == 2 * 3 * 4 * 5 + 2 * 3 * 5


def test_bfloat16_and_equation_round_trip():
    x, w = rand(2, 7, dtype=torch.bfloat16), rand(7, 3, dtype=torch.bfloat16)
    out = einsum("b d, d f -> b f", x, w)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), x.double() @ w.double(), atol=0.05, rtol=0.02)
    assert format_equation(*parse_equation("a  b,b->a")) == "a b, b -> a"


@pytest.mark.parametrize(
    ("equation", "shapes", "message"),
    [
        ("a b", [(2, 3)], "must have one '->'"),
        ("a a -> a", [(2, 2)], "names 'a' twice"),
        ("a -> b", [(2,)], "'b' in the result, which no operand has"),
        ("a b, b -> a", [(2, 3)], "has 2 operands, given 1"),
        ("a b -> a", [(2,)], "must have dimensions 'a b', given shape"),
        ("a b, b -> a", [(2, 3), (4,)], "'b' .* is 3 in an earlier operand, but 4 in operand 1"),
        ("a 2 -> a", [(2, 2)], "'2' where a dimension's name is expected"),
    ],
)
def test_errors(equation, shapes, message):
    with pytest.raises(ValueError, match=message):
        einsum(equation, *_operands(shapes))


def test_dtypes_must_agree():
    with pytest.raises(TypeError, match="must have one dtype"):
        einsum("a, a -> ", rand(3), rand(3, dtype=torch.float32))
