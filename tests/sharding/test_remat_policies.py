"""Policies beyond full, dots and names: the same gradients bit for bit, what is done again, what is kept and where."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from benchmarks import gpu
from fmeg import (
    Layout,
    Mesh,
    budget,
    jit,
    min_cut,
    name,
    offload,
    random,
    recompute,
    region,
    remat,
    save_names,
    scan,
    tree,
    value_and_grad,
)  # fmt: skip
from fmeg.models import deepseek, gpt2, llama, moe, presets
from fmeg.ops.remat import Policy
from fmeg.ops.remat import policy as named
from fmeg.sharding.offload import Offloaded

F64 = dict(dtype=torch.float64)
LLAMA = llama.Config(
    vocab_size=32, vocab_multiple=32, embed=16, layers=2, heads=4, kv_heads=2, head_dim=4, ff=32, dtype=torch.float64
)
MODELS = {
    "llama": (llama, LLAMA),
    "gpt2": (gpt2, replace(presets.get("tiny-gpt2"), **F64)),
    "moe": (moe, replace(presets.get("tiny-moe"), **F64)),
    "deepseek": (deepseek, replace(presets.get("tiny-deepseek"), shared_ff=32, **F64)),
}
ROWS, SEQ = 2, 8
EVERY = [
    "min_cut", min_cut(0.5), budget(10**9), offload(), offload(rest="full"), offload("attention", "ff"),
    recompute("norm", "core_attn"),
]  # fmt: skip
OF = {
    "llama": [recompute("mlp"), budget(3 * ROWS * SEQ * 16 * 8), offload("ff_in", rest="dots")],
    "gpt2": [save_names("ff")],
    "moe": [recompute("moe"), recompute("moe_act")],
    "deepseek": [recompute("mla_up"), recompute("shared_experts", "mlp"), recompute("moe", "mla_up", "core_attn")],
}
SOME = ["min_cut", offload(), recompute("norm", "core_attn")]
CASES = [(m, p) for m in MODELS for p in (*(EVERY if m == "llama" else SOME), *OF[m])]


@cache
def lower(model, policy, mesh=None, layout=None):
    module, cfg = MODELS[model]
    cfg = replace(cfg, remat=policy)

    def step(params, batch):
        return value_and_grad(lambda p, b: module.loss(p, b, cfg))(params, batch)

    jitted = jit(step, mesh=mesh or Mesh(), layout=layout or Layout(), axes={"params": module.logical_axes(cfg)})
    return jitted.lower(*example(model))


@cache
def example(model):
    module, cfg = MODELS[model]
    g = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, cfg.vocab_size, (ROWS, SEQ), generator=g) for _ in range(2))
    batch = dict(tokens=tokens, targets=targets, mask=(torch.rand(ROWS, SEQ, generator=g) > 0.3).double())
    return module.init(random.key(0), replace(cfg, init_std=0.3)), batch


@cache
def usual(model):
    low = lower(model, None)
    return low, [x.global_value() for x in tree.leaves(low.compile()(tree.leaves(example(model))))]


@pytest.mark.parametrize(("model", "policy"), CASES, ids=[f"{m}-{p}" for m, p in CASES])
def test_no_bit_of_a_gradient_depends_on_the_policy(model, policy):
    got = lower(model, policy).compile()(tree.leaves(example(model)))
    for a, b in zip(tree.leaves(got), usual(model)[1], strict=True):
        assert torch.equal(a.global_value(), b)


def layer(model, policy, **where):
    return lower(model, policy, **where).memory().scans[-1]


def test_regions_are_done_again():
    again = {p: list(layer("llama", p).again) for p in (None, recompute("mlp"), recompute("core_attn"))}
    assert again[None].count("einsum") == again[None].count("attention") == 0
    assert again[recompute("mlp")].count("einsum") == 2  # what the last product gives, nothing needs
    assert again[recompute("core_attn")].count("attention") == 1
    assert (
        layer("llama", recompute("core_attn")).flops
        == layer("llama", None).flops + 2 * 2 * ROWS * 4 * 4 * SEQ * (SEQ + 1) // 2
    )
    up = list(layer("deepseek", recompute("mla_up")).again)
    assert up.count("einsum") == 3 and "attention" not in up
    experts = [layer("moe", p).again.count("grouped_matmul") for p in (None, recompute("moe_act"), recompute("moe"))]
    assert experts == [0, 0, 2]


def test_bytes_of_a_layer():
    number = ROWS * SEQ * 8
    low = layer("llama", None)
    # the carry, q, k, v, the attention's result and normaliser, gate, up, the stream between the halves
    assert low.nbytes == number * (16 + 4 * 4 + 2 * 2 * 4 + 4 * 4 + 4 + 2 * 32 + 16) and low.host_bytes == 0
    assert layer("llama", recompute("mlp")).nbytes == low.nbytes - number * 2 * 32
    assert layer("llama", recompute("core_attn")).nbytes == low.nbytes - number * (4 * 4 + 4)
    assert layer("llama", "full").nbytes == number * 16
    assert (lambda s: (s.nbytes, s.host_bytes))(layer("llama", offload(rest="full"))) == (0, number * 16)
    kept = layer("llama", offload("ff_in"))
    assert (kept.nbytes, kept.host_bytes) == (low.nbytes - number * 64, number * 64)
    more = layer("gpt2", offload("ff"))
    assert more.host_bytes == number * MODELS["gpt2"][1].ff and more.nbytes == layer("gpt2", None).nbytes


@pytest.mark.parametrize("model", ["gpt2", "moe", "deepseek"])
def test_a_minimum_cut_keeps_no_more_than_the_usual_choice(model):
    assert layer(model, "min_cut").nbytes <= layer(model, None).nbytes
    assert layer(model, "min_cut").again.count("einsum") == 0


def test_budgets():
    least = layer("llama", "full").nbytes
    kept = [layer("llama", budget(n * least)) for n in (1, 2, 4, 8, 16)]
    assert all(k.nbytes <= n * least for n, k in zip((1, 2, 4, 8, 16), kept, strict=True))
    assert [k.flops for k in kept] == sorted((k.flops for k in kept), reverse=True)
    assert kept[0].flops > kept[2].flops > kept[-1].flops
    assert kept[0].again.count("attention") == 1 and kept[-1].again.count("einsum") == 0
    with pytest.raises(ValueError, match=f"keeps at least {least} bytes on a rank, given a budget of {least - 1}"):
        layer("llama", budget(least - 1))


def test_a_budget_is_a_ranks():
    where = dict(mesh=Mesh(dp=2), layout=Layout(batch="dp"))
    assert layer("llama", budget(64 * 16 * 4), **where).nbytes <= 64 * 16 * 4
    assert layer("llama", "full", **where).nbytes * 2 == layer("llama", "full").nbytes


TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
MESHES = {
    "loop": (Mesh(tp=2), Layout(**TP, res_seq="tp")),
    "vmap": (Mesh(tp=2, backend="vmap"), Layout(**TP, res_seq="tp")),
    "zero-3": (Mesh(dp=2), Layout(batch="dp", params=dict(embed="dp"))),
}


@pytest.mark.parametrize(
    "policy", ["min_cut", budget(4096), recompute("mlp", "norm"), offload(), offload("ff_in")], ids=str
)
@pytest.mark.parametrize("mesh", MESHES)
def test_on_meshes(mesh, policy):
    where, layout = MESHES[mesh]
    params, batch = example("llama")
    one, two = (
        lower("llama", p, where, layout).compile()([*tree.leaves(params), *tree.leaves(batch)]) for p in (None, policy)
    )
    for a, b in zip(tree.leaves(one), tree.leaves(two), strict=True):
        torch.testing.assert_close(a.global_value(), b.global_value(), rtol=1e-12, atol=1e-14)


def test_compiled():
    def step(x, batch):
        def loss(x, batch):
            y, _ = scan(remat(lambda c, b: ((c * b).sin() @ batch, None), offload()), x, batch)
            return y.sum(), torch.ones(())

        return value_and_grad(loss)(x, batch)[1]

    x, batch = torch.rand(3, 3), torch.rand(3, 3)
    low = jit(step).lower(x, batch)
    one, two = (low.compile(mode)([x, batch]).global_value() for mode in ("eager", "inductor"))
    assert low.memory().scans[0].host_bytes > 0
    torch.testing.assert_close(one, two)


def test_a_cuda_graph_cannot_copy_to_the_host():
    with pytest.raises(ValueError, match="CUDA graph"):
        lower("llama", offload()).compile("cudagraph")


def test_memory_falls():
    lows = [gpu.lowered("D1", remat=p) for p in (None, recompute("mlp"), offload(rest="full"))]
    compiled = [low.predicted_peak("inductor") for low in lows]
    assert compiled == sorted(compiled, reverse=True) and compiled[-1] < 0.6 * compiled[0]
    counted = [low.cost().peak for low in lows]
    assert counted == sorted(counted, reverse=True)


def test_the_table():
    text = str(lower("llama", offload("ff_in", rest="dots")).memory())
    assert "2 layers" in text and "dots(ff_in, host ff_in)" in text and " host" in text and "does again" in text
    assert str(jit(lambda x: x + 1).lower(torch.ones(2)).memory()) == "no scan with a gradient"


def test_a_stack_on_the_host_gives_back_what_it_was_given():
    stack = Offloaded(Mesh().backend(), (1,), 3)
    given = [[torch.full((2, 3), float(i)).t(), torch.arange(6.0).view(2, 3).t() + i] for i in range(3)]
    for g in given:
        stack.append(g)
    for g in reversed(given):
        got = stack.pop()
        assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, g, strict=True))
        assert got[0] is g[0]
    assert len(stack) == 0


def test_regions_that_nobody_asked_for_change_nothing():
    def f(x, batch, inside):
        def body(c, y):
            if inside:
                with region("part"):
                    return name((c * y).sin(), "v"), None
            return name((c * y).sin(), "v"), None

        return scan(body, x, batch)[0].sum(), torch.ones(())

    args = torch.ones(3), torch.ones(2, 3)
    one, two = (jit(value_and_grad(partial(f, inside=i))).lower(*args).program for i in (True, False))
    assert one.same_as(two)
    with region("part"):
        assert torch.ones(1).item() == 1


def test_wrong_arguments():
    for wrong, text in [
        (lambda: recompute(), "names of regions"),
        (lambda: budget(0), "limit must be positive"),
        (lambda: budget(1, flops=-1.0), "flops must be positive"),
        (lambda: min_cut(-1.0), "per_byte"),
        (lambda: remat(torch.sin, "half"), "unknown policy 'half'"),
    ]:
        with pytest.raises(ValueError, match=text):
            wrong()
    assert named("min_cut") == min_cut() and isinstance(named(offload()), Policy)


def test_eager_policies():
    x = torch.ones(3, dtype=torch.float64)
    for p in ("full", "min_cut", budget(10), offload(), recompute("mlp")):
        y = x.clone().requires_grad_()
        remat(lambda t: (t * t).sin(), p)(y).sum().backward()
        assert torch.equal(y.grad, 2 * torch.cos(x))
