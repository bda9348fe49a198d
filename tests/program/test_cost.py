"""Costs against counts made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fmeg import Layout, Mesh, TensorType, einsum, jit, ops, remat, scan, trace, value_and_grad
from fmeg.program.cost import Cost, bytes_moved, cost, flops, peak_memory
from fmeg.program.gradient import differentiate

F32 = torch.float32


def t(*shape, dtype=F32):
    return TensorType(shape, dtype)


def of(fn, *types) -> Cost:
    return cost(trace(fn, *types).program)


# -- arithmetic -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("fn", "types", "expected"),
    [
        (lambda x, w: einsum("b s d, d f -> b s f", x, w), (t(2, 3, 4), t(4, 5)), 2 * 2 * 3 * 4 * 5),
        (torch.ops.aten.mm, (t(2, 3), t(3, 4)), 2 * 2 * 3 * 4),
        (torch.bmm, (t(5, 2, 3), t(5, 3, 4)), 5 * 2 * 2 * 3 * 4),
        (torch.addmm, (t(4), t(2, 3), t(3, 4)), 2 * 2 * 3 * 4),
        (lambda x, w: torch.nn.functional.conv1d(x, w), (t(1, 3, 10), t(4, 3, 3)), 2 * 4 * 8 * 3 * 3),
        # causal: 1 + 2 + 3 keys seen, of 5 numbers each in q·k and in p·v, 2 heads
        (lambda q: ops.attention(q, q, q), (t(1, 3, 2, 5),), 2 * (1 + 2 + 3) * 2 * (5 + 5)),
        (lambda q: ops.attention(q, q, q, causal=False), (t(1, 3, 2, 5),), 2 * 9 * 2 * (5 + 5)),
    ],
)
def test_products(fn, types, expected):
    program = trace(lambda *args: fn(*args), *types).program
    assert flops(program) == cost(program).flops == expected


def test_pointwise_reductions_and_copies_are_other():
    assert of(lambda x: x.sin() + 1, t(2, 3)).other == 6 + 6
    assert of(lambda x: x.sum(0), t(5, 3)).other == 15  # the larger side
    assert of(lambda x: x + torch.ones(3), t(5, 3)).other == 15  # making constants is not counted
    assert of(lambda x: x.transpose(0, 1).contiguous(), t(5, 3)).other == 15  # a copy; the view is free
    assert of(lambda x: x.view(15)[None].expand(4, 15), t(5, 3)).other == 0
    assert of(lambda x: x.sin(), t(2, 3)).flops == 0


def test_a_gradient_costs_twice_its_forward_pass():
    def loss(p, x):
        return einsum("b d, d f -> b f", torch.sin(x @ p["a"]), p["b"]).sum(), 1

    params = {"a": t(3, 4), "b": t(4, 5)}
    c = of(value_and_grad(loss), params, t(2, 3))
    first, second = 2 * 2 * 3 * 4, 2 * 2 * 4 * 5
    assert c.flops == 2 * first + 3 * second  # the batch has no gradient
    assert c.by_op == {"einsum": c.flops} or sum(c.by_op.values()) == c.flops


def layer(x, w):
    return einsum("b d, d e -> b e", x, w).sin(), None


ONE = 2 * 4 * 8 * 8  # a product of the layer, for 4 rows


def loss(ws, x):
    return scan(layer, x, ws)[0].sum(), 4


def test_bodies_count_as_often_as_they_run():
    forward = of(lambda x, ws: scan(layer, x, ws)[0], t(4, 8), t(5, 8, 8))
    assert (forward.flops, forward.other) == (5 * ONE, 5 * 4 * 8)
    assert of(value_and_grad(loss), t(5, 8, 8), t(4, 8)).flops == 3 * 5 * ONE
    # half the rows twice
    assert of(value_and_grad(loss, microbatches=2), t(5, 8, 8), t(4, 8)).flops == 3 * 5 * ONE


def test_rematerialised_work_is_counted_in_local_programs():
    def full(ws, x):
        return scan(remat(layer), x, ws)[0].sum(), 4

    def local(fn, mesh, layout):
        step = jit(lambda params, batch: value_and_grad(fn)(params, batch), mesh=mesh, layout=layout)
        return step.lower(t(5, 8, 8), t(4, 8)).cost()

    assert local(loss, Mesh(), Layout()).flops == 3 * 5 * ONE
    assert local(full, Mesh(), Layout()).flops == 4 * 5 * ONE
    assert local(full, Mesh(dp=4), Layout(batch="dp")).flops == 5 * ONE  # one row of four a rank


# -- traffic ----------------------------------------------------------------------------------------------------------
def test_bytes_moved():
    x = t(4, 8)  # 128 bytes
    assert of(lambda x: x.sin(), x).moved == 2 * 128
    assert of(lambda x: x * x, x).moved == 2 * 128  # one operand, read once
    assert of(lambda x: x.view(32)[2:].sin(), x).moved == 2 * 30 * 4
    assert bytes_moved(trace(lambda x, w: x @ w, x, t(8, 2)).program) == 128 + 64 + 32
    scanned = of(lambda x, ws: scan(layer, x, ws)[0], x, t(5, 8, 8))
    assert scanned.moved == 5 * ((128 + 256 + 128) + (128 + 128))
    assert of(lambda x: x.to(torch.float64), x).moved == 128 + 256


def test_running_sums_move_too():
    def total(p, x):
        return (p * x).sum(), 1

    one, two = (of(value_and_grad(total, microbatches=m), t(100), t(4, 100)) for m in (1, 2))
    # p is read and its gradient written once more, the sum of gradients is read twice and written; all else is 0-d or
    # half a batch twice
    gradient = 400
    assert two.moved - one.moved == pytest.approx(2 * gradient + 3 * gradient, abs=64)


# -- memory -----------------------------------------------------------------------------------------------------------
def test_a_chain_needs_two_values():
    assert peak_memory(trace(lambda x: ((x + 1) * 2).sin().cos(), t(4)).program) == 16 + 2 * 16


def test_a_value_lives_until_its_last_use():
    def f(x):
        a = x + 1
        return ((a * 2) * 3) * 4 + a

    assert peak_memory(trace(f, t(4)).program) == 16 + 3 * 16


def test_a_view_keeps_its_base():
    def f(x):
        a = x + 1  # 64 bytes
        first = a[:1].view(2, 2)  # 16, in a
        b = (x.sum() * 2).expand(16) + 1  # 64
        return first * 3, b

    assert peak_memory(trace(f, t(4, 4)).program) == 64 + 64 + 64 + 16
    assert peak_memory(trace(lambda x: (x + 1).t().view(2, 2, 4), t(4, 4)).program) == 2 * 64


def test_inputs_and_outputs():
    c = of(lambda x, y: (x + y, x), t(4), t(4))
    assert (c.inputs, c.outputs, c.peak) == (32, 32, 48)


def carry_and_stack(c, xs):
    def body(c: Tensor, x: Tensor):
        y = c * x
        return y + 1, y

    return scan(body, c, xs)


def test_a_scan_stacks_and_carries():
    c = of(carry_and_stack, t(4), t(5, 4))
    inputs = 16 + 80
    # last step: four slices of ys, its own y and new carry, the carry it got
    assert c.peak == inputs + 4 * 16 + 2 * 16 + 16
    assert (c.inputs, c.outputs) == (inputs, 16 + 80)


def joint(length: int):
    """Forward and backward of c ← c·x, of which the backward pass needs each c."""
    program = trace(lambda c, xs: scan(lambda c, x: (c * x, None), c, xs)[0], t(4), t(length, 4)).program
    return differentiate(program, [0, 1], [0])


@pytest.mark.parametrize("length", [2, 3, 10])
def test_residuals_are_kept_for_every_step(length):
    inputs = 16 + length * 16 + 16  # c, xs, the cotangent
    # at the last backward step but the first: the result; residuals, whose place the cotangents of xs take one by one;
    # two new cotangents, and the one that came in
    assert peak_memory(joint(length)) == inputs + 16 + length * 16 + 2 * 16 + 16


def test_residuals_of_a_local_program_are_kept_by_a_handle():
    def half(c, xs):
        return scan(lambda c, x: (c * x, None), c, xs)[0].sum(), 1

    def peak(length):
        step = jit(lambda params, batch: value_and_grad(lambda p, x: half(x, p))(params, batch))
        return step.lower(t(length, 64), t(64)).cost().peak

    # a step more: its parameter, the gradient, and the carry that it got (which dies as gradients are made)
    assert peak(12) - peak(11) == peak(7) - peak(6) == 2 * 256


def test_remat_needs_less_memory_and_sharding_divides_it():
    def body(x, w):
        return torch.sin(einsum("b d, d e -> b e", x, w)).exp().tanh().exp(), None

    def peak(body, mesh=None, layout=None):
        step = value_and_grad(lambda p, x: (scan(body, x, p)[0].sum(), 1))
        low = jit(lambda params, batch: step(params, batch), mesh=mesh, layout=layout).lower(t(6, 8, 8), t(512, 8))
        assert low.cost().inputs == (512 * 8 // low.mesh.size + 6 * 8 * 8) * 4
        return low.cost().peak - low.cost().inputs

    value, weight, scalars = 512 * 8 * 4, 8 * 8 * 4, 3 * 4
    # the carry and the product are kept for 6 layers; the first backward step has four more values at its widest
    assert peak(body) == (6 * 2 + 4) * value + scalars
    # the carry alone; five more, for the product is made again; widest at the second step: a carry for a residual
    assert peak(remat(body)) == (6 + 5) * value + weight + scalars
    assert peak(body, Mesh(dp=4), Layout(batch="dp")) == (6 * 2 + 4) * value // 4 + scalars


# -- the report -------------------------------------------------------------------------------------------------------
def test_as_text():
    c = of(lambda x, w: (x @ w).relu(), t(2, 3), t(3, 4))
    assert str(c).splitlines() == [
        "flops             48 (aten.mm.default 100.0%)",
        "other operations  8",
        "moved             168 B",
        "peak memory       136 B (inputs 72 B, outputs 32 B)",
    ]
