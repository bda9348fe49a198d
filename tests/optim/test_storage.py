"""bfloat16 parameters: with their low halves they are float32 ones; rounded at random they are right on average."""

from __future__ import annotations

import math

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, TrainState, jit, optim, random, tree
from fmeg.models import llama

BF16 = torch.bfloat16
INT32 = (-(2**31), 2**31)


def same_bits(x, y):
    return x.dtype == y.dtype and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def any_floats(n, seed=0):
    """Every pattern of bits: subnormal, huge, infinite and NaN ones too."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(*INT32, (n,), generator=g).to(torch.int32).view(torch.float32)
    special = torch.tensor([0.0, 1.0, -1.0, math.inf, -math.inf, 3.3e38, 3.4e38, -3.4e38, 1e-38, 1e-44])
    return torch.cat([x, special])


def test_halves_are_the_number():
    x = any_floats(100_000)
    high, low = optim.to_halves({"w": x, "n": x.double()})
    assert high["w"].dtype == BF16 and low["w"].dtype == torch.int16
    assert low["n"] is None and high["n"] is not None and high["n"].dtype == torch.float64
    back = optim.from_halves(high, low)["w"]
    number = ~x.isnan()
    assert same_bits(back[number], x[number])
    assert back[~number].isnan().all() and high["w"][~number].isnan().all()
    ties = low["w"] == -(2**15)
    assert same_bits(high["w"][number & ~ties], x.to(BF16)[number & ~ties])
    all_ones = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(
        torch.float32
    )  # what CUDA calls NaN, and its minus
    assert optim.to_halves(all_ones)[0].isnan().all()


@pytest.mark.parametrize("near", [2.0**-30, 2.0**-16, 1.0])
def test_adding_the_update_gives_the_new_value_exactly(near):
    """Also where parameter and update all but cancel: the new value is then far below both."""
    g = torch.Generator().manual_seed(0)
    old = any_floats(50_000).to(BF16)
    old = {"w": old[old.isfinite() & (old.abs() < 1e38)]}
    u = old["w"].float() * (near * torch.randn(old["w"].shape, generator=g) - 1.0)
    opt = optim.split_master(optim.sgd(1.0))
    state = opt.init(old)
    updates, new = opt.update({"w": -u}, state, old)
    want, low = optim.to_halves({"w": old["w"].float() + u})
    assert torch.equal(optim.apply_updates(old, updates)["w"], want["w"])
    assert torch.equal(new.low["w"], low["w"])
    opt = optim.stochastic_rounding(optim.sgd(1.0))
    got = optim.apply_updates(old, opt.update({"w": -u}, opt.init(old), old)[0])["w"].double()
    exact = (old["w"].float() + u).double()
    assert ((got - exact).abs() <= exact.abs() * 2.0**-7 + 2.0**-133).all()


def model_grads(params, seed):
    """Gradients as a model's that sees bfloat16: noise, and the parameters themselves."""
    g = torch.Generator().manual_seed(seed)
    return tree.map(lambda p: (torch.randn(p.shape, generator=g) + 3 * p.to(BF16).float()).to(BF16), params)


@pytest.mark.parametrize("inner", [optim.adamw(1e-3), optim.lion(1e-4), optim.sgd(1e-2, momentum=0.9)])
def test_a_split_master_is_a_float32_parameter_bit_for_bit(inner):
    g = torch.Generator().manual_seed(0)
    masters = {"w": torch.randn(40, 50, generator=g) * 0.02, "b": torch.randn(7, generator=g)}
    opt = optim.split_master(inner)
    params, low = optim.to_halves(masters)
    state, want = opt.init(params)._replace(low=low), inner.init(masters)
    for step in range(25):
        updates, want = inner.update(model_grads(params, step), want, masters)
        masters = optim.apply_updates(masters, updates)
        updates, state = opt.update(model_grads(params, step), state, params)
        params = optim.apply_updates(params, updates)
        for got, exact in ((optim.from_halves(params, state.low), masters), (state.inner, want)):
            assert all(same_bits(a, b) for a, b in zip(tree.leaves(got), tree.leaves(exact), strict=True))
    assert all(p.dtype == BF16 for p in tree.leaves(params))


def test_moments_in_bfloat16_change_only_the_moments():
    params = {"w": torch.ones(3, 4, dtype=BF16)}
    opt = optim.split_master(optim.adamw(1e-3, mu_dtype=BF16))
    _, state = opt.update(params, opt.init(params), params)
    assert state.inner.mu["w"].dtype == BF16 and state.inner.nu["w"].dtype == torch.float32


