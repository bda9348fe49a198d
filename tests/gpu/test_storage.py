"""bfloat16 parameters on a GPU, compiled: float32 ones in two halves, and rounding at random."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, TrainState, jit, optim, random, tree

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
ADAM = optim.adamw(1e-3, mu_dtype=torch.float32, nu_dtype=torch.float32)


def steps_of(opt, mode, params, n=4, opt_state=None):
    def step(state, grads):
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new)

    state = TrainState.create(params, opt)
    state = state if opt_state is None else state.next(params=params, opt=opt_state(state.opt))
    run = jit(step, mesh=Mesh(), layout=Layout(), donate="state", mode=mode)
    for seed in range(n):
        g = torch.Generator("cuda").manual_seed(seed)
        state = run(state, tree.map(lambda p, g=g: torch.randn(p.shape, device="cuda", generator=g).to(BF16), params))
    return tree.map(lambda x: x.global_value(), state)


@pytest.fixture(autouse=True)
def on_the_gpu():
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("mode", ["eager", "inductor", "cudagraph"])
def test_a_split_master_is_a_float32_parameter(mode):
    g = torch.Generator("cuda").manual_seed(9)
    masters = {"w": torch.randn(300, 1000, generator=g) * 0.02, "b": torch.randn(7, generator=g)}
    params, low = optim.to_halves(masters)
    got = steps_of(optim.split_master(ADAM), mode, params, opt_state=lambda s: s._replace(low=low))
    want = steps_of(ADAM, mode, masters).params
    mine = optim.from_halves(got.params, got.opt.low)
    for x, y, p in zip(tree.leaves(mine), tree.leaves(want), tree.leaves(got.params), strict=True):
        assert p.dtype == BF16
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)
        assert (x == y).double().mean() > 0.99  # compilers may fuse a product and a sum in one of the two
        assert (p == x.to(BF16)).double().mean() > 0.999  # all but ties


@pytest.mark.parametrize("mode", ["eager", "inductor", "cudagraph"])
def test_rounding_is_unbiased_and_the_bits_are_the_cpus(mode):
    n, part = 2**20, 0.3
    opt = optim.stochastic_rounding(optim.sgd(1.0), 3)

    def step(state, grads):
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new)

    def run(device, mode):
        params = {"w": torch.ones(n, dtype=BF16, device=device)}
        state = TrainState.create(params, opt)
        run = jit(step, mesh=Mesh(), layout=Layout(), mode=mode)
        for _ in range(4):
            state = run(state, {"w": torch.full((n,), -part / 128, device=device)})
        return state.params["w"].global_value().cpu()

    got = run("cuda", mode)
    assert abs((got.double().mean() - 1) * 128 - 4 * part) < 4 * (4 * 0.25 / n) ** 0.5 + 2.0**-14
    with torch.device("cpu"):
        assert torch.equal(got, run("cpu", "eager"))


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_nan_stays_nan(mode):
    """CUDA's own NaN has all bits set: rounding must not carry into the sign."""
    nan = optim.Optimizer(lambda p: (), lambda g, s, p=None: (tree.map(lambda x: x.float() * float("inf") * 0.0, g), s))
    for opt in (optim.split_master(nan), optim.stochastic_rounding(nan)):
        state = steps_of(opt, mode, {"w": torch.ones(1000, dtype=BF16)}, n=1)
        assert state.params["w"].isnan().all()


def test_bits_belong_to_the_key_on_any_device():
    key = random.key(4)
    here = random.rounding_bits(key, (33, 65), "w")
    assert torch.equal(here.cpu(), random.rounding_bits(key.cpu(), (33, 65), "w"))
