"""The way from a product by names to the hardware's matrix product: which it is, and how operands and scales lie."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fmeg import precision
from fmeg.precision import scaled
from fmeg.precision.formats import Format, amax, quantize
from fmeg.precision.scaled import as_matmul, scaled_einsum

SIZES = dict(b=2, s=128, d=256, f=384, h=4, e=64)
EQUATIONS = [
    "b s d, d f -> b s f",
    "b s f, d f -> b s d",
    "b s d, b s f -> d f",
    "b s d, d h e -> b s h e",
    "b s h e, h e d -> b s d",
    "b s d, b s h e -> d h e",
    "b s h e, b s d -> h e d",
]


def operands(equation, recipe, device="cpu"):
    """Quantised operands of an equation, and their grids; the second one is the parameter unless it has a batch."""
    mm, args, grids = as_matmul(equation), [], []
    for i, term in enumerate(equation.split("->")[0].split(",")):
        names = tuple(term.split())
        x = torch.randn([SIZES[n] for n in names], generator=torch.Generator().manual_seed(i)).to(device)
        grid = recipe.grid(names, SIZES, mm, i == 1 and "b" not in names)
        args.append(quantize(x, amax(x, grid), grid, Format("e4m3")))
        grids.append(grid)
    return args, tuple(grids)


def kinds(equation, args, grids):
    mm, names = as_matmul(equation), [t.split() for t in equation.split("->")[0].split(",")]
    out = []
    for ns, (q, _), grid in zip(names, args, grids, strict=True):
        of = dict(zip(ns, zip(q.shape, grid, strict=True), strict=True))
        out.append(scaled._kind([of[n] for n in mm.contracted], [of[n] for n in ns if n not in mm.contracted]))
    return tuple(out)


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_torch_scaled_mm(equation, name):
    args, grids = operands(equation, precision.fp8(name))
    kind = kinds(equation, args, grids)
    assert kind == (dict(tensorwise="tensor", rowwise="row")[name],) * 2
    got = scaled._hardware(kind, equation, *args, torch.bfloat16, False)
    want = scaled_einsum(equation, *args[0], *args[1], grids)
    assert got.shape == want.shape and got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2 * want.abs().max().item())


@pytest.mark.parametrize("equation", EQUATIONS)
def test_blocks_lie_as_cublas_wants_them(equation, monkeypatch):
    calls = []

    def fake(x, yt, sx, kx, sy, ky, output_dtype):
        y = yt.t()
        assert x.is_contiguous() and y.is_contiguous()
        wide = []
        for t, s, kind in ((x, sx, kx), (y, sy, ky)):
            rows, depth = t.shape
            if kind == F.ScalingType.BlockWise1x128:
                assert s.shape == (rows, depth // 128) and s.stride() == (1, rows)
                full = s.repeat_interleave(128, 1)
            else:
                padded = -(-depth // 128 // 4) * 4
                assert s.shape == (padded, rows // 128) and s.stride() == (1, padded)
                full = s.t()[:, : depth // 128].repeat_interleave(128, 0).repeat_interleave(128, 1)
            wide.append(t.float() * full)
        calls.append((kx, ky))
        return (wide[0] @ wide[1].t()).to(output_dtype)

    monkeypatch.setattr(F, "scaled_mm", fake)
    args, grids = operands(equation, precision.fp8("blockwise"))
    kind = kinds(equation, args, grids)
    assert kind == ("1x128", "1x128" if "b s" in equation.split("->")[0].split(",")[1] else "128x128")
    got = scaled._hardware(kind, equation, *args, torch.float32, False)
    want = scaled_einsum(equation, *args[0], *args[1], grids)
    assert len(calls) == 1
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2 * want.abs().max().item())


@pytest.mark.parametrize("equation", ["e b d, e d f -> e b f", "b e f, e d f -> b e d", "e b d, e b f -> d e f"])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise"])
def test_a_batch_is_a_loop(equation, name):
    sizes = dict(e=3, b=32, d=64, f=48)
    mm, args, grids = as_matmul(equation), [], []
    for i, term in enumerate(equation.split("->")[0].split(",")):
        names = tuple(term.split())
        x = torch.randn([sizes[n] for n in names], generator=torch.Generator().manual_seed(i))
        grid = precision.fp8(name).grid(names, sizes, mm, i == 1)
        args.append(quantize(x, amax(x, grid), grid, Format("e4m3")))
        grids.append(grid)
    kind = "row" if name == "rowwise" else "tensor"
    got = scaled._hardware((kind, kind), equation, *args, torch.bfloat16, False)
    want = scaled_einsum(equation, *args[0], *args[1], tuple(grids))
    assert got.shape == want.shape
    torch.testing.assert_close(got.float(), want, rtol=1e-2, atol=1e-2 * want.abs().max().item())


def test_a_cpu_has_no_such_product():
    args, grids = operands(EQUATIONS[0], precision.fp8())
    assert scaled.hardware(EQUATIONS[0], args[0][0], args[1][0], grids, torch.bfloat16) is None


def test_scalings_that_no_hardware_has():
    assert scaled._kind([(256, 32)], [(128, 1)]) == ""
    assert scaled._kind([(256, 1)], [(128, 1)]) == ""
    assert scaled._kind([(256, 0)], [(2, 1), (128, 0)]) == ""
    assert scaled._kind([(4, 128), (64, 1)], [(128, 1)]) == ""
