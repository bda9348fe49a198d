"""Experts in low precision: their three products against a loop over experts written out, and rows that no one has."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import fmeg
from fmeg import ops, precision
from fmeg.models import moe, presets
from fmeg.precision.formats import Format, amax, quantize
from fmeg.precision.grouped import scaled_grouped_dw_p, scaled_grouped_p
from fmeg.precision.ragged import EXPERT, dequantize_rows, group_of_rows, groups, rows_amax_p, rows_quantize_p

ALL = dict(match="*", skip_first=0, skip_last=0)
RECIPES = {
    "tensorwise": precision.fp8(**ALL),
    "e4m3": precision.fp8(gradient="e4m3", power_of_two=True, **ALL),
    "rowwise": precision.fp8("rowwise", **ALL),
    "blockwise": precision.fp8("blockwise", block=4, **ALL),
    "mxfp8": precision.mxfp8(block=4, **ALL),
    "nvfp4": precision.nvfp4(block=4, **ALL),
}
INDICES = {  # three tokens of one expert, one of another, none of the third; of the last, more than a block
    "uneven": [0, 0, 0, 1, *[3] * 7],
    "one token": [2],
    "one expert": [1] * 6,
}


def _round(v, element):
    if element == "e2m1":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        return table[(v.abs().clamp(max=6).unsqueeze(-1) - table).abs().argmin(-1)] * v.sign()
    largest, dtype = {"e4m3": (448, torch.float8_e4m3fn), "e5m2": (57344, torch.float8_e5m2)}[element]
    return v.clamp(-largest, largest).to(dtype).double()


def _cast(x, tile, f, top, sent=False):
    """A matrix in low precision, as float64, with one scale a tile of (rows, columns); the last of them may be cut.
    `sent`: if tiles are all of it, `top` is the largest value instead."""
    out = torch.empty_like(x)
    tall, wide = (n or 10**6 for n in tile)
    for i in range(0, x.shape[0], tall):
        for j in range(0, x.shape[1], wide):
            part = x[i : i + tall, j : j + wide]
            s = (top if sent and tile == (0, 0) else part.abs().max()).float() * (1 / f.largest)
            if f.scale == "power":
                s = torch.exp2(torch.ceil(torch.log2(s)))
            if f.scale == "nested":
                outer = top.float() * (1 / (f.largest * 448))
                s = (s / outer).clamp(2**-9, 448).to(torch.float8_e4m3fn).float() * outer
            s = s if s > 0 and part.abs().max() else torch.tensor(1.0)
            out[i : i + tall, j : j + wide] = _round(part * (1 / s).double(), f.element) * s.double()
    return out


def _tiles(recipe):
    """Of a matrix whose columns are contracted: rows of tokens, and parameters."""
    b = recipe.block
    return {"tensorwise": ((0, 0), (0, 0)), "rowwise": ((1, 0), (1, 0))}.get(
        recipe.name, ((1, b), (b if recipe.square else 1, b))
    )


def _expert(recipe, x, w, tops, first=False):
    """y = x · w for the rows of one expert, and (dx, dw) as a function of y's cotangent and the largest of all. Rows of
    the first product, and cotangents of the second, are sent."""
    tile, square = _tiles(recipe)
    forward, gradient = recipe.forward, recipe.gradient
    y = _cast(x, tile, forward, tops["x"], first) @ _cast(w.t(), square, forward, tops["w"]).t()

    def back(dy, top):
        dx = _cast(dy, tile, gradient, top, not first) @ _cast(w, square, forward, tops["w"]).t()
        dw = _cast(x.t(), tile, forward, tops["x"], first) @ _cast(dy.t(), tile, gradient, top, not first).t()
        return dx, dw

    return y, back


def _loss(params, batch):
    """Tokens of one expert each, in two products; half of the cotangent is made by the second."""
    rows, routing = ops.dispatch(batch["x"], batch["indices"], experts=4, keep=batch.get("keep"))
    h = torch.tanh(ops.grouped_matmul(rows, params["w1"], routing))
    y = ops.combine(ops.grouped_matmul(h, params["w2"], routing), routing)
    return (y * batch["c"]).sum(), 1


def _data(indices):
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    n = len(indices)
    params = {"w1": rand(4, 8, 12), "w2": rand(4, 12, 8)}
    return params, {"x": rand(n, 8), "c": rand(n, 8), "indices": torch.tensor(indices)[:, None]}


def _by_hand(recipe, params, batch):
    w1, w2, ids, keep = params["w1"], params["w2"], batch["indices"][:, 0], batch.get("keep")
    ids = ids if keep is None else torch.where(keep[:, 0], ids, 4)
    of, real = [ids == e for e in range(4)], ids < 4
    largest = lambda t: t.abs().max()
    first = [
        _expert(recipe, batch["x"][m], w1[e], dict(x=largest(batch["x"][real]), w=largest(w1)), True)
        for e, m in enumerate(of)
    ]
    h = [torch.tanh(y) for y, _ in first]
    top = largest(torch.cat(h))
    second = [_expert(recipe, h[e], w2[e], dict(x=top, w=largest(w2))) for e in range(4)]
    loss = sum((y * batch["c"][m]).sum() for (y, _), m in zip(second, of, strict=True))
    down = [back(batch["c"][m], largest(batch["c"][real])) for (_, back), m in zip(second, of, strict=True)]
    inner = [dh * (1 - y**2) for (dh, _), y in zip(down, h, strict=True)]
    up = [back(d, largest(torch.cat(inner))) for (_, back), d in zip(first, inner, strict=True)]
    dx = torch.zeros_like(batch["x"])
    for m, (d, _) in zip(of, up, strict=True):
        dx[m] = d
    return loss, torch.stack([dw for _, dw in up]), torch.stack([dw for _, dw in down]), dx


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("indices", INDICES)
@pytest.mark.parametrize("name", RECIPES)
def test_a_loop_over_experts(name, indices, drop):
    params, batch = _data(INDICES[indices])
    if drop:
        batch["keep"] = (torch.arange(len(batch["x"])) % 3 != 1)[:, None]
    loss, dw1, dw2, dx = _by_hand(RECIPES[name], params, batch)
    x = batch.pop("x")
    both = lambda p, b: _loss(p["experts"], {**b, "x": p["x"]})
    (got, _), grads = fmeg.value_and_grad(both, precision=RECIPES[name])({"experts": params, "x": x}, batch)
    close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    close(got, loss)
    for a, b in [(grads["experts"]["w1"], dw1), (grads["experts"]["w2"], dw2), (grads["x"], dx)]:
        close(a, b)


SIZES = [[3, 0, 1, 9], [0, 0, 0, 5], [16], [0, 0], [1, 1, 1, 1]]
GRIDS = [(1, 0), (1, 4), (EXPERT, 0), (EXPERT, 1), (4, 1), (0, 0)]


def _rows(sizes, extra=0, columns=8, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(sum(sizes), columns, generator=g, dtype=torch.float64)
    x = torch.cat([x, x.new_full((extra, columns), torch.nan)])
    return x, torch.tensor(sizes).cumsum(0).to(torch.int32)


def _low(x, ends, grid, format):
    return rows_quantize_p(x, rows_amax_p(x, ends, grid), None, ends, grid, format)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize(("element", "half", "least"), [("e4m3", 2**-4, 2**-10), ("e5m2", 2**-3, 2**-17)])
def test_errors_are_those_of_the_format(sizes, grid, element, half, least):
    """Half a unit in the last place, or of the smallest number; nothing saturates."""
    x, ends = _rows(sizes)
    q, s = _low(x, ends, grid, Format(element))
    assert s.shape == (groups(len(x), len(sizes), grid[0]), {0: 1, 1: 8, 4: 2}[grid[1]])
    back = dequantize_rows(q, s, ends, grid, torch.float64)
    of, _ = group_of_rows(ends, len(x), grid[0])
    scale = s.double()[of].repeat_interleave(8 // s.shape[1], 1)
    assert ((back - x).abs() <= torch.maximum(x.abs() * half, scale * least) * (1 + 1e-6)).all()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_errors_of_products(sizes, name):
    """Of a sum of products with relative errors of 2⁻⁴ each: (1 + 2⁻⁴)² - 1 of the sum of absolute values."""
    recipe, f = RECIPES[name], Format("e4m3")
    (x, ends), (y, _) = _rows(sizes), _rows(sizes, seed=1, columns=12)
    w = torch.randn(len(sizes), 8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for transposed, rows in ((False, x), (True, y)):
        mm = precision.scaled.as_matmul("e r f, e d f -> e r d" if transposed else "e r d, e d f -> e r f")
        grids = (
            recipe.rows_grid(rows.shape[1], False),
            recipe.grid(("e", "d", "f"), dict(e=len(w), d=8, f=12), mm, True),
        )
        low = (*_low(rows, ends, grids[0], f), *quantize(w, amax(w, grids[1]), grids[1], f))
        got = scaled_grouped_p(*low, ends, grids, transposed, torch.float64)
        exact = ops.grouped.grouped_matmul_p
        want, bound = (
            exact(rows, w, ends, transposed=transposed),
            exact(rows.abs(), w.abs(), ends, transposed=transposed),
        )
        assert ((got - want).abs() <= 0.13 * bound + 1e-2).all()
    grids = recipe.rows_grid(8, True), recipe.rows_grid(12, True)
    low = (*_low(x, ends, grids[0], f), *_low(y, ends, grids[1], f))
    got = scaled_grouped_dw_p(*low, ends, grids, torch.float64)
    for e, (a, b) in enumerate(pairwise([0, *ends.tolist()])):
        want, bound = x[a:b].t() @ y[a:b], x[a:b].abs().t() @ y[a:b].abs()
        assert ((got[e] - want).abs() <= 0.13 * bound + 1e-2 * (b > a)).all()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_no_expert_are_read_by_nobody(sizes, grid):
    f, w = Format("e4m3"), torch.randn(len(sizes), 8, 12, dtype=torch.float64)
    low_w = quantize(w, amax(w, (1, 0, 0)), (1, 0, 0), f)
    results = []
    for extra in (0, 5):
        x, ends = _rows(sizes, extra)
        top = rows_amax_p(x, ends, grid)
        q, s = _low(x, ends, grid, f)
        assert top.isfinite().all() and s.isfinite().all()
        product = scaled_grouped_p(q, s, *low_w, ends, (grid, (1, 0, 0)), False, torch.float64)
        dw = scaled_grouped_dw_p(q, s, q, s, ends, (grid, grid), torch.float64)
        assert product[sum(sizes) :].eq(0).all()
        used = sum(-(-n // 4) for n in sizes) if grid[0] == 4 else None
        results.append((product[: sum(sizes)], dw, top[: {1: sum(sizes), 4: used}.get(grid[0])]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_is_not_a_number_stays_visible():
    x, ends = _rows([3, 2], 2)
    x[3] = torch.nan
    _, s = _low(x, ends, (EXPERT, 0), Format("e4m3"))
    assert s[0].isfinite() and s[1].isnan()


def test_runs_of_rows_end_with_their_expert():
    x, ends = _rows([5, 0, 4, 1], 2)
    of, real = group_of_rows(ends, 12, 4)
    assert of[:10].tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3] and real.tolist() == [True] * 10 + [False] * 2
    top = rows_amax_p(x, ends, (4, 0))
    assert top[:4, 0].tolist() == [float(x[a:b].abs().max().float()) for a, b in ((0, 4), (4, 5), (5, 9), (9, 10))]
    shuffled = torch.tensor([2, 0, 1, 3, 4, 3, 2, 1, 0, 0, 0, 0])
    rank, _ = group_of_rows(ends, 12, 2, shuffled, torch.tensor([6, 0, 4, 1]))
    assert rank[:10].tolist() == [1, 0, 0, 1, 2, 4, 4, 3, 3, 5]


def test_under_vmap():
    x, ends = _rows([5, 0, 4, 1], 2)
    for grid in GRIDS:
        f = lambda x, grid=grid: _low(x, ends, grid, Format("e4m3", "power"))
        one, many = f(x[:10]), torch.vmap(f)(torch.stack([x[:10], 2 * x[:10]]))
        assert torch.equal(many[0][0].float(), one[0].float()) and torch.equal(many[1][0], one[1])
        assert torch.equal(many[1][1], torch.where(one[1] == 1, 1, 2 * one[1]))


def test_layers_and_names_are_chosen_as_of_other_products():
    cfg = presets.get("tiny-moe", layers=4, dense=(0, 2), ff=32, dtype=torch.float64)
    params = moe.init(fmeg.random.key(0), cfg)
    tokens = torch.randint(0, 257, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(2, 8)}
    loss = lambda p, b: moe.loss(p, b, cfg)
    sites = lambda **k: set(fmeg.amax_history(loss, precision.fp8("delayed", **k), params, batch))
    everything = sites(skip_first=0, skip_last=0)
    assert {f"layers.{i}.w_{w}" for i in (0, 1) for w in ("gate", "up", "down")} <= everything and len(everything) == 14
    assert sites(match="*.1.w_*", skip_first=0, skip_last=0) == {f"layers.1.w_{w}" for w in ("gate", "up", "down")}
    assert sites(match="*w_*", exclude=("*gate", "*.0.*"), skip_first=0, skip_last=0) == {
        "layers.1.w_up",
        "layers.1.w_down",
    }
    history = fmeg.amax_history(loss, precision.fp8("delayed", skip_first=1, skip_last=0), params, batch)
    assert history["layers.1.w_up"].shape == (1, 3, 16)  # of two periods of two layers, the last
    uniform = presets.get("tiny-moe", layers=3, dtype=torch.float64)
    exact = fmeg.value_and_grad(lambda p, b: moe.loss(p, b, uniform))
    low = fmeg.value_and_grad(lambda p, b: moe.loss(p, b, uniform), precision=precision.fp8(match="*w_down"))
    params = moe.init(fmeg.random.key(1), uniform)
    (a, _), (b, _) = exact(params, batch)[0], low(params, batch)[0]
    assert a != b and float(a) == pytest.approx(float(b), rel=1e-2)


def test_without_the_weights_gradient():
    params, batch = _data(INDICES["uneven"])
    recipe = precision.fp8(weight_gradient=False, **ALL)
    (_, _), grads = fmeg.value_and_grad(_loss, precision=recipe)(params, batch)
    h = [
        torch.tanh(_expert(recipe, batch["x"][m], params["w1"][e], {"x": None, "w": None})[0])
        for e, m in enumerate(batch["indices"][:, 0] == e for e in range(4))
    ]
    want = torch.stack([a.t() @ batch["c"][batch["indices"][:, 0] == e] for e, a in enumerate(h)])
    torch.testing.assert_close(grads["w2"], want, rtol=1e-12, atol=1e-12)


def test_delayed_scales_by_hand():
    recipe = precision.fp8("delayed", history=2, **ALL)
    step, seen = fmeg.value_and_grad(_loss, precision=recipe), []
    params, _ = _data([0])
    batches = [_data([0, 3, 3, 1, 3])[1], _data([1, 1, 3])[1], _data([2, 0])[1]]
    history = fmeg.amax_history(_loss, recipe, params, batches[0])
    assert sorted(history) == ["w1", "w2"]

    def cast(x, role, element):
        top = max((s[role] for s in seen[-2:]), default=torch.tensor(0.0))
        largest = {"e4m3": 448, "e5m2": 57344}[element]
        s = top.float() * (1 / largest) if top else torch.tensor(1.0)
        return _round(x * (1 / s).double(), element) * s.double()

    for batch in batches:
        (loss, aux), grads = step(params, batch, amax=history)
        ids, w1, w2 = batch["indices"][:, 0], params["w1"], params["w2"]
        product = lambda a, w, ids=ids: torch.einsum("nd,ndf->nf", a, w[ids])
        h = torch.tanh(product(cast(batch["x"], 0, "e4m3"), cast(w1, 1, "e4m3")))
        y = product(cast(h, 3, "e4m3"), cast(w2, 4, "e4m3"))
        assert float(loss) == pytest.approx(float((y * batch["c"]).sum()), rel=1e-12)
        one = torch.nn.functional.one_hot(ids, 4).double()
        dw2 = torch.einsum("ne,nf,nd->efd", one, cast(h, 3, "e4m3"), cast(batch["c"], 5, "e5m2"))
        torch.testing.assert_close(grads["w2"], dw2, rtol=1e-12, atol=1e-12)
        dh = product(cast(batch["c"], 5, "e5m2"), cast(w2, 4, "e4m3").transpose(1, 2)) * (1 - h**2)
        seen.append([t.abs().max().float() for t in (batch["x"], w1, dh, h, w2, batch["c"])])
        history = aux["amax"]
        for i, site in enumerate(("w1", "w2")):
            torch.testing.assert_close(history[site][:, 0], torch.stack(seen[-1][3 * i : 3 * i + 3]), rtol=1e-6, atol=0)
