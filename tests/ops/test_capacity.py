"""Queues of experts: who stays, by weight or by position, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from fmeg.ops.capacity import capacity, slots_by_weight
from fmeg.ops.router import Router, router_from_logits
from tests.ops.checks import ints, rand


def test_capacity_is_exact_and_at_most_all_tokens():
    assert [capacity(f, 2, 16, 8) for f in (0.01, 1.0, 1.2, 1.25, 50.0)] == [1, 4, 5, 5, 16]
    assert capacity(1.1, 1, 10, 1) == 10 and capacity(1.1, 1, 100, 10) == 11  # 10 · 1.1 is more than 11 in floats


def _queues(experts, weights, mask, limit, drop):
    """Slot and keep of each assignment, by a loop."""
    b, s, k = experts.shape
    queues: dict[int, list] = {}
    for i in range(b):
        for j in range(s):
            for n in range(k):
                if mask is None or mask[i, j]:
                    queues.setdefault(int(experts[i, j, n]), []).append((i, j, n))
    slots, keep = torch.full((b, s, k), limit), torch.zeros(b, s, k, dtype=torch.bool)
    for queue in queues.values():
        order = queue if drop == "position" else sorted(queue, key=lambda at: -float(weights[at]))
        for place, at in enumerate(order[:limit]):
            slots[at], keep[at] = place, True
    return slots, keep


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("factor", [0.1, 0.75, 1.0, 8.0])
@pytest.mark.parametrize("drop", ["weight", "position"])
def test_queues(drop, factor, masked):
    b, s, e, k = 3, 5, 6, 2
    mask = rand(b, s, seed=3) > -0.5 if masked else None
    logits = (rand(b, s, e) * 2).round() / 2  # some weights are equal: the earlier token goes first
    r = router_from_logits(logits, Router(k, "sigmoid", capacity_factor=factor, drop=drop), mask=mask)
    full = router_from_logits(logits, Router(k, "sigmoid"), mask=mask)
    limit = capacity(factor, k, b * s, e)
    slots, keep = _queues(full.experts, full.weights, mask, limit, drop)
    assert torch.equal(r.slots, slots) and torch.equal(r.keep, keep)
    assert torch.equal(r.experts, full.experts) and torch.equal(r.counts, full.counts)
    assert torch.equal(r.weights, torch.where(keep, full.weights, 0.0))
    kept = torch.bincount(r.experts[r.keep], minlength=e)
    assert torch.equal(kept, full.counts.clamp(max=limit))


def test_slots_are_rows_of_a_padded_buffer():
    r = router_from_logits(rand(2, 8, 4), Router(2, capacity_factor=0.75))
    limit = capacity(0.75, 2, 16, 4)
    flat = (r.experts * limit + r.slots)[r.keep]
    assert len(flat.unique()) == len(flat) and flat.max() < 4 * limit


def test_equal_weights_go_by_position():
    experts = ints(3, 2, 6, 1)
    same = slots_by_weight(experts, torch.ones(2, 6, 1))
    expected = [sum(int(x == y) for y in experts.flatten()[:i]) for i, x in enumerate(experts.flatten())]
    assert same.flatten().tolist() == expected


def test_dropped_tokens_have_no_gradient():
    logits = rand(2, 8, 4).requires_grad_()
    r = router_from_logits(logits, Router(1, capacity_factor=0.5))
    (g,) = torch.autograd.grad((r.weights * rand(2, 8, 1)).sum(), logits)
    kept = r.keep.squeeze(-1)
    assert kept.any() and not kept.all()
    assert not g[~kept].any() and g[kept].abs().sum(-1).min() > 0
