"""Products whose only reader is a cast to float32 give float32, in full and in low precision."""

from __future__ import annotations

import torch

from fmeg import einsum
from fmeg.lower.wide import widen, widen_quantised
from fmeg.ops.einsum import einsum_p
from fmeg.precision.formats import Format, amax, quantize
from fmeg.precision.scaled import scaled_einsum, scaled_einsum_p
from fmeg.program.trace import trace

X, W = torch.randn(8, 16), torch.randn(16, 4)


def _plain(x, w):
    return einsum("b d, d f -> b f", x.bfloat16(), w.bfloat16())


def _scaled(x, w):
    grid, f = (0, 0), Format("e4m3")
    low = [t for v in (x, w) for t in quantize(v, amax(v, grid), grid, f)]
    return scaled_einsum("b d, d f -> b f", *low, (grid, grid), torch.bfloat16)


def test_a_cast_goes_into_the_product():
    for fn, op, rewrite in ((_plain, einsum_p, widen), (_scaled, scaled_einsum_p, widen_quantised)):
        program = rewrite(trace(lambda x, w, fn=fn: fn(x, w).float(), X, W).program)
        assert program.nodes[-1].op is op and program.outputs[0].dtype == torch.float32
        assert program.nodes[-1].outs[0] is program.outputs[0]


def test_another_reader_keeps_it():
    for fn, rewrite in ((_plain, widen), (_scaled, widen_quantised)):
        traced = trace(lambda x, w, fn=fn: ((y := fn(x, w)).float(), y * 2), X, W).program
        assert [n.op for n in rewrite(traced).nodes] == [n.op for n in traced.nodes]
