"""Experts in FP8 on a GPU: the kernels against their meaning in plain torch, in memory full of NaN; and whole steps."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, precision, tree
from fmeg.kernels import rows_fp8
from fmeg.mesh.rows import taken
from fmeg.models import moe, presets
from fmeg.ops.pack import pack
from fmeg.precision import grouped, ragged
from fmeg.precision.formats import Format, amax, quantize
from fmeg.precision.scaled import as_matmul

pytestmark = pytest.mark.gpu
SIZES = {
    "uneven": ([0, 130, 7, 0, 163, 1], 5),
    "one": ([300], 0),
    "all empty but the last": ([0, 0, 0, 40], 0),
    "none": ([0, 0], 3),
    "many": ([i % 5 * 40 for i in range(130)], 1),
}
RECIPES = {
    "tensorwise": precision.fp8(),
    "power": precision.fp8(gradient="e4m3", power_of_two=True),
    "rowwise": precision.fp8("rowwise"),
    "blockwise": precision.fp8("blockwise"),
    "delayed": precision.fp8("delayed"),
}
SHAPES = [(256, 512), (128, 384), (64, 80), (200, 48)]


def _poison():
    """Leave freed memory full of NaN: what a kernel does not write shows."""
    blocks = [torch.full((2**k,), torch.nan, device="cuda", dtype=torch.float32) for k in range(8, 24) for _ in "123"]
    del blocks


def _case(name, d, f):
    sizes, extra = SIZES[name]
    g = torch.Generator().manual_seed(0)
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).cuda()
    rows = [torch.randn(sum(sizes) + extra, n, generator=g).to("cuda", torch.bfloat16) for n in (d, f)]
    for x in rows:
        x[sum(sizes) :] = torch.nan
    return *rows, torch.randn(len(sizes), d, f, generator=g).cuda(), ends, sum(sizes)


def _low(x, ends, grid, format):
    return ragged._quantize(x, ragged._amax(x, ends, grid), None, ends, grid, format)


def _skip(name, d, f):
    if name == "blockwise" and (d % 128 or f % 128) and (d > 128 or f > 128):
        pytest.skip("blocks do not fit")


@pytest.mark.parametrize(("d", "f"), SHAPES)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("name", RECIPES)
def test_quantised_rows_bit_for_bit(name, case, d, f):
    _skip(name, d, f)
    x, _, _, ends, n = _case(case, d, f)
    for contracted in (False, True):
        grid = RECIPES[name].rows_grid(d, contracted)
        if not rows_fp8.takes(grid):
            continue
        of, _ = ragged.group_of_rows(ends, len(x), grid[0])
        for format in (RECIPES[name].forward, RECIPES[name].gradient):
            _poison()
            top, want = ragged._amax_default(x, ends, grid), ragged._amax(x, ends, grid)
            assert torch.equal(top[of[:n]], want[of[:n]])
            q, s = _low(x, ends, grid, format)
            _poison()
            got, turned = rows_fp8.quantize(
                x, torch.reciprocal(s), ends, *grid, format.dtype, format.largest, True, True
            )
            assert torch.equal(got[:n].view(torch.uint8), q[:n].view(torch.uint8))
            (alone,) = rows_fp8.quantize(x, torch.reciprocal(s), ends, *grid, q.dtype, format.largest, False, True)
            _poison()
            again, tiles = rows_fp8.turn(got, ends), sum(-(-k // 128) for k in SIZES[case][0]) * 128
            for t in (again, alone):
                assert torch.equal(t[:, :tiles].view(torch.uint8), turned[:, :tiles].view(torch.uint8))
            first = 0
            for start, end in zip([0, *ends.tolist()], ends.tolist(), strict=False):
                part = turned[:, first : first + -(-(end - start) // 128) * 128].float()
                assert torch.equal(part[:, : end - start].t(), got[start:end].float())
                assert part[:, end - start :].eq(0).all()
                first += part.shape[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("d", "f"), SHAPES)
@pytest.mark.parametrize("case", SIZES)
@pytest.mark.parametrize("name", RECIPES)
def test_products(name, case, d, f, dtype):
    """Sums with as few bits as the hardware has in "fast" ones; bf16 rounds by itself."""
    _skip(name, d, f)
    recipe = RECIPES[name]
    x, y, w, ends, _ = _case(case, d, f)

    def close(got, want, bound):
        assert got.dtype == dtype and got.shape == want.shape and bool(got.isfinite().all())
        error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
        assert error < bound + (2**-8 if dtype == torch.bfloat16 else 0), error

    for transposed, rows, format in ((False, x, recipe.forward), (True, y, recipe.gradient)):
        mm = as_matmul("e r f, e d f -> e r d" if transposed else "e r d, e d f -> e r f")
        sizes = dict(e=len(w), d=d, f=f)
        grids = recipe.rows_grid(rows.shape[1], False), recipe.grid(("e", "d", "f"), sizes, mm, True)
        assert grouped.multiplies(grids, transposed)
        low = (*_low(rows, ends, grids[0], format), *quantize(w, amax(w, grids[1]), grids[1], recipe.forward))
        want = grouped._reference(*low, ends, grids, transposed, torch.float32)
        for fast in (False, True):
            _poison()
            close(grouped.scaled_grouped_p.run()(*low, ends, grids, transposed, dtype, fast), want, 3e-3)
            plus = torch.ones_like(want).to(dtype)
            _poison()
            close(grouped.scaled_grouped_add_p.run()(*low, ends, grids, transposed, dtype, fast, plus), want + 1, 3e-3)
    grids = recipe.rows_grid(d, True), recipe.rows_grid(f, True)
    assert grouped.multiplies_dw(grids)
    low = (*_low(x, ends, grids[0], recipe.forward), *_low(y, ends, grids[1], recipe.gradient))
    want = grouped._reference_dw(*low, ends, grids, torch.float32)
    _poison()
    close(grouped.scaled_grouped_dw_p.run()(*low, ends, grids, dtype), want, 3e-3)
    if dtype == torch.float32:
        stack = torch.full((3, *want.shape), 7.0, device="cuda")
        turned = rows_fp8.turn(low[0], ends), rows_fp8.turn(low[2], ends)
        args = (turned[0], low[1], turned[1], low[3], ends, grids[0][0])
        rows_fp8.product_dw_into(stack[1], *args, False)
        close(stack[1], want, 3e-3)
        rows_fp8.product_dw_into(stack[1], *args, True)
        close(stack[1], 2 * want, 3e-3)
        assert bool((stack[[0, 2]] == 7.0).all())


@pytest.mark.parametrize("case", SIZES)
def test_one_scale_for_all_beside_one_an_expert(case):
    x, y, _, ends, _ = _case(case, 128, 200)
    grids = (0, 0), (-1, 0)
    low = (*_low(x, ends, grids[0], Format("e4m3")), *_low(y, ends, grids[1], Format("e5m2")))
    want = grouped._reference_dw(*low, ends, grids, torch.float32)
    _poison()
    got = grouped.scaled_grouped_dw_p.run()(*low, ends, grids, torch.float32)
    assert (got - want).norm() <= 3e-3 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_rows_of_bytes(dtype):
    x = torch.randn(50, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    order = torch.randint(0, 100, (90,), generator=torch.Generator().manual_seed(1))
    total = torch.tensor(70)
    want = pack(x, order, total, 2, 96)
    _poison()
    got = pack(x.cuda(), order.cuda(), total.cuda(), 2, 96)
    assert got.dtype == dtype and torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(taken(x.cuda(), order.cuda() // 2).cpu().float(), taken(x, order // 2).float())


def test_what_is_not_a_number_stays_visible():
    x, _, _, ends, _ = _case("uneven", 128, 128)
    x[3, 5] = torch.nan
    top = ragged._amax_default(x, ends, (-1, 0))
    assert top[1].isnan() and top[[0, 2, 3, 4, 5]].isfinite().all()


def _problem(cfg, device):
    tokens = torch.randint(0, 500, (4, 129), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(4, 128)}
    params = moe.init(fmeg.random.key(0), cfg)
    return tree.map(lambda x: x.to(device), params), tree.map(lambda x: x.to(device), batch)


def _config(**changes):
    sizes = dict(vocab_size=500, embed=256, layers=3, heads=4, kv_heads=4, head_dim=64, experts=8, expert_ff=384)
    return presets.get("tiny-moe", **{**sizes, "max_seq": 256, "compute_dtype": torch.bfloat16, **changes})


def _gradients(cfg, recipe, device, mesh=None, layout=None, **options):
    params, batch = _problem(cfg, device)
    axes = {"params": moe.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    grad = fmeg.value_and_grad(lambda p, b: moe.loss(p, b, cfg), precision=recipe)

    def step(params, batch, known):
        (loss, _), grads = grad(params, batch, **(dict(amax=known) if known else {}))
        return loss, grads

    loss = lambda p, b: moe.loss(p, b, cfg)
    known = {}
    if recipe is not None and recipe.delayed:
        seen = fmeg.jit(lambda p, b, h: grad(p, b, amax=h)[0][1]["amax"])
        with torch.device(device):
            history = tree.map(lambda h: h.to(device), fmeg.amax_history(loss, recipe, params, batch))
            for _ in range(2):
                history = tree.map(lambda a: a.global_value(), seen(params, batch, history))
        known = history
    with torch.device(device):
        loss, grads = fmeg.jit(step, mesh=mesh, layout=layout, axes=axes, **options)(params, batch, known)
    return float(loss.global_value()), [g.global_value().cpu().float() for g in tree.leaves(grads)]


EXPERTS = dict(match="*layers.w_*", skip_first=0, skip_last=0)  # attention exact, so that routers choose alike
STEPS = {
    "tensorwise": precision.fp8(**EXPERTS),
    "rowwise": precision.fp8("rowwise", **EXPERTS),
    "blockwise": precision.fp8("blockwise", **EXPERTS),
    "delayed": precision.fp8("delayed", **EXPERTS),
    "mxfp8": precision.mxfp8(**EXPERTS),
}


@pytest.fixture(scope="module")
def exact():
    return _gradients(_config(compute_dtype=torch.float32), None, "cpu")


@pytest.mark.parametrize(
    "options", [{}, dict(mode="inductor"), dict(mode="inductor", lowering="fp8")], ids=["eager", "inductor", "fp8"]
)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_as_exact_as_that_of_the_cpu(exact, name, options):
    loss, grads = _gradients(_config(), STEPS[name], "cpu")
    got, on_gpu = _gradients(_config(), STEPS[name], "cuda", **options)
    assert got == pytest.approx(loss, rel=3e-3)
    errors = lambda grads: [float((a - b).norm() / b.norm()) for a, b in zip(grads, exact[1], strict=True)]
    for ours, theirs in zip(errors(on_gpu), errors(grads), strict=True):
        assert ours < 1.25 * theirs + 0.02


@pytest.mark.parametrize("layout", [dict(batch="dp"), dict(batch="dp", experts="dp")])
@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
def test_a_step_on_a_virtual_mesh(name, layout):
    loss, grads = _gradients(_config(), STEPS[name], "cuda")
    got, others = _gradients(_config(), STEPS[name], "cuda", Mesh(dp=2), Layout(**layout))
    assert got == pytest.approx(loss, rel=2e-3)
    for a, b in zip(others, grads, strict=True):
        assert (a - b).norm() < 0.15 * b.norm()


@pytest.mark.parametrize("mode", ["eager", "inductor"])
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_no_wait_for_the_gpu(name, mode):
    cfg = _config()
    params, batch = _problem(cfg, "cuda")
    grad = fmeg.value_and_grad(partial(moe.loss, cfg=cfg), precision=STEPS[name])
    with torch.device("cuda"):
        fn = fmeg.jit(lambda p, b: grad(p, b), mode=mode)
        fn(params, batch)
        torch.cuda.set_sync_debug_mode("error")
        try:
            fn(params, batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_formats_that_no_hardware_has_are_emulated():
    x, y, _, ends, _ = _case("uneven", 64, 96)
    grids = (32, 1), (32, 1)
    low = (*_low(x, ends, grids[0], Format("e4m3", "power")), *_low(y, ends, grids[1], Format("e4m3", "power")))
    got = grouped.scaled_grouped_dw_p.run()(*low, ends, grids, torch.float32)
    torch.testing.assert_close(got, grouped._reference_dw(*low, ends, grids, torch.float32), rtol=1e-4, atol=1e-4)
