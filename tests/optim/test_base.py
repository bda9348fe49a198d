"""The contract's pieces: chain, identity, freeze, apply_updates."""

import pytest
import torch

from fmeg import tree
from fmeg.optim import adamw, apply_updates, chain, clip_by_global_norm, freeze, identity, sgd


def test_chain_feeds_updates_forward_and_keeps_states_in_order(params):
    opt = chain(clip_by_global_norm(0.5), identity(), sgd(0.1, momentum=0.9))
    state = opt.init(params)
    updates, state = opt.update(params, state, params)
    clipped, _ = clip_by_global_norm(0.5).update(params, ())
    tree.map(lambda u, c: torch.testing.assert_close(u, -0.1 * c, rtol=1e-14, atol=0), updates, clipped)
    assert state[:2] == ((), ()) and state[2].step == 1


def test_chains_nest(params, train, assert_same):
    a, b, c = clip_by_global_norm(1.0), adamw(0.1), identity()
    assert_same(train(chain(a, chain(b, c)), params), train(chain(a, b, c), params), tol=0)


def test_a_state_of_another_chain_is_an_error(params):
    with pytest.raises(ValueError, match="`state` has 1 entries for 2 optimizers"):
        chain(sgd(0.1), identity()).update(params, (sgd(0.1).init(params),))


def test_freeze_moves_nothing(params, train, assert_same):
    assert_same(train(freeze(), params, 2), [params, params], tol=0)


def test_apply_updates_adds_wide_and_keeps_the_dtype():
    """1 + 2⁻⁸ + 2⁻¹⁷ rounds up to 1 + 2⁻⁷; with the update rounded first, 1 + 2⁻⁸ would be a tie and round to 1."""
    p, u = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 2.0**-8 + 2.0**-17)
    assert apply_updates({"w": p}, {"w": u})["w"] == torch.tensor([1 + 2.0**-7], dtype=torch.bfloat16)
    assert apply_updates(p, u).dtype == torch.bfloat16


def test_a_tree_of_another_structure_is_an_error(params):
    opt = adamw(0.1)
    with pytest.raises(ValueError, match="it lacks 'embed'"):
        opt.update({k: v for k, v in params.items() if k != "embed"}, opt.init(params), params)
