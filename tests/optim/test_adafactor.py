"""Adafactor against optax and torch.optim in float64; stacked layers are layers one by one."""

import pytest
import torch

from fmeg import tree
from fmeg.optim import adafactor
from tests.optim.problem import make_grads

FLAT = {"w": (4, 6), "tall": (7, 3), "bias": (5,), "cube": (2, 3, 4)}


@pytest.fixture
def flat():
    g = torch.Generator().manual_seed(2)
    return {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in FLAT.items()}


@pytest.mark.parametrize("min_dim", [1, 4, 128])
@pytest.mark.parametrize("relative, clip", [(True, 1.0), (False, None), (True, 0.5)])
def test_equals_optax(flat, train, train_optax, assert_same, relative, clip, min_dim):
    """optax.adafactor's chain, with its decay computed in float64. (It factors the largest dimensions, we the last.)"""
    optax = pytest.importorskip("optax")
    params = {k: v for k, v in flat.items() if k != "cube"}

    def make():
        decay = lambda i, exponent: 1.0 - (i.astype("float64") + 1) ** -exponent
        parts = [optax.scale_by_factored_rms(min_dim_size_to_factor=min_dim, decay_rate_fn=decay)]
        parts += [optax.clip_by_block_rms(clip)] if clip is not None else []
        parts += [optax.scale_by_param_block_rms()] if relative else []
        return optax.chain(*parts, optax.scale(-0.05))

    opt = adafactor(0.05, clip=clip, relative=relative, min_dim=min_dim)
    assert_same(train(opt, params), train_optax(make, params))


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_torch(flat, train, train_torch, assert_same, weight_decay):
    """torch leaves eps out of the moments and bounds them below instead: the same for moments that are far above it."""
    make = lambda ps: torch.optim.Adafactor(ps, lr=0.05, beta2_decay=-0.8, weight_decay=weight_decay)
    assert_same(train(adafactor(0.05, weight_decay=weight_decay, min_dim=1), flat), train_torch(make, flat))


def test_relative_step_sizes_of_torch(flat, train, train_torch, assert_same):
    """torch's learning rate is a bound of 1/√t."""
    make = lambda ps: torch.optim.Adafactor(ps, lr=0.5)
    opt = adafactor(lambda count: (count + 1).rsqrt().clamp(max=0.5), min_dim=1)
    assert_same(train(opt, flat), train_torch(make, flat))


def test_a_stack_of_layers_is_its_layers_one_by_one(params, train, assert_same):
    stacked = train(adafactor(0.05, min_dim=1, b1=0.9, weight_decay=0.1), {"layers": params["layers"]}, 2)
    for i in range(3):
        opt = adafactor(0.05, min_dim=1, b1=0.9, weight_decay=0.1)
        now, state = tree.map(lambda x, i=i: x[i], params["layers"]), None
        state = opt.init(now)
        grads_of = _layer_grads(params, i)
        for step in range(2):
            updates, state = opt.update(grads_of(step, now), state, now)
            now = tree.map(torch.add, now, updates)
            assert_same([tree.map(lambda x, i=i: x[i], stacked[step]["layers"])], [now])


def _layer_grads(params, i):
    zero = {"layers": tree.map(torch.zeros_like, params["layers"])}
    return lambda step, now: tree.map(lambda g, p: g[i] + p, make_grads(zero, step)["layers"], now)


def test_grouped_dimensions_are_the_reshaped_matrix():
    g = torch.Generator().manual_seed(3)
    w = torch.randn(2, 6, 2, 3, generator=g, dtype=torch.float64)
    grouped = adafactor(0.1, matrix={"w": "layers (embed) (heads head_dim)"}, min_dim=1)
    merged = adafactor(0.1, matrix={"w": "layers (embed) (out)"}, min_dim=1)
    a, b = {"w": w}, {"w": w.reshape(2, 6, 6)}
    state = grouped.init(a)
    assert state.v_row["w"].shape == (2, 6, 1, 1) and state.v_col["w"].shape == (2, 1, 2, 3)
    got, _ = grouped.update(a, state, a)
    want, _ = merged.update(b, merged.init(b), b)
    torch.testing.assert_close(got["w"].reshape(2, 6, 6), want["w"], rtol=1e-13, atol=0)


def test_momentum_is_an_average_of_steps(flat):
    opt, plain = adafactor(0.1, b1=0.9, min_dim=1), adafactor(0.1, min_dim=1)
    got, state = opt.update(flat, opt.init(flat), flat)
    want, _ = plain.update(flat, plain.init(flat), flat)
    tree.map(lambda x, y: torch.testing.assert_close(x, 0.1 * y, rtol=1e-13, atol=0), got, want)
    tree.map(lambda m, x: torch.testing.assert_close(-0.1 * m, x, rtol=1e-13, atol=0), state.mu, got)


def test_small_parameters_move_by_the_least_scale():
    params = {"w": torch.zeros(4, dtype=torch.float64)}
    grads = {"w": torch.ones(4, dtype=torch.float64)}
    opt = adafactor(0.1, min_scale=1e-2)
    torch.testing.assert_close(opt.update(grads, opt.init(params), params)[0]["w"], torch.full((4,), -1e-3).double())


def test_relative_needs_params(flat):
    opt = adafactor(0.1)
    with pytest.raises(ValueError, match="relative=True needs it"):
        opt.update(flat, opt.init(flat))
