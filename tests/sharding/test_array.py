"""Arrays on virtual meshes. Real meshes and DTensors: tests/mesh/test_distributed.py."""

from __future__ import annotations

import numpy as np
import optree
import pytest
import torch

from fmeg.mesh import Mesh
from fmeg.program.errors import MeshError, ShardingError
from fmeg.program.ir import TensorType
from fmeg.sharding.array import Array
from fmeg.sharding.dtensor import axis_order
from fmeg.sharding.spec import P

MESHES = [Mesh(), Mesh(dp=2, tp=2), Mesh(dp=2, tp=2, backend="vmap"), Mesh(dp=4, tp=4)]


@pytest.mark.parametrize("mesh", MESHES, ids=repr)
def test_global_tensors_round_trip(mesh: Mesh) -> None:
    x = torch.randn(16, 8, dtype=torch.float64)
    specs = [P(), P(None, None)] + ([P("dp"), P("tp", "dp"), P(("tp", "dp"), None)] if mesh.size > 1 else [])
    for spec in specs:
        a = Array.from_global(x, mesh, spec)
        assert (a.shape, a.dtype, a.ndim, a.nbytes, len(a)) == ((16, 8), torch.float64, 2, 1024, 16)
        assert a.type == TensorType((16, 8), torch.float64)
        assert len(a.spec) == 2
        assert torch.equal(a.global_value(), x)
        assert np.array_equal(np.asarray(a), x.numpy())
        shards = a.addressable_shards
        assert [s.rank for s in shards] == list(range(mesh.size))
        assert all(torch.equal(s.data, x[s.index]) for s in shards)
        again = Array.from_local([s.data for s in shards], mesh, spec)
        assert (again.shape, again.spec) == (a.shape, a.spec)
        assert torch.equal(again.global_value(), x)
        read = Array.from_callback(x.__getitem__, x.shape, mesh, spec)
        assert read.dtype == x.dtype
        assert torch.equal(read.global_value(), x)


def test_the_first_axis_of_a_dimension_is_major() -> None:
    a = Array.from_global(torch.arange(8), Mesh(dp=2, tp=2), P(("tp", "dp")))
    assert [s.data.tolist() for s in a.addressable_shards] == [[0, 1], [4, 5], [2, 3], [6, 7]]


def test_repr() -> None:
    mesh = Mesh(dp=2, tp=2)
    assert repr(Array.from_global(torch.zeros(8, 16), mesh, P("dp"))) == "Array(f32[8@dp, 16], mesh=Mesh(dp=2, tp=2))"
    assert repr(Array.from_global(torch.tensor([0.5, 1.0]).bfloat16(), mesh, P("tp"))) == (
        "Array(bf16[2@tp], mesh=Mesh(dp=2, tp=2), [0.5, 1. ])"
    )
    assert repr(Array.from_global(torch.tensor(2**60 + 1), Mesh())) == f"Array(i64[], mesh=Mesh(), {2**60 + 1})"
    assert repr(Array.from_global(torch.tensor([True]), Mesh())) == "Array(bool[1], mesh=Mesh(), [ True])"


def test_scalars() -> None:
    a = Array.from_global(torch.tensor(2.5), Mesh(dp=2))
    assert (a.item(), float(a), int(a), bool(a)) == (2.5, 2.5, 2, True)
    assert Array.from_global(torch.tensor([7]), Mesh(dp=2)).item() == 7
    with pytest.raises(ShardingError, match=r"expected one element, got f32\[2\].*numpy"):
        Array.from_global(torch.zeros(2), Mesh(dp=2)).item()
    with pytest.raises(TypeError, match="0-d"):
        len(a)


def test_an_array_is_a_leaf() -> None:
    a = Array.from_global(torch.zeros(2), Mesh(dp=2), P("dp"))
    assert optree.tree_leaves({"x": (a, a)}) == [a, a]
    assert torch.utils._pytree.tree_leaves([a]) == [a]


def test_errors() -> None:
    mesh, x = Mesh(dp=2, tp=2), torch.zeros(6, 3)
    with pytest.raises(MeshError, match=r"no axis 'pp'; its axes are \(dp, tp\)"):
        Array.from_global(x, mesh, P("pp"))
    with pytest.raises(ShardingError, match=r"dimension 1 \(size 3\) is cut over \('tp',\), 2 devices.*Pad"):
        Array.from_global(x, mesh, P("dp", "tp"))
    with pytest.raises(ShardingError, match=r"at most 2 entries, one a dimension, got P\('dp', None, None\)"):
        Array.from_global(x, mesh, P("dp", None, None))
    with pytest.raises(ShardingError, match="sequence of at most 2 entries"):
        Array.from_global(x, mesh, "dp")
    with pytest.raises(ShardingError, match="'dp' cuts dimensions 0 and 1"):
        Array.from_global(torch.zeros(2, 2), mesh, P("dp", "dp"))
    with pytest.raises(MeshError, match="expected 4 tensors.*got 1"):
        Array.from_local(x, mesh, P("dp"))
    with pytest.raises(MeshError, match=r"to_dtensor: Mesh\(dp=2, tp=2\) is virtual \(loop backend\).*torchrun"):
        Array.from_global(x, mesh, P("dp")).to_dtensor()
    with pytest.raises(MeshError, match="from_dtensor: .* is virtual"):
        Array.from_dtensor(None, mesh)  # type: ignore[arg-type]


def test_axis_order_follows_every_dimension() -> None:
    axes = ("a", "b", "c", "d")
    assert axis_order(axes, ((), ("b",), ("a", "d"))) == axes
    for spec in ((("d", "a"), ("c", "b")), (("b", "a"), ("d", "c")), (("d", "c", "b", "a"),), (("c", "a"),)):
        order = axis_order(axes, spec)
        assert sorted(order) == list(axes)
        assert all([order.index(a) for a in dim] == sorted(order.index(a) for a in dim) for dim in spec)
