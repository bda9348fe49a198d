"""Lion against optax, in float64, and its defining property."""

import pytest
import torch

from fmeg import tree
from fmeg.optim import decay_matrices, lion


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_optax(params, train, train_optax, assert_same, weight_decay):
    optax = pytest.importorskip("optax")
    mask = tree.map_with_path(decay_matrices, params)
    make = lambda: optax.lion(0.05, b1=0.8, b2=0.95, weight_decay=weight_decay, mask=mask)
    assert_same(train(lion(0.05, 0.8, 0.95, weight_decay, mask), params), train_optax(make, params))


def test_without_decay_every_element_moves_by_the_learning_rate(params):
    opt = lion(0.25, weight_decay=0.0)
    state = opt.init(params)
    for _ in range(3):
        updates, state = opt.update(params, state)
        assert all((u.abs() == 0.25).all() for u in tree.leaves(updates))
    assert torch.equal(updates["bias"].sign(), -params["bias"].sign())
