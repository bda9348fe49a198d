"""From any placement to any other: right on a mesh, and no dearer than it must be."""

from __future__ import annotations

from itertools import chain, combinations, permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmeg import Mesh, TensorType
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Value
from fmeg.sharding.execute import Executable
from fmeg.sharding.partition import Context, Partitioner
from fmeg.sharding.reshard import LATENCY, plan
from fmeg.sharding.value import Placed, Placement, count


def subsets(axes):
    return chain.from_iterable(combinations(axes, n) for n in range(len(axes) + 1))


def placements(axes: tuple[str, ...], ndim: int) -> list[Placement]:
    """Every placement of a tensor: each axis on a dimension (in any order there), pending, or unused."""
    out = set()
    for where in product(range(-2, ndim), repeat=len(axes)):
        pending = frozenset(a for a, w in zip(axes, where, strict=True) if w == -2)
        per_dim = [[a for a, w in zip(axes, where, strict=True) if w == d] for d in range(ndim)]
        for dims in product(*(permutations(d) for d in per_dim)):
            out.add(Placement(tuple(dims), pending))
    return sorted(out, key=repr)


def move(mesh: Mesh, x: Tensor, src: Placement, dst: Placement) -> tuple[list[Tensor], Tensor]:
    """Move a value whose true content is `x`: the local values after, and how a value in `dst` reads as a whole."""
    t = TensorType(tuple(x.shape), x.dtype)
    part = Partitioner(Context(dict(mesh.sizes), {}, {}, False, dict(mesh.sizes)))
    v = Value(t)
    local = part.input(v, placed := Placed(t, src))
    program = part.finish([local], [part.get(placed, dst, "border")])
    backend = mesh.backend()
    got = Executable(program, backend)([terms(mesh, x, src)])[0]
    summed = backend.all_reduce([got], tuple(sorted(dst.pending)))[0] if dst.pending else got
    return backend.local(summed), backend.gather(summed, dst.dims)


def terms(mesh: Mesh, x: Tensor, p: Placement):
    """A backend value in placement `p`: over pending axes, ranks hold different terms of the sum `x`."""
    backend = mesh.backend()
    n = count(tuple(p.pending), mesh.sizes)
    whole = []
    for rank in backend.ranks:
        at, i = mesh.coordinates(rank), 0
        for a in sorted(p.pending):
            i = i * mesh.sizes[a] + at[a]
        rest = (n - 1) * n // 2
        whole.append(x - rest if n > 1 and i == 0 else torch.full_like(x, i) if n > 1 else x)
    blocks = [backend.local(backend.scatter(w, p.dims))[k] for k, w in enumerate(whole)]
    everywhere = (
        tuple(p.dims[0]) + tuple(sorted(p.pending)),
        *p.dims[1:],
    )  # no two ranks of a pending axis hold the same
    return backend.from_local(blocks, everywhere)


def pairs(axes: tuple[str, ...], ndim: int):
    every = placements(axes, ndim)
    return [(a, b) for a in every for b in every if b.pending <= a.pending]


