"""What the exchange of tokens sends: a row once to each rank that holds some of a token's experts, and one row back."""

from __future__ import annotations

from functools import partial
from math import comb
from unittest import mock

import pytest
import torch

from fmeg import Layout, Mesh, jit, tree
from fmeg.mesh import LoopBackend
from fmeg.mesh.rows import sent_and_received
from fmeg.ops.routing import sort_slots
from fmeg.program.structured import walk
from fmeg.sharding.experts.copies import arrive, depart
from fmeg.testing import assert_equivalent
from tests.ops.experts import AXES, BATCH_AXES, problem, step

EP = dict(batch="dp", experts="dp")


def _jitted(mesh, data, weighted="rows", backend="loop", **layout):
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in data}}
    mesh = Mesh(mesh, backend=backend) if isinstance(mesh, dict) else mesh
    return jit(partial(step, weighted=weighted), mesh=mesh, layout=Layout(**layout), axes=axes, strict=True)


def _explained(mesh, weighted="rows", shape=None, **layout):
    params, batch = problem(**(shape or {}))
    return _jitted(mesh, batch, weighted, **layout).lower(params, batch).explain()


def _equal(mesh, shape, layout, weighted, backend="loop"):
    params, batch = problem(**shape)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    run = partial(step, weighted=weighted)
    mesh = Mesh(mesh, backend=backend)
    assert_equivalent(run, params, batch, mesh=mesh, layout=Layout(**layout), axes=axes, strict=True)


def _ranks_of_tokens(batch, members, experts):
    """[tokens, members]: whether a member holds an expert that a token goes to."""
    owner = batch["indices"].flatten(0, 1) // (experts // members)
    keep = batch.get("keep", torch.ones_like(batch["indices"], dtype=torch.bool)).flatten(0, 1)
    return torch.stack([((owner == m) & keep).any(1) for m in range(members)], 1)


