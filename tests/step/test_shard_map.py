"""Local code with explicit collectives: the global function it stands for, and that function's gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fmeg import Layout, Mesh, P, jit, remat, scan, shard_map, value_and_grad
from fmeg.ops.collectives import all_gather, all_reduce, all_to_all, axis_index, ppermute, reduce_scatter
from fmeg.program.errors import MeshError, ShardingError, TraceError

F64 = torch.float64
MESH = Mesh(a=2, b=2)
_g = torch.Generator().manual_seed(0)
X, W = (torch.randn(4, 4, generator=_g, dtype=F64) for _ in range(2))


def blocks(x: Tensor, dim: int, n: int = 2) -> list[Tensor]:
    return list(x.chunk(n, dim))


# local function, in_specs, out_specs, the global function
CASES: dict[str, tuple[Callable, tuple, P, Callable]] = {
    "nothing": (lambda x, w: x.sin() * w, (P("a", "b"), P("a", "b")), P("a", "b"), lambda x, w: x.sin() * w),
    "all_reduce": (
        lambda x, w: all_reduce(torch.tanh(x) @ w, ("a",)),
        (P(None, "a"), P("a", None)),
        P(None, None),
        lambda x, w: torch.tanh(x) @ w,
    ),
    "all_reduce, of several": (
        lambda x, w: torch.mul(*all_reduce([x @ w, (x * w.T).sum()], ("a",))).sin(),
        (P(None, "a"), P("a", None)),
        P(None, None),
        lambda x, w: ((x @ w) * (x * w.T).sum()).sin(),
    ),
    "all_reduce, two axes": (
        lambda x, w: all_reduce((x * w).sum(), ("a", "b")),
        (P("a", "b"), P("a", "b")),
        P(),
        lambda x, w: (x * w).sum(),
    ),
    "all_reduce, one of two axes": (
        lambda x, w: all_reduce(x.sin() @ w, ("b",)),
        (P("a", "b"), P("b", None)),
        P("a", None),
        lambda x, w: x.sin() @ w,
    ),
    "all_gather": (
        lambda x, w: all_gather(x, ("a",), 0).sin() @ w,
        (P("a", None), P(None, "b")),
        P(None, "b"),
        lambda x, w: x.sin() @ w,
    ),
    "all_gather, minor axis first": (
        lambda x, w: all_gather(x, ("b", "a"), 0) * w,
        (P(("a", "b"), None), P(None, None)),
        P(None, None),
        lambda x, w: x[[0, 2, 1, 3]] * w,
    ),
    "reduce_scatter": (
        lambda x, w: reduce_scatter(x @ w, ("a",), 1).cos(),
        (P("b", "a"), P("a", None)),
        P("b", "a"),
        lambda x, w: (x @ w).cos(),
    ),
    "all_to_all": (
        lambda x, w: all_to_all(x * w, ("a",), 1, 0).cumsum(0),
        (P("a", None), P("a", None)),
        P(None, "a"),
        lambda x, w: (x * w).cumsum(0),
    ),
    "ppermute": (
        lambda x, w: ppermute(x.sin(), ("a",), [(0, 1), (1, 0)]) * w,
        (P("a", None), P("a", None)),
        P("a", None),
        lambda x, w: x.sin().roll(2, 0) * w,
    ),
    "ppermute, one way": (
        lambda x, w: ppermute(x.sin(), ("a",), [(0, 1)]) + w,
        (P("a", None), P("a", None)),
        P("a", None),
        lambda x, w: torch.cat([torch.zeros_like(x[:2]), x[:2].sin()]) + w,
    ),
    "axis_index": (
        lambda x, w: x * (axis_index(("a", "b")) + 1) + w,
        (P(("a", "b"), None), P(("a", "b"), None)),
        P(("a", "b"), None),
        lambda x, w: x * torch.arange(1, 5)[:, None] + w,
    ),
    "a replicated result": (
        lambda x, w: all_reduce(x.sum(0), ("a",)) @ w.sin(),
        (P("a", None), P(None, None)),
        P(None),
        lambda x, w: x.sum(0) @ w.sin(),
    ),
    "a stopped maximum": (
        lambda x, w: (x - all_reduce(x.detach().amax(), ("a",), op="max")).exp() * w,
        (P("a", None), P("a", None)),
        P("a", None),
        lambda x, w: (x - x.detach().amax()).exp() * w,
    ),
    "remat": (
        lambda x, w: remat(lambda x: all_reduce(x.sin() @ w, ("b",)).tanh())(x),
        (P("a", "b"), P("b", None)),
        P("a", None),
        lambda x, w: (x.sin() @ w).tanh(),
    ),
}


def _scanned(x: Tensor, w: Tensor) -> Tensor:
    left, right = x[:, :2], x[:, 2:]
    for v in w:
        s = (left * v[:2] + right * v[:2]).tanh()
        left, right = left + s, right + s
    return torch.cat([left, right], 1)


CASES["scan"] = (
    lambda x, w: scan(lambda c, v: (all_reduce(c * v[:2], ("b",)).tanh() + c, c.sum()), x, w)[0],
    (P("a", "b"), P(None, None)),
    P("a", "b"),
    _scanned,
)


def mapped(case: str, mesh: Mesh = MESH) -> Callable:
    fn, ins, outs, _ = CASES[case]
    return shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs)


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_global_functions(case, backend):
    mesh = Mesh(a=2, b=2, backend=backend)
    f, g = mapped(case, mesh), CASES[case][3]
    assert torch.allclose(f(X, W), g(X, W), rtol=1e-14, atol=1e-14)

    def step(fn):
        weights = lambda y: torch.arange(1.0, 1 + y.numel(), dtype=F64).cos().reshape(y.shape)
        loss = lambda p, x: ((lambda y: (y * weights(y)).sum() + (p**2).sum())(fn(x * p.sum(), p)), 2)
        return lambda params, batch: value_and_grad(loss)(params, batch)

    (want, _), grad = step(g)(W, X)
    for layout in (
        Layout(),
        Layout(batch="a"),
        Layout(r="b", c="a", params=dict(r=("a", "b"), c=None), opt=dict(r="b", c="a")),
    ):
        axes = {"params": "r c", "batch": "batch _"}
        (got, _), dw = jit(step(f), mesh=mesh, layout=layout, axes=axes)(W, X)
        assert torch.allclose(got.global_value(), want, rtol=1e-13)
        assert torch.allclose(dw.global_value(), grad, rtol=1e-12, atol=1e-12)


def test_trees_of_arguments_and_results():
    def fn(p, xs):
        s = all_reduce(p["w"].sum() * xs[0], ("a",))
        return {"s": s, "x": [x + 1 for x in xs]}

    f = shard_map(
        fn, mesh=MESH, in_specs=(P("a", None), [P("b"), P(None)]), out_specs={"s": P("b"), "x": [P("b"), P(None)]}
    )
    v = torch.arange(4.0, dtype=F64)
    got = f({"w": X}, [v, v * 2])
    assert torch.allclose(got["s"], X.sum() * v) and torch.equal(got["x"][1], v * 2 + 1)
    same = shard_map(lambda xs: [x * 2 for x in xs], mesh=MESH, in_specs=(P("a"),), out_specs=P("a"))
    assert torch.equal(same([v, v])[1], v * 2)


def test_values_of_the_traced_function_around_it():
    """A tensor of the outer function that the local one is closed over is replicated, and has its gradient."""

    def loss(w, x):
        scale = w.sum().sin()
        f = shard_map(
            lambda x: all_reduce((x * scale).sum(), ("a",)), mesh=MESH, in_specs=(P("a", None),), out_specs=P()
        )
        return f(x), 1

    (value, _), g = jit(lambda params, batch: value_and_grad(loss)(params, batch), mesh=MESH, layout=Layout(batch="a"))(
        W, X
    )
    assert torch.allclose(value.global_value(), X.sum() * W.sum().sin())
    assert torch.allclose(g.global_value(), (X.sum() * W.sum().cos()).expand(4, 4))


def test_axes_of_size_one_and_one_device():
    for mesh in (Mesh(a=1, b=2), Mesh(a=1, b=1)):
        for case in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "a replicated result"):
            assert torch.allclose(mapped(case, mesh)(X, W), CASES[case][3](X, W), rtol=1e-14, atol=1e-14)


def test_collectives_stay_as_written():
    e = jit(lambda x, w: mapped("all_reduce")(x, w), mesh=MESH).lower(X, W).explain()
    assert [(r.kind, r.axes, r.reason) for r in e.rows] == [("all_reduce", ("a",), "shard_map")]
    assert e.rows[0].sources[0].startswith("test_shard_map.py:")


def test_in_a_scan_over_layers():
    layer = shard_map(
        lambda x, w: all_reduce(x @ w, ("b",)), mesh=MESH, in_specs=(P("a", "b"), P("b", None)), out_specs=P("a", None)
    )

    def loss(params, batch, f=layer):
        return scan(lambda c, w: (torch.tanh(f(c, w)), None), batch, params)[0].square().sum(), 1

    params = torch.stack([W, X, W.sin()])
    (want, _), grads = value_and_grad(lambda p, x: loss(p, x, torch.matmul))(params, X)
    step = lambda params, batch: value_and_grad(lambda p, x: loss(p, x))(params, batch)
    (got, _), g = jit(step, mesh=MESH, layout=Layout(batch="a"))(params, X)
    assert torch.allclose(got.global_value(), want) and torch.allclose(g.global_value(), grads, rtol=1e-12, atol=1e-12)


# -- errors -----------------------------------------------------------------------------------------------------------
ROWS = P("a", None)


def failing(fn=lambda x: x, ins=(ROWS,), outs=ROWS):
    return shard_map(fn, mesh=MESH, in_specs=ins, out_specs=outs)


ERRORS = {
    "axis": (
        failing(ins=(P("c", None),)),
        X,
        ShardingError,
        r"in_specs\[0\] names the mesh axis 'c', but the mesh has a, b",
    ),
    "twice": (failing(ins=(P("a", "a"),)), X, ShardingError, "on the mesh axis 'a'"),
    "rank": (failing(ins=(P("a"),)), X, ShardingError, r"args\[0\] of <lambda> is \(4, 4\), but its spec is P\('a'\)"),
    "arguments": (failing(ins=(P(), P())), X, ShardingError, "2 in_specs for 1 arguments"),
    "leaves": (
        failing(ins=([ROWS, ROWS],)),
        [X],
        ShardingError,
        r"in_specs\[0\] has 2 specs for 1 tensors of args\[0\]",
    ),
    "size": (failing(), X[:3], ShardingError, r"args\[0\] of <lambda> of shape \(3, 4\).*2 does not evenly divide 3"),
    "result": (failing(outs=P("a")), X, ShardingError, r"out_specs\[0\] is .*give one entry a dimension"),
    "results": (failing(lambda x: (x, x), outs=[ROWS]), X, ShardingError, "1 out_specs for 2 results"),
    "no tensor": (failing(lambda x: (x, 3)), X, ShardingError, "result 1 of <lambda> is 3"),
    "inside": (failing(lambda x: all_reduce(x, ("c",))), X, MeshError, "the mesh has no axis 'c'; it has a, b"),
    "op": (failing(lambda x: all_reduce(x, ("a",), op="mean")), X, MeshError, "'sum' or 'max', given 'mean'"),
    "parts": (
        failing(lambda x: reduce_scatter(x[:, :3], ("a",), 1)),
        X,
        MeshError,
        "size 3 does not divide into 2 parts",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case):
    fn, arg, error, message = ERRORS[case]
    with pytest.raises(error, match=message):
        fn(arg)


def test_collectives_outside_of_local_code():
    for f in (lambda x: all_reduce(x, ("a",)), jit(lambda x: all_gather(x, ("a",), 0), mesh=MESH)):
        with pytest.raises(MeshError, match="called outside local code: it has a meaning only inside shard_map"):
            f(X)


def test_another_mesh():
    inner = mapped("all_reduce", Mesh(a=4, b=1))
    with pytest.raises(ShardingError, match="was traced for a mesh of .*'a': 4.* but the program runs on"):
        jit(lambda x, w: inner(x, w), mesh=MESH)(X, W)


def test_a_maximum_has_no_gradient():
    f = shard_map(lambda x: all_reduce(x.sum(), ("a",), op="max"), mesh=MESH, in_specs=(P("a", None),), out_specs=P())
    step = lambda params, batch: value_and_grad(lambda p, x: (f(p * x), 1))(params, batch)
    with pytest.raises(TraceError, match="no gradient; stop it with .detach"):
        jit(step, mesh=MESH)(W, X)
