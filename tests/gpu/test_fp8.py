"""FP8 on a GPU: the hardware's products against the meaning in plain torch, and whole steps against the CPU."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, einsum, precision, tree
from fmeg.models import llama
from fmeg.precision.formats import Format, amax, quantize
from fmeg.precision.scaled import _reference, as_matmul, hardware, scaled_einsum

pytestmark = pytest.mark.gpu
SIZES = dict(b=2, s=512, d=1024, f=2048, h=8, e=128)
EQUATIONS = [
    "b s d, d f -> b s f",
    "b s f, d f -> b s d",
    "b s d, b s f -> d f",
    "b s d, d h e -> b s h e",
    "b s h e, h e d -> b s d",
    "b s h e, b s d -> h e d",
    "h s d, h d f -> h s f",
]


def _operands(equation, recipe, elements=("e4m3", "e4m3")):
    mm, args, grids, wide = as_matmul(equation), [], [], []
    for i, term in enumerate(equation.split("->")[0].split(",")):
        names = tuple(term.split())
        x = torch.randn([SIZES[n] for n in names], generator=torch.Generator().manual_seed(i)).cuda()
        grid = recipe.grid(names, SIZES, mm, i == 1 and "b" not in names)
        args += quantize(x, amax(x, grid), grid, Format(elements[i]))
        grids.append(grid)
        wide.append(x)
    return args, tuple(grids), wide


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fast", [False, True])
def test_the_hardware_product_is_the_reference(equation, name, dtype, fast):
    args, grids, wide = _operands(equation, precision.fp8(name))
    kinds = hardware(equation, args[0], args[2], grids, dtype)
    second = "1x128" if "b s" in equation.split("->")[0].split(",")[1] else "128x128"
    if torch.cuda.get_device_capability() == (9, 0):
        expected = {"tensorwise": ("tensor",) * 2, "rowwise": ("row",) * 2, "blockwise": ("1x128", second)}
        assert kinds == expected[name]
    got = scaled_einsum(equation, *args, grids, dtype, fast)
    want = _reference(equation, *args, grids, torch.float32)
    assert got.dtype == dtype and got.shape == want.shape
    assert (got.float() - want).norm() < 4e-3 * want.norm()  # bf16's own rounding is 1.7e-3
    assert (got.float() - einsum(equation, *wide)).norm() < 0.05 * want.norm()


@pytest.mark.parametrize("equation", EQUATIONS[:4])
@pytest.mark.parametrize("at", range(4))
def test_a_scale_may_lie_anywhere(equation, at):
    """As a row of a stack of scales does, where cuBLAS can't read it."""
    (qx, sx, qy, sy), grids, _ = _operands(equation, precision.fp8())
    stacks = [torch.zeros(4, *s.shape, device="cuda") for s in (sx, sy)]
    for stack, s in zip(stacks, (sx, sy), strict=True):
        stack[at] = s
    got = scaled_einsum(equation, qx, stacks[0][at], qy, stacks[1][at], grids, torch.bfloat16)
    assert torch.equal(got, scaled_einsum(equation, qx, sx, qy, sy, grids, torch.bfloat16))


@pytest.mark.parametrize("elements", [("e4m3", "e5m2"), ("e5m2", "e4m3")])
def test_both_elements_in_one_product(elements):
    args, grids, _ = _operands(EQUATIONS[2], precision.fp8(), elements)
    assert hardware(EQUATIONS[2], args[0], args[2], grids, torch.bfloat16) == ("tensor", "tensor")
    want = _reference(EQUATIONS[2], *args, grids, torch.float32)
    got = scaled_einsum(EQUATIONS[2], *args, grids, torch.bfloat16)
    assert (got.float() - want).norm() < 4e-3 * want.norm()


@pytest.mark.parametrize("grid", [(0, 0), (1, 0), (1, 128), (128, 128)])
@pytest.mark.parametrize("format", [Format("e4m3"), Format("e5m2"), Format("e4m3", "power"), Format("e2m1")])
def test_quantised_values_are_those_of_the_cpu(grid, format):
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, s = quantize(x, amax(x, grid), grid, format)
    gq, gs = quantize(x.cuda(), amax(x.cuda(), grid), grid, format)
    assert torch.equal(gs.cpu(), s)
    assert (gq.cpu().float() != q.float()).float().mean() < 1e-3  # a reciprocal may differ in its last bit


