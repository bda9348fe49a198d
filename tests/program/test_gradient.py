"""The gradient of a Program equals torch's, on programs nobody thought of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from fmeg import ops, scan, trace
from fmeg.program.errors import TraceError
from fmeg.program.gradient import MIRROR, active_values, differentiate
from fmeg.program.ir import Program, Value
from fmeg.program.structured import ScanBackward, ScanForward, walk
from tests.program.random_programs import BINARY, INDEXED, UNARY, build, draw, inputs, with_gradient
from tests.program.running import names, run

ARGS = inputs()
ONE = torch.ones((), dtype=torch.float64)
X, Y, Z, I = ARGS


def check(fn, args: list[Tensor], wrt: list[int], joint: Program | None = None) -> Program:
    """Values and gradients of the joint Program equal torch.autograd's; returns it."""
    joint = joint or differentiate(trace(fn, *args).program, wrt, [0])
    got = run(joint, [*args, ONE])
    want = with_gradient(fn, args, wrt)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11), joint
    return joint


@pytest.mark.parametrize("op", [*UNARY, *BINARY, *INDEXED])
def test_one_operation(op):
    check(build([(op, 0, 1)]), ARGS, [0, 1, 2])


@settings(max_examples=40)
@given(draw())
def test_random_programs(steps):
    joint = check(build(steps), ARGS, [0, 1, 2])
    joint.check()
    for node, _, _ in walk(joint):
        assert not (isinstance(node.op, torch._ops.OpOverload) and node.op._schema.is_mutable)
        assert node.source, node.opname
        if node.phase == "B" and node.op is not MIRROR and "gradient of" not in node.source:
            assert node.source.startswith("bwd of "), node.source


# -- which values have a gradient -------------------------------------------------------------------------------------
def test_an_input_without_influence_has_a_gradient_of_zeros():
    joint = check(lambda x, y: (x.sin().sum(), y * 2), [X, Y], [0, 1])
    assert torch.equal(run(joint, [X, Y, ONE])[-1], torch.zeros_like(Y))
    check(lambda x, y: (y.sum() * 2, (x > 0).long()), [X, Y], [0, 1])
    check(lambda x, y: ((x * 3).long().double() * y).sum(), [X, Y], [0, 1])


def test_only_what_is_asked_for():
    program = trace(lambda x, y: (x @ y).sum(), X, Y).program
    joint = differentiate(program, [1], [0])
    assert len(joint.outputs) == 2
    assert len([n for n in joint.nodes if n.phase == "B" and n.opname == "aten.mm.default"]) == 1
    assert len(active_values(program, [1])) == 3  # y, the product, the sum


