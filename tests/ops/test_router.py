"""RouterOutput against a reference that goes token by token, against transformers' routers, and at its edges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fmeg import random, tree
from fmeg.ops.router import Router, RouterOutput, router, router_from_logits, top_k
from tests.ops.checks import F64, close, ints, rand

E, K = 12, 3
GROUPED = dict(groups=4, top_groups=2)
CONFIGS = {
    "softmax": Router(K),
    "softmax, renormalised": Router(K, renormalize=True, scale=1.5),
    "softmax of top k": Router(K, "softmax_of_top_k"),
    "sigmoid": Router(K, "sigmoid", renormalize=True, scale=2.5),
    "sqrt_softplus": Router(K, "sqrt_softplus", renormalize=True),
    "groups by max": Router(K, **GROUPED),
    "groups by two": Router(K, "sigmoid", renormalize=True, group_score="top2sum", **GROUPED),
    "one expert": Router(1, "sigmoid"),
    "all experts": Router(E, "softmax_of_top_k", scale=3.0),
    "groups of one": Router(2, "sigmoid", groups=E, top_groups=2, group_score="top2sum"),
}


def by_token(logits: list[float], bias: list[float], cfg: Router) -> tuple[list[int], list[float]]:
    """Experts, best first, and weights of one token."""
    e = len(logits)
    z = math.fsum(map(math.exp, logits))
    score = {
        "softmax": lambda x: math.exp(x) / z,
        "softmax_of_top_k": lambda x: x,
        "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
        "sqrt_softplus": lambda x: math.sqrt(math.log1p(math.exp(x))),
    }[cfg.score]
    s = [score(x) for x in logits]
    choice = [a + b for a, b in zip(s, bias, strict=True)]
    size = e // cfg.groups

    def merit(g: int) -> float:
        best = sorted(choice[g * size : (g + 1) * size], reverse=True)
        return best[0] if cfg.group_score == "max" else math.fsum(best[:2])

    groups = sorted(range(cfg.groups), key=lambda g: (-merit(g), g))[: cfg.top_groups]
    allowed = [i for i in range(e) if i // size in groups]
    experts = sorted(allowed, key=lambda i: (-choice[i], i))[: cfg.top_k]
    w = [s[i] for i in experts]
    if cfg.score == "softmax_of_top_k":
        total = math.fsum(math.exp(x) for x in w)
        w = [math.exp(x) / total for x in w]
    if cfg.renormalize:
        total = math.fsum(w)
        w = [x / total for x in w]
    return experts, [x * cfg.scale for x in w]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_token_by_token(name, biased):
    cfg, logits = CONFIGS[name], rand(3, 5, E)
    bias = rand(E, seed=1) * 0.3 if biased else None
    r = router_from_logits(logits, cfg, bias=bias)
    used = [0.0] * E if bias is None else bias.tolist()
    rows = [by_token(x, used, cfg) for x in logits.flatten(0, 1).tolist()]
    assert r.experts.flatten(0, 1).tolist() == [experts for experts, _ in rows]
    close(r.weights.flatten(0, 1), torch.tensor([w for _, w in rows], dtype=F64))
    assert torch.equal(r.counts, torch.bincount(r.experts.flatten(), minlength=E))
    assert r.keep is None and r.slots is None and r.running is None and r.losses == {}


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients(name):
    """Through the weights alone: none reaches the bias, and indices have none."""
    cfg, x, w = CONFIGS[name], rand(2, 3, 4), rand(4, E, seed=1)
    ct = rand(2, 3, cfg.top_k, seed=2)
    assert torch.autograd.gradcheck(
        lambda x, w: (router(x, w, cfg).weights * ct).sum(), (x.requires_grad_(), w.requires_grad_())
    )
    bias = rand(E, seed=3).requires_grad_()
    out = router(x, w, cfg, bias=bias)
    assert torch.autograd.grad(out.weights.sum(), [bias], allow_unused=True) == (None,)
    assert not out.counts.requires_grad and not out.experts.requires_grad


# -- transformers -----------------------------------------------------------------------------------------------------
def _gate(module: str, cls: str, config: str, **fields):
    """A router of transformers with random weights, in float64."""
    m = pytest.importorskip(f"transformers.models.{module}")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    gate = getattr(modeling, cls)(getattr(m, config)(**fields))
    gate.weight.data = rand(*gate.weight.shape, seed=5)
    if hasattr(gate, "e_score_correction_bias"):
        gate.e_score_correction_bias = rand(gate.weight.shape[0], seed=6) * 0.1
    return gate


V3 = dict(n_routed_experts=16, num_local_experts=16, num_experts_per_tok=4, n_group=8, topk_group=4)
V3 |= dict(hidden_size=6, num_attention_heads=2)
THEIRS = {
    "mixtral": (
        ("mixtral", "MixtralTopKRouter", "MixtralConfig"),
        dict(num_local_experts=8, num_experts_per_tok=2, hidden_size=6),
        Router(2, "softmax_of_top_k"),
    ),
    "qwen2_moe": (
        ("qwen2_moe", "Qwen2MoeTopKRouter", "Qwen2MoeConfig"),
        dict(num_experts=16, num_experts_per_tok=4, hidden_size=6, norm_topk_prob=False),
        Router(4),
    ),
    "qwen3_moe": (
        ("qwen3_moe", "Qwen3MoeTopKRouter", "Qwen3MoeConfig"),
        dict(num_experts=16, num_experts_per_tok=4, hidden_size=6, norm_topk_prob=True),
        Router(4, renormalize=True),
    ),
    "deepseek_v2 greedy": (
        ("deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config"),
        dict(V3, topk_method="greedy", routed_scaling_factor=1.0, norm_topk_prob=False),
        Router(4),
    ),
    "deepseek_v2": (
        ("deepseek_v2", "DeepseekV2TopkRouter", "DeepseekV2Config"),
        dict(V3, topk_method="group_limited_greedy", routed_scaling_factor=16.0, norm_topk_prob=False),
        Router(4, scale=16.0, groups=8, top_groups=4),
    ),
    "deepseek_v3": (
        ("deepseek_v3", "DeepseekV3TopkRouter", "DeepseekV3Config"),
        dict(V3, routed_scaling_factor=2.5, norm_topk_prob=True),
        Router(4, "sigmoid", renormalize=True, scale=2.5, groups=8, top_groups=4, group_score="top2sum"),
    ),
    "deepseek_v4": (
        ("deepseek_v4", "DeepseekV4TopKRouter", "DeepseekV4Config"),
        dict(num_local_experts=16, n_routed_experts=16, num_experts_per_tok=4, hidden_size=6,
             routed_scaling_factor=1.5, scoring_func="sqrtsoftplus"),
        Router(4, "sqrt_softplus", renormalize=True, scale=1.5),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", THEIRS)
def test_transformers(name, monkeypatch):
    """The same experts, the same weights to 1e-12: their casts to float32 are made casts to float64."""
    where, fields, cfg = THEIRS[name]
    gate = _gate(*where, **fields)
    x = rand(4, 64, 6)
    monkeypatch.setattr(torch, "float32", F64)
    monkeypatch.setattr(torch, "float", F64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    with torch.no_grad():
        _, weights, experts = gate(x)
    monkeypatch.undo()
    assert weights.dtype == F64
    r = router(x, gate.weight.T, cfg, bias=getattr(gate, "e_score_correction_bias", None))
    theirs, order = experts.sort(-1)
    ours, mine = r.experts.flatten(0, 1).sort(-1)
    assert torch.equal(ours, theirs)
    close(r.weights.flatten(0, 1).gather(-1, mine), weights.gather(-1, order))


# -- ties, padding, replay, jitter ------------------------------------------------------------------------------------
def test_ties_go_to_the_lower_index():
    assert top_k(torch.tensor([[1.0, 2.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0]]), 3).tolist() == [[1, 2, 0], [0, 1, 2]]
    logits = ints(3, 50, 8, E).to(F64)
    expected = [sorted(range(E), key=lambda i: (-row[i], i))[:K] for row in logits.flatten(0, 1).tolist()]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        assert router_from_logits(logits.to(dtype), Router(K)).experts.flatten(0, 1).tolist() == expected
    equal = router_from_logits(torch.zeros(1, 1, E), Router(2, group_score="top2sum", **GROUPED))
    assert equal.experts.tolist() == [[[0, 1]]]


MASK = torch.tensor([[True, True, False, True], [False, False, False, False], [True, False, True, True]])
EVERY_LOSS = dict(sequence_loss=0.1, batch_loss=0.2, running_loss=0.3, z_loss=0.4)


def _without_padding(r: RouterOutput) -> tuple:
    return r.experts[MASK], r.weights[MASK], r.counts, r.losses, r.running


@pytest.mark.parametrize("select", ["top_k", "sinkhorn"])
def test_padding_goes_nowhere_whatever_it_holds(select):
    cfg = Router(2, "softmax_of_top_k", select=select, capacity_factor=1.0, drop="position", **EVERY_LOSS)
    x, w = rand(3, 4, 6), rand(6, 8, seed=1)
    r = router(x, w, cfg, mask=MASK)
    assert r.counts.sum() == 2 * MASK.sum() and not r.keep[~MASK].any() and not r.weights[~MASK].any()
    assert (r.slots[~MASK] == 3).all()
    for other in (rand(3, 4, 6, seed=7) * 100, torch.full_like(x, torch.nan), torch.full_like(x, torch.inf)):
        changed = torch.where(MASK.unsqueeze(-1), x, other)
        a, b = (tree.leaves(_without_padding(y)) for y in (r, router(changed, w, cfg, mask=MASK)))
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_all_masked():
    cfg = Router(2, capacity_factor=1.0, **EVERY_LOSS)
    w = rand(6, 8, seed=1).requires_grad_()
    for select in ("top_k", "sinkhorn", "balanced"):
        r = router(rand(2, 3, 6), w, replace(cfg, select=select), mask=torch.zeros(2, 3, dtype=torch.bool))
        assert not r.counts.any() and not r.weights.any() and not r.keep.any()
        assert all(v == 0 for v in r.losses.values())
        (grad,) = torch.autograd.grad(tree.sum(list(r.losses.values())) + r.weights.sum(), w)
        assert torch.equal(grad, torch.zeros_like(w))


def test_replay():
    """The given experts, the router's own weights, gradients as if it had chosen them."""
    cfg = Router(K, "sigmoid", renormalize=True, batch_loss=1.0)
    logits = rand(2, 5, E).requires_grad_()
    r = router_from_logits(logits, cfg)
    again = router_from_logits(logits, cfg, replay=r.experts)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(r), tree.leaves(again), strict=True))
    given = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(i))[:K] for i in range(10)])
    other = router_from_logits(logits, cfg, replay=given.view(2, 5, K).int())
    assert torch.equal(other.experts, given.view(2, 5, K))
    s = logits.sigmoid().gather(-1, other.experts)
    close(other.weights, s / s.sum(-1, keepdim=True))
    assert torch.equal(other.counts, torch.bincount(given.flatten(), minlength=E))
    close(other.losses["batch"], r.losses["batch"])  # counts the scores, unless told to count the chosen
    chosen = router_from_logits(logits, replace(cfg, counted="chosen"), replay=other.experts)
    assert abs(chosen.losses["batch"] - r.losses["batch"]) > 1e-3
    (g,) = torch.autograd.grad(other.weights[..., 0].sum(), logits)
    assert (g != 0).sum() == 2 * 5 * K