def _config(**changes):
    sizes = dict(vocab_size=500, embed=512, layers=4, heads=4, kv_heads=4, head_dim=128, ff=1024)
    return llama.Config(**{**sizes, "compute_dtype": torch.bfloat16, **changes})


def _problem(cfg, device):
    with torch.device("cpu"):
        tokens = torch.randint(0, 500, (4, 129), generator=torch.Generator().manual_seed(0))
        params = llama.init(fmeg.random.key(0), cfg)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": torch.ones(4, 128, device="cpu")}
    return tree.map(lambda x: x.to(device), params), tree.map(lambda x: x.to(device), batch)


def _gradients(cfg, recipe, device, mesh=None, layout=None, **options):
    params, batch = _problem(cfg, device)
    axes = {"params": llama.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), precision=recipe)

    def step(params, batch):
        (loss, _), grads = grad(params, batch)
        return loss, grads

    with torch.device(device):
        loss, grads = fmeg.jit(step, mesh=mesh, layout=layout, axes=axes, **options)(params, batch)
    return float(loss.global_value()), [g.global_value().cpu().float() for g in tree.leaves(grads)]


RECIPES = {
    "tensorwise": precision.fp8(),
    "rowwise": precision.fp8("rowwise"),
    "blockwise": precision.fp8("blockwise", power_of_two=True),
    "mxfp8": precision.mxfp8(),
    "nvfp4": precision.nvfp4(),
}


@pytest.fixture(scope="module")
def exact():
    return _gradients(_config(compute_dtype=torch.float32), None, "cpu")


def _errors(grads, exact):
    return [float((a - b).norm() / b.norm()) for a, b in zip(grads, exact[1], strict=True)]


@pytest.mark.parametrize("mode", ["eager", "inductor"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_is_as_exact_as_that_of_the_cpu(exact, name, mode):
    """One value that rounds differently is a step of a whole eighth: what agrees is the size of the error."""
    loss, grads = _gradients(_config(), RECIPES[name], "cpu")
    got, on_gpu = _gradients(_config(), RECIPES[name], "cuda", mode=mode)
    assert got == pytest.approx(loss, rel=2e-3)
    for ours, theirs in zip(_errors(on_gpu, exact), _errors(grads, exact), strict=True):
        assert ours < 1.25 * theirs + 0.01


def test_a_step_on_a_virtual_mesh():
    tp = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
    layout = Layout(batch="dp", res_seq="tp", params=dict(embed="dp"), **tp)
    loss, grads = _gradients(_config(), RECIPES["tensorwise"], "cuda")
    got, others = _gradients(_config(), RECIPES["tensorwise"], "cuda", Mesh(dp=2, tp=2), layout, strict=True)
    assert got == pytest.approx(loss, rel=1e-3)
    for a, b in zip(others, grads, strict=True):
        assert (a - b).norm() < 0.15 * b.norm()


def test_training_follows_bf16():
    """At a rate at which the loss falls smoothly: 0.5 is so high that two bf16 curves would part as well."""
    losses, rate = {}, 0.003
    for name in (None, "tensorwise", "rowwise", "blockwise"):
        cfg = _config()
        params, batch = _problem(cfg, "cuda")
        loss_fn = lambda p, b, cfg=cfg: llama.loss(p, b, cfg)
        grad = fmeg.value_and_grad(loss_fn, precision=RECIPES[name] if name else None)

        def step(params, batch, grad=grad):
            (loss, _), grads = grad(params, batch)
            return tree.map(lambda p, g: p - rate * g, params, grads), loss

        with torch.device("cuda"):
            run, losses[name] = fmeg.jit(step), []
            for _ in range(20):
                params, loss = run(params, batch)
                losses[name].append(float(loss.global_value()))
    assert losses[None][-1] < 0.9 * losses[None][0]
    for name, curve in losses.items():
        assert curve == pytest.approx(losses[None], rel=0.003), name