SHAPES = {1: (24,), 2: (12, 24)}
MESHES = [Mesh(a=2, b=3), Mesh(b=3, a=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_every_pair_on_two_axes(mesh):
    for ndim, shape in SHAPES.items():
        x = torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape)
        for src, dst in pairs(("a", "b"), ndim):
            locals_, whole = move(mesh, x, src, dst)
            assert torch.equal(whole, x), (src, dst)
            if not dst.pending:
                want = mesh.backend().local(mesh.backend().scatter(x, dst.dims))
                assert all(torch.equal(a, b) for a, b in zip(locals_, want, strict=True)), (src, dst)


@settings(max_examples=60)
@given(st.data())
def test_three_axes(data):
    axes = data.draw(st.permutations(("a", "b", "c")))
    mesh = Mesh(dict.fromkeys(axes, 2))
    every = placements(tuple(axes), 2)
    src = data.draw(st.sampled_from(every))
    dst = data.draw(st.sampled_from([p for p in every if p.pending <= src.pending]))
    x = torch.arange(64.0, dtype=torch.float64).reshape(8, 8)
    assert torch.equal(move(mesh, x, src, dst)[1], x)


def kinds(src: Placement, dst: Placement, shape=(4096, 4096), **sizes: int) -> list[str]:
    return [m.kind for m in plan(src, dst, shape, 4, sizes or {"a": 2, "b": 4})[1] if m.kind != "slice"]


def at(*dims: str, p: str = "") -> Placement:
    """`at("a b", "", p="c")`: the first dimension on a then b, the second whole, pending over c."""
    return Placement(tuple(tuple(d.split()) for d in dims), frozenset(p.split()))


@pytest.mark.parametrize(
    ("src", "dst", "want"),
    [
        (at("", ""), at("a", "b"), []),
        (at("a", ""), at("", ""), ["all_gather"]),
        (at("a b", ""), at("", ""), ["all_gather"]),
        (at("a b", ""), at("a", ""), ["all_gather"]),
        (at("a", ""), at("", "a"), ["all_to_all"]),
        (at("a b", ""), at("", "a b"), ["all_to_all"]),
        (at("a b", ""), at("a", "b"), ["all_to_all"]),
        (at("a b", ""), at("b a", ""), ["ppermute"]),
        (at("b", ""), at("a b", ""), ["ppermute"]),
        (at("a", ""), at("a b", ""), []),
        (at("", "", p="a"), at("", ""), ["all_reduce"]),
        (at("", "", p="a b"), at("", ""), ["all_reduce"]),
        (at("", "", p="a"), at("a", ""), ["reduce_scatter"]),
        (at("", "", p="a b"), at("a b", ""), ["reduce_scatter"]),
        (at("b", "", p="a"), at("b a", ""), ["reduce_scatter"]),
        (at("b", "", p="a"), at("b", "a"), ["reduce_scatter"]),
        (at("", "", p="a b"), at("a", "", p="b"), ["reduce_scatter"]),
        (at("", "", p="a b"), at("", "", p="b"), ["all_reduce"]),
        (at("", "", p="a b"), at("a", ""), ["reduce_scatter", "all_reduce"]),
        (at("a", "", p="b"), at("", "a"), ["all_to_all", "all_reduce"]),
    ],
    ids=lambda v: repr(v) if isinstance(v, list) else None,
)
def test_which_collectives(src, dst, want):
    assert sorted(kinds(src, dst)) == sorted(want)


def test_a_split_sum_is_reduced_before_it_is_moved():
    """Scattering first makes what follows smaller."""
    assert kinds(at("", "", p="a b"), at("a", "")) == ["reduce_scatter", "all_reduce"]


def test_what_does_not_divide_is_gathered():
    assert kinds(at("a", ""), at("", "a"), shape=(4096, 4096)) == ["all_to_all"]
    with pytest.raises(ShardingError, match="no sequence of collectives"):
        plan(at("a", ""), at("", "a"), (4096, 3), 4, {"a": 2})


@pytest.mark.parametrize("n", [2, 3])
def test_no_axis_is_gathered_to_be_sliced_again(n):
    """Of a large tensor; of a small one, one collective fewer may be worth some bytes."""
    sizes = dict(a=2, b=4, c=2)
    axes = tuple(sizes)[:n]
    for src, dst in pairs(axes, 2) if n == 2 else pairs(axes, 1):
        shape = (4096, 4096) if n == 2 else (1 << 24,)
        moves = plan(src, dst, shape, 4, {a: sizes[a] for a in axes})[1]
        gathered = {(a, m.dims[0]) for m in moves if m.kind == "all_gather" for a in m.axes}
        sliced = {(a, m.dims[0]) for m in moves if m.kind == "slice" for a in m.axes}
        assert not gathered & sliced, (src, dst, moves)
        assert len(moves) <= 2 * n


def test_costs_are_bytes_received_plus_a_price_a_collective():
    b, sizes = 4 * 16 * 16, {"a": 4}
    cost = lambda src, dst: plan(src, dst, (16, 16), 4, sizes)[0] - LATENCY
    assert cost(at("a", ""), at("", "")) == 3 * b / 4
    assert cost(at("a", ""), at("", "a")) == 3 / 4 * b / 4
    assert cost(at("", "", p="a"), at("a", "")) == 3 / 4 * b
    assert cost(at("", "", p="a"), at("", "")) == 2 * 3 / 4 * b


def test_nothing_to_do_and_what_cannot_be():
    assert plan(at("a"), at("a"), (8,), 4, {"a": 2}) == (0.0, ())
    with pytest.raises(ShardingError, match="whole cannot become a pending sum"):
        plan(at(""), at("", p="a"), (8,), 4, {"a": 2})


def test_every_rank_finds_the_same_path():
    """The plan depends on its arguments alone: computed afresh, in any order of questions, it is the same."""
    from fmeg.sharding.reshard import _plan

    every = pairs(("a", "b"), 2)
    sizes = {"a": 2, "b": 2}
    first = [plan(s, d, (8, 8), 4, sizes) for s, d in every]
    _plan.cache_clear()
    again = [plan(s, d, (8, 8), 4, sizes) for s, d in reversed(every)][::-1]
    assert first == again
