"""Four Gloo processes against the loop backend, bit for bit, and Arrays against DTensors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from fmeg.mesh import DistributedBackend, LoopBackend, Mesh
from fmeg.mesh.transport import PIECE_BYTES, Transport
from fmeg.program.errors import MeshError, ShardingError
from fmeg.sharding.array import Array
from tests.mesh import processes
from tests.mesh import reference as ref

WORLD = 4
MESHES = [Mesh(a=4), Mesh(a=2, b=2), Mesh(a=2, one=1, b=2)]


def collectives() -> None:
    """Every collective, over every tuple of axes, equals the loop's, and its plain definition."""
    for mesh in MESHES:
        backend, loop = mesh.backend(), LoopBackend(mesh)
        assert isinstance(backend, DistributedBackend)
        [rank] = backend.ranks
        for axes in ref.axes_tuples(mesh):
            n = mesh.axis_size(axes)
            shapes = [(n, 2 * n, 3), (2 * n, n, 1), (n, n, 5), (n, n, 2), (0, n, 1)]
            dtypes = [torch.float64, torch.float64, torch.bfloat16, torch.bool, torch.int32]
            xs = [
                [ref.sample(shape, dtype, 100 * r + i) for r in range(mesh.size)]
                for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
            ]
            everywhere = (mesh.axes, (), ())
            for what, ask, define in ref.cases(mesh, axes):
                mine = ask(backend, [x[rank] for x in xs])
                virtual = ask(loop, [loop.from_local(x, everywhere) for x in xs])
                for x, got, want in zip(xs, mine, virtual, strict=True):
                    assert torch.equal(got, loop.local(want)[rank]), f"{what} over {axes} of {mesh}"
                    assert torch.equal(got, define(x)[rank]), f"{what} over {axes} of {mesh}"
                    assert got.dtype == x[0].dtype
                    assert got.is_contiguous() == loop.local(want)[rank].is_contiguous(), what
            assert torch.equal(backend.axis_index(axes), ref.axis_index(mesh, axes)[rank])


def scatter_and_gather() -> None:
    """Blocks are the loop's; gathering them gives the tensor back."""
    for mesh in MESHES:
        backend, loop = mesh.backend(), LoopBackend(mesh)
        [rank] = backend.ranks
        x = ref.sample((8, 4), torch.float64, 0)
        for axes in ref.axes_tuples(mesh):
            for dims in ((axes, ()), ((), axes), (axes[:1], axes[1:])):
                block = backend.scatter(x, dims)
                assert torch.equal(block, loop.local(loop.scatter(x, dims))[rank])
                assert torch.equal(backend.gather(block, dims), x)
                assert torch.equal(backend.scatter(x.__getitem__, dims, x.shape), block)
                assert not any(dims) or mesh.axis_size(axes) == 1 or block.untyped_storage().nbytes() < x.nbytes


