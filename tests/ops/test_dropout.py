from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fmeg import random
from fmeg.ops.dropout import dropout, dropout_p
from tests.ops.checks import check_vjp, close, node_of, rand
from tests.ops.ranks import check_rule

KEY = random.key(3)


def test_mask_is_that_of_the_key():
    x = rand(40, 50)
    out = dropout(x, 0.25, KEY)
    keep = random.bernoulli(KEY, (40, 50), 0.75)
    close(out, torch.where(keep, x / 0.75, 0.0))
    assert 0.2 < (out == 0).double().mean() < 0.3
    assert torch.equal(out, dropout(x, 0.25, KEY))
    assert not torch.equal(out, dropout(x, 0.25, random.key(4)))


def test_gradients_use_the_same_mask():
    x = rand(3, 7)
    check_vjp(dropout_p, x, KEY, bits=True, rate=0.5, shape=(3, 7))
    f = lambda x: dropout(x, 0.5, KEY)
    assert gradcheck(f, x.requires_grad_())
    assert gradgradcheck(f, x)


def test_rule_under_every_placement():
    """Every rank draws its own block of the one mask."""
    x = rand(4, 8, 12)
    check_rule(dropout_p, x, KEY, rate=0.5, shape=(4, 8, 12))
    r = dropout_p.rule(node_of(dropout_p, x, KEY, rate=0.5, shape=(4, 8, 12)))
    assert r.linear == {0} and r.whole == {"word"}


def test_rate_zero_is_the_identity_and_bfloat16():
    x = rand(3, 4)
    assert dropout(x, 0.0, KEY) is x
    assert dropout(x.bfloat16(), 0.5, KEY).dtype == torch.bfloat16


def test_vmap_over_keys():
    x, keys = rand(6), random.split(KEY, 3)
    out = torch.func.vmap(lambda k: dropout(x, 0.5, k))(keys)
    close(out, torch.stack([dropout(x, 0.5, k) for k in keys]))


def test_errors():
    with pytest.raises(ValueError, match=r"rate must be in \[0, 1\), given 1.0"):
        dropout(rand(3), 1.0, KEY)
    with pytest.raises(TypeError, match="key"):
        dropout(rand(3), 0.5, 7)
