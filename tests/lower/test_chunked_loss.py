"""Losses in chunks: the same numbers, the logits never whole."""

import pytest
import torch

import fmeg
from fmeg import ops, tree
from fmeg.lower.chunked_loss import ChunkedLoss, chunked
from fmeg.lower.common import share
from fmeg.lower.rewrite import everywhere
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable


def step_of(weigh):
    def loss(p, batch):
        x = ops.rms_norm(batch["x"] * p["scale"], p["norm"])
        logits = fmeg.einsum("b s d, v d -> b s v", x, p["head"])
        losses = ops.cross_entropy(logits, batch["t"], z_loss=1e-3)
        return weigh(losses, batch["mask"]), batch["mask"].sum()

    return lambda params, batch: fmeg.value_and_grad(loss)(params, batch)


def example(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    params = {
        "scale": torch.randn(6, generator=g, dtype=dtype),
        "norm": torch.randn(6, generator=g, dtype=dtype),
        "head": torch.randn(10, 6, generator=g, dtype=dtype),
    }
    batch = {
        "x": torch.randn(4, 6, 6, generator=g, dtype=dtype),
        "t": torch.randint(0, 10, (4, 6), generator=g),
        "mask": (torch.rand(4, 6, generator=g) > 0.3).to(dtype),
    }
    return params, batch


def run(lowered, program, leaves):
    out = Executable(program, lowered.mesh.backend())(leaves)
    return [x for x in out if isinstance(x, torch.Tensor)]


def chunks_of(program):
    return [n.op.chunks for n, _, _ in walk(program) if isinstance(n.op, ChunkedLoss)]


@pytest.mark.parametrize(
    ("limit", "least", "chunks"),
    [
        (8 * 10 * 24, None, []),
        (8 * 10 * 12, None, [2]),
        (8 * 10 * 7, None, [4]),
        (1, None, [24]),
        (8 * 10 * 24, 8 * 10 * 24, []),
        (8 * 10 * 24, 8 * 10 * 23, [1]),
        (8 * 10 * 12, 8 * 10 * 99, [2]),
    ],
)
def test_equal_to_the_whole(limit, least, chunks):
    params, batch = example()
    lowered = fmeg.jit(step_of(lambda x, m: (x * m).sum())).lower(params, batch)
    program = everywhere(chunked(limit, least), everywhere(share, lowered.program))
    assert chunks_of(program) == chunks
    program.check()
    leaves = tree.leaves((params, batch))
    for a, b in zip(run(lowered, lowered.program, leaves), run(lowered, program, leaves), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


def test_a_cotangent_that_depends_on_the_loss_keeps_it_whole():
    params, batch = example()
    lowered = fmeg.jit(step_of(lambda x, m: (x * x * m).sum())).lower(params, batch)
    program = everywhere(chunked(1), everywhere(share, lowered.program))
    assert chunks_of(program) == []


def test_rows_that_hardly_divide_stay_whole():
    params, batch = example()
    batch = {k: v[:1].repeat(1, 4, *[1] * (v.ndim - 2))[:, :23] for k, v in batch.items()}
    lowered = fmeg.jit(step_of(lambda x, m: (x * m).sum())).lower(params, batch)
    program = everywhere(share, lowered.program)
    assert chunks_of(everywhere(chunked(8 * 10 * 12), program)) == []
    assert chunks_of(everywhere(chunked(8 * 10 * 3), program)) == [23]
