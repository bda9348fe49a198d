"""Kernels that make FP8 operands, against what they mean in plain torch; and a product written where it belongs."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import precision, tree
from fmeg.kernels import fp8
from fmeg.models import llama
from fmeg.ops.activations import swiglu_bwd_p, swiglu_p
from fmeg.ops.rms_norm import rms_norm_p
from fmeg.precision.formats import Format, amax_p, dequantize, quantize_p
from fmeg.precision.pairs import largest_p, pair_p, transposed
from fmeg.precision.scaled import _reference, scaled_einsum_p
from fmeg.program.ir import Node, TensorType, Value

pytestmark = pytest.mark.gpu
SHAPES = [(2, 128, 256), (3, 50, 4, 24), (2, 1000, 1040), (1, 16), (99, 57)]
FORMATS = [Format("e4m3"), Format("e5m2"), Format("e4m3", "power")]


def normal(*shape, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def check(got, values, known, format, lead, rows, seen=()):
    """The pairs `got` against the values quantised one by one; `seen`: the largest values expected besides."""
    assert len(got) == 3 * len(values) + len(seen)
    for i, (v, top) in enumerate(zip(values, known, strict=True)):
        grid = (1,) * lead + (0,) * (v.ndim - lead)
        q, s = quantize_p.reference(v, top, None, grid, format)
        mine, turned, scale = got[3 * i : 3 * i + 3]
        assert torch.equal(scale, s) and mine.dtype == turned.dtype == format.dtype
        assert torch.equal(turned.view(torch.uint8), transposed(mine, lead, rows).view(torch.uint8))
        a, b = (dequantize(x, s, grid, torch.float32) for x in (mine, q))
        assert (a != b).sum() < 0.05 * a.numel() + 2  # values that round otherwise
        step, least = (1 / 4, 2.0**-16) if format.element == "e5m2" else (1 / 8, 2.0**-9)
        assert ((a - b).abs() <= step * torch.maximum(a.abs(), b.abs()) + 1.001 * least * s).all()  # a neighbour
    for a, b in zip(got[3 * len(values) :], seen, strict=True):
        assert torch.allclose(a, b, rtol=8e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("seen", [False, True])
def test_a_tensor(shape, format, seen):
    x, rows = normal(*shape), len(shape) - 1
    top = amax_p(x, (0,) * x.ndim)
    known = top * 0.5 if seen else top
    got = pair_p.run()("plain", (x,), None, (known,), format, 0, rows, seen, 0.0, None)
    check(got, [x], [known], format, 0, rows, [top] if seen else [])
    q, _ = quantize_p.reference(x, known, None, (0,) * x.ndim, format)
    assert (got[0].float() != q.float()).float().mean() < 1e-3  # the same arithmetic, but for a reciprocal's last bit


@pytest.mark.parametrize("rows", [72, 35, 1])
@pytest.mark.parametrize("seen", [False, True])
def test_a_stack_of_float32_parameters(seen, rows):
    x = normal(3, rows, 4, 40, dtype=torch.float32)
    half = x.bfloat16()
    top = amax_p(half, (1, 0, 0, 0))
    found = largest_p.run()("plain", (x,), 1, 0.0, torch.bfloat16)
    assert torch.equal(found, top)
    got = pair_p.run()("plain", (x,), None, (found,), FORMATS[0], 1, 1, seen, 0.0, torch.bfloat16)
    check(got, [half], [top], FORMATS[0], 1, 1, [top] if seen else [])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_norm(shape, weighted):
    x, w = 3 * normal(*shape), normal(shape[-1], seed=1) if weighted else None
    want = rms_norm_p(x, w, eps=1e-5)
    top, inverse = largest_p.run()("rms_norm", (x, w), 0, 1e-5, None)
    assert torch.allclose(top, amax_p(want, (0,) * x.ndim), rtol=8e-3)
    got = pair_p.run()("rms_norm", (x, w), inverse, (top,), FORMATS[0], 0, len(shape) - 1, False, 1e-5, None)
    check(got, [want], [top], FORMATS[0], 0, len(shape) - 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seen", [False, True])
def test_gated(shape, seen):
    gate, up, ct = (normal(*shape, seed=i) for i in range(3))
    rows, zero = len(shape) - 1, (0,) * len(shape)
    want = swiglu_p(gate.float(), up.float()).bfloat16()
    top = largest_p.run()("swiglu", (gate, up), 0, 0.0, None)
    assert torch.allclose(top, amax_p(want, zero), rtol=8e-3)
    got = pair_p.run()("swiglu", (gate, up), None, (top,), FORMATS[0], 0, rows, seen, 0.0, None)
    check(got, [want], [top], FORMATS[0], 0, rows, [top] if seen else [])
    both = [v.bfloat16() for v in swiglu_bwd_p(gate.float(), up.float(), ct.float())]
    tops = largest_p.run()("swiglu_bwd", (gate, up, ct), 0, 0.0, None)
    for a, b in zip(tops, both, strict=True):
        assert torch.allclose(a, amax_p(b, zero), rtol=8e-3)
    got = pair_p.run()("swiglu_bwd", (gate, up, ct), None, tops, FORMATS[1], 0, rows, seen, 0.0, None)
    check(got, both, tops, FORMATS[1], 0, rows, tops if seen else [])


def test_not_a_number_stays_one():
    x = normal(64, 64)
    x[3, 5] = float("nan")
    assert largest_p.run()("plain", (x,), 0, 0.0, None).isnan().all()
    one = torch.ones(1, 1, device="cuda")
    q, t, _ = pair_p.run()("plain", (x,), None, (one,), FORMATS[0], 0, 1, False, 0.0, None)
    assert q.float().isnan().sum() == t.float().isnan().sum() == 1 and q[3, 5].float().isnan()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "swiglu"])
def test_a_largest_value_that_is_no_number_leaves_none(kind, format):
    values = (normal(64, 48),) if kind == "plain" else (normal(64, 48), normal(64, 48, seed=1))
    known = torch.full((1, 1), torch.nan, device="cuda")
    q, t, scale = pair_p.run()(kind, values, None, (known,), format, 0, 1, False, 0.0, None)
    assert scale.isnan().all() and q.float().isnan().all() and t.float().isnan().all()


@pytest.mark.parametrize("equation", ["d b s, f b s -> d f", "h e b s, d b s -> h e d", "b s d, f b s -> d f"])
def test_a_product_into_memory(equation):
    sizes = dict(b=2, s=64, d=128, f=96, h=4, e=32)
    terms = [t.split() for t in equation.split("->")[0].split(",")]
    args, grids = [], []
    for i, names in enumerate(terms):
        x = normal(*(sizes[n] for n in names), seed=i)
        grids.append((0,) * x.ndim)
        args += quantize_p.reference(x, amax_p(x, grids[-1]), None, grids[-1], FORMATS[i])
    values = [Value(TensorType.of(a)) for a in args]
    node = Node(scaled_einsum_p, (equation, *values, tuple(grids), torch.float32, False), {})
    want = _reference(equation, *args, tuple(grids), torch.float32)
    stack = torch.ones(3, *want.shape, device="cuda")
    scaled_einsum_p.lowerings["into"](node)(stack[1], *args, False)
    assert (stack[1] - want).norm() < 1e-3 * want.norm()
    scaled_einsum_p.lowerings["into"](node)(stack[1], *args, True)
    assert (stack[1] - 2 * want).norm() < 2e-3 * want.norm()
    assert (stack[[0, 2]] == 1).all()


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_a_compiled_step_is_as_the_eager_one(name):
    """In all modes, over steps: one value that rounds otherwise is a whole step of a float8, so the rate is low enough
    for the loss to fall smoothly."""
    sizes = dict(vocab_size=500, embed=512, layers=4, heads=4, kv_heads=2, head_dim=128, ff=1024)
    cfg = llama.Config(**sizes, compute_dtype=torch.bfloat16)
    recipe = precision.fp8(name, skip_first=0, skip_last=0)
    with torch.device("cpu"):
        params = tree.map(lambda x: x.cuda(), llama.init(fmeg.random.key(0), cfg))
        ids = torch.randint(0, 500, (4, 129), generator=torch.Generator().manual_seed(0)).cuda()
    loss_fn = lambda p, b: llama.loss(p, b, cfg)
    grad = fmeg.value_and_grad(loss_fn, precision=recipe)
    curves = {}
    with torch.device("cuda"):
        batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "mask": torch.ones(4, 128)}
        first = fmeg.amax_history(loss_fn, recipe, params, batch) if name == "delayed" else {}
        for mode in ("eager", "inductor", "cudagraph"):

            def step(params, batch, amax):
                (loss, aux), grads = grad(params, batch, **(dict(amax=amax) if amax else {}))
                return tree.map(lambda p, g: p - 0.05 * g, params, grads), loss, aux["amax"] if amax else {}

            run = fmeg.jit(step, mode=mode)
            now, amax, curves[mode] = params, tree.map(lambda x: x.cuda(), first), []
            for _ in range(6):
                now, loss, amax = run(now, batch, amax)
                curves[mode].append(float(loss.global_value()))
    assert curves["eager"][-1] < curves["eager"][0]
    for mode in ("inductor", "cudagraph"):
        assert curves[mode] == pytest.approx(curves["eager"], rel=0.02)


def test_an_operand_that_does_not_fit():
    """float64 has no kernels."""
    x = normal(16, 32, dtype=torch.float64)
    assert not fp8.fits(x)
    got = pair_p.run()("plain", (x,), None, (amax_p(x, (0, 0)),), FORMATS[0], 0, 1, False, 0.0, None)
    assert torch.equal(got[1].view(torch.uint8), got[0].view(torch.uint8).t())
