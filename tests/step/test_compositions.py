"""Steps put together in ways nobody planned: on a mesh they are what they are on one device."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

import fmeg
from fmeg import Layout, Mesh, TrainState, jit, optim, random, scan, tree, value_and_grad
from fmeg.models import llama

F64 = torch.float64
_g = torch.Generator().manual_seed(0)
W = {k: torch.randn(8, 8, generator=_g, dtype=F64) * 0.5 for k in "wv"}
X = torch.randn(4, 8, generator=_g, dtype=F64)
MESH, LAYOUT = Mesh(dp=2, tp=2), Layout(batch="dp", ff="tp", params=dict(embed="dp"))
AXES = {"params": {"w": "embed ff", "v": "ff embed"}}


def first(p: dict, b: Tensor) -> tuple[Tensor, int]:
    return (torch.tanh(b @ p["w"]) @ p["v"]).square().sum(), b.shape[0]


def second(p: dict, b: Tensor) -> tuple[Tensor, int]:
    return (b @ p["w"]).sin().sum(), 2


def descend(p: dict, x: Tensor) -> tuple[dict, Tensor]:
    (value, _), g = value_and_grad(first)(p, x)
    return tree.map(lambda a, b: a - 0.1 * b, p, g), value


def two_losses(params, batch):
    (a, _), ga = value_and_grad(first)(params, batch)
    (b, _), gb = value_and_grad(second, microbatches=2)(params, batch)
    return a + b, tree.map(torch.sub, ga, gb)


def steps_in_a_scan(params, batch):
    return scan(descend, params, torch.stack([batch, batch * 2, batch.sin()]))


def steps_in_a_loop(params, batch):
    for _ in range(3):
        params, value = descend(params, batch)
    return params, value


def a_cast_outside(params, batch):
    (value, _), g = value_and_grad(first)(tree.map(lambda p: p * 2, params), batch)
    return value, g


def closed_over_a_traced_value(params, batch):
    s = batch.sum()
    return value_and_grad(lambda p, b: ((b @ p["w"] * s).sum(), 1))(params, batch)


def closed_over_a_parameter(params, batch):
    return value_and_grad(lambda p, b: ((b @ p["w"] @ params["v"]).sum(), 1))({"w": params["w"]}, batch)


def per_sample(params, batch):
    return torch.func.vmap(lambda x: value_and_grad(first)(params, x[None])[1]["w"])(batch)


def hessian_vector(params, batch):
    norm = lambda w: (torch.func.grad(lambda w: first({**params, "w": w}, batch)[0])(w) ** 2).sum()
    return torch.func.grad(norm)(params["w"])


MODULE = torch.nn.Linear(8, 8, dtype=F64)


def a_module(params, batch):
    def loss(p: dict, b: Tensor) -> tuple[Tensor, int]:
        return torch.func.functional_call(MODULE, {"weight": p["w"], "bias": p["v"][0]}, (b,)).sin().sum(), 1

    return value_and_grad(loss)(params, batch)


def checkpointed(params, batch):
    inner = lambda b, w: torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(x @ w), b, use_reentrant=False)
    return value_and_grad(lambda p, b: (inner(b, p["w"]).sum(), 1))(params, batch)


class Model:
    def __call__(self, params, batch):
        return value_and_grad(self.loss)(params, batch)

    def loss(self, p: dict, b: Tensor) -> tuple[Tensor, int]:
        return first(p, b)


CASES = {
    f.__name__: f
    for f in (
        two_losses, steps_in_a_scan, steps_in_a_loop, a_cast_outside, closed_over_a_traced_value,
        closed_over_a_parameter, per_sample, hessian_vector, a_module, checkpointed,
    )
} | {
    "partial": functools.partial(lambda k, params, batch: value_and_grad(first)(params, batch * k), 2.0),
    "callable": Model(),
    "method": Model().__call__,
}  # fmt: skip


def equal(got, want, tol: float = 1e-12) -> None:
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and torch.allclose(a.global_value(), b, rtol=tol, atol=tol)


@pytest.mark.parametrize("case", CASES)
def test_compositions(case):
    fn = CASES[case]
    equal(jit(fn, mesh=MESH, layout=LAYOUT, axes=AXES)(W, X), fn(W, X))


def test_grad_modes_around_a_call():
    fn = lambda params, batch: value_and_grad(first)(params, batch)
    want = fn(W, X)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got = jit(fn, mesh=MESH, layout=LAYOUT, axes=AXES)(W, X)
            forward = jit(lambda params, batch: first(params, batch)[0], mesh=MESH, layout=LAYOUT, axes=AXES)(W, X)
        equal(got, want)
        equal(forward, first(W, X)[0])


def test_autocast_inside_and_around():
    w, x = tree.map(Tensor.float, W), X.float()

    def inside(params, batch):
        def loss(p: dict, b: Tensor) -> tuple[Tensor, int]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = torch.tanh(b @ p["w"]) @ p["v"]
            assert y.dtype == torch.bfloat16
            return y.float().square().sum(), 4

        return value_and_grad(loss)(params, batch)

    equal(jit(inside)(w, x), inside(w, x), 0)
    equal(jit(inside, mesh=MESH, layout=LAYOUT, axes=AXES)(w, x), inside(w, x), 0.05)
    around = lambda params, batch: value_and_grad(first)(params, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        equal(jit(around)(w, x), around(w, x), 0)


def test_what_was_traced_without_autocast_is_traced_again_with_it():
    """The state of autocast belongs to a trace as dtypes do; what runs later is as it was traced."""
    step, x = jit(lambda x: x @ x), torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        assert torch.equal(step(x).global_value(), x @ x) and step(x).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = step(x)
            assert got.dtype == torch.bfloat16 and torch.equal(got.global_value(), x @ x)
    assert len(step._cache) == 2


def test_arrays_are_for_jit():
    params = jit(lambda params: params, mesh=MESH)(W)
    with pytest.raises(TypeError, match=r"value_and_grad\(first\): p.v is of type Array.*under fmeg.jit"):
        value_and_grad(first)(params, X)


# -- sizes at the edge ------------------------------------------------------------------------------------------------
TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
SP = dict(TP, res_seq="tp")
Z3 = dict(params=dict(embed="dp"))
SIZES = {
    "one layer, one row": (dict(layers=1), (1, 8), Mesh(tp=2), SP, 1),
    "one token": (dict(), (2, 1), Mesh(tp=2), TP, 1),
    "an odd sequence": (dict(), (2, 7), Mesh(dp=2, tp=2), dict(batch="dp", **TP), 1),
    "microbatches of one row a rank": (dict(), (4, 8), Mesh(dp=2, tp=2), dict(batch="dp", **TP, **Z3), 2),
    "threes": (
        dict(embed=18, heads=6, kv_heads=3, ff=36, vocab_multiple=12), (6, 9),
        Mesh(dp=3, tp=3), dict(batch="dp", **SP, **Z3), 1,
    ),
    "sixteen ranks": (
        dict(), (4, 8), Mesh(dp=4, cp=2, tp=2), dict(batch="dp", **TP, seq="cp", res_seq=("cp", "tp"), **Z3), 1
    ),
    "everything masked": (dict(), (4, 8), Mesh(dp=2, tp=2), dict(batch="dp", **SP), 1),
    "bf16": (dict(dtype=torch.bfloat16), (4, 8), Mesh(dp=2, tp=2), dict(batch="dp", **SP, opt=dict(embed="dp")), 1),
}  # fmt: skip


@pytest.mark.parametrize("case", SIZES)
def test_sizes_at_the_edge(case):
    changes, (rows, seq), mesh, layout, m = SIZES[case]
    shape = dict(vocab_size=31, embed=16, layers=2, heads=4, kv_heads=2, head_dim=4, ff=24, vocab_multiple=8, dtype=F64)
    cfg = llama.Config(**{**shape, **changes})
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    g = torch.Generator().manual_seed(0)
    tokens, targets = torch.randint(0, cfg.vocab_size, (2, rows, seq), generator=g)
    batch = {"tokens": tokens, "targets": targets, "mask": torch.full((rows, seq), float(case != "everything masked"))}

    def step(state, batch):
        (value, aux), g = value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=m)(state.params, batch)
        updates, new = opt.update(g, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), {"loss": value, **aux}

    want = got = TrainState.create(llama.init(random.key(0), cfg), opt, llama.logical_axes(cfg))
    jitted = jit(step, mesh=mesh, layout=Layout(**layout), strict=True, donate=("state",))
    for _ in range(2):
        want, metrics = step(want, batch)
        got, same = jitted(got, batch)
    fmeg.check_finite(same)
    equal((got, same), (want, metrics), 0.05 if case == "bf16" else 1e-11)
    if case == "everything masked":
        assert float(metrics["loss"]) == 0 and float(metrics["count"]) == 0