def test_other_dtypes_pass_through():
    params = {"half": torch.ones(2, dtype=torch.float16), "wide": torch.ones(2), "w": torch.ones(2, dtype=BF16)}
    for opt in (optim.split_master(optim.sgd(0.1)), optim.stochastic_rounding(optim.sgd(0.1))):
        updates, _ = opt.update(params, opt.init(params), params)
        plain, _ = optim.sgd(0.1).update(params, optim.sgd(0.1).init(params), params)
        assert torch.equal(updates["half"], plain["half"]) and torch.equal(updates["wide"], plain["wide"])
        with pytest.raises(ValueError, match="params"):
            opt.update(params, opt.init(params))


# -- rounding at random -----------------------------------------------------------------------------------------------
def rounded(value, u, n=200_000, steps=1):
    """Steps of adding u to n copies of a value."""
    opt = optim.stochastic_rounding(optim.sgd(1.0), 3)
    params = {"w": torch.full((n,), value, dtype=BF16)}
    state = opt.init(params)
    for _ in range(steps):
        updates, state = opt.update({"w": torch.full((n,), -u)}, state, params)
        params = optim.apply_updates(params, updates)
    return params["w"]


@pytest.mark.parametrize("value", [1.0, -1.0, 3.0, 0.0, 1e-30])
@pytest.mark.parametrize("part", [0.47, 0.23, 0.01, -0.3])
def test_unbiased(value, part):
    """The share that takes the step of one unit is its expectation, within four deviations of a binomial."""
    unit = 2.0 ** (math.floor(math.log2(abs(value))) - 7) if value else 2.0**-20
    u, n = part * unit, 200_000
    got = rounded(value, u, n).double()
    exact = torch.tensor(value, dtype=BF16).double() + u
    values = got.unique()
    assert len(values) == 2 and values[0] <= exact <= values[1]
    share = (exact - values[0]) / (values[1] - values[0])
    deviation = (share * (1 - share) / n).sqrt()
    assert abs((got == values[1]).double().mean() - share) < 4 * deviation + 2.0**-16


def test_what_needs_no_rounding_is_not_rounded():
    x = any_floats(20_000, seed=5).to(BF16)
    opt = optim.stochastic_rounding(optim.sgd(1.0))
    zero = {"w": torch.zeros(len(x))}
    got = optim.apply_updates({"w": x}, opt.update(zero, opt.init({"w": x}), {"w": x})[0])["w"]
    finite = x.isfinite()
    assert torch.equal(got[finite], x[finite]) and got[x.isnan()].isnan().all()


def test_steps_leaves_and_elements_are_independent():
    n = 2**16
    k = random.key(1)
    draws = [random.rounding_bits(random.fold_in(k, s), (n,), name) for s in (0, 1) for name in ("", "a", "layers.wq")]
    draws += [draws[0].roll(s) for s in (1, 2, 4, 32, 128)]
    x = torch.stack(draws).double()
    close = torch.corrcoef(x) - torch.eye(len(x), dtype=torch.float64)
    assert close.abs().max() < 5 / n**0.5
    counts = torch.bincount(draws[0] >> 8, minlength=256).double()
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 255 + 5 * (2 * 255) ** 0.5  # chi squared
    for bit in range(16):
        assert abs(((draws[0] >> bit) & 1).double().mean() - 0.5) < 4 * 0.5 / n**0.5


def test_bits_belong_to_the_global_index():
    k, shape = random.key(2), (4, 6, 10)
    whole = random.rounding_bits(k, shape)
    block = random._rounding_bits(k, 2, torch.tensor(3), 0, shape=shape, block=(2, 3, 5), salt=random._hash(""))
    assert torch.equal(block, whole[2:4, 3:6, 0:5])
    huge = (2**20, 2**14)  # more elements than an int32 counts
    draw = lambda i, j: random._rounding_bits(k, i, j, shape=huge, block=(3, 4), salt=0)
    a, b = draw(2**19, 5), draw(2**19 + 1, 6)
    assert torch.equal(a[1:, 1:], b[:2, :3]) and not torch.equal(draw(0, 5), draw(2**18, 5))
    assert random.rounding_bits(k, ()).shape == () and random.rounding_bits(k, (0, 3)).shape == (0, 3)