def library_sums() -> None:
    """The path that lets the library add (NCCL's on CUDA) has the same meaning."""
    mesh = Mesh(a=2, b=2)
    backend = mesh.backend()
    [rank] = backend.ranks
    for axes in (("a", "b"), ("b", "a"), ("a",), ("b",)):
        n = mesh.axis_size(axes)
        ordered = backend.group(axes).transport
        order = None if axes != ("b", "a") else [0, 2, 1, 3]
        native = Transport(ordered.group, n, order, ordered=False)
        xs = [
            ref.sample((n, 3), torch.int64, rank),
            ref.sample((n, 2, 2), torch.float64, rank + 10),
            ref.sample((n,), torch.int64, rank),
            ref.sample((2, n, PIECE_BYTES // 16), torch.int64, rank).double(),  # in two pieces; sums are exact
        ]
        kept = [x.clone() for x in xs]
        outs = [None, xs[1].new_empty(1, 2, 2), None, xs[3].new_empty(2, 1, PIECE_BYTES // 16)]
        firsts, dims = (0, 0, 0, 1), (1, 2, 0, 1)
        ys = [torch.cat([x] * n, d) for x, d in zip(xs, dims, strict=True)]
        for got, want in (
            (native.all_reduce(xs, "sum"), ordered.all_reduce(xs, "sum")),
            (native.all_reduce(xs, "max"), ordered.all_reduce(xs, "max")),
            (native.reduce_scatter(xs, firsts), ordered.reduce_scatter(xs, firsts)),
            (native.gather(xs, firsts), ordered.gather(xs, firsts)),
            (native.start_gather(xs, dims)(), ordered.gather(xs, dims)),
            (native.start_reduce_scatter(ys, dims)(), ordered.reduce_scatter(ys, dims)),
            (native.start_reduce_scatter(xs, firsts, outs=outs)(), ordered.reduce_scatter(xs, firsts)),
            ([outs[1]], ordered.reduce_scatter(xs, firsts)[1:2]),
            (native.all_reduce(xs[:1], "sum"), ordered.all_reduce(xs[:1], "sum")),
        ):
            for g, w in zip(got, want, strict=True):
                torch.testing.assert_close(g, w, rtol=1e-15, atol=1e-15)
        assert all(map(torch.equal, xs, kept)), "an input was written to"


def errors() -> None:
    """A mesh that is not the world, and what needs a launcher."""
    with pytest.raises(MeshError, match=r"Mesh\(a=3\) has 3 devices, but 4 processes are running.*multiply to 4"):
        Mesh(a=3).backend()
    assert isinstance(Mesh(a=3, backend="loop").backend(), LoopBackend)
    x = torch.zeros(2, 6)
    with pytest.raises(ShardingError, match="4 does not divide 6"):
        MESHES[0].backend().reduce_scatter([x], ("a",), [1])


def arrays() -> None:
    """What an Array shows on a real mesh; printing alone does not hang."""
    mesh = Mesh(a=2, b=2)
    x = torch.arange(16.0).view(4, 4)
    a = Array.from_global(x, mesh, (("b", "a"), None))
    rank = dist.get_rank()
    [shard] = a.addressable_shards
    assert shard.rank == rank
    assert torch.equal(shard.data, x[shard.index])
    assert torch.equal(Array.from_local(shard.data, mesh, a.spec).global_value(), x)
    if rank == 0:
        assert repr(a) == "Array(f32[4@b+a, 4], mesh=Mesh(a=2, b=2))"
        assert repr(Array.from_global(x[0], mesh)) == "Array(f32[4], mesh=Mesh(a=2, b=2), [0., 1., 2., 3.])"
    assert Array.from_global(torch.tensor(3), mesh).item() == 3


def dtensors() -> None:
    """Arrays become the DTensors that torch makes of the same placement, and come back."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = Mesh(a=2, b=2)
    x = ref.sample((8, 4), torch.float64, 0)
    for spec in ((), ("a",), (None, "b"), ("b", "a"), (("a", "b"),), (("b", "a"),), (None, ("b", "a"))):
        a = Array.from_global(x, mesh, spec)
        d = a.to_dtensor()
        assert torch.equal(d.full_tensor(), x)
        assert d.stride() == (4, 1)
        back = Array.from_dtensor(d, mesh)
        assert back.spec == a.spec
        assert torch.equal(back.global_value(), x)
        assert back.value.data_ptr() == a.value.data_ptr()
    theirs = distribute_tensor(x, init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")), [Shard(1), Shard(0)])
    mine = Array.from_dtensor(theirs, mesh)
    assert mine.spec == (("b",), ("a",))
    assert torch.equal(mine.value, theirs.to_local())
    assert Array.from_global(x, mesh, ("b", "a")).to_dtensor().placements == theirs.placements
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "c"))
    with pytest.raises(MeshError, match=r"axes \('a', 'c'\), expected those of Mesh\(a=2, b=2\)"):
        Array.from_dtensor(distribute_tensor(x, other, [Replicate(), Replicate()]), mesh)
    partial = type(theirs).from_local(x, theirs.device_mesh, [Partial(), Replicate()])
    with pytest.raises(ShardingError, match="neither Shard nor Replicate"):
        Array.from_dtensor(partial, mesh)
    uneven = distribute_tensor(torch.zeros(3), theirs.device_mesh, [Shard(0), Replicate()])
    with pytest.raises(ShardingError, match="unequal blocks"):
        Array.from_dtensor(uneven, mesh)


CHECKS: list[Callable[[], None]] = [collectives, scatter_and_gather, library_sums, errors, arrays, dtensors]


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    return processes.run(CHECKS, WORLD)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [c.__name__ for c in CHECKS])
def test_four_processes(name: str, results: dict[str, list[str]]) -> None:
    assert not results[name], "\n".join(results[name])
