from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.rope import Llama3Scaling, rope, rope_p, rope_table
from tests.ops.checks import check_vjp, close, node_of, rand
from tests.ops.ranks import check_rule


def _table(s, e, b=None):
    positions = torch.arange(s, dtype=torch.float64)
    return rope_table(positions if b is None else positions + 3 * torch.arange(b)[:, None], e)


@pytest.mark.parametrize("b", [None, 2])
def test_rotation_is_a_complex_product(b):
    x, table = rand(2, 5, 3, 8), _table(5, 8, b)
    z = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(table[..., 0], table[..., 1]).unsqueeze(-2)
    close(rope(x, table), torch.cat([z.real, z.imag], -1))


def test_scores_depend_on_the_distance_alone():
    q, k = rand(1, 1, 1, 8), rand(1, 1, 1, 8, seed=1)
    at = lambda x, p: rope(x, rope_table(torch.tensor([float(p)], dtype=torch.float64), 8))
    close((at(q, 9) * at(k, 4)).sum(), (at(q, 105) * at(k, 100)).sum(), tol=1e-11)


@pytest.mark.parametrize("b", [None, 2])
@pytest.mark.parametrize("inverse", [False, True])
def test_gradients(b, inverse):
    x, table = rand(2, 5, 3, 8), _table(5, 8, b)
    check_vjp(rope_p, x, table, inverse=inverse)
    assert gradcheck(rope, (x.requires_grad_(), table.requires_grad_()))
    assert gradgradcheck(rope, (x, table))
    close(rope_p(rope(x, table), table, inverse=True), x)


def test_gradient_has_the_bits_of_autograd():
    x, table = rand(2, 33, 3, 16), _table(33, 16)
    leaf = x.clone().requires_grad_()
    ct = rand(*x.shape, seed=4)
    (expected,) = torch.autograd.grad(rope(leaf, table), leaf, ct)
    assert torch.equal(rope_p.vjp((x, table), {}, (None,), (ct,))[0], expected)


def test_table_keeps_precision_at_long_contexts():
    p = 1_000_003
    exact = rope_table(torch.tensor([float(p)], dtype=torch.float64), 4)
    torch.testing.assert_close(rope_table(torch.tensor([p]), 4).double(), exact, atol=1e-7, rtol=0)


@pytest.mark.parametrize("scaled", [False, True])
def test_table_and_rotation_equal_hugging_face(scaled):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from transformers import LlamaConfig

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, rope_theta=5e5)
    if scaled:
        config.rope_parameters = {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        }
    module = llama.LlamaRotaryEmbedding(config)
    positions = torch.arange(40)
    cos, sin = module(torch.zeros(1), positions[None])
    scaling = Llama3Scaling(8.0, original_max_position=256) if scaled else None
    assert rope_utils is not None
    table = rope_table(positions, 16, base=5e5, scaling=scaling)
    torch.testing.assert_close(table[..., 0], cos[0, :, :8], atol=2e-6, rtol=0)
    torch.testing.assert_close(table[..., 1], sin[0, :, :8], atol=2e-6, rtol=0)
    q = rand(1, 40, 4, 16, dtype=torch.float32)
    expected, _ = llama.apply_rotary_pos_emb(q.transpose(1, 2), q.transpose(1, 2), cos, sin)
    torch.testing.assert_close(rope(q, table), expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_dtypes_and_vmap():
    x, table = rand(2, 5, 3, 8), rope_table(torch.arange(5), 8)
    assert table.dtype == torch.float32 and rope(x.bfloat16(), table).dtype == torch.bfloat16
    close(
        torch.func.vmap(rope, in_dims=(0, None))(torch.stack([x, -x]), table),
        torch.stack([rope(x, table), -rope(x, table)]),
    )


@pytest.mark.parametrize("b", [None, 4])
def test_rule_under_every_placement(b):
    x, table = rand(4, 8, 4, 6), _table(8, 6, b)
    check_rule(rope_p, x, table)
    r = rope_p.rule(node_of(rope_p, x, table))
    assert r.linear == {0} and r.whole == {"e", "r", "c"}


def test_errors():
    with pytest.raises(ValueError, match="head_dim must be even, given 7"):
        rope_table(torch.arange(3), 7)
    with pytest.raises(ValueError, match="table must have shape .* make it by rope_table"):
        rope(rand(1, 4, 2, 8), rope_table(torch.arange(5), 8))
    with pytest.raises(ValueError, match="x must be 'b s h e'"):
        rope(rand(4, 2, 8), rope_table(torch.arange(4), 8))
    with pytest.raises(ValueError, match="table must have shape .* make it by rope_table"):
        rope(rand(1, 4, 2, 8), rope_table(torch.arange(4), 6))
    with pytest.raises(ValueError, match="or fewer pairs for x"):
        rope(rand(1, 4, 2, 8), rope_table(torch.arange(4), 10), part="last")
    with pytest.raises(ValueError, match="part must be"):
        rope(rand(1, 4, 2, 8), rope_table(torch.arange(4), 8), part="middle")
