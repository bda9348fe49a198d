"""Schedules against optax, and their corners."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg.optim import constant, cosine, inverse_sqrt, join, linear, with_warmup, wsd

COUNTS = range(30)


def values(schedule):
    out = [schedule(torch.tensor(t)) for t in COUNTS]
    assert all(x.shape == () and x.dtype == torch.float64 for x in out)
    return torch.stack(out)


@pytest.fixture
def same():
    """Equal to an optax schedule at every count, to 1e-14."""
    jax = pytest.importorskip("jax")
    pytest.importorskip("optax")

    def check(ours, make):
        with jax.enable_x64(True):
            theirs = [float(make()(jax.numpy.asarray(t))) for t in COUNTS]
        torch.testing.assert_close(values(ours), torch.tensor(theirs, dtype=torch.float64), rtol=1e-14, atol=1e-15)

    return check


def test_against_optax(same):
    optax = pytest.importorskip("optax")
    same(constant(0.3), lambda: optax.constant_schedule(0.3))
    same(constant(0.3, warmup=5), lambda: optax.linear_schedule(0.0, 0.3, 5))
    same(linear(0.3, 20, end=0.1), lambda: optax.linear_schedule(0.3, 0.1, 20))
    same(cosine(0.3, 20), lambda: optax.cosine_decay_schedule(0.3, 20))
    same(
        cosine(0.3, 20, end=0.05, warmup=4),
        lambda: optax.warmup_cosine_decay_schedule(0.0, 0.3, warmup_steps=4, decay_steps=20, end_value=0.05),
    )
    same(
        with_warmup(linear(0.3, 10, end=0.1), 3, start=0.02),
        lambda: optax.join_schedules([optax.linear_schedule(0.02, 0.3, 3), optax.linear_schedule(0.3, 0.1, 10)], [3]),
    )
    same(
        wsd(0.3, 22, decay=6, end=0.01, warmup=4),
        lambda: optax.join_schedules(
            [optax.linear_schedule(0.0, 0.3, 4), optax.constant_schedule(0.3), optax.linear_schedule(0.3, 0.01, 6)],
            [4, 16],
        ),
    )
    same(
        wsd(0.3, 22, decay=6, warmup=4, shape="cosine"),
        lambda: optax.join_schedules(
            [optax.linear_schedule(0.0, 0.3, 4), optax.constant_schedule(0.3), optax.cosine_decay_schedule(0.3, 6)],
            [4, 16],
        ),
    )
    same(
        join([constant(1.0), linear(2.0, 4), cosine(3.0, 5)], [3, 11]),
        lambda: optax.join_schedules(
            [optax.constant_schedule(1.0), optax.linear_schedule(2.0, 0.0, 4), optax.cosine_decay_schedule(3.0, 5)],
            [3, 11],
        ),
    )


def test_inverse_sqrt_by_its_formula():
    want = [0.3 * min(t / 5, (5 / t) ** 0.5) if t else 0.0 for t in COUNTS]
    want = torch.tensor(want, dtype=torch.float64)
    torch.testing.assert_close(values(inverse_sqrt(0.3, 5)), want, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    "shape, f",
    [("sqrt", lambda x: 1 - x**0.5), ("exponential", lambda x: 2 * 0.5**x - 1), ("linear", lambda x: 1 - x)],
)
def test_decay_shapes_of_wsd_by_their_formulas(shape, f):
    got = values(wsd(0.3, 20, decay=8, end=0.1, shape=shape))
    want = [0.1 + 0.2 * f(min(max(t - 12, 0) / 8, 1)) for t in COUNTS]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-14, atol=0)


@given(
    shape=st.sampled_from(["linear", "cosine", "sqrt", "exponential"]),
    warmup=st.integers(0, 9),
    stable=st.integers(0, 9),
    decay=st.integers(1, 9),
)
def test_wsd_rises_stays_and_falls_to_its_end(shape, warmup, stable, decay):
    steps = warmup + stable + decay
    v = wsd(1.0, steps, decay, end=0.25, warmup=warmup, shape=shape)(torch.arange(steps + 5))
    assert (v[:warmup].diff() > 0).all() and (v[warmup : warmup + stable + 1] == 1).all()
    assert (v[warmup + stable : steps + 1].diff() < 0).all()
    torch.testing.assert_close(v[steps:], torch.full((5,), 0.25).double(), rtol=1e-15, atol=0)


def test_numbers_and_tables_work_too():
    s = cosine(1.0, 10, warmup=2)
    assert s(1).item() == 0.5
    torch.testing.assert_close(s(torch.arange(4)), torch.stack([s(t) for t in range(4)]), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: cosine(1.0, 4, warmup=4), "`steps - warmup` should be above 0, given 0"),
        (lambda: linear(1.0, 0), "`steps` should be above 0, given 0"),
        (lambda: inverse_sqrt(1.0, 0), "`warmup` should be above 0"),
        (lambda: wsd(1.0, 10, decay=8, warmup=3), r"given 3 \+ 8 > 10"),
        (lambda: wsd(1.0, 10, decay=8, shape="cubic"), "one of linear, cosine, sqrt, exponential, given 'cubic'"),
        (lambda: join([constant(1.0)], [3]), "1 schedules need 0 ascending boundaries"),
        (lambda: join([constant(1.0)] * 3, [5, 3]), "3 schedules need 2 ascending boundaries"),
    ],
)
def test_errors_say_what_was_given(make, message):
    with pytest.raises(ValueError, match=message):
        make()
