"""What a rewritten loss computes, forward and backward, against the three products of each layer written out."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import einsum, precision, tree
from fmeg.precision.formats import Format, amax, quantize
from fmeg.precision.recipe import blocks
from fmeg.precision.scaled import as_matmul, scaled_einsum, scaled_einsum_p
from fmeg.program.errors import TraceError
from fmeg.testing.rulecheck import check_rule

RECIPES = {
    "tensorwise": precision.fp8(),
    "e4m3": precision.fp8(gradient="e4m3", power_of_two=True),
    "rowwise": precision.fp8("rowwise"),
    "blockwise": precision.fp8("blockwise", block=4),
    "mxfp8": precision.mxfp8(block=4),
    "nvfp4": precision.nvfp4(block=4),
}


def _round(v, element):
    if element == "e2m1":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        near = (v.abs().clamp(max=6).unsqueeze(-1) - table).abs()
        return table[near.argmin(-1)] * v.sign()
    largest, dtype = {"e4m3": (448, torch.float8_e4m3fn), "e5m2": (57344, torch.float8_e5m2)}[element]
    return v.clamp(-largest, largest).to(dtype).double()


def _cast(x, recipe, gradient=False, parameter=False):
    """A matrix [rows, depth] in low precision, as float64."""
    f = recipe.gradient if gradient else recipe.forward
    rows, depth = x.shape
    if recipe.name == "tensorwise":
        tall, wide = rows, depth
    elif recipe.name == "rowwise":
        tall, wide = 1, depth
    else:
        tall, wide = recipe.block if parameter and recipe.square else 1, recipe.block
    groups = x.reshape(rows // tall, tall, depth // wide, wide).permute(0, 2, 1, 3)
    flat = groups.reshape(-1, tall * wide)
    s = flat.abs().amax(1, keepdim=True).float() * (1 / f.largest)
    if f.scale == "power":
        s = torch.exp2(torch.ceil(torch.log2(s)))
    if f.scale == "nested":
        outer = x.abs().max().float() * (1 / (f.largest * 448))
        s = (s / outer).to(torch.float8_e4m3fn).float() * outer
    low = _round(flat * (1 / s).double(), f.element) * s.double()
    return low.reshape(groups.shape).permute(0, 2, 1, 3).reshape(x.shape)


def _layer(recipe, x, w):
    """y [b, f] = x [b, d] · w [d, f], and the function of its cotangent that gives those of x and w."""
    cast = lambda t, **k: _cast(t, recipe, **k)
    y = cast(x) @ cast(w.t(), parameter=True).t()

    def back(dy):
        dx = cast(dy, gradient=True) @ cast(w, parameter=True).t()
        dw = cast(x.t()) @ cast(dy.t(), gradient=True).t()
        return dx, dw

    return y, back


def _data():
    g = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    params = {"layers": {"w1": rand(8, 12), "w2": rand(12, 4)}, "other": rand(4, 4)}
    return params, {"x": rand(16, 8), "c": rand(16, 4)}


def _loss(params, batch):
    h = torch.tanh(einsum("b d, d f -> b f", batch["x"], params["layers"]["w1"]))
    y = einsum("b f, f e -> b e", h, params["layers"]["w2"])
    return (einsum("b e, e k -> b k", y, params["other"]) * batch["c"]).sum(), 1


@pytest.mark.parametrize("name", RECIPES)
def test_a_network_of_two_layers(name):
    recipe = RECIPES[name]
    params, batch = _data()
    w1, w2 = params["layers"]["w1"], params["layers"]["w2"]
    h, back1 = _layer(recipe, batch["x"], w1)
    y, back2 = _layer(recipe, torch.tanh(h), w2)
    dh, dw2 = back2(batch["c"] @ params["other"].t())
    _, dw1 = back1(dh * (1 - torch.tanh(h) ** 2))
    (loss, _), grads = fmeg.value_and_grad(_loss, precision=recipe)(params, batch)
    assert float(loss) == pytest.approx(float((y @ params["other"] * batch["c"]).sum()), rel=1e-12)
    torch.testing.assert_close(grads["layers"]["w2"], dw2, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads["layers"]["w1"], dw1, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads["other"], y.t() @ batch["c"], rtol=1e-12, atol=1e-12)


def test_without_the_weight_gradient():
    recipe = precision.fp8(weight_gradient=False)
    params, batch = _data()
    _, grads = fmeg.value_and_grad(_loss, precision=recipe)(params, batch)
    h, _ = _layer(recipe, batch["x"], params["layers"]["w1"])
    want = torch.tanh(h).t() @ (batch["c"] @ params["other"].t())
    torch.testing.assert_close(grads["layers"]["w2"], want, rtol=1e-12, atol=1e-12)


def _stack(params, batch):
    body = lambda x, w: (torch.tanh(einsum("b d, d e -> b e", x, w)), None)
    x, _ = fmeg.scan(body, batch, params["layers"])
    return x.square().sum(), x.numel()


@pytest.mark.parametrize("skip", [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1)])
def test_first_and_last_layers_stay_as_they_were(skip):
    g = torch.Generator().manual_seed(1)
    w, x = torch.randn(4, 8, 8, generator=g).double(), torch.randn(16, 8, generator=g).double()
    recipe = precision.fp8(skip_first=skip[0], skip_last=skip[1])
    (_, _), grads = fmeg.value_and_grad(_stack, precision=recipe)({"layers": w}, x)
    low = range(skip[0], 4 - skip[1])
    backs, h = [], x
    for i in range(4):
        if i in low:
            y, back = _layer(recipe, h, w[i])
        else:
            y, back = h @ w[i], lambda dy, h=h, i=i: (dy @ w[i].t(), h.t() @ dy)
        h = torch.tanh(y)
        backs.append((back, 1 - h**2))
    dh, want = 2 * h / h.numel(), [None] * 4
    for i in reversed(range(4)):
        back, slope = backs[i]
        dh, want[i] = back(dh * slope)
    torch.testing.assert_close(grads["layers"], torch.stack(want), rtol=1e-11, atol=1e-13)


def test_of_two_scans_the_first_and_the_last_layer_are_left_out():
    def loss(params, batch):
        body = lambda x, w: (torch.tanh(einsum("b d, d e -> b e", x, w)), None)
        x, _ = fmeg.scan(body, batch, params["layers1"])
        x, _ = fmeg.scan(body, x, params["layers2"])
        return x.square().sum(), 1

    g = torch.Generator().manual_seed(3)
    w, x = 0.4 * torch.randn(5, 8, 8, generator=g).double(), torch.randn(16, 8, generator=g).double()
    two = fmeg.value_and_grad(loss, precision=precision.fp8())({"layers1": w[:2], "layers2": w[2:]}, x)
    one = fmeg.value_and_grad(_stack, precision=precision.fp8())({"layers": w}, x)
    assert float(two[0][0]) == pytest.approx(float(one[0][0]) * x.numel(), rel=1e-12)
    grads = torch.cat([two[1]["layers1"], two[1]["layers2"]])
    torch.testing.assert_close(grads, one[1]["layers"] * x.numel(), rtol=1e-11, atol=1e-12)


def test_a_stacked_result_of_a_split_scan():
    def loss(params, batch):
        body = lambda x, w: ((y := torch.tanh(einsum("b d, d e -> b e", x, w))), y.square().sum())
        x, ys = fmeg.scan(body, batch, params["layers"])
        return ys.sum() + x.sum(), 1

    g = torch.Generator().manual_seed(2)
    w, x = 0.3 * torch.randn(4, 8, 8, generator=g).double(), torch.randn(16, 8, generator=g).double()
    recipe = precision.fp8(match="layers", skip_first=1, skip_last=1)
    (got, _), low = fmeg.value_and_grad(loss, precision=recipe)({"layers": w}, x)
    (want, _), full = fmeg.value_and_grad(loss)({"layers": w}, x)
    assert float(got) == pytest.approx(float(want), rel=0.1)
    assert (low["layers"] - full["layers"]).norm() < 0.1 * full["layers"].norm()


def test_a_parameter_is_followed_through_casts_and_views():
    def loss(params, batch):
        w = params["layers"]["w1"].to(torch.float32).reshape(4, 2, 12).permute(2, 0, 1)
        return einsum("b i j, f i j -> b f", batch["x"].float().reshape(16, 4, 2), w).square().sum(), 1

    params, batch = _data()
    recipe = precision.fp8(match="layers.w1")
    (low, _), _ = fmeg.value_and_grad(loss, precision=recipe)(params, batch)
    (full, _), _ = fmeg.value_and_grad(loss)(params, batch)
    assert low != full and float(low) == pytest.approx(float(full), rel=0.05)


def test_a_vector_is_no_matrix():
    """The gate of shared experts, one number a token, stays as it is: no hardware has such a product in FP8."""

    def loss(params, batch):
        gate = torch.sigmoid(einsum("b d, d -> b", batch, params["layers"]["gate"]))
        return (einsum("b d, d f -> b f", batch, params["layers"]["w"]) * gate[:, None]).sum(), 1

    g = torch.Generator().manual_seed(0)
    params = {"layers": {"gate": torch.randn(8, generator=g), "w": torch.randn(8, 16, generator=g)}}
    recipe = precision.fp8("delayed")
    assert sorted(fmeg.amax_history(loss, recipe, params, torch.ones(4, 8))) == ["layers.w"]
    with pytest.raises(TraceError, match="Products have layers.w$"):
        fmeg.value_and_grad(loss, precision=precision.fp8(match="*gate"))(params, torch.ones(4, 8))


def test_nothing_to_do_is_an_error_that_says_what_there_is():
    params, batch = _data()
    with pytest.raises(TraceError, match=r"matches 'blocks\.\*'.*layers\.w1, layers\.w2, other"):
        fmeg.value_and_grad(_loss, precision=precision.fp8(match="blocks.*"))(params, batch)
    with pytest.raises(TraceError, match=r"matches 'layers\.wx' of `match`.*layers\.w1, layers\.w2, other"):
        fmeg.value_and_grad(_loss, precision=precision.fp8(match=("layers.w1", "layers.wx")))(params, batch)
    w = {"layers": torch.randn(2, 8, 8)}
    with pytest.raises(TraceError, match="skip_first=1, skip_last=1"):
        fmeg.value_and_grad(_stack, precision=precision.fp8())(w, torch.randn(4, 8))


def test_blocks_that_do_not_fit_are_an_error():
    params, batch = _data()
    with pytest.raises(ValueError, match=r"blocks of 5 do not fit the dimensions d=8"):
        fmeg.value_and_grad(_loss, precision=precision.fp8("blockwise", block=5))(params, batch)
    assert blocks("hse", dict(h=3, s=4, e=2), 4) == {"e": 0, "s": 2, "h": 1}


def test_recipes_are_checked():
    with pytest.raises(ValueError, match="tensorwise, delayed"):
        precision.fp8("per-tensor")
    with pytest.raises(ValueError, match="count layers"):
        precision.fp8(skip_first=-1)
    with pytest.raises(ValueError, match="skip_last count layers, given 1 and -1"):
        precision.mxfp8(skip_last=-1)
    with pytest.raises(ValueError, match="history counts steps, given 0"):
        precision.fp8("delayed", history=0)
    for make in (lambda: precision.fp8("blockwise", block=0), lambda: precision.nvfp4(block=-16)):
        with pytest.raises(ValueError, match="block counts elements"):
            make()
    with pytest.raises(ValueError, match="gradient must be e4m3 or e5m2, given 'e2m1'"):
        precision.fp8(gradient="e2m1")


def test_under_another_transform():
    params, batch = _data()
    f = fmeg.value_and_grad(_loss, precision=precision.fp8())
    with pytest.raises(TraceError, match="no derivatives beyond"):
        torch.func.grad(lambda p: f(p, batch)[0][0])(params)


def test_microbatches_are_summed():
    params, batch = _data()
    recipe = precision.fp8("rowwise", weight_gradient=False)  # rows do not see one another
    one = fmeg.value_and_grad(_loss, precision=recipe)(params, batch)[1]
    four = fmeg.value_and_grad(_loss, precision=recipe, microbatches=4)(params, batch)[1]
    for a, b in zip(tree.leaves(one), tree.leaves(four), strict=True):
        torch.testing.assert_close(4 * b, a, rtol=1e-12, atol=1e-12)  # the count is 1 a microbatch


EQUATIONS = ["b s d, d f -> b s f", "b s f, d f -> b s d", "b s d, b s f -> d f", "e c d, e d f -> e c f"]


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
def test_the_product_and_its_rule(equation, name):
    sizes = dict(b=2, s=4, d=8, f=4, e=2, c=4)
    mm = as_matmul(equation)
    g = torch.Generator().manual_seed(0)
    args, grids, wide = [], [], []
    for i, term in enumerate(equation.split("->")[0].split(",")):
        names = tuple(term.split())
        x = torch.randn([sizes[n] for n in names], generator=g, dtype=torch.float64)
        grid = RECIPES[name].grid(names, sizes, mm, i == 1)
        q, s = quantize(x, amax(x, grid), grid, Format("e4m3"))
        args += [q, s]
        grids.append(grid)
        wide.append(x)
    got = scaled_einsum(equation, *args, tuple(grids), torch.float64)
    want = einsum(equation, *wide)
    assert (got - want).norm() < 0.06 * want.norm()
    assert check_rule(scaled_einsum_p, equation, *args, tuple(grids), torch.float64) > 0


def test_what_is_no_product():
    with pytest.raises(ValueError, match="no product of two matrices"):
        scaled_einsum("a, b -> a b", *[torch.ones(1)] * 4, ((0,), (0,)))
    assert as_matmul("a b, b -> a") is not None and as_matmul("a b c, b -> a") is None and as_matmul("a b -> a") is None
