"""Autocast and traces: casts are recorded once, where the function makes them; nothing that comes after casts again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fmeg import Layout, Mesh, jit, ops, remat, scan, tree, value_and_grad
from fmeg.program.errors import TraceError

GENERATOR = torch.Generator().manual_seed(0)
X, W = torch.randn(8, 8, generator=GENERATOR), torch.randn(3, 8, 8, generator=GENERATOR) * 0.4


def low(**how) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, **how)


def exact() -> torch.autocast:
    return torch.autocast("cpu", enabled=False)


def plain(params: dict, batch: Tensor) -> tuple[Tensor, int]:
    """A product that is cast between two that are not, and a primitive beside these."""
    w = params["w"]
    with exact():
        h = ops.rms_norm(batch.mm(w[0]), params["g"])
    h = h.mm(w[1])
    with exact():
        return h.float().mm(w[2]).square().sum(), len(batch)


def scanned(params: dict, batch: Tensor) -> tuple[Tensor, int]:
    def body(h: Tensor, w: Tensor) -> tuple[Tensor, None]:
        with exact():
            a = h.mm(w).tanh()
        return a + a.mm(w).float(), None

    return scan(remat(body), batch, params["w"])[0].square().sum(), len(batch)


def arguments():
    return {"w": W.clone(), "g": torch.ones(8)}, X


def one(x):
    return x.global_value() if hasattr(x, "global_value") else x


@pytest.mark.parametrize("loss", [plain, scanned])
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_a_step_under_autocast_equals_eager(loss, inside):
    def fn(params, batch):
        with low(enabled=inside):
            return loss(params, batch)

    grad = value_and_grad(fn if inside else loss)
    with low(enabled=not inside):
        got, want = jit(grad)(*arguments()), grad(*arguments())
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert one(g).dtype == w.dtype and torch.equal(one(g), w)


def test_products_that_autocast_leaves_alone_have_exact_gradients():
    """As in the same function where autocast is nowhere on: bfloat16 would be off by a hundredth."""

    def loss(params, batch):
        with exact():
            return batch.mm(params["w"][0]).mm(params["w"][1]).square().sum(), 1

    exact_ones = value_and_grad(loss)(*arguments())
    with low():
        for found in (value_and_grad(loss)(*arguments()), jit(value_and_grad(loss))(*arguments())):
            for g, w in zip(tree.leaves(found), tree.leaves(exact_ones), strict=True):
                assert torch.allclose(one(g), w, rtol=1e-6)


def test_partitioned_and_microbatched_under_autocast():
    layout = Layout(batch="dp", ff="tp", params=dict(embed="dp"))
    axes = {"params": {"w": "layers embed ff", "g": "embed"}}
    step = jit(value_and_grad(plain, microbatches=2), mesh=Mesh(dp=2, tp=2), layout=layout, axes=axes)
    with low():
        got, want = step(*arguments()), value_and_grad(plain, microbatches=2)(*arguments())
    for g, w in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert one(g).dtype == w.dtype
        assert (one(g) - w).norm() <= 5e-3 * w.norm()


def test_a_gpu_s_autocast_is_refused():
    """A trace's tensors lie on no GPU: nothing would be cast."""
    step = jit(lambda x: x @ x)
    step(X)
    torch.set_autocast_enabled("cuda", True)
    try:
        with pytest.raises(TraceError, match=r"autocast\('cuda'\) at .*would cast nothing in a trace"):
            step(X)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert torch.equal(step(X).global_value(), X @ X)
