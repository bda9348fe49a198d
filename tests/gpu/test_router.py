"""The router on a GPU: the same experts, queues and numbers as on a CPU, ties included, on one device and on meshes."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, einsum, jit, random, tree, value_and_grad
from fmeg.lower.split import product_by_parts, rounded_product_by_parts
from fmeg.ops import Router, loss_counts, router, router_from_logits
from fmeg.ops.einsum import einsum_p
from fmeg.ops.router import top_k

pytestmark = pytest.mark.gpu
EVERY_LOSS = dict(sequence_loss=0.1, batch_loss=0.2, running_loss=0.3, z_loss=0.4)
CONFIGS = {
    "mixtral": Router(2, "softmax_of_top_k", **EVERY_LOSS),
    "deepseek_v3": Router(
        8, "sigmoid", renormalize=True, scale=2.5, groups=8, top_groups=4, group_score="top2sum", **EVERY_LOSS
    ),
    "drop by weight": Router(4, "sqrt_softplus", capacity_factor=0.75, jitter=0.1, **EVERY_LOSS),
    "drop by position": Router(4, capacity_factor=0.75, drop="position", **EVERY_LOSS),
    "sinkhorn": Router(1, "sigmoid", select="sinkhorn", **EVERY_LOSS),
}
AXES = {
    "params": {"w": "embed experts"},
    "batch": {"x": "batch seq width", "mask": "batch seq", "bias": "experts", "key": "_"},
}


def _run(cfg, device, layout=None):
    g = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    params = {"w": normal(16, 64)}
    batch = {"x": normal(4, 32, 16), "mask": torch.rand(4, 32, generator=g) > 0.2, "bias": 0.1 * normal(64)}
    params, batch = (tree.map(lambda t: t.to(device), t) for t in (params, batch))
    batch["key"] = random.key(1).to(device)

    def step(params, batch):
        def call(p):
            return router(batch["x"], p["w"], cfg, key=batch["key"], bias=batch["bias"], mask=batch["mask"])

        def loss(p, batch):
            r, n = call(p), loss_counts(batch["x"], cfg, batch["mask"])
            return [((r.weights * r.weights).sum(), 1), *((r.losses[name], n[name]) for name in n)]

        return value_and_grad(lambda p, _: loss(p, batch))(params, ()), call(params)

    with torch.device(device):
        if layout is not None:
            step = jit(step, mesh=Mesh(x=2, y=2), layout=Layout(**layout), axes=AXES)
        out = step(params, batch)
    return [x.global_value().cpu() if hasattr(x, "global_value") else x.cpu() for x in tree.leaves(out)]


@pytest.mark.parametrize("layout", [None, dict(batch="x", seq="y"), dict(batch=("x", "y"), experts="x")], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_cpu(name, layout):
    got, want = _run(CONFIGS[name], "cuda", layout), _run(CONFIGS[name], "cpu")
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("experts", [8, 64, 256, 512])
def test_ties_do_not_depend_on_the_number_of_tokens(experts, dtype):
    logits = torch.randint(0, 4, (64, 128, experts), generator=torch.Generator().manual_seed(0)).to(dtype)
    for drop in ("weight", "position"):
        cfg = Router(8, "sigmoid", capacity_factor=0.5, drop=drop)
        got, want = router_from_logits(logits.cuda(), cfg), router_from_logits(logits, cfg)
        assert torch.equal(got.experts.cpu(), want.experts) and torch.equal(got.slots.cpu(), want.slots)
    for rows in (1, 3, 64):
        part = router_from_logits(logits[:rows, :rows].cuda(), Router(8, "sigmoid")).experts.cpu()
        assert torch.equal(part, want.experts[:rows, :rows])


@pytest.mark.parametrize("equation", ["b s d, d e -> b s e", "b s d, b s e -> d e", "b s e, d e -> b s d"])
def test_float32_by_tensor_cores(equation):
    """The router's products from bf16 parts lose no more than tensor cores' own sums do, a few bits of float32."""
    sizes = dict(b=2, s=1024, d=2048, e=128)
    g = torch.Generator("cuda").manual_seed(0)
    x, y = (
        torch.randn([sizes[n] for n in t.split()], device="cuda", generator=g)
        for t in equation.split("->")[0].split(",")
    )
    low = x.bfloat16()
    error = lambda a, b: float((a.double() - b).norm() / b.norm())
    short = y.bfloat16()
    sums = error(
        einsum_p.run()(equation, low, short, dtype=torch.float32), einsum(equation, low.double(), short.double())
    )
    exact = einsum(equation, low.double(), y.double())
    assert error(product_by_parts(equation, low, y), exact) < 1.5 * sums < 5e-6
    exact = einsum(equation, x.double(), y.double())
    assert error(rounded_product_by_parts(equation, x, y), exact) < 1.1 * error(exact.bfloat16(), exact)


@pytest.mark.parametrize("n", [3, 64, 128, 300])
def test_top_k_of_odd_numbers(n):
    """Zeros of both signs, infinities and NaN come in the order of a stable sort."""
    x = torch.randn(1000, n, generator=torch.Generator().manual_seed(0))
    x[:100] = torch.randint(-1, 2, (100, n), generator=torch.Generator().manual_seed(1)).float() * -0.0
    x[100:200, n // 2 :] = -torch.inf
    x[200:300, 1] = torch.nan
    x[300:400] = x[300:400].round()
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(top_k(x.cuda().to(dtype), min(n, 8)).cpu(), top_k(x.to(dtype), min(n, 8)))
