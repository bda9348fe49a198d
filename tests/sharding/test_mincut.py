"""The choice of what to keep, against every possible one on small graphs."""

from __future__ import annotations

import random
from itertools import combinations

import pytest
import torch

from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.sharding.mincut import Forward

N = 6  # operations of a graph


def graph(seed):
    """A random graph: results of random sizes, prices of which some are None, a free input, wanted values."""
    r = random.Random(seed)
    inputs = [Value(TensorType((r.randint(1, 9),), torch.int8)) for _ in range(3)]
    values, nodes, price = list(inputs), [], {}
    for _ in range(N):
        args = tuple(r.sample(values, r.randint(1, 2)))
        n = Node(torch.ops.aten.add.Tensor, args, {})
        n.outs = tuple(Value(TensorType((r.randint(1, 9),), torch.int8), n, i) for i in range(r.choice((1, 1, 2))))
        nodes.append(n)
        values += n.outs
        price[id(n)] = r.choice((None, 0.0, 0.5, 2.0, 5.0))
    wanted = r.sample(values, 3)
    program = Program(tuple(inputs), nodes, tuple(wanted))
    return Forward(program, nodes, {id(inputs[0])}, wanted), values, lambda n: price[id(n)]


def choices(forward, values, price):
    """(bytes, price) of every set of values that is enough."""
    can = [v for v in values if id(v) not in forward.free]
    for k in range(len(can) + 1):
        for kept in combinations(can, k):
            have = set(forward.free) | {id(v) for v in kept}
            todo, again, fits = list(forward.wanted), {}, True
            while todo and fits:
                v = todo.pop()
                if id(v) in have or (v.node is not None and id(v.node) in again):
                    continue
                fits = v.node is not None and price(v.node) is not None
                if fits:
                    again[id(v.node)] = v.node
                    todo += v.node.operands()
            if fits:
                yield forward.size(kept), sum(price(n) for n in again.values())


def cost_of(forward, cut, price):
    assert not any(price(n) is None for n in forward.nodes if id(n) in cut.again)
    return forward.size(cut.kept.values()), sum(price(n) for n in forward.nodes if id(n) in cut.again)


@pytest.mark.parametrize("seed", range(8))
def test_the_cut_is_the_cheapest_choice(seed):
    forward, values, price = graph(seed)
    kept, again = cost_of(forward, forward.cut(price), price)
    assert kept + again == min(map(sum, choices(forward, values, price)))


@pytest.mark.parametrize("seed", range(8))
def test_a_budget_is_kept_and_near_the_best(seed):
    forward, values, price = graph(seed)
    every = list(choices(forward, values, price))
    least = min(b for b, _ in every)
    with pytest.raises(ValueError, match=f"at least {least} bytes"):
        forward.within(least - 1, price)
    exact = 0
    for limit in range(least, least + 20, 2):
        kept, time = cost_of(forward, forward.within(limit, price), price)
        best = min(t for b, t in every if b <= limit)
        assert kept <= limit and best <= time
        assert time <= min(t for b, t in every if b == least)
        exact += time == best
    assert exact >= 7  # of 10: what the search and the filling miss


def test_of_equal_choices_the_one_that_does_least_again():
    x = Value(TensorType((4,), torch.int8))
    nodes = []
    for _ in range(3):
        n = Node(torch.ops.aten.neg.default, (nodes[-1].outs[0] if nodes else x,), {})
        n.outs = (Value(TensorType((4,), torch.int8), n),)
        nodes.append(n)
    cut = Forward(Program((x,), nodes, (nodes[-1].outs[0],)), nodes, (), [nodes[-1].outs[0]]).cut(lambda n: 0.0)
    assert not cut.again and list(cut.kept.values()) == [nodes[-1].outs[0]]


def test_nothing_wanted_nothing_kept():
    forward, _, price = graph(0)
    none = Forward(forward.joint, forward.nodes, forward.free, [])
    assert none.cut(price).kept == {} and none.within(1, price).kept == {}
