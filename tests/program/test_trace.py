"""From functions to Programs: what is recorded means what the function means; what cannot be recorded is an error."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmeg import TensorType, scan, trace, tree
from fmeg.program.errors import TraceError
from fmeg.program.gradient import differentiate
from fmeg.program.structured import Scan, walk
from tests.program.running import names, run

X = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).sin()


def same(fn, *args) -> None:
    """`fn` traced and run equals `fn`, bit for bit."""
    copies = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, args)
    program = trace(fn, *args).program
    got, want = run(program, tree.leaves(args)), tree.leaves(fn(*copies))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), program


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


# -- writes -----------------------------------------------------------------------------------------------------------
def _column(y: Tensor) -> None:
    y[:, 0] = 0.0


def _block(y: Tensor) -> None:
    y[1:3, 0:2].add_(1)


def _flat(y: Tensor) -> None:
    y.view(-1)[2:5].mul_(2)


def _transposed(y: Tensor) -> None:
    y.t()[1].sub_(1)
    y.permute(1, 0)[2] = 0


def _columns_unbound(y: Tensor) -> None:
    a, _, c = y.unbind(1)
    a.add_(c)


def _pieces(y: Tensor) -> None:
    y.split(3)[1].neg_()
    y.split([1, 3])[1].add_(1)
    y.chunk(2, 1)[1].mul_(3)


def _diagonal(y: Tensor) -> None:
    y.diagonal().fill_(7)


def _masked(y: Tensor) -> None:
    y[y > 0] = 7.0
    y[torch.tensor([True, False, False, True])] = -1.0
    y.masked_fill_(y < -0.5, 3.0)


def _indexed(y: Tensor) -> None:
    y[torch.tensor([0, 2])] = 7.0
    y.index_add_(0, torch.tensor([1]), y[:1] * 1)


def _elements(y: Tensor) -> None:
    y[0, 0] += 1
    y[0][1] = y[1][1]


def _copies(y: Tensor) -> None:
    y[0].copy_(torch.ones(3, dtype=torch.float32))
    y[1:] = torch.arange(3)
    y[:, 2:].copy_(y[:, :1] * 2)


def _arithmetic(y: Tensor) -> None:
    y += 1
    y *= y
    y **= 2
    y /= 3
    y.clamp_(min=0.5).sqrt_().sub_(0.25, alpha=2)


def _activations(y: Tensor) -> None:
    F.relu(y, inplace=True)
    F.silu(y, inplace=True)
    y.unsqueeze(0).squeeze(0).flatten().tanh_()


def _shapes(y: Tensor) -> None:
    y.unsqueeze_(1)
    row = y[2]
    y.squeeze_(1).t_()
    y[0].add_(1)
    row.mul_(2)
    y.transpose_(0, 1)


def _fills(y: Tensor) -> None:
    y[0].zero_()
    y[1].fill_(2)
    y[2].fill_(torch.tensor(3.0))


WRITES = [v for k, v in sorted(globals().items()) if k.startswith("_") and getattr(v, "__module__", "") == __name__]


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__[1:])
def test_writes_become_functional(write):
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 1
        row = y[1]
        write(y)
        return y, row, y.t() * 2

    same(fn, X)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("nabcdef"), st.integers(0, 2)), min_size=1, max_size=7))
def test_every_view_sees_every_write(steps):
    """Overlapping views of one tensor, written in any order."""

    def fn(x: Tensor) -> list[Tensor]:
        y = x * 1
        b, c = y[1:3].unbind(0)
        views = dict(n=y, a=y[0:2], b=b, c=c, d=y.view(-1)[3:9], e=y.t()[1], f=y.split(2)[1][:, 1:])
        for i, (name, op) in enumerate(steps):
            v = views[name]
            (v.add_(i + 1), v.mul_(2), v.copy_(views["e"][:1] * 1))[op]
        return list(views.values())

    same(fn, X)


def test_detach_and_contiguous_share_memory_as_in_torch():
    def fn(x: Tensor) -> tuple:
        y = x * 1
        y.detach().add_(1)
        z = y.contiguous()
        z.mul_(2)
        w = y.t().contiguous()
        w.zero_()
        return y, z, w

    same(fn, X)


def test_shapes_in_place_belong_to_the_tensor_alone():
    """Torch's own `vector @ matrix` does so."""

    def fn(x: Tensor) -> tuple:
        y = x * 1
        square = y[:3]
        row = square[0]
        square.t_()
        square[0, 1] = 5
        z = (x * 2).detach_()
        z.add_(1)
        return y, square, row, z, x[:, 0] @ x, x @ x[0]

    same(fn, X)


