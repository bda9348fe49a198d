"""Where Programs differ."""

from __future__ import annotations

import torch

from fmeg import Layout, Mesh, P, TensorType, einsum, jit, remat, scan, shard, trace, value_and_grad
from fmeg.program.compare import compare

F32 = torch.float32
X, WS = TensorType((4, 8), F32), TensorType((3, 8, 8), F32)


def model(x, ws, act=torch.tanh, scale=1.0):
    return scan(lambda x, w: (act(einsum("b d, d f -> b f", x, w)) * scale, None), x, ws)[0].sum()


def traced(fn, *types):
    return trace(fn, *types).program


def gradient(**kw):
    return traced(value_and_grad(lambda w, x: (model(x, w, **kw), 4)), WS, X)


def test_the_same_function_traced_twice():
    for make in (lambda: traced(model, X, WS), gradient):
        assert make().same_as(make()) and compare(make(), make()) == []


def test_another_operation():
    a, b = traced(lambda x: x.sin().sum(), X), traced(lambda x: x.cos().sum(), X)
    assert compare(a, b) == ["node 0 aten.sin.default(a): the other has aten.cos.default(a)"]
    assert not a.same_as(b)


def test_another_operand():
    a, b = traced(lambda x, y: x - y, X, X), traced(lambda x, y: y - x, X, X)
    assert compare(a, b) == [
        "node 0 aten.sub.Tensor(a, b): argument 0 is a, not b",
        "node 0 aten.sub.Tensor(a, b): argument 1 is b, not a",
    ]


def test_another_number_nested_argument_and_keyword():
    a, b = traced(lambda x: x + 1, X), traced(lambda x: x + 1.0, X)
    assert compare(a, b) == ["node 0 aten.add.Tensor(a, 1): argument 1 is 1, not 1.0"]
    a, b = traced(lambda x: x.sum([0]), X), traced(lambda x: x.sum([1]), X)
    assert compare(a, b)[0] == "node 0 aten.sum.dim_IntList(a, [0]): argument 1[0] is 0, not 1"
    a, b = (traced(lambda x, d=d: x.to(d), X) for d in (torch.float64, torch.int64))
    assert [d.split(": ")[1] for d in compare(a, b)] == [
        "dtype is torch.float64, not torch.int64",
        "result 0 is f64[4, 8], not i64[4, 8]",
    ]


def test_types_of_inputs_and_constants():
    a, b = traced(lambda x: x + 1, X), traced(lambda x: x + 1, TensorType((4, 9), F32))
    assert compare(a, b)[0] == "input 0 is f32[4, 8], not f32[4, 9]"
    a, b = (traced(lambda x, c=c: x + torch.tensor(c), X) for c in (1.0, 2.0))
    assert not a.same_as(b) and a.same_as(traced(lambda x: x + torch.tensor(1.0), X))


def test_missing_nodes_and_outputs():
    a, b = traced(lambda x: (x.sin(), x.cos()), X), traced(lambda x: (x.sin(), None), X)
    assert compare(a, b) == ["2 nodes, not 1; the first more is aten.cos.default(a)"]
    a, b = traced(lambda x: (x.sin(), x), X), traced(lambda x: (x, x.sin()), X)
    assert compare(a, b) == ["output 0 is b, not a", "output 1 is a, not b"]


def test_inside_bodies():
    (found,) = compare(traced(model, X, WS), traced(lambda x, ws: model(x, ws, torch.sigmoid), X, WS))
    at = "node 0 scan[times=3]: scan body: node 1"
    assert found == f"{at} aten.tanh.default(f): the other has aten.sigmoid.default(f)"
    found = compare(gradient(), gradient(scale=2.0))
    assert any("scan body: node 2" in d and "is 1.0, not 2.0" in d for d in found)
    assert any("scan body backward: " in d for d in found)
    longer = TensorType((5, 8, 8), F32)
    assert "node 0 scan[times=3]: times 3, not 5" in compare(traced(model, X, WS), traced(model, X, longer))


def test_the_limit():
    a, b = traced(lambda x: tuple(x + i for i in range(20)), X), traced(lambda x: tuple(x - i for i in range(20)), X)
    assert len(compare(a, b)) == 1  # the rest of the body would all differ
    a, b = (traced(lambda x, k=k: tuple(x + i * k for i in range(1, 20)), X) for k in (1, 2))
    assert len(compare(a, b)) == 10 and len(compare(a, b, limit=30)) == 19


def test_remat_and_sources():
    def f(policy):
        return traced(remat(lambda x: x.sin(), policy), X)

    assert f("full").same_as(f("full")) and not f("full").same_as(f("dots"))
    a, b = traced(lambda x: x.sin(), X), traced(lambda x: x.sin(), X)
    assert a.same_as(b)
    c = traced(
        lambda x: x.sin(),
        X,
    )
    assert compare(a, c, sources=True) and not compare(a, c)


def test_placements():
    def f(batch):
        return shard(batch * 2, P("batch", None))

    a, b = (jit(f, mesh=Mesh(dp=2), layout=Layout(**kw)).lower(X).program for kw in ({"batch": "dp"}, {}))
    assert compare(a, b)[0] == "input 0 is f32[2, 8], not f32[4, 8]"
    a, b = (jit(f, mesh=Mesh(dp=2, tp=2), layout=Layout(batch=axis)).lower(X).program for axis in ("dp", "tp"))
    assert compare(a, b)[0] == "input 0 is f32[4@dp, 8], not f32[4@tp, 8]"
