"""Products of rows sorted by expert on a GPU: both kernels against float64, in memory full of NaN; and a whole step."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fmeg import Layout, Mesh, jit, tree
from fmeg.kernels import experts, grouped
from fmeg.ops import pack, routing
from fmeg.sharding.experts.copies import arrive, depart
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


def _kernels(dtype):
    from fmeg.kernels import _triton_grouped

    yield _triton_grouped.matmul, _triton_grouped.matmul_dw
    yield grouped.grouped_matmul, lambda x, y, ends: grouped.grouped_matmul_dw(x, y, ends, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("d", "f"), [(64, 128), (40, 72), (33, 17), (256, 8)])
@pytest.mark.parametrize("extra", [0, 37])
def test_products(name, dtype, d, f, extra):
    x, y, w, ends = _case(name, dtype, d, f, extra)
    if not x.numel():
        pytest.skip("no rows")
    want = grouped.loop(x.double(), w.double(), ends)
    want_t = grouped.loop(y.double(), w.double(), ends, transposed=True)
    want_dw = grouped.loop_dw(x.double(), y.double(), ends)
    for matmul, matmul_dw in _kernels(dtype):
        _poison()
        _close(matmul(x, w, ends, False), want, dtype)
        _poison()
        _close(matmul(y, w, ends, True), want_t, dtype)
        _poison()
        _close(matmul_dw(x, y, ends), want_dw, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("d", "f"), [(64, 128), (40, 72), (33, 17)])
def test_pairs_and_gradients_in_float32(name, dtype, d, f):
    """Two matrices in one product, beside one another in memory and not; and gradients written into given memory."""
    x, y, w, ends = _case(name, dtype, d, f, 5)
    both = torch.cat([w, 0.5 * w.flip(0)], 2)
    a, b = both[..., :f], both[..., f:]
    yy = torch.cat([y, 2 * y.flip(0)], 1)
    exact = x.double(), a.double(), b.double(), yy.double()
    want = torch.cat([grouped.loop(exact[0], e, ends) for e in exact[1:3]], 1)
    want_t = sum(
        grouped.loop(exact[3][:, s], e, ends, True) for s, e in ((slice(f), exact[1]), (slice(f, None), exact[2]))
    )
    from fmeg.kernels import _triton_grouped

    for c, e in ((a, b), (a.contiguous(), b.contiguous())):
        _poison()
        _close(grouped.grouped_pair(x, c, e, ends, False), want, dtype)
        _close(grouped.grouped_pair(yy, c, e, ends, True), want_t, dtype)
        _close(_triton_grouped.matmul(x, c, ends, False, e), want, dtype)
        _close(_triton_grouped.matmul(yy, c, ends, True, e), want_t, dtype)
    for half in (yy[:, :f], yy[:, f:]):
        want_dw = grouped.loop_dw(x.double(), half.double(), ends)
        _close(grouped.grouped_matmul_dw(x, half, ends, torch.float32), want_dw, torch.float32)
        stack = torch.full((3, *want_dw.shape), 7.0, device="cuda")
        grouped.grouped_dw_into(stack[1], x, half, ends, False)
        _close(stack[1], want_dw, torch.float32)
        grouped.grouped_dw_into(stack[1], x, half, ends, True)
        _close(stack[1], 2 * want_dw, torch.float32)
        assert bool((stack[[0, 2]] == 7.0).all())


def test_torch_has_its_own():
    x, y, w, _ = _case("uneven", torch.bfloat16, 64, 128)
    hopper = torch.cuda.get_device_capability() >= (9, 0)
    assert grouped.torch_takes(x, w) == grouped.torch_takes(x, y) == hopper
    assert not grouped.torch_takes(*_case("uneven", torch.bfloat16, 33, 17)[:2])


@pytest.mark.parametrize("mode", ["eager", "inductor"])
@pytest.mark.parametrize("weighted", ["rows", "combine"])
def test_no_wait_for_the_gpu(weighted, mode):
    """One device: from tokens to gradients nothing reads a size off the GPU."""
    params, batch = _on_gpu(problem(embed=16, ff=24), torch.bfloat16)
    axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
    with torch.device("cuda"):
        fn = jit(partial(step, weighted=weighted), mesh=Mesh(), layout=Layout(), axes=axes, mode=mode)
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
    """On one device and on a virtual mesh, against one CPU in float64 with the same numbers.

    Weights are small enough for the softmax of the second layer not to turn a rounding into another choice: unscaled, a
    CPU in bfloat16 is off by as much as a GPU, 16 to 46 % of a gradient's norm.
    """
    params, batch = problem(embed=16, ff=24, layers=2, routing=routing, drop=True)
    params = {k: v if k == "x" else v / 4 for k, v in params.items()}
    params, batch = tree.map(lambda t: t.to(dtype).double() if t.is_floating_point() else t, (params, batch))
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
                error = (a - e).norm() / e.norm()
                assert error <= (1e-10 if dtype == torch.float64 else 0.02), (mesh, error)


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
    run = lambda: [
        pack.pack(ct, order, limit, k, slots + 2), pack.unpack(rows, inverse, limit, k),
        pack.weigh(rows, inverse, limit, weights), *pack.weigh_bwd(*bwd),
        *pack.weigh_bwd(ct, rows[:total], order[:total], inverse, limit, weights, None),
    ]  # fmt: skip
    want = run()
    rows, ct, order, inverse, weights = (t.cuda() for t in (rows, ct, order, inverse, weights))
    limit = None if limit is None else limit.cuda()
    bwd = (ct, rows, order, inverse, limit, weights, slots + 2)
    _poison()
    got = run()
    near = dict(rtol=2e-6, atol=1e-6 * d**0.5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
    for a, b in zip(got, want, strict=True):  # a weight's gradient sums d products, in another order
        torch.testing.assert_close(a.cpu(), b, **near)


@pytest.mark.parametrize("n", [1, 5, 128, 300])
@pytest.mark.parametrize("slots", [0, 1, 1000, 65536])
def test_sorting_slots(slots, n):
    ids = torch.randint(0, n + 1, (slots,), generator=torch.Generator().manual_seed(0))
    _poison()
    for got, want in zip(routing.sort_slots(ids.cuda(), n), routing.sort_slots(ids, n), strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "f"), [(33, 40), (5, 768), (1000, 300), (0, 8)])
@pytest.mark.parametrize("weighted", [True, False])
def test_gated_rows(rows, f, weighted, dtype):
    g = torch.Generator().manual_seed(0)
    pair, ct = (torch.randn(rows, n, generator=g).to("cuda", dtype) for n in (2 * f, f))
    w = torch.rand(rows, 1, generator=g).cuda() if weighted else None
    gate, up = pair[:, :f], pair[:, f:]
    exact = [t.double().requires_grad_() for t in (gate, up, *(() if w is None else (w,)))]
    want = torch.nn.functional.silu(exact[0]) * exact[1] * (exact[2] if weighted else 1.0)
    grads = torch.autograd.grad(want, exact, ct.double())
    _poison()
    h, dpair, dw = experts.gated_bwd(gate, up, w, ct)
    for got in (h, experts.gated(gate, up, w)):
        _close(got, want.detach(), dtype)
    _close(dpair, torch.cat(grads[:2], 1), dtype)
    if weighted:
        torch.testing.assert_close(dw.double(), grads[2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [None, 700])
@pytest.mark.parametrize(("members", "each", "k"), [(2, 64, 8), (8, 16, 8), (16, 1, 2)])
def test_copies(members, each, k, width):
    """Which tokens leave and arrive, as on a CPU; the host waits for nothing."""
    places = torch.randint(0, members * each + 1, (members * 1000, k), generator=torch.Generator().manual_seed(0))
    want = [depart(places[:1000], each, members), arrive(places, torch.tensor(1), each, members, width)]
    places, me = places.cuda(), torch.tensor(1).cuda()
    _poison()
    arrive(places, me, each, members, width)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = [depart(places[:1000], each, members), arrive(places, me, each, members, width)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip((t for ts in got for t in ts), (t for ts in want for t in ts), strict=True):
        assert torch.equal(a.cpu(), b)
