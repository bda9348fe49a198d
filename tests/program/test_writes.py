"""In-place operations: a Program has their functional forms, and every view sees every write."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmeg import scan, trace
from fmeg.program.errors import TraceError
from tests.program.running import X, same


def _column(y: Tensor) -> None:
    y[:, 0] = 0.0


def _block(y: Tensor) -> None:
    y[1:3, 0:2].add_(1)


def _flat(y: Tensor) -> None:
    y.view(-1)[2:5].mul_(2)


def _transposed(y: Tensor) -> None:
    y.t()[1].sub_(1)
    y.permute(1, 0)[2] = 0


def _columns_unbound(y: Tensor) -> None:
    a, _, c = y.unbind(1)
    a.add_(c)


def _pieces(y: Tensor) -> None:
    y.split(3)[1].neg_()
    y.split([1, 3])[1].add_(1)
    y.chunk(2, 1)[1].mul_(3)


def _diagonal(y: Tensor) -> None:
    y.diagonal().fill_(7)


def _masked(y: Tensor) -> None:
    y[y > 0] = 7.0
    y[torch.tensor([True, False, False, True])] = -1.0
    y.masked_fill_(y < -0.5, 3.0)


def _indexed(y: Tensor) -> None:
    y[torch.tensor([0, 2])] = 7.0
    y.index_add_(0, torch.tensor([1]), y[:1] * 1)


def _elements(y: Tensor) -> None:
    y[0, 0] += 1
    y[0][1] = y[1][1]


def _copies(y: Tensor) -> None:
    y[0].copy_(torch.ones(3, dtype=torch.float32))
    y[1:] = torch.arange(3)
    y[:, 2:].copy_(y[:, :1] * 2)


def _arithmetic(y: Tensor) -> None:
    y += 1
    y *= y
    y **= 2
    y /= 3
    y.clamp_(min=0.5).sqrt_().sub_(0.25, alpha=2)


def _activations(y: Tensor) -> None:
    F.relu(y, inplace=True)
    F.silu(y, inplace=True)
    y.unsqueeze(0).squeeze(0).flatten().tanh_()


def _shapes(y: Tensor) -> None:
    y.unsqueeze_(1)
    row = y[2]
    y.squeeze_(1).t_()
    y[0].add_(1)
    row.mul_(2)
    y.transpose_(0, 1)


def _fills(y: Tensor) -> None:
    y[0].zero_()
    y[1].fill_(2)
    y[2].fill_(torch.tensor(3.0))


WRITES = [v for k, v in sorted(globals().items()) if k.startswith("_") and getattr(v, "__module__", "") == __name__]


@pytest.mark.parametrize("write", WRITES, ids=lambda f: f.__name__[1:])
def test_writes_become_functional(write):
    def fn(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x * 1
        row = y[1]
        write(y)
        return y, row, y.t() * 2

    same(fn, X)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("nabcdef"), st.integers(0, 2)), min_size=1, max_size=7))
def test_every_view_sees_every_write(steps):
    """Overlapping views of one tensor, written in any order."""

    def fn(x: Tensor) -> list[Tensor]:
        y = x * 1
        b, c = y[1:3].unbind(0)
        views = dict(n=y, a=y[0:2], b=b, c=c, d=y.view(-1)[3:9], e=y.t()[1], f=y.split(2)[1][:, 1:])
        for i, (name, op) in enumerate(steps):
            v = views[name]
            (v.add_(i + 1), v.mul_(2), v.copy_(views["e"][:1] * 1))[op]
        return list(views.values())

    same(fn, X)


def test_detach_and_contiguous_share_memory_as_in_torch():
    def fn(x: Tensor) -> tuple:
        y = x * 1
        y.detach().add_(1)
        z = y.contiguous()
        z.mul_(2)
        w = y.t().contiguous()
        w.zero_()
        return y, z, w

    same(fn, X)


def test_shapes_in_place_belong_to_the_tensor_alone():
    """Torch's own `vector @ matrix` does so."""

    def fn(x: Tensor) -> tuple:
        y = x * 1
        square = y[:3]
        row = square[0]
        square.t_()
        square[0, 1] = 5
        z = (x * 2).detach_()
        z.add_(1)
        return y, square, row, z, x[:, 0] @ x, x @ x[0]

    same(fn, X)


def test_dtype_of_a_write():
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.zeros(4, 3, dtype=torch.int64)
        y.copy_(x * 10)
        z = torch.zeros(4, 3)
        z.add_(x)
        return y, z

    same(fn, X)


REFUSED = {
    "an argument": (lambda x: x.add_(1), "writes into its argument 'x'"),
    "a view of an argument": (lambda x: x[:, 0].zero_(), "writes into its argument 'x'"),
    "an argument's shape": (lambda x: x.t_(), "writes into its argument 'x'"),
    "size": (lambda x: (x * 1).resize_(2, 2), "use the form that returns its result"),
    "out": (lambda x: torch.add(x, 1, out=x * 1), "use the form that returns its result"),
    "lists": (lambda x: torch._foreach_add_([x * 1], 1.0), "use the form that returns its result"),
    "strides": (lambda x: (x * 1).as_strided((2,), (1,)).add_(1), "view made by aten.as_strided.default"),
    "dtype": (lambda x: (x > 0).long().add_(x), "cast"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_writes_that_are_refused(case):
    fn, message = REFUSED[case]
    with pytest.raises((TraceError, RuntimeError), match=message):
        trace(lambda x: fn(x), X)


def test_a_body_may_not_write_what_it_was_given():
    def outside(x: Tensor) -> Tensor:
        total = torch.zeros(3, dtype=x.dtype)

        def body(c: Tensor, a: Tensor) -> tuple[Tensor, None]:
            total.add_(a)
            return c + total, None

        return scan(body, x[0], x)[0]

    with pytest.raises(TraceError, match=r"test_writes.py:\d+ body writes into an argument, or a tensor from outside"):
        trace(outside, X)
    with pytest.raises(TraceError, match="writes into its argument 'carry'"):
        trace(lambda x: scan(lambda c, a: (c.add_(a), None), x[0], x)[0], X)