def test_detach_and_no_grad_stop_the_gradient():
    def fn(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            k = (x * y).exp()
            rows = scan(lambda c, a: (c * a, c + a), x[0], y)[1]

        def body(c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                m = c.abs().amax()
            return (c - m) * a, a.detach() * c

        c, ys = scan(body, x[0], y)
        return (k * x + rows * y + ys + x.detach() * y).sum() + c.sum()

    check(fn, [X, Y], [0, 1])
    check(lambda x: (x + (x.round() - x).detach()).square().sum(), [X], [0])


def test_a_gradient_inside_is_differentiated_again():
    check(lambda x: (torch.func.grad(lambda z: (z**3).sum())(x) ** 2).sum(), [X], [0])
    check(lambda x: (torch.func.grad(lambda z: (ops.rms_norm(z, None) ** 3).sum())(x) ** 2).sum(), [X], [0])
    check(lambda x: torch.func.vmap(torch.func.grad(lambda r: (r.exp() * r).sum()))(x).sin().sum(), [X], [0])
    check(lambda x: (torch.func.jvp(torch.tanh, (x,), (x,))[1] ** 2).sum(), [X], [0])


def test_complex_values_between_real_ones():
    def rotated(x: Tensor) -> Tensor:
        turn = torch.polar(torch.ones(2, dtype=torch.float64), torch.arange(2.0, dtype=torch.float64))
        return torch.view_as_real(torch.view_as_complex(x.reshape(4, 2, 2)) * turn).sin().sum()

    check(rotated, [X], [0])


def test_dtypes_between():
    check(lambda x: (x.float() * 2).sin().double().sum(), [X], [0])
    check(lambda x: (x.bfloat16() @ x.bfloat16()).double().sum(), [X], [0])
    joint = differentiate(trace(lambda x: x.float().sin().sum(), X.bfloat16()).program, [0], [0])
    assert run(joint, [X.bfloat16(), torch.ones(())])[1].dtype == torch.bfloat16


def test_a_custom_backward_is_refused_only_where_it_matters():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 100

    program = trace(lambda x, y: (Double.apply(x) * y).sum(), X, Y).program
    assert torch.equal(run(program, [X, Y])[0], (X * 2 * Y).sum())
    assert torch.equal(run(differentiate(program, [1], [0]), [X, Y, ONE])[1], X * 2)
    with pytest.raises(
        TraceError, match=r"gradient of Double, a torch.autograd.Function, at test_gradient.py:\d+ forward"
    ):
        differentiate(program, [0], [0])


# -- outputs ----------------------------------------------------------------------------------------------------------
def test_several_outputs_with_cotangents_of_their_own():
    program = trace(lambda x: (x.sin(), x, x.cos(), (x > 0).long()), X).program
    joint = differentiate(program, [0], [0, 1])
    a, b = Y, Z
    assert torch.allclose(run(joint, [X, a, b])[-1], X.cos() * a + b, rtol=1e-15, atol=1e-15)


def test_the_same_value_twice_among_the_outputs():
    program = trace(lambda x: (lambda y: (y, y))(x.sin()), X).program
    assert torch.allclose(run(differentiate(program, [0], [0, 1]), [X, Y, Z])[-1], X.cos() * (Y + Z), atol=1e-15)


def test_an_output_that_cannot_be_differentiated():
    program = trace(lambda x: ((x > 0).sum(), 3), X).program
    for i in (0, 1):
        with pytest.raises(TraceError, match=f"output {i} cannot be differentiated"):
            differentiate(program, [0], [i])


# -- structure --------------------------------------------------------------------------------------------------------
def test_latest_use_first_and_one_mirror_a_value():
    def fn(x: Tensor) -> Tensor:
        h = x.sin()
        return (h * 2 + h * 3 + h * 4).sum()

    joint = differentiate(trace(fn, X).program, [0], [0])
    h = joint.nodes[0].outs[0]
    mirrors = [n for n in joint.nodes if n.op is MIRROR and n.tags["primal"] is h]
    assert len(mirrors) == 1
    adds = [n for n in joint.nodes if n.phase == "B" and n.opname == "aten.add.Tensor"]
    factors = [v.node.args[1] for v in (*adds[0].operands(), adds[1].operands()[1])]
    assert factors == [4, 3, 2] and all(n.tags["accumulate"] for n in adds)


def test_the_forward_half_is_the_program():
    program = trace(build([("scan, carries", 0, 1), ("softmax", 0, 0)]), *ARGS).program
    joint = differentiate(program, [0, 1, 2], [0])
    forward = [n.opname for n in joint.nodes if n.phase == "F"]
    assert forward == [n.opname.replace("scan", "scan_forward") for n in program.nodes]


def test_nothing_is_computed_for_inputs_without_gradient():
    def body(c: Tensor, layer: dict, k: Tensor) -> tuple[Tensor, Tensor]:
        return c * layer["w"] + k + layer["n"], c.detach()

    def fn(x: Tensor, w: Tensor, k: Tensor) -> Tensor:
        c, ys = scan(body, x[0], {"w": w, "n": torch.arange(4)}, k)
        return (c + ys.sum(0)).sum()

    joint = check(fn, [X, Y, Z[0]], [0, 1])
    (node,) = [n for n in joint.nodes if isinstance(n.op, ScanBackward)]
    pair = node.op.pair
    assert (pair.carries, pair.ys, pair.xs, pair.consts) == ((0,), (), (1,), ())
    assert [o.type.shape for o in node.outs] == [(4,), (4, 4)]


def test_a_carry_that_becomes_active_later():
    """Neither carry depends on the parameter at first; each step mixes them."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        zeros = torch.zeros_like(x[0])
        body = lambda c, a: ((c[1] * 2, c[2] + 1, a * c[0] + a), None)
        (a, b, c), _ = scan(body, (zeros + 1, zeros, zeros), w)
        return (a + b * c).sum()

    check(fn, [X, Y], [0, 1])


def test_a_scan_that_does_not_reach_the_loss():
    joint = check(lambda x: (x.sum(), scan(lambda c, a: (c * a, None), x[0], x)[0]), [X], [0])
    assert not any(isinstance(n.op, ScanBackward) for n in joint.nodes)
    assert any(isinstance(n.op, ScanForward) for n in joint.nodes)


def test_a_scan_over_batches_of_matrices_with_a_captured_weight():
    def fn(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        def body(c: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(c @ w + a), c @ b

        c, ys = scan(body, x, torch.stack([x, x.sin()]))
        return (c * ys.prod(0)).sum()

    check(fn, [X, Y, Z], [0, 1, 2])


def test_a_constant_carry_and_a_carry_that_is_dropped():
    check(lambda x: scan(lambda c, a: (torch.zeros_like(c), c * a), x[0], x)[1].sum(), [X], [0])
    check(lambda x: (scan(lambda c, a: ((c[0], a), None), (x[0], x[1]), x)[0][0] ** 2).sum(), [X], [0])


def test_a_gradient_of_a_gradient_program_is_an_error_with_a_way_out():
    from fmeg import value_and_grad

    def outer(x: Tensor) -> Tensor:
        (loss, _), g = value_and_grad(lambda p, b: ((p * b).sum(), 1))(x, x)
        return loss + (g**2).sum()

    program = trace(outer, X).program
    assert all(isinstance(v, Value) for v in program.outputs) and "accumulate" in names(program)
    with pytest.raises(TraceError, match="torch.func"):
        differentiate(program, [0], [0])
