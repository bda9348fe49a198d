"""What cannot be traced is an error that says where, and what to use instead."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg import scan, trace
from fmeg.program.errors import TraceError
from tests.program.running import X, same

OUTSIDE = torch.ones(3, dtype=torch.float64)

IMPOSSIBLE = {
    "if": (lambda x: x if x.sum() > 0 else -x, "use torch.where"),
    "item": (lambda x: x.sum().item(), "static argument"),
    "float": (lambda x: float(x[0, 0]), "static argument"),
    "index": (lambda x: x[int(x[0, 0])], "static argument"),
    "list": (lambda x: x.tolist(), "static argument"),
    "numpy": (lambda x: x.numpy(), "numpy"),
    "nonzero": (lambda x: x.nonzero(), "masked form"),
    "mask": (lambda x: x[x > 0], "masked form"),
    "randn": (lambda x: x + torch.randn(3), "fmeg.random"),
    "rand_like": (lambda x: torch.rand_like(x), "fmeg.random"),
    "dropout": (lambda x: F.dropout(x, 0.5), "fmeg.ops.dropout"),
    "permutation": (lambda x: x[torch.randperm(4)], "fmeg.random"),
    "in place": (lambda x: (x * 1).normal_(), "fmeg.random"),
    "closure": (lambda x: x + OUTSIDE, "the tensor `OUTSIDE` of type f64"),
    "in a scan": (lambda x: scan(lambda c, a: (c + OUTSIDE, None), x[0], x), "the tensor `OUTSIDE`"),
    "branch in a scan": (lambda x: scan(lambda c, a: (c if c.sum() > 0 else a, None), x[0], x), "torch.where"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_what_cannot_be_traced(case):
    fn, message = IMPOSSIBLE[case]
    with pytest.raises(TraceError, match=message) as e:
        trace(fn, X)
    assert "test_refused.py:" in str(e.value)


def test_a_closed_over_tensor_is_named_by_the_way_to_it():
    class Holder:
        def __init__(self) -> None:
            self.w = OUTSIDE * 1

        def __call__(self, x: Tensor) -> Tensor:
            return x + self.w

    inside, holder, table, pair = OUTSIDE * 2, Holder(), {"k": OUTSIDE * 3}, [1, OUTSIDE * 4]
    linear = torch.nn.Linear(3, 3, dtype=torch.float64)
    for fn, called in [
        (lambda x: x + inside, "inside"),
        (holder, "self.w"),
        (lambda x: x + table["k"], "table['k']"),
        (lambda x: x + pair[1], "pair[1]"),
        (lambda x, w=inside: x + w, "w"),
        (lambda x: linear(x), "linear.weight"),
    ]:
        with pytest.raises(TraceError, match=re.escape(f"the tensor `{called}` of type f64[3")):
            trace(fn, X)


def test_a_module_is_closed_over_its_parameters():
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    with pytest.raises(TraceError, match="pass it as an argument"):
        trace(layer, X)
    same(lambda p, x: torch.func.functional_call(layer, p, (x,)), dict(layer.named_parameters()), X)
