"""Muon: against torch.optim.Muon and optax in float64, per layer, per reshaped matrix, and who goes where."""

import pytest
import torch

from fmeg import tree
from fmeg.optim import adamw, matrices, muon, sgd
from fmeg.optim.newton_schulz import newton_schulz

EVERY = {"a": "(rows) (cols)", "b": "(rows) (cols)"}


@pytest.fixture
def two():
    g = torch.Generator().manual_seed(5)
    return {k: torch.randn(s, generator=g, dtype=torch.float64) for k, s in {"a": (4, 6), "b": (7, 3)}.items()}


@pytest.fixture
def float64_torch_muon(monkeypatch):
    """torch.optim.Muon with a Newton-Schulz in float64 instead of bfloat16."""
    module = pytest.importorskip("torch.optim._muon")
    monkeypatch.setattr(module, "_zeropower_via_newtonschulz", lambda x, *_: newton_schulz(x))
    return torch.optim.Muon


@pytest.mark.parametrize("nesterov", [False, True])
def test_equals_torch(two, train, train_torch, assert_same, float64_torch_muon, nesterov):
    kw = dict(nesterov=nesterov, weight_decay=0.3)
    make = lambda ps: float64_torch_muon(ps, lr=0.05, momentum=0.9, adjust_lr_fn="match_rms_adamw", **kw)
    assert_same(train(muon(0.05, EVERY, b1=0.9, **kw), two), train_torch(make, two), tol=1e-12)


def test_original_scaling_is_torchs_on_transposed_weights(two, float64_torch_muon):
    """torch's weights are (out, in), ours (in, out)."""
    params = [torch.nn.Parameter(p.mT.contiguous()) for p in two.values()]
    for p in params:
        p.grad = p.detach().clone()
    float64_torch_muon(params, lr=0.05, weight_decay=0.3, adjust_lr_fn="original").step()
    opt = muon(0.05, EVERY, weight_decay=0.3, scaling="original")
    updates, _ = opt.update(two, opt.init(two), two)
    for k, p in zip(two, params, strict=True):
        torch.testing.assert_close(two[k] + updates[k], p.detach().mT, rtol=1e-12, atol=1e-10)


def test_equals_optax_with_the_rest_on_adamw(two, train, train_optax, assert_same):
    """Without Nesterov: optax corrects the bias of the momentum, which only a norm sees, and eps is far below it."""
    optax = pytest.importorskip("optax")
    params = two | {"norm": two["a"][0], "scale": two["b"][0, 0]}

    def make():
        return optax.contrib.muon(
            0.05, beta=0.9, eps=1e-30, weight_decay=0.3, nesterov=False, adam_b1=0.8, adam_b2=0.95, consistent_rms=0.2
        )

    rest = adamw(0.05, 0.8, 0.95, eps=1e-30, weight_decay=0.0)
    opt = muon(0.05, EVERY, rest, b1=0.9, nesterov=False, weight_decay=0.3, eps=1e-30)
    assert_same(train(opt, params), train_optax(make, params), tol=1e-12)


def test_stacked_layers_and_heads_are_the_matrices_one_by_one():
    g = torch.Generator().manual_seed(1)
    wq = torch.randn(2, 6, 2, 3, generator=g, dtype=torch.float64)
    wo = torch.randn(2, 2, 3, 6, generator=g, dtype=torch.float64)
    params = {"layers": {"wq": wq, "wo": wo}}
    axes = {"layers": {"wq": "layers embed heads head_dim", "wo": "layers heads head_dim embed"}}
    opt = muon(0.1, matrices(axes))
    updates, state = opt.update(params, opt.init(params), params)
    assert tree.map(lambda x: x.shape, state["muon"].mu) == tree.map(lambda x: x.shape, params)
    for name, shape in {"wq": (6, 6), "wo": (6, 6)}.items():
        for i in range(2):
            one = {"a": params["layers"][name][i].reshape(shape)}
            alone = muon(0.1, {"a": "(r) (c)"})
            want = alone.update(one, alone.init(one), one)[0]["a"]
            got = updates["layers"][name][i].reshape(shape)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_default_rule_takes_stacked_matrices_only(params):
    state = muon(0.1, others=sgd(0.1, momentum=0.9)).init(params)
    assert tree.paths(state["muon"].mu) == ["layers.w"]
    assert tree.paths(state["others"].mu) == ["bias", "embed", "head", "layers.norm", "temperature"]


def test_update_has_adamws_size(two):
    """match_rms: the update's root mean square is about 0.2 of the learning rate, whatever the shape."""
    opt = muon(1.0, EVERY, weight_decay=0.0)
    updates, _ = opt.update(two, opt.init(two), two)
    for u in updates.values():
        assert 0.2 * 0.68 < u.square().mean().sqrt() < 0.2 * 1.14


def test_newton_schulz_dtype(two):
    exact, rough = muon(1.0, EVERY, weight_decay=0.0), muon(1.0, EVERY, weight_decay=0.0, dtype=torch.bfloat16)
    a, b = (o.update(two, o.init(two), two)[0]["a"] for o in (exact, rough))
    assert a.dtype == b.dtype == torch.float64
    assert 0 < (a - b).abs().max() < 0.02


def test_errors_say_what_to_give(params):
    with pytest.raises(ValueError, match=r"'layers.wq' has shape \(2, 6, 2, 3\).*matrices\(logical axes\)"):
        muon(0.1).init({"layers": {"wq": torch.ones(2, 6, 2, 3)}})
    with pytest.raises(ValueError, match="no parameter is a matrix by the rule"):
        muon(0.1).init({"w": torch.ones(3, 3)})
    with pytest.raises(ValueError, match="one of match_rms, original, given 'rms'"):
        muon(0.1, scaling="rms")
