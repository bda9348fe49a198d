"""Gathers and reductions in parts: what they give, and that no memory is read before it is written, or written while it
is read, whenever each rank's launches run."""

from __future__ import annotations

import pytest
import torch

from fmeg.mesh.beside import gathered, scattered
from tests.mesh.peers import Group

ROUNDS = 3
SHAPES = [((2, 3, 4), 1), ((3, 2), 0), ((2, 2, 2), 2), ((1, 5), 1), ((2, 3, 4), 0)]


def inputs(n, shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, *shape, dtype=torch.float64, generator=g) for _ in range(ROUNDS)]


def gather_rounds(n, shape, dim, whole, skip=None):
    """What each rank was given, by member, and the whole, round after round."""
    xs = inputs(n, shape)

    def work(peers):
        rounds = []
        for x in xs:
            seen = {}

            def use(member, part, seen=seen):
                assert member not in seen
                seen[member] = part * 2

            out = gathered(peers, x[peers.index], dim, use, whole)
            rounds.append((list(seen), [seen[r] for r in range(n)], out))
        return rounds

    group = Group(n, skip or {})
    return xs, group.run(work), group


def scatter_rounds(n, shape, skip=None):
    xs = inputs(n, (n, *shape))

    def work(peers):
        def produce(x):
            return lambda member, memory: torch.mul(x[peers.index, member], 2, out=memory)

        return [scattered(peers, shape, torch.float64, torch.device("cpu"), produce(x)) for x in xs]

    group = Group(n, skip or {})
    return xs, group.run(work), group


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("whole", [False, True])
def test_gathered(n, shape, dim, whole):
    xs, got, group = gather_rounds(n, shape, dim, whole)
    for rank, rounds in enumerate(got):
        for x, (order, parts, out) in zip(xs, rounds, strict=True):
            assert order == [(rank + i) % n for i in range(n)]
            assert all(torch.equal(a, b * 2) for a, b in zip(parts, x, strict=True))
            assert torch.equal(out, torch.cat(list(x), dim)) if whole else out is None
    assert not group.races()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_scattered(n):
    xs, got, group = scatter_rounds(n, (2, 3))
    for rank, rounds in enumerate(got):
        for x, y in zip(xs, rounds, strict=True):
            assert y.shape == (2, 3)
            torch.testing.assert_close(y, 2 * x[:, rank].sum(0), rtol=1e-14, atol=1e-14)
    assert not group.races()


@pytest.mark.parametrize(
    ("shape", "whole", "pieces"), [((3, 2, 4), False, 1), ((3, 2, 4), True, 3), ((65, 2), False, 1), ((65, 2), True, 1)]
)
def test_copies_are_few(shape, whole, pieces):
    """One of each other member's part, if it lies in one piece, or is cut into many."""
    _, _, group = gather_rounds(3, shape, 1, whole)
    copies = {(a.lane, a.at) for a in group.accesses if a.lane[1] == "apart" and a.op == "aten::copy_"}
    assert len(copies) == 3 * ROUNDS * pieces * (3 if whole else 2)


def test_a_sum_is_rounded_once():
    """256 + 1 + 1 + … in bfloat16: rounded after each, it stays 256."""
    parts = [256.0, 1.0, 1.0, 1.0]

    def work(peers):
        fill = lambda member, memory: memory.fill_(parts[peers.index])
        return scattered(peers, (4,), torch.bfloat16, torch.device("cpu"), fill)

    assert all(torch.equal(y, torch.full((4,), 260, dtype=torch.bfloat16)) for y in Group(4).run(work))


def test_memory_is_shared_by_what_comes_one_after_the_other():
    def work(peers):
        peers.reserve(1000)
        x = torch.full((2, 3), float(peers.index))
        for _ in range(2):
            gathered(peers, x, 0, lambda member, part: None)
            y = scattered(peers, (5,), torch.float32, torch.device("cpu"), lambda member, memory: memory.fill_(member))
            assert torch.equal(y, torch.full((5,), 3.0 * peers.index))

    group = Group(3)
    group.run(work)
    assert {hi - lo for lo, hi in group.shared} == {1000} and not group.races()


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("kind", "each_round"), [("barrier", 2), ("wait", 0), ("apart", 1)])
def test_every_order_of_a_gather_is_needed(kind, each_round, n):
    """Without any one of them, in any round but the last, a race."""
    for k in range((each_round or n - 1) * (ROUNDS - 1)):
        assert gather_rounds(n, (2, 3), 0, False, {kind: k})[2].races(), k


@pytest.mark.parametrize("n", [2, 3])
def test_a_gather_whose_whole_is_read_needs_the_join(n):
    def work(peers):
        out = gathered(peers, torch.ones(2, 3), 0, lambda member, part: None, True)
        return out * 2

    group = Group(n, {"join": 0})
    group.run(work)
    assert group.races()


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_order_of_a_reduction_is_needed(n):
    for kind, each_round in (("barrier", n), ("join", 1)):
        for k in range(each_round * (ROUNDS - 1)):
            assert scatter_rounds(n, (2, 3), {kind: k})[2].races(), (kind, k)