def test_jitter():
    x, w, key = rand(2, 3, 6), rand(6, 8, seed=1), random.key(4)
    cfg = Router(8, "softmax_of_top_k", jitter=0.1)
    assert torch.equal(router(x, w, cfg).weights, router(x, w, replace(cfg, jitter=0.0), key=key).weights)
    noise = 0.9 + 0.2 * random.uniform(key, x.shape, F64)
    close(router(x, w, cfg, key=key).weights, router(x * noise, w, cfg).weights)
    assert not torch.equal(router(x, w, cfg, key=key).weights, router(x, w, cfg, key=random.key(5)).weights)


def test_balanced_is_balanced():
    r = router_from_logits(rand(2, 8, 8), Router(3, select="balanced"))
    assert r.counts.tolist() == [6] * 8
    assert r.experts.flatten().tolist() == [i % 8 for i in range(48)]
    close(r.weights, rand(2, 8, 8).softmax(-1).gather(-1, r.experts))


def test_linear_bias():
    x, w, b = rand(2, 3, 6), rand(6, 8, seed=1), rand(8, seed=2)
    got, want = router(x, w, Router(2), linear_bias=b), router_from_logits(x @ w + b, Router(2))
    assert torch.equal(got.experts, want.experts)
    close(got.weights, want.weights)


