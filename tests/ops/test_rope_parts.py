"""Interleaved pairs, heads of which a part turns, and YaRN."""

from __future__ import annotations

from math import pi

import pytest
import torch
from torch.autograd import gradcheck

from fmeg.ops.rope import Llama3Scaling, YarnScaling, rope, rope_p, rope_table
from tests.ops.checks import check_vjp, close, rand
from tests.ops.ranks import check_rule

OPTIONS = [{"interleaved": i, "part": p} for i in (False, True) for p in ("all", "first", "last")]


def _table(s, options, e=8, scaling=None):
    n = e if options["part"] == "all" else e - 4
    return rope_table(torch.arange(s, dtype=torch.float64), n, scaling=scaling)


@pytest.mark.parametrize("options", OPTIONS)
def test_interleaved_pairs_are_complex_numbers(options):
    x, table = rand(2, 5, 3, 8), _table(5, options)
    n = 2 * table.shape[-2]
    turning = {"all": x, "first": x[..., :n], "last": x[..., 8 - n :]}[options["part"]]
    even, odd = (
        (turning[..., 0::2], turning[..., 1::2])
        if options["interleaved"]
        else (turning[..., : n // 2], turning[..., n // 2 :])
    )
    z = torch.complex(even, odd) * torch.complex(table[..., 0], table[..., 1]).unsqueeze(-2)
    want = torch.view_as_real(z).flatten(-2) if options["interleaved"] else torch.cat([z.real, z.imag], -1)
    got = rope(x, table, **options)
    start = 8 - n if options["part"] == "last" else 0
    close(got[..., start : start + n], want)
    assert torch.equal(got[..., :start], x[..., :start]) and torch.equal(got[..., start + n :], x[..., start + n :])


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("scaling", [None, YarnScaling(4.0, 16, mscale=2.0, mscale_all_dim=0.5)])
def test_gradients_and_rule(options, scaling):
    """Under a table whose magnitude is not one the gradient is the transpose, not the inverse."""
    x, table = rand(4, 8, 4, 8), _table(8, options, scaling=scaling)
    check_vjp(rope_p, x, table, **options)
    small = rand(1, 3, 2, 8).requires_grad_(), _table(3, options, scaling=scaling).requires_grad_()
    assert gradcheck(lambda x, t: rope(x, t, **options), small)
    check_rule(rope_p, x, table, **options)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(
    "extra",
    [{}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 0.3}, {"attention_factor": 1.7}],
)
def test_yarn_equals_hugging_face(extra, truncate):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=4096)
    given = {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": 2}
    config.rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "truncate": truncate, **given, **extra}
    freq, magnitude = utils.ROPE_INIT_FUNCTIONS["yarn"](config)
    scaling = YarnScaling(8.0, 512, 16.0, 2.0, truncate=truncate, **extra)
    plain = 1e4 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    torch.testing.assert_close(scaling(plain, 1e4).float(), freq, rtol=2e-6, atol=0)
    assert scaling.magnitude == pytest.approx(magnitude, rel=1e-12)
    assert 0 < scaling.bounds(32, 1e4)[0] < scaling.bounds(32, 1e4)[1] < 31  # low, blended and high ones are there
    table = rope_table(torch.arange(9.0, dtype=torch.float64), 64, scaling=scaling)
    close(table.square().sum(-1), torch.full((9, 32), magnitude**2, dtype=torch.float64))


def test_yarn_by_hand():
    """DeepSeek's numbers, and the ends: a frequency that turns often is kept, one that turns little is divided."""
    v3, v2 = YarnScaling(40.0, mscale=1.0, mscale_all_dim=1.0), YarnScaling(40.0, mscale=0.707, mscale_all_dim=0.707)
    assert v3.bounds(32, 1e4) == (10, 23) and v3.magnitude == v2.magnitude == 1.0
    assert v3.softmax_factor == pytest.approx(1.36889**2, rel=1e-5)
    assert v2.softmax_factor * 192**-0.5 == pytest.approx(0.114721, rel=1e-5)
    freq = 1e4 ** (-torch.arange(32, dtype=torch.float64) / 32)
    got = v3(freq, 1e4)
    assert torch.equal(got[:11], freq[:11])
    close(got[23:], freq[23:] / 40)
    assert ((got[11:23] < freq[11:23]) & (got[11:23] > freq[11:23] / 40)).all()
    turns = 4096 * freq / (2 * pi)
    assert turns[10] > 32 and turns[23] < 1
    assert YarnScaling(1.0, mscale=0.5).magnitude == 1.0 and YarnScaling(2.0).softmax_factor == 1.0


def test_yarn_with_equal_bounds():
    scaling = YarnScaling(2.0, 8, beta_fast=1.0, beta_slow=1.0, truncate=False)
    assert scaling.bounds(2, 10.0)[0] == scaling.bounds(2, 10.0)[1]
    assert scaling(torch.tensor([1.0, 0.3]).double(), 10.0).isfinite().all()
    assert Llama3Scaling(8.0).magnitude == 1.0
