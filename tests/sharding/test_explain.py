"""The table of collectives."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console

from fmeg import Layout, Mesh, P, TensorType, einsum, jit, ops, scan, shard, value_and_grad
from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PPERMUTE, REDUCE_SCATTER
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Program, Value
from fmeg.sharding.coalesce import coalesce_where
from fmeg.sharding.explain import Explanation, explain, received

F64 = torch.float64


def t(*shape):
    return TensorType(shape, F64)


def explained(fn, *types, mesh, layout, **kw) -> Explanation:
    return jit(fn, mesh=mesh, layout=layout, **kw).lower(*types).explain()


MLP_AXES = {"params": {"up": "layers embed ff", "down": "layers ff embed"}}
MLP = {"up": t(3, 8, 16), "down": t(3, 16, 8)}


def mlp(x, p):
    h = torch.relu(einsum("b d, d f -> b f", x, p["up"]))
    return x + shard(einsum("b f, f d -> b d", h, p["down"]), P("batch", None)), None


def train(params, batch):
    return value_and_grad(lambda p, b: (scan(mlp, b, p)[0].sum(), b.numel()))(params, batch)


@pytest.fixture(scope="module")
def tp() -> Explanation:
    layout = Layout(batch="dp", ff="tp")
    return explained(train, MLP, t(4, 8), mesh=Mesh(dp=2, tp=2), layout=layout, axes=MLP_AXES, strict=True)


@pytest.mark.parametrize(
    ("op", "n", "expected"),
    [
        (ALL_GATHER, 4, 300),
        (REDUCE_SCATTER, 4, 75),
        (ALL_TO_ALL, 4, 75),
        (ALL_REDUCE, 4, 150),
        (PPERMUTE, 4, 100),
        (ALL_REDUCE, 2, 100),
    ],
)
def test_bytes_received_for_100_of_input(op, n, expected):
    assert received(op, 100, n) == expected


def test_a_row_says_what_where_how_often_and_why(tp):
    (forward,) = tp.select(segment="scan body").rows
    assert (forward.kind, forward.axes, forward.group, forward.tensors) == ("all_reduce", ("tp",), 2, 1)
    assert (forward.count, forward.nbytes, forward.total) == (3, 2 * 8 * 8, 3 * 2 * 8 * 8)
    assert forward.values == ("f64[4@dp, 8]{P:tp} -> f64[4@dp, 8]",)
    assert re.fullmatch(r"test_explain\.py:\d+ mlp", *forward.sources)
    assert forward.path == ("microbatch", "scan body") and (forward.phase, forward.again) == ("F", False)
    assert (forward.reason, forward.owed) == ("shard", True)
    (backward,) = tp.select(segment="scan body backward").rows
    assert (backward.kind, backward.phase, backward.reason) == ("all_reduce", "B", "mirror")
    assert backward.sources == ("gradient of carry",)


def test_counts_executions_and_bytes(tp):
    # a layer: one each way; a step: the gradients with the loss
    assert tp.counts() == {"all_reduce": 3} and tp.executed() == {"all_reduce": 3 + 3 + 1}
    assert tp.counts(segment="scan body") == {"all_reduce": 1}
    assert tp.counts(segment="scan body", axes=("dp",)) == {}
    assert tp.executed(phase="B") == {"all_reduce": 3 + 1}
    gradients = 2 * 3 * 8 * 16 // 2 * 8
    assert tp.nbytes(segment="step") == {"all_reduce": gradients + 8}
    assert tp.by_axes() == {("tp",): 2 * 3 * 128, ("dp",): gradients + 8}
    assert tp.total == sum(tp.by_axes().values())
    assert tp.totals() == [
        ("all_reduce", ("dp",), 1, 1, gradients + 8),
        ("all_reduce", ("tp",), 2, 6, 768),
    ]


def test_several_values_in_one_node_keep_their_sources_and_reasons(tp):
    (row,) = tp.select(segment="step").rows
    assert row.tensors == 3 == len(row.values)
    assert row.reason == "gradient + output" and row.owed
    assert len(row.sources) == 1  # the gradients' line; the loss is brought out by no line


def implicit(batch):
    return torch.exp(einsum("b d, e d -> b e", batch, batch))


def test_what_nothing_asked_for_is_implicit():
    layout, axes = Layout(width="tp"), {"batch": "batch width"}
    kw = dict(mesh=Mesh(tp=2), layout=layout, axes=axes)
    e = explained(implicit, t(4, 8), **kw)
    (row,) = e.rows
    assert (row.kind, row.reason, row.owed) == ("all_reduce", "pending sum", False)
    assert e.implicit == (row,)
    assert "1 implicit" in str(e) and "pending sum (implicit)" in str(e)
    with pytest.raises(ShardingError, match="strict"):
        explained(implicit, t(4, 8), strict=True, **kw)


def test_a_merged_node_is_owed_only_if_all_of_it_is():
    xs = [Value(TensorType((4,), F64)) for _ in range(3)]
    nodes = [
        Node(ALL_REDUCE, ([x], ("tp",), "sum"), {}, source=f"model.py:{i} f", tags={"reason": reason})
        for i, (x, reason) in enumerate(zip(xs, ("output", "output", "pending sum"), strict=True))
    ]
    for n, x in zip(nodes, xs, strict=True):
        n.outs = (Value(x.type, n),)
    program = Program(tuple(xs), nodes, tuple(n.outs[0] for n in nodes))
    (row,) = explain(coalesce_where(program, lambda n: True), Mesh(tp=2)).rows
    assert (row.tensors, row.nbytes, row.reason, row.owed) == (3, 3 * 32, "output + pending sum", False)
    assert row.sources == ("model.py:0 f", "model.py:1 f", "model.py:2 f")


def test_nested_loops_multiply():
    def inner(x, p):
        return scan(mlp, x, p)

    def outer(params, batch):
        return scan(lambda x, p: (inner(x, p)[0], None), batch, params)[0]

    params = {k: TensorType((5, *v.shape), v.dtype) for k, v in MLP.items()}
    axes = {"params": {k: f"blocks {v}" for k, v in MLP_AXES["params"].items()}}
    e = explained(outer, params, t(4, 8), mesh=Mesh(tp=2), layout=Layout(ff="tp"), axes=axes)
    (row,) = e.rows
    assert row.path == ("scan body", "scan body") and row.count == 15


def test_ranks_and_slices_are_not_collectives():
    def f(params, batch):
        return ops.embedding(params, batch)

    ids = TensorType((4, 8), torch.int64)
    low = jit(f, mesh=Mesh(tp=2), layout=Layout(vocab="tp"), axes={"params": "vocab embed"}).lower(t(8, 16), ids)
    assert any(n.opname == "axis_index" for n in low.program.nodes)
    assert low.explain().counts() == {"all_reduce": 1}


def test_one_device_has_none():
    e = explained(train, MLP, t(4, 8), mesh=Mesh(), layout=Layout(), axes=MLP_AXES)
    assert e.rows == () and e.counts() == {} and e.total == 0
    assert str(e).startswith("0 collectives") and "<table>" in e._repr_html_()


def test_as_text(tp):
    lines = str(tp).splitlines()
    assert repr(tp) == str(tp)
    assert lines[0] == "3 collectives, 7 executions, 3.8 KiB a rank"
    assert lines[1].split() == ["where", "collective", "over", "runs", "bytes", "in", "all", "value", "why", "line"]
    assert re.match(r"scan body +F +all_reduce +tp \(2\) +3× +128 B +384 B +f64\[4@dp, 8\]\{P:tp\} -> f64", lines[2])
    assert re.search(r"and 2 more +gradient \+ output", str(tp))
    assert re.search(r"total +all_reduce +tp +6× +768 B +2 nodes", str(tp))


def test_as_html_and_rich(tp):
    html = tp._repr_html_()
    assert (
        html.count("<tr>") == 1 + 3 + 2
        and html.count("</td>") == (3 + 2) * 10
        and "f64[4@dp, 8]{P:tp} -&gt; f64[4@dp, 8]" in html
    )
    console = Console(width=200, record=True, file=StringIO())
    console.print(tp)
    assert "scan body backward" in console.export_text()


def test_rows_are_data(tp):
    again = Explanation(tuple(replace(r, count=1) for r in tp.rows))
    assert again.executed() == again.counts()