# -- edges ------------------------------------------------------------------------------------------------------------
def test_one_token_and_no_token():
    for b, s in ((1, 1), (0, 3), (2, 0)):
        for drop in ("weight", "position"):
            r = router(rand(b, s, 6), rand(6, 8), Router(2, capacity_factor=1.0, drop=drop, **EVERY_LOSS))
            assert r.experts.shape == (b, s, 2) and r.counts.sum() == 2 * b * s
            assert all(torch.isfinite(v) for v in r.losses.values())
    assert r.keep.all()


def test_an_expert_without_tokens():
    w = torch.cat([rand(6, 7), torch.full((6, 1), -9.0, dtype=F64)], -1)
    x = rand(2, 3, 6).abs()
    r = router(x, w.requires_grad_(), Router(2, "softmax_of_top_k"))
    assert r.counts[7] == 0
    (g,) = torch.autograd.grad((r.weights * rand(2, 3, 2)).sum(), w)
    assert not g[:, 7].any() and g.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_routed_in_float32(dtype):
    x, w = rand(2, 3, 64, dtype=dtype), rand(64, 8, dtype=dtype)
    r = router(x, w, Router(2, "sigmoid", renormalize=True, batch_loss=1.0), bias=rand(8, dtype=dtype))
    exact = router(
        x.float(), w.float(), Router(2, "sigmoid", renormalize=True, batch_loss=1.0), bias=rand(8, dtype=dtype).float()
    )
    assert r.weights.dtype == torch.float32 and r.losses["batch"].dtype == torch.float32
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(r), tree.leaves(exact), strict=True))


