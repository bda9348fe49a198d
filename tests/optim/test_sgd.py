"""SGD against torch.optim and optax, in float64."""

import pytest
import torch

from fmeg.optim import linear, sgd


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_equals_torch(params, train, train_torch, assert_same, momentum, nesterov, weight_decay):
    kw = dict(momentum=momentum, nesterov=nesterov, weight_decay=weight_decay)
    want = train_torch(lambda ps: torch.optim.SGD(ps, lr=0.05, **kw), params)
    assert_same(train(sgd(0.05, **kw), params), want)


@pytest.mark.parametrize("momentum, nesterov", [(0.0, False), (0.9, False), (0.9, True)])
def test_equals_optax(params, train, train_optax, assert_same, momentum, nesterov):
    optax = pytest.importorskip("optax")
    schedule = optax.linear_schedule(0.1, 0.02, 4)
    make = lambda: optax.sgd(lambda count: schedule(count.astype("float64")), momentum or None, nesterov)
    assert_same(train(sgd(linear(0.1, 4, end=0.02), momentum, nesterov), params), train_optax(make, params))


def test_no_momentum_no_buffer(params):
    assert sgd(0.1).init(params).mu is None


def test_penalty_only_where_the_mask_says(params):
    zero = {k: torch.zeros_like(params[k]) for k in ("bias", "head")}
    some = {k: params[k] for k in zero}
    opt = sgd(1.0, weight_decay=0.5, mask=lambda path, leaf: path == "head")
    updates, _ = opt.update(zero, opt.init(some), some)
    assert torch.equal(updates["bias"], zero["bias"])
    assert torch.equal(updates["head"], -0.5 * params["head"])


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="nesterov=True needs a momentum"):
        sgd(0.1, nesterov=True)


def test_momentum_kept_in_another_dtype_meets_float64_gradients():
    params = {"w": torch.linspace(-1, 1, 5, dtype=torch.float64)}
    opt = sgd(0.1, momentum=0.9, mu_dtype=torch.float32)
    updates, state = opt.update(params, opt.init(params))
    assert updates["w"].dtype == torch.float64 and state.mu["w"].dtype == torch.float32
    torch.testing.assert_close(state.mu["w"], params["w"].float(), rtol=0, atol=0)
