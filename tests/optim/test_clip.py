"""Clipping by global norm: torch's formula, and what it promises."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg import tree
from fmeg.optim import clip_by_global_norm, global_norm


def test_norm_is_that_of_the_concatenation(params):
    flat = torch.cat([x.reshape(-1) for x in tree.leaves(params)])
    torch.testing.assert_close(global_norm(params), flat.norm(), rtol=1e-14, atol=0)


@given(max_norm=st.floats(0.01, 100.0), size=st.floats(1e-3, 1e3))
def test_equals_torch(max_norm, size):
    grads = {"a": size * torch.linspace(-1, 2, 6, dtype=torch.float64), "b": torch.full((2, 2), size).double()}
    ps = [torch.nn.Parameter(g.clone()) for g in tree.leaves(grads)]
    for p in ps:
        p.grad = p.detach().clone()
    norm = torch.nn.utils.clip_grad_norm_(ps, max_norm)
    clipped, state = clip_by_global_norm(max_norm).update(grads, ())
    torch.testing.assert_close(global_norm(grads), norm, rtol=1e-14, atol=0)
    for got, p in zip(tree.leaves(clipped), ps, strict=True):
        torch.testing.assert_close(got, p.grad, rtol=1e-14, atol=0)
    assert state == () and global_norm(clipped) <= max_norm


def test_short_gradients_pass_bit_for_bit(params):
    clipped, _ = clip_by_global_norm(1e6).update(params, ())
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(clipped), tree.leaves(params), strict=True))


def test_zero_gradients_stay_zero():
    assert torch.equal(clip_by_global_norm(1.0).update({"w": torch.zeros(3)}, ())[0]["w"], torch.zeros(3))


def test_bfloat16_gradients_have_a_float32_norm_and_keep_their_dtype():
    """256 ones: a running sum in bfloat16 could not tell 256 from 257."""
    grads = {"a": torch.ones(256, dtype=torch.bfloat16), "b": torch.ones(1, dtype=torch.bfloat16)}
    assert global_norm(grads).dtype == torch.float32
    torch.testing.assert_close(global_norm(grads), torch.tensor(257.0).sqrt())
    assert clip_by_global_norm(1.0).update(grads, ())[0]["a"].dtype == torch.bfloat16