def test_a_score_that_underflows_has_a_gradient():
    x = torch.tensor([[[-200.0, 3.0, -1000.0]]], requires_grad=True)
    r = router_from_logits(x, Router(3, "sqrt_softplus", renormalize=True, batch_loss=1.0))
    (g,) = torch.autograd.grad(r.weights[..., 0].sum() + r.losses["batch"], x)
    assert torch.isfinite(g).all()


ERRORS = {
    "score must be one of 'softmax', .* given 'relu'": lambda: Router(2, "relu"),
    "select must be one of": lambda: Router(2, select="best"),
    "group_score must be one of": lambda: Router(2, group_score="mean"),
    "drop must be one of": lambda: Router(2, drop="random"),
    "counted must be one of": lambda: Router(2, counted="all"),
    "top_k must be at least 1, given 0": lambda: Router(0),
    r"top_groups must be in \[1, groups = 2\], given 3": lambda: Router(2, groups=2, top_groups=3),
    r"jitter must be in \[0, 1\), given 1.5": lambda: Router(2, jitter=1.5),
    "capacity_factor must be positive, given -1": lambda: Router(2, capacity_factor=-1),
    "x must be 'b s d' and w 'd e', given shapes": lambda: router(rand(3, 4), rand(4, 8), Router(2)),
    "groups=3 do not divide the 8 experts": lambda: router_from_logits(rand(1, 2, 8), Router(2, groups=3)),
    "only 2 of the 8 experts": lambda: router_from_logits(rand(1, 2, 8), Router(3, groups=4, top_groups=1)),
    "top_k=9, but": lambda: router_from_logits(rand(1, 2, 8), Router(9)),
    r"bias must have shape \(8,\)": lambda: router_from_logits(rand(1, 2, 8), Router(2), bias=rand(7)),
    r"running must have shape \(8,\)": lambda: router_from_logits(rand(1, 2, 8), Router(2), running=ints(3, 7)),
    r"mask must have shape \(1, 2\)": lambda: router_from_logits(rand(1, 2, 8), Router(2), mask=MASK),
    "mask must be bool": lambda: router_from_logits(rand(1, 2, 8), Router(2), mask=ints(2, 1, 2)),
    r"replay must have shape \(1, 2, 2\)": lambda: router_from_logits(rand(1, 2, 8), Router(2), replay=ints(2, 1, 2)),
    "replay must be int64 or int32": lambda: router_from_logits(rand(1, 2, 8), Router(2), replay=rand(1, 2, 2)),
    "x must be a floating-point tensor": lambda: router(ints(2, 1, 2, 3), rand(3, 8), Router(2)),
    "logits must be 'b s e'": lambda: router_from_logits(rand(2, 8), Router(2)),
    r"linear_bias must have shape \(8,\)": lambda: router(rand(1, 2, 3), rand(3, 8), Router(2), linear_bias=rand(3)),
}  # fmt: skip


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    with pytest.raises((ValueError, TypeError), match=message):
        ERRORS[message]()
