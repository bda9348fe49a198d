"""`donate=`: arguments whose memory the step may take."""

import weakref

import pytest
import torch

import fmeg
from fmeg import Array, Layout, Mesh
from fmeg.program.errors import ShardingError


def step(state, batch):
    return {"w": state["w"] + batch.sum(), "same": state["same"]}, (state["w"] * 2).sum()


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2), Mesh(dp=2, backend="vmap")], ids=str)
def test_what_was_given_is_gone(mesh):
    layout = Layout(rows="dp") if mesh.size > 1 else Layout()
    axes = {"state": {"w": "rows", "same": "rows"}}
    state = {"w": torch.arange(4.0), "same": torch.ones(4)}
    placed = {k: Array.from_global(v.clone(), mesh, ("dp",) if mesh.size > 1 else ()) for k, v in state.items()}
    batch = Array.from_global(torch.ones(3), mesh)
    value = placed["w"].value
    held = weakref.ref(value if isinstance(value, torch.Tensor) else mesh.backend().local(value)[0])
    del value
    run = fmeg.jit(step, mesh=mesh, layout=layout, axes=axes, donate=("state",))
    got, total = run(placed, batch)
    assert held() is None
    assert torch.equal(got["w"].global_value(), torch.arange(4.0) + 3)
    assert torch.equal(got["same"].global_value(), torch.ones(4))
    assert total.item() == 12.0
    for use in (
        lambda a: a.value,
        lambda a: a.global_value(),
        lambda a: a.numpy(),
        lambda a: run({**got, "w": a}, batch),
    ):
        with pytest.raises(ShardingError, match="donated to step"):
            use(placed["w"])
    assert "donated to step" in repr(placed["w"])
    again, _ = run(got, batch)
    assert torch.equal(again["w"].global_value(), torch.arange(4.0) + 6)


def test_plain_tensors_stay_the_callers():
    state = {"w": torch.arange(4.0), "same": torch.ones(4)}
    fmeg.jit(step, donate=("state",))(state, torch.ones(3))
    assert torch.equal(state["w"], torch.arange(4.0))


def test_without_donation_nothing_is_taken():
    placed = {k: Array.from_global(torch.ones(4), Mesh()) for k in ("w", "same")}
    run = fmeg.jit(step)
    for _ in range(2):
        assert run(placed, torch.ones(3))[1].item() == 8.0


def test_only_arguments_can_be_donated():
    with pytest.raises(ShardingError, match=r"donate names 'sate', which is not a parameter; it has state, batch"):
        fmeg.jit(step, donate=("sate",))
