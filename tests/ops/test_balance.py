"""Balance losses, z-loss, the loss-free bias and Sinkhorn's plan, by their formulas."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fmeg import value_and_grad
from fmeg.ops.balance import loss_counts, sinkhorn, update_bias
from fmeg.ops.router import Router, router, router_from_logits
from tests.ops.checks import F64, close, ints, rand

B, S, E, K = 4, 6, 8, 2
EVERY_LOSS = dict(sequence_loss=0.1, batch_loss=0.2, running_loss=0.3, z_loss=0.4)
MASK = rand(B, S, seed=9) > -0.6
SCORES = ("softmax", "softmax_of_top_k", "sigmoid", "sqrt_softplus")


def _probabilities(x: list[float], score: str) -> list[float]:
    f = {"sigmoid": lambda v: 1 / (1 + math.exp(-v)), "sqrt_softplus": lambda v: math.sqrt(math.log1p(math.exp(v)))}
    s = [f.get(score, math.exp)(v) for v in x]
    return [v / math.fsum(s) for v in s]


def _loss(tokens: list[list[float]], score: str, k: int, before: list[int] | None = None) -> float:
    """e/(k T) Σ_i C_i mean_x P_i(x), token by token."""
    e = len(tokens[0])
    counts = list(before or [0] * e)
    p = [_probabilities(x, score) for x in tokens]
    for row in p:
        for i in sorted(range(e), key=lambda i: -row[i])[:k]:
            counts[i] += 1
    mean = [math.fsum(row[i] for row in p) / len(p) for i in range(e)]
    return e * math.fsum(c * m for c, m in zip(counts, mean, strict=True)) / sum(counts)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("score", SCORES)
def test_losses_token_by_token(score, masked):
    cfg, mask = Router(K, score, **EVERY_LOSS), MASK if masked else None
    logits, before = rand(B, S, E), ints(20, E)
    r = router_from_logits(logits, cfg, mask=mask, running=before, bias=rand(E, seed=5))
    n = loss_counts(logits, cfg, mask)
    rows = [[x for j, x in enumerate(row) if mask is None or mask[i, j]] for i, row in enumerate(logits.tolist())]
    tokens = [x for row in rows for x in row]
    assert n == {"sequence": 4, "batch": len(tokens), "running": len(tokens), "z": len(tokens)}
    expected = {
        "sequence": 0.1 * math.fsum(_loss(row, score, K) for row in rows),
        "batch": 0.2 * _loss(tokens, score, K) * len(tokens),
        "running": 0.3 * _loss(tokens, score, K, before.tolist()) * len(tokens),
        "z": 0.4 * math.fsum(math.log(math.fsum(map(math.exp, x))) ** 2 for x in tokens),
    }
    assert r.losses.keys() == expected.keys()
    for name, value in expected.items():
        close(r.losses[name], torch.tensor(value, dtype=F64))
    plain = router_from_logits(logits, replace(cfg, counted="chosen"), mask=mask)
    assert torch.equal(r.running, before + plain.counts)


def test_what_is_counted():
    """The plain top-k of the scores, unless the chosen experts are asked for: then bias and groups count."""
    logits, bias = rand(B, S, E), rand(E, seed=5)
    cfg = Router(K, "sigmoid", groups=4, top_groups=2, batch_loss=1.0)
    plain = router_from_logits(logits, Router(K, "sigmoid", batch_loss=1.0)).losses["batch"]
    assert torch.equal(router_from_logits(logits, cfg, bias=bias).losses["batch"], plain)
    r = router_from_logits(logits, replace(cfg, counted="chosen"), bias=bias)
    s = logits.sigmoid()
    p = (s / s.sum(-1, keepdim=True)).mean((0, 1))
    close(r.losses["batch"], B * S * E * (r.counts.to(F64) / r.counts.sum() * p).sum())
    assert not torch.equal(r.losses["batch"], plain)


def test_perfect_balance_is_one():
    for score in SCORES:
        cfg = Router(K, score, sequence_loss=1.0, batch_loss=1.0, select="balanced", counted="chosen")
        r = router_from_logits(torch.zeros(B, 8, E, dtype=F64), cfg)
        close(r.losses["sequence"] / B, torch.tensor(1.0, dtype=F64))
        close(r.losses["batch"] / (B * 8), torch.tensor(1.0, dtype=F64))


def test_transformers_loss():
    """Theirs counts k assignments a token as k, ours as one."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = rand(B, S, E, dtype=torch.float32)
    for mask in (None, MASK):
        theirs = mixtral.load_balancing_loss_func((logits.flatten(0, 1),), E, K, mask)
        cfg = Router(K, "softmax_of_top_k", batch_loss=1.0)
        ours = router_from_logits(logits, cfg, mask=mask).losses["batch"] / loss_counts(logits, cfg, mask)["batch"]
        close(ours * K, theirs, 1e-6)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches(microbatches):
    """By sequence: whichever microbatch a sequence is in. By batch: the mean over microbatches, weighted by tokens."""
    params, batch = {"w": rand(5, E)}, {"x": rand(B, S, 5, seed=1), "mask": MASK}

    def run(cfg, n):
        def loss(p, bt):
            r, counts = router(bt["x"], p["w"], cfg, mask=bt["mask"]), loss_counts(bt["x"], cfg, bt["mask"])
            return [(r.losses[name], counts[name]) for name in counts], {"counts": r.counts}

        return value_and_grad(loss, microbatches=n)(params, batch)

    by_sequence = Router(K, sequence_loss=0.1, z_loss=0.2)
    (one, aux), grads = run(by_sequence, 1)
    (many, more), others = run(by_sequence, microbatches)
    close(one, many)
    close(grads["w"], others["w"])
    assert torch.equal(aux["counts"], more["counts"])
    by_batch = Router(K, batch_loss=0.1)
    (value, _), _ = run(by_batch, microbatches)
    parts = []
    for x, m in zip(batch["x"].chunk(microbatches), MASK.chunk(microbatches), strict=True):
        parts.append(router(x, params["w"], by_batch, mask=m).losses["batch"])
    close(value, sum(parts) / MASK.sum())
    assert abs(value - run(by_batch, 1)[0][0]) > 1e-5


