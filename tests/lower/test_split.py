"""Products in float32 as products of bf16 parts: as exact, and found where a router has them."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, einsum, jit, tree, value_and_grad
from fmeg.kernels.split import split
from fmeg.lower.rewrite import everywhere
from fmeg.lower.split import (
    product_by_parts,
    rounded_product_by_parts,
    split_product_p,
    split_product_rounded_p,
    split_products,
)
from fmeg.ops import Router, router
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable

EQUATIONS = ["b s d, d e -> b s e", "b s d, b s e -> d e", "b s e, d e -> b s d", "d e, b s d -> b s e"]
SIZES = dict(b=2, s=16, d=64, e=8)


def tensors(equation, seed=0):
    g = torch.Generator().manual_seed(seed)
    left = equation.split("->")[0].split(",")
    return [torch.randn([SIZES[n] for n in names.split()], generator=g) for names in left]


def error(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("first", [True, False])
def test_as_exact_as_float32(equation, first):
    x, y = tensors(equation)
    x, y = (x.bfloat16(), y) if first else (x, y.bfloat16())
    want = einsum(equation, x.double(), y.double())
    got = product_by_parts(equation, x, y)
    assert got.dtype == torch.float32 and got.shape == want.shape
    assert error(got, want) < 3e-7


@pytest.mark.parametrize("equation", EQUATIONS)
def test_one_rounding(equation):
    x, y = tensors(equation)
    want = einsum(equation, x.double(), y.double())
    got = rounded_product_by_parts(equation, x, y)
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    assert error(got, want) < 1.1 * error(want.bfloat16(), want)


def test_parts_add_up():
    x = torch.randn(5, 7) * 10.0 ** torch.arange(-3, 4)
    parts = split(x, [0, 1, 2], 1)
    assert parts.shape == (5, 3, 7)
    torch.testing.assert_close(parts.double().sum(1).float(), x, rtol=2**-23, atol=0)


def test_found_in_a_router():
    """Forward and backward: no activation is copied to float32."""
    params = {"x": torch.randn(2, 8, 16).bfloat16(), "w": torch.randn(16, 4)}
    batch = torch.randn(2, 8, 2)

    def step(params, batch):
        def loss(p, b):
            return (router(p["x"], p["w"], Router(2)).weights * b).sum(), 1

        return value_and_grad(loss)(params, batch)

    axes = {"params": {"x": "batch seq embed", "w": "embed _"}, "batch": "batch seq _"}
    low = jit(step, mesh=Mesh(), layout=Layout(), axes=axes).lower(params, batch)
    fast = everywhere(split_products, low.program)
    found = [n.op for n, _, _ in walk(fast)]
    assert found.count(split_product_p) == 2 and found.count(split_product_rounded_p) == 1
    wide = [o.shape for n, _, _ in walk(fast) for o in n.outs if o.dtype == torch.float32]
    assert params["x"].shape not in wide
    leaves = tree.leaves((params, batch))
    got, want = (Executable(p, low.mesh.backend())(list(leaves)) for p in (fast, low.program))
    for a, b in zip(got, want, strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(a, b, rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-5, atol=1e-6)
