"""Delayed scaling: the scales of a step are those of earlier ones, and what it saw is handed on."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, einsum, precision, tree
from fmeg.models import llama
from fmeg.program.errors import TraceError
from fmeg.testing import assert_equivalent

RECIPE = precision.fp8("delayed", history=2, skip_first=0, skip_last=0)


def _cast(x, amax, element):
    largest, dtype = {"e4m3": (448, torch.float8_e4m3fn), "e5m2": (57344, torch.float8_e5m2)}[element]
    s = (amax.float() * (1 / largest)) if amax else torch.tensor(1.0)
    return (x * (1 / s).double()).clamp(-largest, largest).to(dtype).double() * s.double()


def _loss(params, batch):
    y = einsum("b d, d f -> b f", batch["x"], params["layers"])
    return (torch.tanh(y) * batch["c"]).sum(), 1


def _data(seed=0, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    rand = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    return {"layers": rand(8, 12)}, {"x": scale * rand(16, 8), "c": rand(16, 12)}


def test_four_steps_by_hand():
    step = fmeg.value_and_grad(_loss, precision=RECIPE)
    params, _ = _data()
    history = fmeg.amax_history(_loss, RECIPE, params, _data()[1])
    w, seen = params["layers"], [[torch.tensor(0.0)] * 3] * 2
    for i in range(4):
        batch = _data(i, scale=[1.0, 4.0, 2.0, 0.5][i])[1]
        ax, aw, ag = (max(s[role] for s in seen[-2:]) for role in range(3))
        y = _cast(batch["x"], ax, "e4m3") @ _cast(w, aw, "e4m3")
        dy = batch["c"] * (1 - torch.tanh(y) ** 2)
        dw = _cast(batch["x"], ax, "e4m3").t() @ _cast(dy, ag, "e5m2")
        (loss, aux), grads = step(params, batch, amax=history)
        history = aux["amax"]
        assert float(loss) == pytest.approx(float((torch.tanh(y) * batch["c"]).sum()), rel=1e-12)
        torch.testing.assert_close(grads["layers"], dw, rtol=1e-12, atol=1e-12)
        seen.append([t.abs().max().float() for t in (batch["x"], w, dy)])
        assert history["layers"].tolist() == [[float(seen[-1][r]), float(seen[-2][r])] for r in range(3)]


def test_values_beyond_the_history_saturate():
    params, batch = _data()
    history = {"layers": torch.ones(3, 2)}
    (loss, _), _ = fmeg.value_and_grad(_loss, precision=RECIPE)(params, batch, amax=history)
    y = batch["x"].clamp(-1, 1) @ params["layers"].clamp(-1, 1)
    assert float(loss) == pytest.approx(float((torch.tanh(y) * batch["c"]).sum()), rel=0.1)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_step_that_was_not_finite_is_no_scale(bad):
    """The next one has the scales of the steps before it, and sees finite values again."""
    params, batch = _data()
    step = fmeg.value_and_grad(_loss, precision=RECIPE)
    before = {"layers": torch.tensor([[2.0, 1.0], [3.0, 1.0], [4.0, 1.0]])}
    broken = {**batch, "x": batch["x"].index_fill(0, torch.tensor([3]), bad)}
    (_, aux), _ = step(params, broken, amax=before)
    assert not aux["amax"]["layers"][0, 0].isfinite()
    (loss, after), grads = step(params, batch, amax=aux["amax"])
    top = params["layers"].abs().max().clamp(min=3.0)
    y = _cast(batch["x"], torch.tensor(2.0), "e4m3") @ _cast(params["layers"], top, "e4m3")
    assert float(loss) == pytest.approx(float((torch.tanh(y) * batch["c"]).sum()), rel=1e-12)
    assert grads["layers"].isfinite().all() and after["amax"]["layers"][:, 0].isfinite().all()


def test_of_microbatches_the_largest_is_kept():
    params, batch = _data()
    one = fmeg.value_and_grad(_loss, precision=RECIPE)(params, batch)[0][1]["amax"]["layers"]
    four = fmeg.value_and_grad(_loss, precision=RECIPE, microbatches=4)(params, batch)[0][1]["amax"]["layers"]
    assert torch.equal(one[:2], four[:2])
    assert torch.allclose(four[2], one[2] / 4)  # the mean over four counts


def _problem():
    sizes = dict(vocab_size=61, embed=16, layers=4, heads=4, kv_heads=2, head_dim=8, ff=32, vocab_multiple=16)
    cfg = llama.Config(**sizes, dtype=torch.float64)
    tokens = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(4, 16, dtype=torch.float64)}
    axes = {"params": llama.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    return (lambda params, batch: llama.loss(params, batch, cfg)), llama.init(fmeg.random.key(0), cfg), batch, axes


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_mesh_is_one_device(microbatches):
    loss, params, batch, axes = _problem()
    recipe = precision.fp8("delayed", history=3)
    step = fmeg.value_and_grad(loss, precision=recipe, microbatches=microbatches)

    def two_steps(params, batch, amax):
        (_, aux), _ = step(params, batch, amax=amax)
        return step(params, batch, amax=aux["amax"])

    tp = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
    layout = Layout(batch="dp", res_seq="tp", params=dict(embed="dp"), **tp)
    history = fmeg.amax_history(loss, recipe, params, batch)
    assert {tuple(h.shape) for h in history.values()} == {(2, 3, 3)} and len(history) == 7
    mesh = Mesh(dp=2, tp=2)
    assert_equivalent(two_steps, params, batch, history, mesh=mesh, layout=layout, axes=axes, strict=True, tol=1e-11)


def test_near_the_exact_gradient_once_it_knows():
    loss, params, batch, _ = _problem()
    recipe = precision.fp8("delayed", history=3)
    step, amax = fmeg.value_and_grad(loss, precision=recipe), None
    want = fmeg.value_and_grad(loss)(params, batch)[1]
    for limit in (1.0, 0.1):
        (_, aux), grads = step(params, batch, amax=amax)
        amax = aux["amax"]
        for a, b in zip(tree.leaves(grads), tree.leaves(want), strict=True):
            assert (a - b).norm() < limit * b.norm()


def test_two_uses_of_one_parameter_are_two_sites():
    def loss(params, batch):
        x = einsum("b d, d e -> b e", batch, params["layers"])
        return einsum("b d, d e -> b e", x, params["layers"]).sum(), 1

    params = {"layers": torch.randn(8, 8)}
    history = fmeg.amax_history(loss, RECIPE, params, torch.ones(2, 8))
    assert sorted(history) == ["layers", "layers:1"]
    (_, aux), _ = fmeg.value_and_grad(loss, precision=RECIPE)(params, torch.ones(2, 8), amax=history)
    assert aux["amax"]["layers"][0, 0] == 1.0 and aux["amax"]["layers:1"][0, 0] != 1.0


def test_without_the_weight_gradient_nothing_is_seen_of_the_cotangent():
    params, batch = _data()
    recipe = precision.fp8("delayed", history=2, weight_gradient=False)
    history = {"layers": torch.full((3, 2), 5.0)}
    (_, aux), _ = fmeg.value_and_grad(_loss, precision=recipe)(params, batch, amax=history)
    assert aux["amax"]["layers"][2].tolist() == [5.0, 5.0]
    assert aux["amax"]["layers"][0, 0] == batch["x"].abs().max().float()


def test_what_it_refuses():
    params, batch = _data()
    with pytest.raises(ValueError, match="amax must have the entries"):
        fmeg.value_and_grad(_loss, precision=RECIPE)(params, batch, amax={"layers": torch.ones(3, 4)})
    with pytest.raises(TraceError, match="does not run in a pipeline"):
        fmeg.value_and_grad(_loss, precision=RECIPE, schedule="1f1b")(params, batch)
