from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from fmeg.ops.embedding import embedding, embedding_bwd_p, embedding_p
from tests.ops.checks import check_vjp, close, ints, node_of, rand
from tests.ops.ranks import check_rule, spmd
from tests.sharding.factors import contracted


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 3, 4)])
def test_value_and_gradients(shape):
    table, ids = rand(7, 3), ints(7, *shape)
    assert torch.equal(embedding(table, ids), table[ids])
    check_vjp(embedding_p, table, ids, bits=True)
    assert gradcheck(lambda t: embedding(t, ids), table.requires_grad_())
    assert gradgradcheck(lambda t: embedding(t, ids), table)


def test_backward_adds_repeated_ids():
    ct, ids = rand(2, 6, 3), ints(4, 2, 6)
    onehot = torch.nn.functional.one_hot(ids, 9).double()
    close(embedding_bwd_p(ct, ids, 9), torch.einsum("bsv,bsd->vd", onehot, ct))
    assert gradcheck(lambda c: embedding_bwd_p(c, ids, 9), ct.requires_grad_())


def test_int32_and_vmap():
    table, ids = rand(7, 3), ints(7, 5)
    assert torch.equal(embedding(table, ids.int()), embedding(table, ids))
    tables, many = torch.stack([table, -table]), torch.stack([ids, ids.flip(0)])
    out = torch.func.vmap(embedding)(tables, many)
    assert torch.equal(out, torch.stack([table[ids], -table[ids.flip(0)]]))
    grads = torch.func.vmap(lambda c, i: embedding_bwd_p(c, i, 7))(out, many)
    close(grads[1], embedding_bwd_p(out[1], many[1], 7))


def test_rules_under_every_placement():
    """Also with the table's rows sharded: each rank then holds only some of the rows that are asked for."""
    table, ids = rand(8, 4), ints(8, 4, 8)
    check_rule(embedding_p, table, ids)
    check_rule(embedding_bwd_p, rand(4, 8, 4), ids, 8)


def test_no_collective_and_pending_over_the_vocabulary():
    table, ids = rand(8, 4), ints(8, 4, 8)
    r = embedding_p.rule(node_of(embedding_p, table, ids))
    assert contracted(r) == {"v"} and not r.resolved and r.linear == {0}
    _, counts = spmd(embedding_p, (table, ids), {}, {"v": ("x",)}, {"x": 4})
    assert counts == {}


def test_errors():
    with pytest.raises(TypeError, match="ids must be int64 or int32, given torch.float64"):
        embedding(rand(3, 2), rand(2))
    with pytest.raises(ValueError, match="table must be 'v d'"):
        embedding(rand(3), ints(3, 2))
    with pytest.raises(IndexError):
        embedding(rand(3, 2), torch.tensor([3]))
