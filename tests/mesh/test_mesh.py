"""Names, sizes, coordinates and errors of Mesh."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg.mesh import LoopBackend, Mesh, SingleBackend, VmapBackend, init_distributed
from fmeg.program.errors import MeshError


def test_axes_are_major_first() -> None:
    mesh = Mesh(dp=2, tp=4)
    assert (mesh.axes, dict(mesh.sizes), mesh.size) == (("dp", "tp"), {"dp": 2, "tp": 4}, 8)
    assert [mesh.coordinates(r)["tp"] for r in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert mesh.axis_size(("tp", "dp")) == 8
    assert mesh.axis_size("tp") == 4
    assert mesh.axis_size(()) == 1
    assert repr(mesh) == "Mesh(dp=2, tp=4)"
    assert Mesh().size == 1
    assert repr(Mesh()) == "Mesh()"


@given(st.lists(st.integers(1, 5), max_size=4))
def test_rank_and_coordinates_are_inverse(sizes: list[int]) -> None:
    mesh = Mesh(zip("abcd", sizes, strict=False))
    seen = [tuple(mesh.coordinates(r).values()) for r in range(mesh.size)]
    assert seen == sorted(set(seen))
    assert [mesh.rank(mesh.coordinates(r)) for r in range(mesh.size)] == list(range(mesh.size))


def test_any_name_can_be_an_axis() -> None:
    mesh = Mesh({"backend": 2}, axes=3, self=1, backend="loop")
    assert dict(mesh.sizes) == {"backend": 2, "axes": 3, "self": 1}


def test_equality_hash_copy_and_pickle() -> None:
    mesh = Mesh(dp=2, tp=4)
    mesh.backend()
    assert mesh == Mesh({"dp": 2, "tp": 4}) == Mesh.from_string(" dp=2,tp = 4")
    assert len({mesh, Mesh(dp=2, tp=4), Mesh(tp=4, dp=2), Mesh(dp=2, tp=4, backend="vmap")}) == 3
    for other in (pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh)):
        assert other == mesh
        assert hash(other) == hash(mesh)
    assert repr(Mesh(dp=2, backend="vmap")) == "Mesh(dp=2, backend='vmap')"


def test_immutable() -> None:
    mesh = Mesh(dp=2)
    with pytest.raises(AttributeError, match="immutable"):
        mesh.size = 3  # type: ignore[misc]
    with pytest.raises(AttributeError):
        mesh._sizes = {}
    with pytest.raises(TypeError):
        mesh.sizes["dp"] = 3  # type: ignore[index]


@pytest.mark.parametrize("size", [0, -1, 2.0, "2", True, None])
def test_sizes_are_checked(size: object) -> None:
    with pytest.raises(MeshError, match=r"axis 'dp' must have a size that is an int >= 1"):
        Mesh(dp=size)


def test_errors_say_what_was_given() -> None:
    mesh = Mesh(dp=2, tp=4)
    with pytest.raises(MeshError, match=r"Mesh\(dp=2, tp=4\) has no axis 'pp'; its axes are \(dp, tp\)"):
        mesh.axis_size(("dp", "pp"))
    with pytest.raises(MeshError, match="'dp' twice"):
        mesh.axis_size(("dp", "dp"))
    with pytest.raises(MeshError, match="identifier"):
        Mesh({"d p": 2})
    with pytest.raises(MeshError, match="given twice"):
        Mesh({"dp": 2}, dp=3)
    with pytest.raises(MeshError, match="backend must be one of auto, loop, vmap, distributed, got 'nccl'"):
        Mesh(dp=2, backend="nccl")
    with pytest.raises(MeshError, match="ranks 0 to 7"):
        mesh.coordinates(8)
    with pytest.raises(MeshError, match="coordinate for each of"):
        mesh.rank({"dp": 0})
    with pytest.raises(MeshError, match="axis 'tp' has size 4, got coordinate 4"):
        mesh.rank({"dp": 0, "tp": 4})
    for text in ("dp", "dp=x", "dp=-2", "2"):
        with pytest.raises(MeshError):
            Mesh.from_string(text)


def test_backend_is_chosen_by_size_and_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert isinstance(Mesh().backend(), SingleBackend)
    assert isinstance(Mesh(dp=1, backend="vmap").backend(), SingleBackend)
    assert isinstance(Mesh(dp=2, tp=4).backend(), LoopBackend)
    assert isinstance(Mesh(dp=3, tp=3).backend(), VmapBackend)
    assert isinstance(Mesh(dp=3, tp=3, backend="loop").backend(), LoopBackend)
    assert isinstance(Mesh(dp=2, backend="vmap").backend(), VmapBackend)
    mesh = Mesh(dp=2)
    assert mesh.backend() is mesh.backend()
    assert mesh.device == torch.device("cpu")


def test_distributed_needs_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(MeshError, match=r"RANK, MASTER_ADDR, MASTER_PORT not set.*torchrun"):
        Mesh(dp=4).backend()
    with pytest.raises(MeshError, match="torchrun"):
        Mesh(dp=4, backend="distributed").backend()
    assert isinstance(Mesh(dp=4, backend="loop").backend(), LoopBackend)


@pytest.mark.parametrize("ctas", [0, -1, True, 2.0])
def test_ctas_are_a_positive_number(ctas):
    with pytest.raises(MeshError, match="ctas must be an int >= 1, or None"):
        init_distributed(ctas=ctas)


def test_options_of_groups_come_before_them(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    init_distributed()
    for how in ({"ctas": 4}, {"high_priority": True}):
        with pytest.raises(MeshError, match="joined already"):
            init_distributed(**how)


def test_nccl_is_told_how_much_it_may_take(monkeypatch):
    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream, self.config = is_high_priority_stream, SimpleNamespace()

    asked = []
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *a, **kwargs: asked.append(kwargs))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("RANK", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    init_distributed()
    init_distributed(timedelta(seconds=5), ctas=4)
    init_distributed(high_priority=True)
    plain, few, urgent = (kwargs["pg_options"] for kwargs in asked)
    assert plain is None
    assert vars(few.config) == {"max_ctas": 4} and few._timeout == timedelta(seconds=5)
    assert not few.is_high_priority_stream
    assert urgent.is_high_priority_stream and vars(urgent.config) == {}