# -- on meshes and compiled -------------------------------------------------------------------------------------------
AXES = {"layers": {"w": "layers embed ff"}, "embed": "vocab embed"}
SIZES = dict(layers=2, embed=8, ff=12, vocab=16)
LAYOUTS = {
    "tensor": (dict(tp=2), Layout(ff="tp", vocab="tp")),
    "ZeRO-1": (dict(dp=2), Layout(opt=dict(embed="dp"))),
    "ZeRO-3, tensor, layers": (
        dict(dp=2, tp=2, pp=2),
        Layout(layers="pp", ff="tp", vocab="tp", params=dict(embed="dp"), opt=dict(embed="dp")),
    ),
}
inner = optim.adamw(1e-3, mu_dtype=torch.float32, nu_dtype=torch.float32)
WRAPPED = {
    "split_master": optim.split_master(inner),
    "stochastic_rounding": optim.stochastic_rounding(inner, 5),
    "skipping": optim.skip_nonfinite(optim.split_master(inner)),
}


def normal(seed):
    g = torch.Generator().manual_seed(seed)
    return tree.map(lambda s: torch.randn([SIZES[n] for n in s.split()], generator=g).to(BF16), AXES)


def step_of(opt):
    def step(state, grads):
        updates, opt_state = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=opt_state)

    return step


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WRAPPED)
def test_a_mesh_equals_one_device_bit_for_bit(name, layout):
    step, (sizes, view) = step_of(WRAPPED[name]), LAYOUTS[layout]
    on_mesh = jit(step, mesh=Mesh(**sizes), layout=view, axes={"grads": AXES}, params=(), strict=True)
    want = got = TrainState.create(normal(0), WRAPPED[name], AXES)
    for seed in (1, 2, 3):
        want, got = step(want, normal(seed)), on_mesh(got, normal(seed))
    for x, y in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert same_bits(x.global_value(), y)


@pytest.mark.parametrize("name", ["split_master", "stochastic_rounding"])
def test_compiled_into_donated_memory(name):
    step = step_of(WRAPPED[name])
    run = jit(step, mesh=Mesh(), layout=Layout(), axes={"grads": AXES}, params=(), donate="state", mode="inductor")
    want = TrainState.create(normal(0), WRAPPED[name], AXES)
    got = run(want, normal(1))
    want = step(want, normal(1))
    before = [x.value.data_ptr() for x in tree.leaves(got)]
    for seed in (2, 3):
        want, got = step(want, normal(seed)), run(got, normal(seed))
    assert [x.value.data_ptr() for x in tree.leaves(got)] == before
    for x, y in zip(tree.leaves(got.params), tree.leaves(want.params), strict=True):
        assert (x.global_value() != y).double().mean() < 0.02  # its arithmetic differs in the last bits
    if name == "split_master":
        whole = tree.map(lambda x: x.global_value(), got)
        mine = optim.from_halves(whole.params, whole.opt.low)
        torch.testing.assert_close(mine, optim.from_halves(want.params, want.opt.low), rtol=1e-6, atol=1e-9)


def test_training_goes_on_where_bfloat16_stalls():
    losses = {how: tiny_llama(how) for how in ("float32", "plain", "split", "random")}
    fallen = {how: x[0] - sum(x[-5:]) / 5 for how, x in losses.items()}
    assert fallen["float32"] > 0.1
    assert fallen["plain"] < 0.5 * fallen["float32"]
    assert abs(fallen["random"] / fallen["float32"] - 1) < 0.03
    assert abs(fallen["split"] / fallen["float32"] - 1) < 0.03


def tiny_llama(how, steps=100):
    cfg = llama.Config(
        vocab_size=64, embed=32, layers=2, heads=2, kv_heads=2, head_dim=16, ff=64,
        dtype=torch.float32 if how == "float32" else BF16, compute_dtype=torch.float32,
    )  # fmt: skip
    adam = optim.adamw(2e-5, b2=0.95, mu_dtype=torch.float32, nu_dtype=torch.float32, weight_decay=0.0)
    opt = {
        "split": optim.split_master(adam), "random": optim.stochastic_rounding(adam, 1)
    }.get(how, adam)  # fmt: skip
    params = tree.map(lambda p: p.to(BF16).to(cfg.dtype), llama.init(random.key(0), cfg))
    ids = torch.randint(0, 8, (8, 33), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(8, 32)}
    grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))
    state, losses = opt.init(params), []
    for _ in range(steps):
        (loss, _), grads = grad(params, batch)
        updates, state = opt.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        losses.append(float(loss))
    return losses
