"""Formats and scales against tables of all numbers of a format, and formulas written out element by element."""

from __future__ import annotations

import math

import pytest
import torch

from fmeg.precision.formats import (
    Format,
    amax,
    amax_p,
    dequantize,
    power_of_two,
    quantize,
    quantize_p,
    round_e2m1,
    scales,
)
from fmeg.testing.rulecheck import check_rule

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def _numbers(element):
    """All finite numbers of a format, and whether the last bit of each is 0."""
    if element == "e2m1":
        values, even = torch.cat([-FP4, FP4]), torch.arange(8).remainder(2).eq(0).repeat(2)
    else:
        codes = torch.arange(256, dtype=torch.uint8)
        values = codes.view({"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[element]).double()
        even, keep = codes.remainder(2) == 0, values.isfinite()
        values, even = values[keep], even[keep]
    return values, even


def _nearest(x, element):
    """x rounded to the nearest number of a format, ties to even, by looking at all of them."""
    values, even = _numbers(element)
    distance = (x.double().reshape(-1, 1).clamp(values.min(), values.max()) - values).abs()
    best = distance == distance.amin(1, keepdim=True)
    pick = torch.where(best, even.double() + 1, 0.0).argmax(1)
    return values[pick].reshape(x.shape)


@pytest.mark.parametrize("element", ["e4m3", "e5m2", "e2m1"])
@pytest.mark.parametrize("kind", ["float", "power"])
def test_quantized_values_are_the_nearest(element, kind):
    f = Format(element, kind)
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 3
    q, s = quantize(x, amax(x, (0,)), (0,), f)
    want = x.abs().max() * (1 / f.largest)
    if kind == "power":
        want = torch.tensor(2.0 ** math.ceil(math.log2(want)))
    assert s.item() == want.item()
    assert torch.equal(q.double(), _nearest(x * (1 / s), element))
    assert f.largest == _numbers(element)[0].max()


def test_ties_go_to_even():
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4]
    assert torch.equal(round_e2m1(-ties).double(), _nearest(-ties, "e2m1"))


@pytest.mark.parametrize("grid", [(0, 0), (1, 0), (0, 1), (1, 4), (2, 4), (3, 0), (1, 1)])
def test_every_block_has_its_own_scale(grid):
    x = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    f = Format("e4m3")
    q, s = quantize(x, amax(x, grid), grid, f)
    got = dequantize(q, s, grid, torch.float64)
    rows, columns = (n if g == 0 else g for n, g in zip(x.shape, grid, strict=True))
    assert s.shape == (6 // rows, 8 // columns)
    for i in range(0, 6, rows):
        for j in range(0, 8, columns):
            block = x[i : i + rows, j : j + columns]
            scale = (block.abs().max().float() * (1 / 448)).item()
            assert s[i // rows, j // columns].item() == pytest.approx(scale, rel=1e-7)
            inverse = torch.reciprocal(s[i // rows, j // columns]).double()
            want = _nearest(block * inverse, "e4m3") * s[i // rows, j // columns].double()
            assert torch.equal(got[i : i + rows, j : j + columns], want)


def test_nested_scales():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(2))
    f, grid = Format("e2m1", "nested"), (1, 16)
    m = amax(x, grid)
    q, s = quantize(x, m, grid, f, top=amax(m, (0, 0)))
    outer = x.abs().max() / (6 * 448)
    inner = _nearest(x.reshape(4, 2, 16).abs().amax(-1) / 6 / outer, "e4m3")
    assert torch.allclose(s.double(), inner * outer.double(), rtol=1e-6)
    assert set(q.float().abs().unique().tolist()) <= set(FP4.tolist())
    assert (dequantize(q, s, grid, torch.float32) - x).abs().max() <= 1.1 * s.max()


def test_power_of_two_rounds_up():
    x = torch.tensor([1.0, 1.0000001, 0.75, 3.0, 2.0**-60, 2.0**60 * 1.5])
    assert power_of_two(x).tolist() == [1.0, 2.0, 1.0, 4.0, 2.0**-60, 2.0**61]


@pytest.mark.parametrize("kind", ["float", "power"])
def test_zeros_tiny_and_broken_values(kind):
    f = Format("e4m3", kind)
    for x in (torch.zeros(4), torch.full((4,), 1e-38)):
        q, s = quantize(x, amax(x, (0,)), (0,), f)
        assert s.tolist() == [1.0] and not q.float().any()
    for bad in (math.nan, math.inf):
        x = torch.tensor([1.0, bad])
        q, s = quantize(x, amax(x, (0,)), (0,), f)
        assert not dequantize(q, s, (0,), torch.float32).isfinite().any()
    q, s = quantize(torch.tensor([100.0, -3.0, math.inf]), torch.tensor([2.0]), (0,), f)  # an old amax: saturates
    most = {"float": 2.0, "power": 448 / 128}[kind]
    assert dequantize(q, s, (0,), torch.float32).tolist() == pytest.approx([most, -min(3.0, most), most])
    q, s = quantize(torch.tensor([1.0, 0.0]), torch.tensor([math.nan]), (0,), f)
    assert dequantize(q, s, (0,), torch.float32).isnan().all()


def test_a_format_that_is_not_there():
    with pytest.raises(ValueError, match="element must be one of"):
        Format("e3m4")


@pytest.mark.parametrize("grid", [(0, 0), (1, 0), (0, 1), (1, 4), (2, 4), (1, 1)])
def test_rules(grid):
    x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert check_rule(amax_p, x, grid) > 0
    m = amax(x, grid)
    assert check_rule(quantize_p, x, m, None, grid, Format("e4m3", "power")) > 0
    assert scales(m, Format("e4m3")).shape == m.shape
