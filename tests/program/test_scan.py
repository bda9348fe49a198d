"""Scan as one node of a Program: any carry, bodies in bodies, one trace of each; what a body must keep."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fmeg import scan, trace
from fmeg.program.errors import TraceError
from tests.program.running import X, same


def test_scan_with_everything():
    def fn(x: Tensor, w: Tensor, n: Tensor) -> tuple:
        scale = x.exp()

        def body(carry: dict, layer: dict, shift: Tensor, power: int) -> tuple:
            y = (carry["y"] * layer["w"] + shift).tanh() * scale
            return {"y": y, "n": carry["n"] + layer["i"], "same": carry["same"]}, (y**power, None, layer["i"] * 2)

        layers = {"w": w, "i": torch.arange(4)}
        return scan(body, {"y": x, "n": n, "same": x}, layers, x.cos(), 2)

    same(fn, X[0], X, torch.tensor(3))


def test_scan_in_scan():
    def fn(x: Tensor, w: Tensor) -> tuple:
        def outer(c: Tensor, row: Tensor) -> tuple:
            return scan(lambda d, e: (d * e + c + x, d), c, row)

        return scan(outer, x, w)

    same(fn, X[0], torch.stack([X, X + 1, X.cos()]))


def test_scan_of_one_step_and_outputs_that_are_inputs():
    same(lambda x: scan(lambda c, a: (c, a), x[0], x[:1]), X)
    same(lambda x: scan(lambda c, a: (a, c), x[0], x), X)
    same(lambda x: scan(lambda c, a: ((c[1], c[0]), (c[0], c[0])), (x[0], x[1]), x), X)


def test_a_body_is_traced_once():
    calls = []

    def body(c: Tensor, a: Tensor) -> tuple[Tensor, None]:
        calls.append(1)
        return c + a, None

    trace(lambda x: scan(body, x[0], x)[0], X)
    assert len(calls) == 1


CONTRACT = {
    "dtype": (
        lambda c, a: (c.float(), None),
        r"carry \(whole\) is f64\[3\] at the start but the body returns f32\[3\]",
    ),
    "shape": (lambda c, a: (c[:2], None), r"f64\[3\] at the start but the body returns f64\[2\]"),
    "structure": (lambda c, a: ((c, c), None), "return the structure that the body was given"),
    "number": (lambda c, a: (0, None), "must be a tensor, given 0"),
    "y": (lambda c, a: (c, {"k": 3.0}), "y.k must be a tensor, given 3.0"),
    "return": (lambda c, a: c, r"must return \(carry, y\)"),
}


@pytest.mark.parametrize("case", CONTRACT)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_body_keeps_the_carry(case, traced):
    body, message = CONTRACT[case]
    with pytest.raises(TraceError, match=message):
        (lambda f: trace(f, X) if traced else f(X))(lambda x: scan(body, x[0], x))


def test_what_scan_runs_over():
    body = lambda c, a: (c, None)
    for xs, message in [
        ({}, "no tensors"),
        ({"a": X, "b": X[:2]}, r"a: \(4, 3\), b: \(2, 3\)"),
        (X[:0], "leading size of 0"),
        (X.sum(), r"xs: \(\)"),
        ([1, 2], "xs.0 must be a tensor"),
    ]:
        with pytest.raises(ValueError, match=message):
            scan(body, X[0], xs)
    with pytest.raises(TraceError, match="carry.n must be a tensor, given 0"):
        scan(body, {"n": 0}, X)
