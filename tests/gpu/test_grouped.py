"""Products of rows sorted by expert on a GPU: both kernels against float64, in memory full of NaN; and a whole step."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, jit, tree
from fmeg.kernels import grouped
from fmeg.ops import pack
from fmeg.ops.grouped import _loop, _loop_dw
from tests.ops.experts import AXES, BATCH_AXES, problem, step

pytestmark = pytest.mark.gpu
SIZES = {
    "uneven": [0, 130, 7, 0, 163, 1],
    "one": [300],
    "all empty but the last": [0, 0, 0, 40],
    "rows of none": [17, 0, 20],
    "none": [0, 0],
    "many": [i % 5 for i in range(256)],
}


def _poison():
    """Leave freed memory full of NaN: what a kernel does not write shows."""
    blocks = [
        torch.full((2**k,), torch.nan, device="cuda", dtype=torch.float32) for k in range(8, 24) for _ in range(3)
    ]
    del blocks


def _case(name, dtype, d, f, extra=0):
    sizes = torch.tensor(SIZES[name])
    ends = sizes.cumsum(0).to(torch.int32)
    rows = int(sizes.sum()) + extra
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(rows, d, generator=g), torch.randn(rows, f, generator=g)
    w = torch.randn(len(sizes), d, f, generator=g)
    return [t.to("cuda", dtype) for t in (x, y, w)] + [ends.cuda()]


def _close(got, want, dtype):
    assert got.dtype == dtype
    scale = want.abs().max().clamp(min=1e-30)
    worst = ((got.double() - want).abs().max() / scale).item() if want.numel() else 0.0
    assert worst <= (2e-6 if dtype == torch.float32 else 2**-8), worst


def _kernels(dtype, d, f):
    from fmeg.kernels import _triton_grouped

    yield _triton_grouped.matmul, _triton_grouped.matmul_dw
    yield grouped.grouped_matmul, grouped.grouped_matmul_dw


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("d", "f"), [(64, 128), (40, 72), (33, 17), (256, 8)])
@pytest.mark.parametrize("extra", [0, 37])
def test_products(name, dtype, d, f, extra):
    x, y, w, ends = _case(name, dtype, d, f, extra)
    if not x.numel():
        pytest.skip("no rows")
    want = _loop(x.double(), w.double(), ends)
    want_t = _loop(y.double(), w.double(), ends, transposed=True)
    want_dw = _loop_dw(x.double(), y.double(), ends)
    for matmul, matmul_dw in _kernels(dtype, d, f):
        _poison()
        _close(matmul(x, w, ends, False), want, dtype)
        _poison()
        _close(matmul(y, w, ends, True), want_t, dtype)
        _poison()
        _close(matmul_dw(x, y, ends), want_dw, dtype)


def test_torch_has_its_own():
    x, y, w, _ = _case("uneven", torch.bfloat16, 64, 128)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert grouped.torch_takes(x, w) == grouped.torch_takes(x, y) == hopper
    assert not grouped.torch_takes(*_case("uneven", torch.bfloat16, 33, 17)[:2])


def test_no_wait_for_the_gpu():
    """One device: from tokens to gradients nothing reads a size off the GPU."""
    params, batch = _on_gpu(problem(), torch.bfloat16)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    fn = jit(step, mesh=Mesh(), layout=Layout(), axes=axes)
    fn(params, batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        fn(params, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _on_gpu(trees, dtype):
    return tree.map(lambda t: t.to("cuda", dtype) if t.is_floating_point() else t.cuda(), trees)


@pytest.mark.parametrize("kind", ["all_to_all", "all_gather"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("routing", ["skewed", "empty"])
def test_step(kind, dtype, routing):
    """On one device and on a virtual mesh, against one CPU in float64."""
    params, batch = problem(embed=16, ff=24, layers=2, routing=routing, drop=True)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    (want, _), grads = step(params, batch)
    p, b = _on_gpu((params, batch), dtype)
    layout = dict(batch="dp", seq="cp", experts=("cp", "dp"), dispatch=kind)
    meshes = [(Mesh(), Layout()), (Mesh(dp=2, cp=2, backend="loop"), Layout(**layout))]
    with torch.device("cuda"):
        for mesh, chosen in meshes:
            _poison()
            (value, _), got = jit(step, mesh=mesh, layout=chosen, axes=axes)(p, b)
            pairs = [(value, want), *((got[k], grads[k]) for k in grads)]
            for a, e in pairs:
                a = a.global_value().cpu().double()
                error = (a - e).abs().max() / e.abs().max()
                assert error <= (1e-10 if dtype == torch.float64 else 0.05), (mesh, error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "k", "d", "total"), [(5, 3, 40, None), (7, 2, 1100, 9), (3, 1, 5, 0), (64, 8, 2048, 300)]
)
def test_adding_up(tokens, k, d, total, dtype):
    """The kernels of `fmeg.ops.pack` against its formulas, where rows that nobody has hold NaN."""
    slots = tokens * k
    g = torch.Generator().manual_seed(0)
    order = torch.randperm(slots, generator=g)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(slots))
    rows, ct = (torch.randn(n, d, generator=g).to(dtype) for n in (slots + 3, tokens))
    weights, limit = torch.randn(tokens, k, generator=g), None if total is None else torch.tensor(total)
    rows[slots if total is None else total :] = torch.nan
    bwd = (ct, rows, order, inverse, limit, weights, slots + 2)
    want = pack.unpack(rows, inverse, limit, k), pack.weigh(rows, inverse, limit, weights), *pack.weigh_bwd(*bwd)
    rows, ct, order, inverse, weights = (t.cuda() for t in (rows, ct, order, inverse, weights))
    limit = None if limit is None else limit.cuda()
    bwd = (ct, rows, order, inverse, limit, weights, slots + 2)
    _poison()
    got = pack.unpack(rows, inverse, limit, k), pack.weigh(rows, inverse, limit, weights), *pack.weigh_bwd(*bwd)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.cpu(), b, **({} if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)))
