"""Rows sorted by expert, on one device: against every expert on every token, at the edges, and under transforms."""

from __future__ import annotations

import pytest
import torch

from fmeg import ops, value_and_grad
from fmeg.ops.dispatch import collect_p, combine_p, dispatch_p
from fmeg.ops.grouped import grouped_bias_p, grouped_matmul_dw_p, grouped_matmul_p, scale_rows_p
from fmeg.ops.routing import route, routing_args
from tests.ops.checks import check_vjp, close, ints, rand
from tests.ops.experts import dense_layer, loss, problem, step

SHAPES = {
    "random": {},
    "skewed": dict(routing="skewed"),
    "an expert without tokens": dict(routing="empty", experts=6),
    "all to one expert": dict(routing="one expert", k=1),
    "one token": dict(batch=1, seq=1),
    "one token, one expert": dict(batch=1, seq=1, experts=1, k=1),
    "every expert": dict(k=4),
    "drops": dict(drop=True),
    "two layers": dict(layers=2, drop=True, experts=5, k=3),
}


@pytest.mark.parametrize("weighted", ["combine", "rows"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_every_expert_on_every_token(shape, weighted):
    params, batch = problem(**SHAPES[shape])
    (got, _), grads = step(params, batch, weighted)
    (want, _), expected = value_and_grad(lambda p, b: loss(p, b, weighted, dense_layer))(params, batch)
    close(got, want)
    for name, g in grads.items():
        close(g, expected[name])


def test_everything_dropped():
    params, batch = problem()
    batch["keep"] = torch.zeros_like(batch["indices"], dtype=torch.bool)
    (got, _), grads = step(params, batch)
    close(got, (params["x"] * batch["target"]).sum() / (4 * 8))
    assert all(not g.any() for name, g in grads.items() if name != "x")


def test_rows_are_sorted_stably():
    indices = ints(3, 5, 2)
    rows, routing = ops.dispatch(torch.arange(5.0)[:, None], indices, experts=3)
    slots = [(e, t) for e in range(3) for t in range(5) for j in range(2) if indices[t, j] == e]
    assert rows[:10].flatten().tolist() == [t for _, t in slots]
    assert rows.shape[0] == 12 and not rows[10:].any()
    assert routing.ends.tolist() == [sum(e <= i for e, _ in slots) for i in range(3)]
    assert routing.order[routing.inverse].equal(torch.arange(10))


@pytest.mark.parametrize("drop", [False, True])
def test_gradient_rules(drop):
    keep = rand(6, 2) > 0 if drop else None
    routing = route(ints(3, 6, 2), 3, keep)
    args, ends = routing_args(routing), routing.ends
    rows = rand(routing.rows, 4, seed=1)
    check_vjp(dispatch_p, rand(6, 4), *args, k=2, rows=routing.rows)
    check_vjp(collect_p, rows, *args, tokens=(6,), k=2)
    check_vjp(combine_p, rows, rand(6, 2), *args)
    check_vjp(grouped_matmul_p, rows, rand(3, 4, 5), ends, transposed=False)
    check_vjp(grouped_matmul_p, rows, rand(3, 5, 4), ends, transposed=True)
    check_vjp(grouped_matmul_dw_p, rows, rand(routing.rows, 5), ends)
    check_vjp(grouped_bias_p, rows, rand(3, 4), ends)
    check_vjp(scale_rows_p, rows, rand(routing.rows, 1))


def test_second_derivatives():
    routing = route(ints(3, 4, 2), 3)
    w, x, weights = (t.requires_grad_() for t in (rand(3, 2, 2), rand(4, 2), rand(4, 2, seed=3)))

    def f(x, w, weights):
        rows = dispatch_p(x, *routing_args(routing), k=2, rows=routing.rows)
        return ops.combine(ops.grouped_matmul(rows, w, routing), routing, weights)

    assert torch.autograd.gradgradcheck(f, (x, w, weights))


def test_under_vmap_and_grad():
    params, batch = problem()

    def one(x, batch):
        return loss({**params, "x": x[None]}, {k: v[None] for k, v in batch.items()})[0]

    got = torch.func.vmap(torch.func.grad(one))(params["x"], batch)
    want = torch.stack(
        [torch.func.grad(one)(x, {k: v[i] for k, v in batch.items()}) for i, x in enumerate(params["x"])]
    )
    close(got, want)


def test_sums_are_wide_in_bf16():
    rows, routing = ops.dispatch(rand(64, 8, dtype=torch.bfloat16), torch.arange(8).repeat(64, 1), experts=8)
    weights = rand(64, 8, dtype=torch.float32)
    got = ops.combine(rows, routing, weights)
    want = torch.einsum("td,tk->td", rows.view(8, 64, 8)[0].float(), weights)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=2**-8, atol=2**-8)


def test_bad_input():
    x, indices = rand(3, 2), ints(2, 3, 1)
    with pytest.raises(ValueError, match=r"indices must have shape \(3, 1\)"):
        ops.dispatch(x, ints(2, 4, 1), experts=2)
    with pytest.raises(ValueError, match="indices must be int64"):
        ops.dispatch(x, indices.int(), experts=2)
    with pytest.raises(ValueError, match="keep must be bool"):
        ops.dispatch(x, indices, experts=2, keep=indices)
    with pytest.raises(ValueError, match="experts must be at least 1"):
        ops.dispatch(x, indices, experts=0)
    rows, routing = ops.dispatch(x, indices, experts=2)
    with pytest.raises(ValueError, match=r"w must have shape \(2, 2, 4\)"):
        ops.grouped_matmul(rows, rand(3, 2, 4), routing)
    with pytest.raises(TypeError, match="one dtype"):
        ops.grouped_matmul(rows, rand(2, 2, 4, dtype=torch.float32), routing)
    with pytest.raises(ValueError, match="rows of the routing"):
        ops.combine(rows[:-1], routing)
    with pytest.raises(ValueError, match="weights must have shape"):
        ops.combine(rows, routing, rand(3, 2))
