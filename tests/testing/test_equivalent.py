"""The comparison: what it accepts, what it finds, and what it says."""

from __future__ import annotations

import math

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, P, ops
from fmeg.program.errors import ShardingError
from fmeg.testing import assert_equivalent, errors, relative_error
from fmeg.testing.equivalent import FLOOR

F64 = torch.float64
one = lambda *x: torch.tensor(x, dtype=F64)


def test_relative_error():
    assert relative_error(one(1.0, -4.0), one(1.0, -5.0)) == 0.2
    assert relative_error(one(1e-9), one(0.0)) == 1e-9 / FLOOR
    assert relative_error(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_error(torch.tensor([True]), torch.tensor([False])) == math.inf
    assert relative_error(torch.tensor([2]), torch.tensor([2])) == 0.0
    with pytest.raises(ValueError, match=r"\(2,\) of torch.float64 against \(1,\)"):
        relative_error(one(1, 2), one(1))
    with pytest.raises(ValueError, match="float32"):
        relative_error(one(1).float(), one(1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_must_be_the_same(bad):
    assert relative_error(one(bad, 1.0), one(bad, 1.0)) == 0.0
    assert relative_error(one(bad, 1.0), one(0.0, 1.0)) == math.inf
    assert relative_error(one(0.0, 1.0), one(bad, 1.0)) == math.inf
    assert relative_error(one(bad, 1.5), one(bad, 1.0)) == 0.5


def test_trees_must_have_one_structure():
    with pytest.raises(ValueError, match="the trees differ"):
        errors({"a": one(1)}, {"b": one(1)})
    with pytest.raises(ValueError, match=r"shape is \(1,\), but \(2,\)"):
        errors(one(1), one(1, 2))
    assert errors({"n": 1}, {"n": 2}) == {"n": math.inf}


def test_a_replica_that_differs_is_found_and_named():
    """A sum over this rank's rows alone, presented as the sum of all: the first rank's is what eager gives, too."""
    mesh, layout = Mesh(dp=2), Layout(batch="dp")
    local_sum = fmeg.shard_map(lambda x: x.sum(), mesh=mesh, in_specs=(P("dp"),), out_specs=P())

    def fn(batch):
        return {"good": batch.sum(), "bad": {"sum": local_sum(batch)}}

    x = one(1.0, 1.0, 2.0, 2.0)
    assert fn(x)["bad"]["sum"] == 2.0
    with pytest.raises(AssertionError) as e:
        assert_equivalent(fn, x, mesh=mesh, layout=layout)
    text = str(e.value)
    assert "1 of 2 leaves differ from one device by more than 1e-10" in text
    assert "'bad.sum' with a relative error of 1, on Mesh(dp=2) with Layout(batch='dp')" in text


def test_options_reach_jit():
    w = torch.eye(4, dtype=F64)
    fn = lambda params, batch: fmeg.shard(fmeg.einsum("b d, d f -> b f", batch, params), P("batch", None))
    args = dict(
        mesh=Mesh(dp=2, tp=2), layout=Layout(batch="dp", ff="tp"), axes={"params": "embed ff", "batch": "batch embed"}
    )
    assert assert_equivalent(fn, w, torch.ones(4, 4, dtype=F64), strict=True, **args) == {"": 0.0}
    loose = lambda params, batch: ops.rms_norm(fmeg.einsum("b d, d f -> b f", batch, params), None)
    assert_equivalent(loose, w, torch.ones(4, 4, dtype=F64), **args)
    with pytest.raises(ShardingError, match="strict"):
        assert_equivalent(loose, w, torch.ones(4, 4, dtype=F64), strict=True, **args)
