"""Newton-Schulz against optax and torch.optim.Muon's, and the properties it is used for."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg.optim.newton_schulz import QUINTIC, _flops, _primitive, _rule, newton_schulz
from fmeg.program.ir import Node, TensorType, Value
from fmeg.testing.rulecheck import check_rule

SHAPES = [(4, 4), (3, 8), (8, 3), (1, 5)]


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def node(*shape):
    return Node(_primitive, (Value(TensorType(shape, torch.float32)),), {"coefficients": QUINTIC, "eps": 1e-7})


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_optax(shape):
    jax, muon = pytest.importorskip("jax"), pytest.importorskip("optax.contrib._muon")
    x = normal(*shape)
    with jax.enable_x64(True):
        coefficients = jax.numpy.asarray(QUINTIC[0])
        want = muon.orthogonalize_via_newton_schulz(jax.numpy.asarray(x.numpy()), coefficients, eps=1e-7).tolist()
    torch.testing.assert_close(newton_schulz(x), torch.tensor(want, dtype=torch.float64), rtol=1e-12, atol=1e-12)


class InFloat64(torch.Tensor):
    """A tensor that stays as wide as it is when asked for bfloat16."""

    def bfloat16(self):
        return self.clone()


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape):
    """torch runs it in bfloat16 and bounds the norm by eps instead of adding it: here in float64, with a tiny eps."""
    reference = pytest.importorskip("torch.optim._muon")._zeropower_via_newtonschulz
    x = normal(*shape)
    want = reference(x.as_subclass(InFloat64), QUINTIC[0], len(QUINTIC), 1e-30).as_subclass(torch.Tensor)
    torch.testing.assert_close(newton_schulz(x, eps=1e-30), want, rtol=1e-12, atol=1e-12)


def test_runs_in_the_dtype_of_its_argument():
    x = normal(4, 6)
    got = newton_schulz(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert 0 < (got.double() - newton_schulz(x)).abs().max() < 0.1


@given(rows=st.integers(1, 7), cols=st.integers(1, 7), seed=st.integers(0, 100), size=st.floats(1e-4, 1e4))
def test_singular_vectors_stay_and_values_follow_the_polynomial(rows, cols, seed, size):
    """U S Vᵀ goes to U p(S / ‖S‖) Vᵀ, for a matrix of any size in norm."""
    u, s, vt = torch.linalg.svd(size * normal(rows, cols, seed=seed), full_matrices=False)
    t = s / (s.norm() + 1e-7)
    for a, b, c in QUINTIC:
        t = a * t + b * t**3 + c * t**5
    want = u @ torch.diag(t) @ vt
    torch.testing.assert_close(newton_schulz(u @ torch.diag(s) @ vt), want, rtol=1e-9, atol=1e-9)


def test_singular_values_end_in_the_band_the_docstring_names():
    s = torch.logspace(-2, 0, 2000, dtype=torch.float64)
    for a, b, c in QUINTIC:
        s = a * s + b * s**3 + c * s**5
    assert s.min() > 0.68 and s.max() < 1.14


def test_a_stack_is_its_matrices_one_by_one():
    x = normal(2, 3, 4, 6)
    got = newton_schulz(x)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(got[i, j], newton_schulz(x[i, j]), rtol=1e-12, atol=1e-12)


def test_zero_stays_zero():
    assert torch.equal(newton_schulz(torch.zeros(2, 3, 3)), torch.zeros(2, 3, 3))


def test_one_triple_a_step():
    x = normal(3, 5)
    a, b, c = coefficients = (2.0, -1.5, 0.5)
    y = x / (x.norm() + 1e-7)
    want = a * y + b * y @ y.mT @ y + c * y @ y.mT @ y @ y.mT @ y
    torch.testing.assert_close(newton_schulz(x, (coefficients,)), want, rtol=1e-13, atol=1e-13)


def test_rule_keeps_matrices_whole_and_moves_their_axes_to_the_stack():
    r = _rule(node(6, 4, 8))
    assert r.ins == r.outs == ((("l0",), ("m",), ("n",)),)
    assert r.whole == {"m", "n"} and r.prefer == {"m": "l0", "n": "l0"}
    assert r.declared and not r.linear and r.sizes == {"l0": 6, "m": 4, "n": 8}
    assert _rule(node(4, 8)).prefer == {}
    assert _rule(node(2, 3, 4, 8)).ins == ((("l0",), ("l1",), ("m",), ("n",)),)


def test_flops_are_those_of_its_products():
    """Two m × n by n × m products and one of m × m, five times, for each of the stack's matrices."""
    m, n = 4, 8
    assert _flops(node(6, m, n)) == _flops(node(6, n, m)) == 6 * 5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n)


def test_vectors_are_refused():
    with pytest.raises(ValueError, match=r"at least two dimensions, given shape \(3,\)"):
        newton_schulz(torch.ones(3))


def test_rule_on_virtual_meshes():
    assert check_rule(_primitive, normal(4, 6, 8), coefficients=QUINTIC, eps=1e-7) >= 2
    assert check_rule(_primitive, normal(4, 4, 6, 8), coefficients=QUINTIC, eps=1e-7) >= 5
