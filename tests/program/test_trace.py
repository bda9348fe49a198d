"""From functions to Programs: what is recorded means what the function means."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg import TensorType, scan, trace, tree
from fmeg.program.gradient import differentiate
from fmeg.program.structured import Scan, walk
from tests.program.running import X, names, run, same


# -- leaves -----------------------------------------------------------------------------------------------------------
def test_a_tensor_passed_twice_is_two_inputs():
    program = trace(lambda a, b: a - 2 * b, X, X).program
    assert len(program.inputs) == 2
    assert torch.equal(run(program, [X, X + 1])[0], X - 2 * (X + 1))


def test_tied_leaves_have_a_gradient_each():
    program = trace(lambda p: (p["a"].sin() * p["b"]).sum(), {"a": X, "b": X}).program
    assert program.names == ("p.a", "p.b")
    _, ga, gb = run(differentiate(program, [0, 1], [0]), [X, X, torch.ones((), dtype=X.dtype)])
    assert torch.allclose(ga, X.cos() * X, atol=1e-15) and torch.allclose(gb, X.sin(), atol=1e-15)


def test_a_carry_that_is_also_a_constant():
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return scan(lambda c, a, first: (c * a + first, None), x, w, x)[0]

    program = trace(fn, X[0], X).program
    args = [X[0].clone().requires_grad_(), X.clone().requires_grad_()]
    want = fn(*args)
    got = run(differentiate(program, [0, 1], [0]), [X[0], X, torch.ones(3, dtype=X.dtype)])
    for a, b in zip(got, [want, *torch.autograd.grad(want.sum(), args)], strict=True):
        assert torch.allclose(a, b, rtol=1e-14, atol=1e-14)


def test_an_input_may_be_an_output_and_twice():
    same(lambda x: (x, x, x + 1), X)


def test_types_are_enough_and_other_leaves_are_static():
    t = trace(lambda x, n, f: {"y": f(x) * n, "n": n}, TensorType((2, 3), torch.float32), 3, torch.sin)
    assert [v.type for v in t.program.inputs] == [TensorType((2, 3), torch.float32)]
    assert tree.unflatten(t.out_tree, t.program.outputs)["n"] == 3


def test_a_function_without_tensors():
    assert torch.equal(run(trace(lambda: torch.arange(3)).program, [])[0], torch.arange(3))


# -- constants and modes ----------------------------------------------------------------------------------------------
def test_constants():
    same(lambda x: torch.tensor(2.0) * x + torch.tensor([1.0, 2.0, 3.0]) + torch.full((3,), 0.5), X)
    same(lambda x: torch.stack([x[0], torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)]), X)

    def written(x: Tensor) -> Tensor:
        c = torch.tensor([1.0, 2.0, 3.0])
        c[0] = 5
        return x * c

    same(written, X)


def test_default_dtypes_are_those_of_the_trace():
    before = torch.get_default_dtype()
    program = trace(lambda: (torch.zeros(2), torch.arange(3), torch.arange(3.0), torch.full((2,), 1.5))).program
    try:
        torch.set_default_dtype(torch.float64)
        got = run(program, [])
    finally:
        torch.set_default_dtype(before)
    assert (
        [t.dtype for t in got]
        == [v.dtype for v in program.outputs]
        == [torch.float32, torch.int64, *[torch.float32] * 2]
    )


def test_functional_transforms_inside():
    same(lambda x: torch.func.grad(lambda y: (y**3).sum())(x), X)
    same(lambda x: torch.func.vmap(lambda r: r.cumsum(0))(x), X)
    same(lambda x: torch.func.jvp(torch.sin, (x,), (x * 2,)), X)
    same(lambda x: torch.func.hessian(lambda y: (y**3).sum())(x[0]), X)
    same(lambda x: torch.func.vmap(torch.func.grad(lambda r: (r.exp() * r).sum()))(x), X)


def test_autograd_inside_and_grad_modes():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.detach().requires_grad_(True)
        (g,) = torch.autograd.grad((y**2).sum(), y)
        with torch.no_grad():
            z = x * 2
        return g, z

    same(fn, X)
    with torch.no_grad():
        program = trace(lambda x: (x.sin() * 2).sum(), X).program
    got = run(differentiate(program, [0], [0]), [X, torch.ones((), dtype=X.dtype)])[1]
    assert torch.allclose(got, 2 * X.cos(), atol=1e-15)


def test_unused_nodes_are_dropped():
    def fn(x: Tensor) -> Tensor:
        x.exp()
        y = x.clone()
        y[0] = 1
        return x.sin()

    assert names(trace(fn, X).program) == ["aten.sin.default"]


def test_one_trace_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: x / (1 // 0), X)
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: scan(lambda c, a: (c / (1 // 0), None), x[0], x), X)
    same(lambda x: x + 1, X)
    assert torch.equal(X + 1, X + 1) and torch.is_grad_enabled()


def test_a_default_device_is_not_part_of_a_program():
    def f(x):
        order = x.argsort(-1) + torch.arange(x.shape[-1])
        return x.gather(-1, order.clamp(max=x.shape[-1] - 1)) + torch.zeros(3, device=x.device) + x.new_ones(3)

    x = torch.zeros(2, 3)
    plain = str(trace(f, x).program)
    with torch.device("cuda"):  # there need not be one
        assert str(trace(f, x).program) == plain


# -- source lines -----------------------------------------------------------------------------------------------------
def test_every_node_knows_its_line():
    def body(c: Tensor, a: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        c = F.silu(c * a) + k  # line of the body
        return c, F.softmax(c, -1)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y, ys = scan(body, x, w, x.exp())
        return (y * y).sum() + ys.logsumexp(-1).sum()

    program = trace(fn, X[0], X).program
    joint = differentiate(program, [0, 1], [0])
    for node, _, path in walk(joint):
        assert node.source, node.opname
        where = "body" if "scan body" in path or "scan body backward" in path else "fn"
        if node.phase == "F" and node.opname not in ("scan", "scan_forward"):
            assert node.source.startswith("test_trace.py:") and node.source.endswith(f" {where}"), (
                node.opname,
                node.source,
            )
        if node.phase == "B":
            assert node.source.startswith(("bwd of test_trace.py:", "gradient of ")), (node.opname, node.source)
    first = body.__code__.co_firstlineno + 1
    scans = [n for n in program.nodes if isinstance(n.op, Scan)]
    assert scans[0].op.body.nodes[0].source == f"test_trace.py:{first} body"