def test_running_counts_approach_the_global_batch():
    """Counts of all microbatches before, given to each: the loss of the whole batch, exactly."""
    logits = rand(B, S, E)
    whole = router_from_logits(logits, Router(K, batch_loss=1.0))
    cfg, state, total = Router(K, running_loss=1.0), None, 0.0
    for part in logits.split(1):
        r = router_from_logits(part, cfg, running=state)
        state = r.running
    assert torch.equal(state, whole.counts)
    for part in logits.split(1):
        others = whole.counts - router_from_logits(part, cfg).counts
        total = total + router_from_logits(part, cfg, running=others).losses["running"]
    close(total, whole.losses["batch"])


def test_gradients():
    logits = rand(2, 3, E).requires_grad_()
    for score, name in itertools.product(SCORES, EVERY_LOSS):
        cfg = Router(K, score, **{name: 0.5})
        key = name.removesuffix("_loss")
        assert torch.autograd.gradcheck(lambda x, cfg=cfg, key=key: router_from_logits(x, cfg).losses[key], (logits,))


# -- loss-free balancing ----------------------------------------------------------------------------------------------
def test_update_bias():
    counts, bias = ints(9, 3, E), rand(3, E)
    c = counts.to(F64)
    close(update_bias(bias, counts, 0.01), bias + 0.01 * torch.sign(c.mean(-1, keepdim=True) - c))
    even = torch.full((7,), 2**40 + 1)
    assert torch.equal(update_bias(torch.zeros(7), even), torch.zeros(7))
    with pytest.raises(ValueError, match=r"bias has shape \(3,\), but counts \(4,\)"):
        update_bias(rand(3), ints(2, 4))


def test_the_bias_balances():
    """A router that prefers two experts becomes balanced, and its weights are what they were."""
    logits = rand(8, 32, E) + torch.tensor([2.0, 2.0, *[0.0] * (E - 2)], dtype=F64)
    cfg, bias = Router(K, "sigmoid"), torch.zeros(E, dtype=F64)
    start = router_from_logits(logits, cfg).counts
    for _ in range(400):
        bias = update_bias(bias, router_from_logits(logits, cfg, bias=bias).counts, 2e-3)
    r = router_from_logits(logits, cfg, bias=bias)
    assert start.max() > 150 and r.counts.max() - r.counts.min() <= 6
    assert torch.equal(r.weights, logits.sigmoid().gather(-1, r.experts))


# -- Sinkhorn ---------------------------------------------------------------------------------------------------------
def test_sinkhorn():
    logits = rand(B, S, E) * 2
    for mask in (None, MASK):
        plan = sinkhorn(logits, 200, mask)
        tokens = B * S if mask is None else int(mask.sum())
        rows = plan.sum(-1)[slice(None) if mask is None else mask].flatten()
        close(rows, torch.full_like(rows, 1 / tokens))
        close(plan.sum((0, 1)), torch.full((E,), 1 / E, dtype=F64))
    c = logits.flatten(0, 1).exp()  # as its formula reads: a scaling of rows and columns, from ones
    u, v = torch.ones(len(c), dtype=F64), torch.ones(E, dtype=F64)
    for _ in range(5):
        u = 1 / (len(c) * (c @ v))
        v = 1 / (E * (u @ c))
    close(sinkhorn(logits, 5).flatten(0, 1), u[:, None] * c * v)


def test_sinkhorn_selects_evenly():
    logits = rand(8, 32, E) + torch.tensor([3.0, *[0.0] * (E - 1)], dtype=F64)
    plain = router_from_logits(logits, Router(1, "sigmoid")).counts
    even = router_from_logits(logits, Router(1, "sigmoid", select="sinkhorn", sinkhorn_steps=50)).counts
    assert plain.max() > 200 and even.max() < 50
    large = router_from_logits(logits * 1e3, Router(1, "sigmoid", select="sinkhorn"))
    assert torch.isfinite(large.weights).all()
