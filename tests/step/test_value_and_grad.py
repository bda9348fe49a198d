"""Loss and gradient: eager, traced, in microbatches and under outer transforms are one thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fmeg import Layout, Mesh, einsum, jit, ops, remat, scan, tree, value_and_grad
from fmeg.program.errors import ShardingError, TraceError

F64 = torch.float64
B, S, D, V = 4, 6, 8, 12


def problem(seed: int = 0) -> tuple[dict, dict]:
    g = torch.Generator().manual_seed(seed)
    f = lambda *s: torch.randn(*s, generator=g, dtype=F64) * 0.5
    params = {"table": f(V, D), "layers": {"w": f(3, D, D), "b": f(3, D)}, "step": torch.tensor(7)}
    ids = lambda: torch.randint(0, V, (B, S), generator=g)
    return params, {"ids": ids(), "targets": ids(), "mask": (torch.rand(B, S, generator=g) < 0.6).double()}


def model(p: dict, batch: dict) -> Tensor:
    layer = remat(lambda x, q: torch.tanh(einsum("b s d, d f -> b s f", x, q["w"]) + q["b"]) + x)
    x, _ = scan(lambda c, q: (layer(c, q), None), ops.embedding(p["table"], batch["ids"]), p["layers"])
    return ops.cross_entropy(einsum("b s d, v d -> b s v", x, p["table"]), batch["targets"])


def loss(p: dict, batch: dict) -> tuple[Tensor, Tensor]:
    return (model(p, batch) * batch["mask"]).sum(), batch["mask"].sum()


def mean(p: dict, batch: dict) -> Tensor:
    total, count = loss(p, batch)
    return total / count


def reference(fn, p: dict, batch: dict) -> tuple[Tensor, dict]:
    """The loss as one number, differentiated by autograd; None for what is not a float."""
    active = tree.map(lambda x: x.clone().requires_grad_(x.is_floating_point()), p)
    value = fn(active, batch)
    value.backward()
    return value.detach(), tree.map(lambda x: x.grad, active)


def jitted(fn, *args, mesh=None, layout=None, axes=None):
    out = jit(lambda params, batch: fn(params, batch), mesh=mesh, layout=layout, axes=axes)(*args)
    return tree.map(lambda a: a.global_value(), out)


def equal(got, want, tol: float = 1e-13) -> None:
    assert tree.paths(got) == tree.paths(want)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, path
        assert torch.allclose(a, b, rtol=tol, atol=tol), (path, (a - b).abs().max())


WAYS = ["eager", "traced", "two microbatches", "four microbatches", "traced, two microbatches"]


def run(way: str, fn, p, batch):
    m = 2 if "two" in way else 4 if "four" in way else 1
    f = value_and_grad(fn, microbatches=m)
    return jitted(f, p, batch) if "traced" in way else f(p, batch)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_is_the_mean_over_the_whole_batch(way):
    p, batch = problem()
    (value, aux), grads = run(way, loss, p, batch)
    want, want_grads = reference(mean, p, batch)
    equal(value, want)
    equal(aux, {"count": batch["mask"].sum()})
    assert grads["step"] is None
    equal(grads, want_grads)


def test_on_one_device_traced_is_eager_bit_for_bit():
    p, batch = problem()
    tables = {
        "in": p["table"],
        "out": p["table"],
    }  # eager autograd adds the two uses of a tied table a microbatch at a time
    untied = lambda q, b: loss({**q, "table": q["table"]["in"] * 0.5 + q["table"]["out"] * 0.5}, b)
    for m, fn, params in [(1, loss, p), (2, untied, {**p, "table": tables})]:
        f = value_and_grad(fn, microbatches=m)
        for a, b in zip(tree.leaves(jitted(f, params, batch)), tree.leaves(f(params, batch)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("way", WAYS)
def test_several_pairs_and_aux(way):
    """A main loss and an auxiliary one with counts of their own; sums of whatever else."""

    def fn(p, batch):
        losses = model(p, batch)
        second = (losses[:, 1:] ** 2).sum()
        aux = {"tokens": losses.numel(), "largest": {"rows": (losses > 2).sum(0)}, "squares": second}
        return [((losses * batch["mask"]).sum(), batch["mask"].sum()), (0.1 * second, losses[:, 1:].numel())], aux

    def one(p, batch):
        (a, n), (b, k) = fn(p, batch)[0]
        return a / n + b / k

    p, batch = problem()
    (value, aux), grads = run(way, fn, p, batch)
    want, want_grads = reference(one, p, batch)
    equal(value, want)
    equal(grads, want_grads)
    losses = model(p, batch)
    assert float(aux["tokens"]) == B * S and float(aux["count"]) == float(batch["mask"].sum())
    assert torch.equal(aux["largest"]["rows"], (losses > 2).sum(0))
    equal(aux["squares"], (losses[:, 1:] ** 2).sum())


def test_a_tuple_of_pairs_and_a_pair_with_aux():
    p, x = torch.tensor(2.0, dtype=F64), torch.arange(4.0, dtype=F64)
    (a, _), g = value_and_grad(lambda p, x: (((p * x).sum(), 2), ((p * p * x).sum(), 4)))(p, x)
    assert (float(a), float(g)) == (12.0, 9.0)
    (a, aux), g = value_and_grad(lambda p, x: (((p * x).sum(), x.numel() // 2), {"n": 1}), microbatches=2)(p, x)
    assert (float(a), float(g), float(aux["n"])) == (6.0, 3.0, 2.0)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_to_count_is_a_loss_of_zero(way):
    """A batch whose every token is masked changes nothing, and is no NaN; nor is a microbatch of that kind."""
    p, batch = problem()
    none = {**batch, "mask": torch.zeros(B, S, dtype=F64)}
    (value, aux), grads = run(way, loss, p, none)
    assert float(value) == 0 and float(aux["count"]) == 0
    assert all(torch.equal(g, torch.zeros_like(g)) for g in tree.leaves(grads))
    some = {**batch, "mask": torch.cat([torch.zeros(2, S, dtype=F64), torch.ones(2, S, dtype=F64)])}
    (value, _), grads = run(way, loss, p, some)
    want, want_grads = reference(mean, p, some)
    equal(value, want)
    equal(grads, want_grads)


@pytest.mark.parametrize("way", WAYS)
def test_parameters_without_influence(way):
    p, batch = problem()
    p["extra"], p["mask"] = torch.ones(2, 3, dtype=F64), torch.ones(3, dtype=torch.bool)
    _, grads = run(way, loss, p, batch)
    assert torch.equal(grads["extra"], torch.zeros(2, 3, dtype=F64)) and grads["mask"] is None
    (value, _), grads = run(way, lambda p, b: (b["mask"].sum() * 2, b["mask"].shape[0]), p, batch)
    equal(value, batch["mask"].sum() / 2)
    assert all(not g.any() for g in tree.leaves(grads))


def test_no_parameters_at_all():
    (value, _), grads = value_and_grad(lambda p, b: (b.sum(), 2))({}, torch.ones(4))
    assert float(value) == 2 and grads == {}


@tree.register_dataclass(static=("rate",))
@dataclass
class Weights:
    w: Tensor
    rate: float


class Pair(NamedTuple):
    a: Tensor
    b: Weights


@pytest.mark.parametrize("way", WAYS)
def test_parameters_in_any_pytree(way):
    p = Pair(torch.ones(3, dtype=F64), Weights(torch.full((3,), 2.0, dtype=F64), 0.5))
    fn = lambda p, x: ((p.a * p.b.w * x * p.b.rate).sum(), x.numel())
    x = torch.arange(12.0, dtype=F64).reshape(4, 3)
    _, grads = run(way, fn, p, x)
    assert isinstance(grads, Pair) and isinstance(grads.b, Weights) and grads.b.rate == 0.5
    equal(grads.a, x.sum(0) / 12)
    again = torch.func.vmap(lambda row: value_and_grad(fn)(p, row[None])[1].b.w)(x)
    equal(again, x / 6)


def test_bf16_parameters():
    p = {"w": torch.randn(4, 4).bfloat16(), "v": torch.randn(4)}

    def fn(p, x):
        return torch.tanh(x.bfloat16() @ p["w"]).float().mul(p["v"]).square().sum(), x.shape[0]

    x = torch.randn(4, 4)
    want, want_grads = reference(lambda p, x: fn(p, x)[0] / 4, p, x)
    for way in WAYS:
        (value, _), grads = run(way, fn, p, x)
        assert grads["w"].dtype == torch.bfloat16 and grads["v"].dtype == torch.float32
        assert torch.allclose(value, want, rtol=1e-2) and torch.allclose(
            grads["w"], want_grads["w"], rtol=0.05, atol=0.05
        )


def test_a_batch_of_one_row_and_scalars_in_the_batch():
    fn = lambda p, b: ((p * b["x"] * b["scale"]).sum(), b["n"])
    batch = {"x": torch.ones(1, 2), "scale": torch.tensor(3.0), "n": 2}
    for f in (value_and_grad(fn), lambda p, b: jitted(value_and_grad(fn), p, b)):
        (value, _), g = f(torch.tensor(2.0), batch)
        assert (float(value), float(g)) == (6.0, 3.0)
    batch = {"x": torch.ones(4, 2), "scale": torch.tensor(3.0), "n": 2}
    (value, aux), _ = value_and_grad(fn, microbatches=4)(torch.tensor(2.0), batch)
    assert (float(value), float(aux["count"])) == (6.0, 8.0)


def test_the_count_is_not_remembered_from_other_static_values():
    f = value_and_grad(lambda p, b, scale: ((p * b["x"]).sum() * scale, b["n"] * scale), microbatches=2)
    x = torch.ones(4)
    for n, scale in [(1, 1), (2, 1), (2, 3), (1, 1)]:
        (_, aux), _ = f(torch.tensor(2.0), {"x": x, "n": n}, scale)
        assert float(aux["count"]) == 2 * n * scale


def test_eager_losses_need_not_be_traceable():
    """Closed over tensors, branching on data: plain eager code, in microbatches as well."""
    weight = torch.arange(4.0)

    def fn(p, x):
        y = p * x * weight
        return (y.sum() if y.sum() > 0 else -y.sum()), (x > 0).sum()

    x = torch.ones(4, 4)
    assert [float(value_and_grad(fn, microbatches=m)(torch.tensor(-2.0), x)[0][0]) for m in (1, 2)] == [3.0, 3.0]


# -- under outer transforms -------------------------------------------------------------------------------------------
def test_per_sample_gradients():
    p, batch = problem()
    del p["step"]
    grads = torch.func.vmap(lambda b: value_and_grad(loss)(p, tree.map(lambda x: x[None], b))[1])(batch)
    for i in range(B):
        row = tree.map(lambda x, i=i: x[i : i + 1], batch)
        equal(tree.map(lambda g, i=i: g[i], grads), value_and_grad(loss)(p, row)[1])


@pytest.mark.parametrize("m", [1, 2])
def test_a_gradient_of_the_gradient(m):
    p, batch = problem()

    def norm(p):
        (value, _), g = value_and_grad(loss, microbatches=m)(p, batch)
        return tree.sum([(x**2).sum() for x in tree.leaves(g)]) + value

    def plain(table):
        active = {**p, "table": table}
        g = torch.autograd.grad(mean(active, batch), [table, *leaves], create_graph=True)
        return sum((x**2).sum() for x in g) + mean(active, batch)

    leaves = [p["layers"]["w"].requires_grad_(), p["layers"]["b"].requires_grad_()]
    table = p["table"].clone().requires_grad_()
    (want,) = torch.autograd.grad(plain(table), table)
    p = tree.map(torch.Tensor.detach, p)
    got = torch.func.grad(lambda t: norm({**p, "table": t}))(p["table"])
    equal(got, want, 1e-12)


def test_integer_parameters_under_vmap():
    p = {"w": torch.ones(2, dtype=F64), "n": torch.tensor(3)}
    fn = lambda p, x: ((p["w"] * x * p["n"]).sum(), 1)
    got = torch.func.vmap(lambda x: value_and_grad(fn)(p, x)[1]["w"])(torch.eye(2, dtype=F64))
    equal(got, 3 * torch.eye(2, dtype=F64))


# -- what a loss function may not return ------------------------------------------------------------------------------
X = torch.ones(4, 2)
WRONG = {
    "a tensor": (lambda p, b: (p * b).sum(), "given Tensor|given FakeTensor"),
    "a mean and nothing else": (lambda p, b: [(p * b).mean()], "must return"),
    "per-token losses": (lambda p, b: (p * b, 8), r"the sum is f32\[[42], 2\]"),
    "a vector of counts": (lambda p, b: ((p * b).sum(), b[:, 0]), r"the count is f32\[[42]\]"),
    "an integer sum": (lambda p, b: (b.long().sum(), 1), r"the sum is i64\[\]"),
    "no count": (lambda p, b: ((p * b).sum(), None), "the count is None"),
    "aux that is no number": (lambda p, b: (((p * b).sum(), 1), {"name": "x"}), r"aux\['name'\] is 'x'"),
    "nothing": (lambda p, b: None, "given NoneType"),
    "a count of parameters": (lambda p, b: ((p * b).sum(), (p * b).mean()), "the count depends on the parameters"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("way", ["eager", "traced", "two microbatches", "traced, two microbatches"])
def test_what_a_loss_function_may_not_return(case, way):
    fn, message = WRONG[case]
    with pytest.raises(TraceError, match=message):
        run(way, fn, torch.tensor(2.0), X)


def test_a_count_of_values_that_have_no_gradient_is_fine():
    fn = lambda p, b: ((p * b).sum(), (p.detach() * b).sum())
    for way in WAYS:
        (value, _), _ = run(way, fn, torch.tensor(2.0), X)
        assert float(value) == 1


@pytest.mark.parametrize("way", ["eager", "traced"])
def test_microbatches_that_do_not_divide(way):
    p, batch = problem()
    f = value_and_grad(loss, microbatches=3)
    with pytest.raises(ShardingError, match=r"3 microbatches do not divide the 4 rows of batch.ids, shape \(4, 6\)"):
        jitted(f, p, batch) if way == "traced" else f(p, batch)
    with pytest.raises(ShardingError, match="at least 1, given 0"):
        value_and_grad(loss, microbatches=0)


# -- on a mesh --------------------------------------------------------------------------------------------------------
AXES = {"params": {"table": "vocab embed", "layers": {"w": "layers embed ff", "b": "layers ff"}, "step": ""}}
LAYOUTS = {
    "dp": Layout(batch="dp"),
    "zero": Layout(batch="dp", params=dict(embed="dp"), opt=dict(vocab="tp", embed="dp")),
    "tp": Layout(batch="dp", ff="tp", vocab="tp"),
    "seq": Layout(batch="dp", seq="tp"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 2])
def test_layouts(layout, m):
    p, batch = problem()
    f = value_and_grad(loss, microbatches=m)
    got = jitted(f, p, batch, mesh=Mesh(dp=2, tp=2), layout=LAYOUTS[layout], axes=AXES)
    equal(got, value_and_grad(loss)(p, batch), 1e-12)
