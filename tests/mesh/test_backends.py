"""Virtual backends against the plain definitions of the collectives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmeg.mesh import Backend, LoopBackend, Mesh, SingleBackend, VmapBackend
from fmeg.program.errors import MeshError, ShardingError
from tests.mesh import reference as ref

NAMES = "abcd"
BACKENDS: dict[str, Callable[[Mesh], Backend]] = {
    "loop": LoopBackend,
    "every rank": lambda mesh: LoopBackend(mesh, dedupe=False),
    "vmap": VmapBackend,
}


def make_mesh(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(zip(NAMES, sizes, strict=False))


def check_equal(got: Tensor, want: Tensor, exact: bool, what: str) -> None:
    assert got.dtype == want.dtype, what
    if exact or not got.dtype.is_floating_point:
        assert torch.equal(got, want), what
    else:
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14, msg=what)


def place(
    backend: Backend, mesh: Mesh, dims: tuple, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> object:
    """A value that varies over the axes in dims, from tensors that are not contiguous."""
    axes = tuple(a for d in dims for a in d)
    where = [tuple(mesh.coordinates(r)[a] for a in axes) for r in range(mesh.size)]
    tensors = {c: ref.sample(shape, dtype, seed + 31 * i) for i, c in enumerate(sorted(set(where)))}
    return backend.from_local([tensors[c] for c in where], dims)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sizes", ref.meshes(), ids=str)
def test_collectives_equal_their_definitions(sizes: tuple[int, ...], name: str) -> None:
    mesh = make_mesh(sizes)
    backend = BACKENDS[name](mesh)
    for axes in ref.axes_tuples(mesh):
        n = mesh.axis_size(axes)
        for dims in ref.value_dims(mesh):
            xs = [
                place(backend, mesh, dims, (n, 2 * n, 3), torch.float64),
                place(backend, mesh, dims, (2 * n, n, 1), torch.float64, 1),
                place(backend, mesh, dims, (n, n, 5), torch.int32, 2),
                place(backend, mesh, dims, (n, n, 2), torch.bool, 3),
            ]
            inputs = [backend.local(x) for x in xs]
            for what, ask, define in ref.cases(mesh, axes):
                outs = ask(backend, xs)
                assert len(outs) == len(xs)
                for x, out in zip(inputs, outs, strict=True):
                    for r, (got, want) in enumerate(zip(backend.local(out), define(x), strict=True)):
                        check_equal(got, want, name != "vmap", f"{what} over {axes} of {dims}, rank {r}")
                        assert n == 1 or got.is_contiguous(), what
            for x, before in zip(xs, inputs, strict=True):
                assert all(map(torch.equal, backend.local(x), before)), "an input was written to"
        for got, want in zip(backend.local(backend.axis_index(axes)), ref.axis_index(mesh, axes), strict=True):
            check_equal(got, want, True, f"axis_index {axes}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64])
def test_dtypes_survive(dtype: torch.dtype) -> None:
    mesh = Mesh(a=2, b=3)
    for name, make in BACKENDS.items():
        backend = make(mesh)
        x = place(backend, mesh, (("a",), ()), (6, 6), dtype)
        for y in (
            *backend.all_reduce([x], ("b", "a")),
            *backend.all_reduce([x], ("b",), "max"),
            *backend.all_gather([x], ("a", "b"), [0]),
            *backend.reduce_scatter([x], ("a", "b"), [1]),
            *backend.all_to_all([x], ("b",), [0], [1]),
            backend.ppermute(x, ("a",), [(0, 1)]),
        ):
            assert {t.dtype for t in backend.local(y)} == {dtype}, name


def test_variadic_equals_one_by_one() -> None:
    mesh = Mesh(a=2, b=2)
    for make in BACKENDS.values():
        backend = make(mesh)
        xs = [place(backend, mesh, (("a",), ()), (4, 8), torch.float64, s) for s in range(3)]
        for together, alone in (
            (
                backend.all_gather(xs, ("b", "a"), [0, 1, 0]),
                [backend.all_gather([x], ("b", "a"), [d])[0] for x, d in zip(xs, (0, 1, 0), strict=True)],
            ),
            (
                backend.reduce_scatter(xs, ("a",), [1, 0, 1]),
                [backend.reduce_scatter([x], ("a",), [d])[0] for x, d in zip(xs, (1, 0, 1), strict=True)],
            ),
        ):
            for t, a in zip(together, alone, strict=True):
                assert all(map(torch.equal, backend.local(t), backend.local(a)))
        assert backend.all_reduce([], ("a",)) == []


def test_replicas_are_summed() -> None:
    for make in BACKENDS.values():
        backend = make(Mesh(a=3, b=2))
        x = torch.full((2,), 0.1, dtype=torch.float64)
        [y] = backend.all_reduce([x], ("a",))
        torch.testing.assert_close(backend.local(y)[0], 3 * x, rtol=1e-15, atol=0)
        [z] = backend.all_gather([x], ("b",), [0])
        assert torch.equal(backend.local(z)[5], torch.cat([x, x]))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Mesh, tuple, Tensor]:
    """A mesh, a placement, and a global tensor that divides by it (sizes of 0 too), contiguous or not."""
    mesh = make_mesh(tuple(draw(st.lists(st.integers(1, 3), max_size=3))))
    ndim = draw(st.integers(0, 3))
    homes = [draw(st.integers(-1, ndim - 1)) for _ in mesh.axes]
    order = draw(st.permutations(range(len(mesh.axes))))
    dims = tuple(tuple(mesh.axes[i] for i in order if homes[i] == d) for d in range(ndim))
    shape = tuple(draw(st.integers(0, 3)) * mesh.axis_size(axes) for axes in dims)
    dtype = draw(st.sampled_from([torch.float64, torch.bool, torch.bfloat16, torch.int64]))
    return mesh, dims, ref.sample(shape, dtype, 0)


@settings(max_examples=80)
@given(placed())
def test_scatter_and_gather_are_inverse(case: tuple[Mesh, tuple, Tensor]) -> None:
    mesh, dims, x = case
    backends = [make(mesh) for make in BACKENDS.values()]
    if mesh.size == 1:
        backends.append(SingleBackend(mesh))
    first = backends[0].local(backends[0].scatter(x, dims))
    for backend in backends:
        value = backend.scatter(x, dims)
        assert torch.equal(backend.gather(value, dims), x)
        tensors = backend.local(value)
        assert all(map(torch.equal, tensors, first))
        assert torch.equal(backend.gather(backend.from_local(tensors, dims), dims), x)
        read = backend.scatter(lambda where: x[where], dims, x.shape)
        assert torch.equal(backend.gather(read, dims), x)
        # Gathering is what the collective does.
        for d, axes in enumerate(dims):
            [value] = backend.all_gather([value], axes, [d])
        assert all(torch.equal(t, x) for t in backend.local(value))


def test_scatter_reads_each_block_once_and_copies_what_it_cuts() -> None:
    mesh, x, seen = Mesh(a=2, b=3), torch.arange(12.0).view(6, 2), []

    def read(where: tuple[slice, ...]) -> Tensor:
        seen.append((where[0].start, where[0].stop))
        return x[where]

    LoopBackend(mesh).scatter(read, (("b",), ()), (6, 2))
    assert seen == [(0, 2), (2, 4), (4, 6)]
    value = LoopBackend(mesh).scatter(x, (("b",), ()))
    value.tensors[0].zero_()
    assert x[0, 1] == 1
    assert LoopBackend(mesh).scatter(x, ((), ())) is x


CALLS: list[tuple[str, Callable]] = [
    ("one tensor", lambda b, x, y, c: b.call(torch.ops.aten.mul.Tensor, (x, y))),
    ("constant", lambda b, x, y, c: b.call(torch.ops.aten.add.Tensor, (x, c), {"alpha": 2})),
    ("constants alone", lambda b, x, y, c: b.call(torch.ops.aten.mul.Tensor, (c, 3))),
    ("no argument", lambda b, x, y, c: b.call(torch.ops.aten.zeros.default, ([2, 3],))),
    ("list", lambda b, x, y, c: b.call(torch.ops.aten.cat.default, ([x, y, c], 1))),
    ("keyword", lambda b, x, y, c: b.call(lambda *, u, v: u - v, (), {"u": x, "v": (y,)[0]})),
    ("nested", lambda b, x, y, c: b.call(lambda d, l: d["p"][0] * l[0][0] + l[1], ({"p": (x, 1)}, [(y, None), c]))),
    (
        "view",
        lambda b, x, y, c: b.call(
            torch.ops.aten.view.default, (b.call(torch.ops.aten.mm.default, (x, b.call(torch.t, (y,)))), [4])
        ),
    ),
]


@pytest.mark.parametrize("what,ask", CALLS, ids=[c[0] for c in CALLS])
def test_call_runs_on_every_rank(what: str, ask: Callable) -> None:
    mesh = Mesh(a=2, b=3, c=2)
    x, y, c = (
        torch.randn(8, 3, dtype=torch.float64),
        torch.randn(12, 3, dtype=torch.float64),
        torch.randn(2, 3, dtype=torch.float64),
    )
    dims_x, dims_y = (("c", "a"), ()), (("b", "a"), ())
    expected = [
        ask(SingleBackend(Mesh()), u, v, c)
        for u, v in zip(_locals(mesh, x, dims_x), _locals(mesh, y, dims_y), strict=True)
    ]
    for name, make in BACKENDS.items():
        backend = make(mesh)
        got = ask(backend, backend.scatter(x, dims_x), backend.scatter(y, dims_y), c)
        for g, e in zip(backend.local(got), expected, strict=True):
            check_equal(g, e, name != "vmap", f"{what} on {name}")


def _locals(mesh: Mesh, x: Tensor, dims: tuple) -> list[Tensor]:
    backend = LoopBackend(mesh, dedupe=False)
    return backend.local(backend.scatter(x, dims))


def test_call_keeps_the_structure_of_results() -> None:
    for make in BACKENDS.values():
        backend = make(Mesh(a=2, b=2))
        x = backend.scatter(torch.arange(8.0).view(4, 2), (("a",), ()))
        first, (second, none, number) = backend.call(lambda t: [t + 1, (t * 2, None, 7)], (x,))
        assert (none, number) == (None, 7)
        assert backend.local(first)[3].tolist() == [[5, 6], [7, 8]]
        assert backend.local(second)[0].tolist() == [[0, 2], [4, 6]]
        values, indices = backend.call(torch.ops.aten.max.dim, (x, 1))
        assert backend.local(values)[2].tolist() == [5, 7]
        assert backend.local(indices)[2].tolist() == [1, 1]


def test_the_loop_computes_what_is_replicated_once() -> None:
    mesh, count = Mesh(a=2, b=3), []

    def fn(*tensors: Tensor) -> Tensor:
        count.append(1)
        return tensors[0] + 1

    def runs(backend: LoopBackend, *dims: tuple) -> int:
        count.clear()
        backend.call(fn, tuple(backend.scatter(torch.zeros(6), d) for d in dims))
        return len(count)

    loop, every = LoopBackend(mesh), LoopBackend(mesh, dedupe=False)
    assert [runs(loop, ((),)), runs(loop, (("a",),)), runs(loop, (("b",),)), runs(loop, (("a",),), (("b",),))] == [
        1,
        2,
        3,
        6,
    ]
    assert [runs(every, ((),)), runs(every, (("a",),))] == [6, 6]
    x = loop.scatter(torch.zeros(6), (("b", "a"),))
    [y] = loop.all_reduce([x], ("a",))
    assert (len(x.tensors), len(y.tensors)) == (6, 3)


def test_vmap_runs_hundreds_of_ranks() -> None:
    mesh = Mesh(dp=16, cp=4, tp=8)
    backend = mesh.backend()
    assert isinstance(backend, VmapBackend)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(32, 8, generator=g, dtype=torch.float64)
    w, v = torch.randn(8, 16, generator=g, dtype=torch.float64), torch.randn(16, 8, generator=g, dtype=torch.float64)
    xs = backend.scatter(x, (("dp",), ()))
    h = backend.call(torch.ops.aten.mm.default, (xs, backend.scatter(w, ((), ("tp",)))))
    y = backend.call(torch.ops.aten.mm.default, (h, backend.scatter(v, (("tp",), ()))))
    [y] = backend.all_reduce([y], ("tp",))
    torch.testing.assert_close(backend.gather(y, (("dp",), ())), x @ w @ v, rtol=1e-12, atol=1e-12)


def test_vmap_refuses_randomness() -> None:
    backend = VmapBackend(Mesh(a=2))
    with pytest.raises(RuntimeError, match="random"):
        backend.call(torch.rand_like, (backend.scatter(torch.zeros(4), (("a",),)),))


@pytest.mark.parametrize("name", BACKENDS)
def test_errors(name: str) -> None:
    backend = BACKENDS[name](Mesh(a=2, b=4))
    x = backend.scatter(torch.zeros(4, 6), (("a",), ()))
    with pytest.raises(MeshError, match=r"no axis 'tp'; its axes are \(a, b\)"):
        backend.all_reduce([x], ("tp",))
    with pytest.raises(MeshError, match="op must be one of sum, max, got 'mean'"):
        backend.all_reduce([x], ("a",), "mean")
    with pytest.raises(MeshError, match=r"dimension 2 is out of range for local shape \(2, 6\)"):
        backend.all_gather([x], ("a",), [2])
    with pytest.raises(MeshError, match="one dimension a value, got 1 values"):
        backend.all_gather([x], ("a",), [0, 1])
    with pytest.raises(
        ShardingError, match=r"reduce_scatter over \('b',\): dimension 1 of local shape \(2, 6\).*4 does not divide 6"
    ):
        backend.reduce_scatter([x], ("b",), [1])
    with pytest.raises(ShardingError, match="all_to_all over"):
        backend.all_to_all([x], ("b",), [0], [1])
    with pytest.raises(MeshError, match="members are 0 to 3"):
        backend.ppermute(x, ("b",), [(0, 4)])
    with pytest.raises(MeshError, match="receive once"):
        backend.ppermute(x, ("b",), [(0, 1), (2, 1)])
    with pytest.raises(
        ShardingError,
        match=r"shape \(3, 6\) does not divide.*dimension 0 \(size 3\).*dimension 1 \(size 6\) is cut over \('b',\), 4",
    ):
        backend.scatter(torch.zeros(3, 6), (("a",), ("b",)))
    with pytest.raises(ShardingError, match="mesh axis 'a' cuts dimensions 0 and 1"):
        backend.scatter(torch.zeros(4, 6), (("a",), ("a",)))
    with pytest.raises(ShardingError, match="one tuple of mesh axes for each of 2 dimensions"):
        backend.scatter(torch.zeros(4, 6), (("a",),))
    with pytest.raises(MeshError, match="needs the global shape"):
        backend.scatter(lambda where: torch.zeros(2), (("a",),))
    with pytest.raises(ShardingError, match=r"expected a block of shape \(2,\), got \(3,\)"):
        backend.scatter(lambda where: torch.zeros(3), (("a",),), (4,))
    with pytest.raises(MeshError, match="expected 8 tensors"):
        backend.from_local([torch.zeros(2)], (("a",),))
    with pytest.raises(MeshError, match="agree in shape and dtype"):
        backend.from_local([torch.zeros(r) for r in range(8)], ((),))
