"""skip_nonfinite: one bad element anywhere means no step at all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg import tree
from fmeg.optim import adamw, chain, clip_by_global_norm, skip_nonfinite

GRADS = {"a": torch.linspace(-1, 1, 6).reshape(2, 3), "b": torch.tensor(2.0), "c": torch.ones(4)}


def equal(a, b):
    return tree.structure(a) == tree.structure(b) and all(
        torch.equal(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)
    )


@given(index=st.integers(0, 10), bad=st.sampled_from([float("nan"), float("inf"), -float("inf")]))
def test_a_bad_element_skips_the_step(index, bad):
    leaves, treedef = tree.flatten(GRADS)
    flat = torch.cat([x.reshape(-1) for x in leaves])
    flat[index] = bad
    parts = flat.split([x.numel() for x in leaves])
    grads = tree.unflatten(treedef, [p.reshape(x.shape) for p, x in zip(parts, leaves, strict=True)])

    opt = skip_nonfinite(chain(clip_by_global_norm(1.0), adamw(0.1)))
    _, before = opt.update(GRADS, opt.init(GRADS), GRADS)
    updates, after = opt.update(grads, before, GRADS)
    assert equal(after.inner, before.inner)
    assert all((u == 0).all() for u in tree.leaves(updates))
    assert (before.skipped, after.skipped) == (0, 1)
    again, then = opt.update(GRADS, after, GRADS)
    want, _ = opt.update(GRADS, before, GRADS)
    assert equal(again, want) and then.skipped == 1


def test_finite_gradients_are_untouched(params, train, assert_same):
    assert_same(train(skip_nonfinite(adamw(0.1)), params), train(adamw(0.1), params), tol=0)


@pytest.mark.parametrize("big", [1e30])
def test_a_large_finite_gradient_is_not_skipped(big):
    """Its square overflows float32, the gradient itself is finite."""
    opt = skip_nonfinite(adamw(0.1))
    grads = {"w": torch.full((2,), big)}
    assert opt.update(grads, opt.init(grads), grads)[1].skipped == 0
