"""AdamW against torch.optim and optax, in float64."""

import pytest
import torch

from fmeg import tree
from fmeg.optim import adamw, cosine, decay_matrices


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_torch(params, train, train_torch, assert_same, weight_decay):
    kw = dict(eps=1e-6, weight_decay=weight_decay)
    want = train_torch(lambda ps: torch.optim.AdamW(ps, lr=0.05, betas=(0.8, 0.95), **kw), params)
    assert_same(train(adamw(0.05, 0.8, 0.95, **kw), params), want)


def test_equals_optax_with_mask_and_schedule(params, train, train_optax, assert_same):
    optax = pytest.importorskip("optax")
    mask = tree.map_with_path(decay_matrices, params)
    assert 0 < sum(tree.leaves(mask)) < len(tree.leaves(mask))

    def make():
        schedule = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 6, 0.01)
        lr = lambda count: schedule(count.astype("float64"))
        return optax.adamw(lr, b1=0.8, b2=0.95, eps=1e-6, weight_decay=0.3, mask=mask)

    got = train(adamw(cosine(0.1, 6, end=0.01, warmup=2), 0.8, 0.95, 1e-6, 0.3, mask), params)
    assert_same(got, train_optax(make, params))


def test_a_weight_decay_schedule_is_used_at_each_step(params, train, assert_same):
    """λ(t) = 0.1 (t + 1): the first step is that of λ = 0.1, and later ones are not."""
    scheduled = train(adamw(0.1, weight_decay=lambda count: 0.1 * (count + 1)), params, 2)
    plain = train(adamw(0.1, weight_decay=0.1), params, 2)
    assert_same(scheduled[:1], plain[:1])
    w, v = (h[1]["layers"]["w"] for h in (scheduled, plain))
    torch.testing.assert_close(w - v, -0.1 * 0.1 * plain[0]["layers"]["w"], rtol=1e-10, atol=1e-12)


def test_moments_have_the_dtype_asked_for():
    params = {"w": torch.ones(3, dtype=torch.bfloat16)}
    opt = adamw(0.1, mu_dtype=torch.float32)
    state = opt.init(params)
    assert (state.mu["w"].dtype, state.nu["w"].dtype) == (torch.float32, torch.bfloat16)
    updates, state = opt.update(params, state, params)
    assert (state.mu["w"].dtype, state.nu["w"].dtype) == (torch.float32, torch.bfloat16)
    assert updates["w"].dtype == torch.float32


def test_update_uses_the_moments_before_they_are_rounded():
    """A bfloat16 second moment is rounded in the state only: the first update is that of float32 moments."""
    params = {"w": torch.linspace(-2, 2, 7)}
    exact, rounded = adamw(0.1), adamw(0.1, mu_dtype=torch.bfloat16, nu_dtype=torch.bfloat16)
    want = exact.update(params, exact.init(params), params)[0]
    assert torch.equal(rounded.update(params, rounded.init(params), params)[0]["w"], want["w"])


def test_decay_without_params_is_an_error(params):
    opt = adamw(0.1)
    with pytest.raises(ValueError, match=r"adamw: `params` is None"):
        opt.update(params, opt.init(params))