def test_dtype_of_a_write():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.zeros(4, 3, dtype=torch.int64)
        y.copy_(x * 10)
        z = torch.zeros(4, 3)
        z.add_(x)
        return y, z

    same(fn, X)


REFUSED = {
    "an argument": (lambda x: x.add_(1), "writes into its argument 'x'"),
    "a view of an argument": (lambda x: x[:, 0].zero_(), "writes into its argument 'x'"),
    "an argument's shape": (lambda x: x.t_(), "writes into its argument 'x'"),
    "size": (lambda x: (x * 1).resize_(2, 2), "use the form that returns its result"),
    "out": (lambda x: torch.add(x, 1, out=x * 1), "use the form that returns its result"),
    "lists": (lambda x: torch._foreach_add_([x * 1], 1.0), "use the form that returns its result"),
    "strides": (lambda x: (x * 1).as_strided((2,), (1,)).add_(1), "view made by aten.as_strided.default"),
    "dtype": (lambda x: (x > 0).long().add_(x), "cast"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_writes_that_are_refused(case):
    fn, message = REFUSED[case]
    with pytest.raises((TraceError, RuntimeError), match=message):
        trace(lambda x: fn(x), X)


def test_a_body_may_not_write_what_it_was_given():
    def outside(x: Tensor) -> Tensor:
        total = torch.zeros(3, dtype=x.dtype)

        def body(c: Tensor, a: Tensor) -> tuple[Tensor, None]:
            total.add_(a)
            return c + total, None

        return scan(body, x[0], x)[0]

    with pytest.raises(TraceError, match=r"test_trace.py:\d+ body writes into an argument, or a tensor from outside"):
        trace(outside, X)
    with pytest.raises(TraceError, match="writes into its argument 'carry'"):
        trace(lambda x: scan(lambda c, a: (c.add_(a), None), x[0], x)[0], X)


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


# -- scan -------------------------------------------------------------------------------------------------------------
def test_scan_with_everything():
    def fn(x: Tensor, w: Tensor, n: Tensor) -> tuple:
        scale = x.exp()

        def body(carry: dict, layer: dict, shift: Tensor, power: int) -> tuple:
            y = (carry["y"] * layer["w"] + shift).tanh() * scale
            return {"y": y, "n": carry["n"] + layer["i"], "same": carry["same"]}, (y**power, None, layer["i"] * 2)

        layers = {"w": w, "i": torch.arange(4)}
        return scan(body, {"y": x, "n": n, "same": x}, layers, x.cos(), 2)

    same(fn, X[0], X, torch.tensor(3))


def test_scan_in_scan():
    def fn(x: Tensor, w: Tensor) -> tuple:
        def outer(c: Tensor, row: Tensor) -> tuple:
            return scan(lambda d, e: (d * e + c + x, d), c, row)

        return scan(outer, x, w)

    same(fn, X[0], torch.stack([X, X + 1, X.cos()]))


def test_scan_of_one_step_and_outputs_that_are_inputs():
    same(lambda x: scan(lambda c, a: (c, a), x[0], x[:1]), X)
    same(lambda x: scan(lambda c, a: (a, c), x[0], x), X)
    same(lambda x: scan(lambda c, a: ((c[1], c[0]), (c[0], c[0])), (x[0], x[1]), x), X)


def test_a_body_is_traced_once():
    calls = []

    def body(c: Tensor, a: Tensor) -> tuple[Tensor, None]:
        calls.append(1)
        return c + a, None

    trace(lambda x: scan(body, x[0], x)[0], X)
    assert len(calls) == 1


CONTRACT = {
    "dtype": (
        lambda c, a: (c.float(), None),
        r"carry \(whole\) is f64\[3\] at the start but the body returns f32\[3\]",
    ),
    "shape": (lambda c, a: (c[:2], None), r"f64\[3\] at the start but the body returns f64\[2\]"),
    "structure": (lambda c, a: ((c, c), None), "return the structure that the body was given"),
    "number": (lambda c, a: (0, None), "must be a tensor, given 0"),
    "y": (lambda c, a: (c, {"k": 3.0}), "y.k must be a tensor, given 3.0"),
    "return": (lambda c, a: c, r"must return \(carry, y\)"),
}


@pytest.mark.parametrize("case", CONTRACT)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_body_keeps_the_carry(case, traced):
    body, message = CONTRACT[case]
    with pytest.raises(TraceError, match=message):
        (lambda f: trace(f, X) if traced else f(X))(lambda x: scan(body, x[0], x))


def test_what_scan_runs_over():
    body = lambda c, a: (c, None)
    for xs, message in [
        ({}, "no tensors"),
        ({"a": X, "b": X[:2]}, r"a: \(4, 3\), b: \(2, 3\)"),
        (X[:0], "leading size of 0"),
        (X.sum(), r"xs: \(\)"),
        ([1, 2], "xs.0 must be a tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            scan(body, X[0], xs)
    with pytest.raises(TraceError, match="carry.n must be a tensor, given 0"):
        scan(body, {"n": 0}, X)


# -- what cannot be traced --------------------------------------------------------------------------------------------
OUTSIDE = torch.ones(3, dtype=torch.float64)

IMPOSSIBLE = {
    "if": (lambda x: x if x.sum() > 0 else -x, "use torch.where"),
    "item": (lambda x: x.sum().item(), "static argument"),
    "float": (lambda x: float(x[0, 0]), "static argument"),
    "index": (lambda x: x[int(x[0, 0])], "static argument"),
    "list": (lambda x: x.tolist(), "static argument"),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "nonzero": (lambda x: x.nonzero(), "masked form"),
    "mask": (lambda x: x[x > 0], "masked form"),
    "randn": (lambda x: x + torch.randn(3), "fmeg.random"),
    "rand_like": (lambda x: torch.rand_like(x), "fmeg.random"),
    "dropout": (lambda x: F.dropout(x, 0.5), "fmeg.ops.dropout"),
    "permutation": (lambda x: x[torch.randperm(4)], "fmeg.random"),
    "in place": (lambda x: (x * 1).normal_(), "fmeg.random"),
    "closure": (lambda x: x + OUTSIDE, "the tensor `OUTSIDE` of type f64"),
    "in a scan": (lambda x: scan(lambda c, a: (c + OUTSIDE, None), x[0], x), "the tensor `OUTSIDE`"),
    "branch in a scan": (lambda x: scan(lambda c, a: (c if c.sum() > 0 else a, None), x[0], x), "torch.where"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_traced(case):
    fn, message = IMPOSSIBLE[case]
    with pytest.raises(TraceError, match=message) as e:
        trace(fn, X)
    assert "test_trace.py:" in str(e.value)


def test_a_closed_over_tensor_is_named_by_the_way_to_it():
    class Holder:
        def __init__(self) -> None:
            self.w = OUTSIDE * 1

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.w

    inside, holder, table, pair = OUTSIDE * 2, Holder(), {"k": OUTSIDE * 3}, [1, OUTSIDE * 4]
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)
    for fn, called in [
        (lambda x: x + inside, "inside"),
        (holder, "self.w"),
        (lambda x: x + table["k"], "table['k']"),
        (lambda x: x + pair[1], "pair[1]"),
        (lambda x, w=inside: x + w, "w"),
        (lambda x: linear(x), "linear.weight"),
    ]:
        with pytest.raises(TraceError, match=re.escape(f"the tensor `{called}` of type f64[3")):
            trace(fn, X)


def test_a_module_is_closed_over_its_parameters():
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    with pytest.raises(TraceError, match="pass it as an argument"):
        trace(layer, X)
    same(lambda p, x: torch.func.functional_call(layer, p, (x,)), dict(layer.named_parameters()), X)


def test_a_default_device_is_not_part_of_a_program():
    def f(x):
        order = x.argsort(-1) + torch.arange(x.shape[-1])
        return x.gather(-1, order.clamp(max=x.shape[-1] - 1)) + torch.zeros(3, device=x.device) + x.new_ones(3)

    x = torch.zeros(2, 3)
    plain = str(trace(f, x).program)
    with torch.device("cuda"):  # there need not be one
        assert str(trace(f, x).program) == plain