@pytest.mark.parametrize("weighted", ["rows", "combine"])
@pytest.mark.parametrize(
    "shape",
    [
        dict(experts=8, k=4, routing="skewed"),
        dict(experts=8, k=4, drop=True),
        dict(experts=8, k=8),
        dict(routing="one expert", k=1),
        dict(routing="empty", k=2),
    ],
    ids=str,
)
def test_a_row_a_token_and_rank(shape, weighted):
    """What really travels, counted rank by rank."""
    params, batch = problem(**shape)
    n, experts = 4, params["w_gate"].shape[1]
    sent: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    exchange = LoopBackend.exchange_rows

    def spied(self, x, table, axes, back, *rest):
        if axes:
            tables = self.local(table)
            assert len(tables) == n
            rows = sent.setdefault((back, tuple(self.local(x)[0].shape[1:])), [])
            rows += [sum(sent_and_received(t, back)[0]) for t in tables]
        return exchange(self, x, table, axes, back, *rest)

    with mock.patch.object(LoopBackend, "exchange_rows", spied):
        _jitted(dict(dp=n), batch, weighted, **EP)(params, batch)
    there = _ranks_of_tokens(batch, n, experts)
    going = there.view(n, -1, n).sum((1, 2)).tolist()  # copies that leave each rank's tokens, its own included
    coming = there.sum(0).tolist()
    wide = (params["x"].shape[-1],)
    assert sent[False, wide] == 2 * going and sent[True, wide] == 2 * coming
    assert all(rows == going * (len(rows) // n) for (back, _), rows in sent.items() if not back)
    assert all(rows == coming * (len(rows) // n) for (back, _), rows in sent.items() if back)


def distinct(experts, members, k):
    """Ranks that a token goes to, on average, if every choice of k experts is as likely as another."""
    return members * (1 - comb(experts - experts // members, k) / comb(experts, k))


@pytest.mark.parametrize(("experts", "k", "n"), [(16, 8, 2), (16, 8, 4), (8, 1, 4), (8, 8, 2), (32, 2, 8)])
def test_bytes(experts, k, n):
    """Of a wide exchange: a token's distinct ranks, but for one in n, in place of k (n - 1) / n rows."""
    shape = dict(batch=8, seq=32, experts=experts, k=k, embed=96)
    rows = [r for r in _explained(dict(dp=n), shape=shape, **EP).rows if r.kind == "exchange_rows" and r.path]
    tokens, row = 8 * 32 / n, 96 * 8
    wide = [r.nbytes / (tokens * row) for r in rows if r.nbytes > tokens * row / 2]
    expected = distinct(experts, n, k) * (n - 1) / n
    assert wide == pytest.approx([expected] * 4, rel=0.02)
    assert expected <= min(k, n) * (n - 1) / n + 1e-9
    assert all(r.axes for r in rows)


@pytest.mark.parametrize("bound", [1.0, 4.0])
def test_bytes_with_a_bound(bound):
    """A rank has room for no more tokens of another than that one has."""
    shape = dict(batch=4, seq=8, experts=8, k=4, embed=6)
    rows = _explained(dict(dp=2), shape=shape, dispatch_bound=bound, **EP).select(kind="all_to_all").rows
    assert [r.nbytes for r in rows if r.nbytes >= 16 * 6 * 8] == [16 * 6 * 8] * 4


def _narrow(lowered):
    """Collectives of a layer's body, by kind."""
    kinds = [n.op.name for n, _, path in walk(lowered.program) if type(n.op).__name__ == "Collective" and path]
    return {k: kinds.count(k) for k in kinds}


def test_nothing_else_travels_more_often():
    """Choices are gathered where counts were; a read by the host; weights there and their cotangents back."""
    params, batch = problem(layers=2)
    lowered = _jitted(dict(dp=2), batch, **EP).lower(params, batch)
    rows = [r for r in lowered.explain().rows if r.path]
    assert [(r.phase, r.kind) for r in rows] == [("F", "all_gather"), *[("F", "exchange_rows")] * 3, *[("B", "exchange_rows")] * 3]  # fmt: skip  # noqa: E501
    assert sum(n.opname == "to_host" for n, _, _ in walk(lowered.program)) == 1


def test_weights_travel_once():
    """Weights that `combine` applies go to the rows' ranks in the forward pass, and are there in the backward pass."""
    rows = [r for r in _explained(dict(dp=2), "combine", dict(layers=2), **EP).rows if r.path]
    assert [r.phase for r in rows if r.kind == "exchange_rows"] == ["F"] * 3 + ["B"] * 3


@pytest.mark.parametrize("weighted", ["rows", "combine"])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_an_expert_twice(weighted, backend):
    """A token may name an expert in several of its slots, each with its own weight."""
    shape = dict(experts=4, k=3)
    params, batch = problem(**shape)
    batch["indices"] = batch["indices"].clone()
    batch["indices"][..., 1] = batch["indices"][..., 0]
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    for bound in (None, 4.0):
        layout = Layout(**EP, dispatch_bound=bound)
        mesh = Mesh(dp=4, backend=backend)
        run = partial(step, weighted=weighted)
        assert_equivalent(run, params, batch, mesh=mesh, layout=layout, axes=axes, strict=True)


@pytest.mark.parametrize("weighted", ["rows", "combine"])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("bound", [None, 8.0])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (dict(dp=8), EP),
        (dict(dp=1), EP),
        (dict(dp=2, cp=2, tp=2), dict(batch="dp", seq="cp", experts=("tp", "cp", "dp"))),
        (dict(dp=2, cp=2, tp=2), dict(batch="dp", seq="cp", experts=("dp", "tp"), expert_ff="cp")),
    ],
    ids=str,
)
def test_more_ranks_than_choices(mesh, layout, bound, backend, weighted):
    shape = dict(batch=8, experts=8, k=3, drop=True, routing="skewed")
    _equal(mesh, shape, dict(**layout, dispatch_bound=bound), weighted, backend)


# -- a bound ----------------------------------------------------------------------------------------------------------
def _loss(batch, params, **layout):
    (loss, _), grads = _jitted(dict(dp=4), batch, **EP, **layout)(params, batch)
    return loss.global_value(), grads


def test_a_bound_is_of_all_rows_of_a_rank():
    """Rows of one rank may be many as long as those of others are few: here each sends all that it has to one rank."""
    params, batch = problem(batch=4, seq=8, k=2, experts=8)
    owner = torch.arange(4)[:, None, None].expand(4, 8, 2)
    batch["indices"] = 2 * owner + torch.arange(2)  # rank r: both experts of rank r
    assert _loss(batch, params, dispatch_bound=1.0)[0].isnan()  # 4 tokens fit of one rank, it sends 8
    assert _loss(batch, params, dispatch_bound=2.0)[0].isfinite()
    batch["indices"] = 2 * ((owner + torch.arange(8)[:, None]) % 4) + torch.arange(2)
    assert _loss(batch, params, dispatch_bound=1.0)[0].isfinite()  # an even share of rows, two tokens from each


@pytest.mark.parametrize("k", [2, 4])
def test_rows_that_do_not_fit_spoil_everything_of_their_rank(k):
    """Tokens fit, but rank 0 would have more rows than it has room for."""
    params, batch = problem(batch=4, seq=8, k=k, experts=4 * k)
    batch["indices"] = torch.arange(k).expand(4, 8, k).clone()
    value, grads = _loss(batch, params, dispatch_bound=4.0)
    assert value.isfinite() and all(g.global_value().isfinite().all() for g in tree.leaves(grads))
    bound = 4.0 - 1 / (2 * k)  # a row of each rank too few, while its tokens still fit
    value, grads = _loss(batch, params, dispatch_bound=bound)
    assert value.isnan() and grads["x"].global_value().isnan().all()


# -- who goes where ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("width", [None, 2, 5])
@pytest.mark.parametrize(("members", "each", "k"), [(1, 3, 2), (2, 4, 3), (4, 1, 2), (5, 2, 8), (3, 2, 1)])
def test_copies(members, each, k, width):
    """Against loops over all tokens: what leaves, what arrives, and in which order its rows are."""
    g = torch.Generator().manual_seed(members * each * k)
    tokens = 5
    places = torch.randint(0, members * each + 2, (members, tokens, k), generator=g).clamp(max=members * each)
    leaving = [depart(p, each, members) for p in places]
    columns = min(k, members)
    for p, (order, inverse, counts) in zip(places, leaving, strict=True):
        want = [(m, t) for m in range(members) for t in range(tokens) if (p[t] // each == m).any()]
        got = [int(i) // columns for i in order[: len(want)]]
        assert got == [t for _, t in want] and counts.tolist() == [sum(w[0] == m for w in want) for m in range(members)]
        assert order.shape == (tokens * columns,) and torch.equal(order[inverse], torch.arange(tokens * columns))
        ranks = inverse.view(tokens, columns)
        for t in range(tokens):  # a token's copies are in the order of their ranks
            mine = [int(i) for i in ranks[t] if i < len(want)]
            assert mine == sorted(mine) and [want[i][1] for i in mine] == [t] * len(mine)
    for me in range(members):
        order, inverse, counts, received = arrive(places.flatten(0, 1), torch.tensor(me), each, members, width)
        come = [[t for t in range(tokens) if (places[r, t] // each == me).any()] for r in range(members)]
        assert received.tolist() == [len(c) for c in come] == [int(out[2][me]) for out in leaving]
        if width is None:
            at = [(r, t) for r in range(members) for t in come[r]]
            at += [None] * (members * tokens - len(at))
        else:
            at = [x for r in range(members) for x in ([(r, t) for t in come[r]][:width] + [None] * width)[:width]]
        local = [[int(places[x[0], x[1], j]) - me * each if x else each for j in range(k)] for x in at]
        ids = torch.tensor(local)
        ids = torch.where((ids >= 0) & (ids < each), ids, each).flatten()
        for a, b in zip((order, inverse, counts), sort_slots(ids, each), strict=True):
            assert torch.equal(a, b)
