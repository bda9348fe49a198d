"""Rewrites of what moves between ranks: the same numbers on a virtual mesh, less or earlier movement."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, ops, tree
from fmeg.lower import lower
from fmeg.lower.behind import reduce_layers
from fmeg.lower.chunked_loss import ChunkedLoss
from fmeg.lower.hasten import hasten_gathers, hasten_reductions
from fmeg.lower.inline import inline
from fmeg.lower.lookups import exchange_lookups
from fmeg.lower.rewrite import everywhere
from fmeg.models import llama
from fmeg.models.table import Param
from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from fmeg.program.ir import Program, TensorType
from fmeg.program.structured import loop_of, walk
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScan, LocalScanBackward

MESH = Mesh(dp=2, backend="loop")
AXES = {"table": "vocab embed", "w": "layers embed ff", "head": "ff vocab"}


def step(params, batch):
    def loss(p, b):
        x, _ = fmeg.scan(lambda x, w: (torch.tanh(fmeg.einsum("b s d, d f -> b s f", x, w)), None),
                         ops.embedding(p["table"], b["ids"]), p["w"])  # fmt: skip
        return (fmeg.einsum("b s f, f v -> b s v", x, p["head"]) ** 2).sum(), 1

    return fmeg.value_and_grad(loss)(params, batch)


def lowered(vocab, layout):
    g = torch.Generator().manual_seed(0)
    normal = lambda *s: torch.randn(*s, dtype=torch.float64, generator=g)
    params = {"table": normal(vocab, 4), "w": normal(2, 4, 4), "head": normal(4, vocab)}
    batch = {"ids": torch.randint(0, vocab, (4, 3), generator=g)}
    f = fmeg.jit(step, mesh=MESH, layout=layout, axes={"params": AXES, "batch": {"ids": "batch seq"}})
    low = f.lower(params, batch)
    values = [MESH.backend().scatter(x, p.dims) for x, p in zip(tree.leaves((params, batch)), low.inputs, strict=True)]
    return low, values


def results(low, program: Program, values):
    b = MESH.backend()
    outs = Executable(program, b)(values)
    return [b.local(x)[r] for x in outs for r in range(2)]


def count(program, op):
    return sum(n.op is op for n, _, _ in walk(program))


SHARDED = Layout(batch="dp", params=dict(embed="dp"))


@pytest.mark.parametrize(("vocab", "exchanges"), [(40, 2), (8, 0)])
def test_lookups_are_exchanged_where_that_moves_less(vocab, exchanges):
    low, values = lowered(vocab, SHARDED)
    program = everywhere(exchange_lookups, low.program)
    program.check()
    assert count(program, ALL_TO_ALL) == exchanges
    gathered = [n.outs[0].shape for n, _, _ in walk(program) if n.op is ALL_GATHER]
    assert ((vocab, 4) in gathered) == (exchanges == 0)
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)


def test_a_lookup_of_one_row():
    def step(params, i):
        return fmeg.value_and_grad(lambda p, i: (ops.embedding(p["table"], i).sin().sum(), 1))(params, i)

    table = torch.randn(40, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    args = {"table": table}, torch.tensor(3)
    got = fmeg.jit(
        step,
        mesh=MESH,
        layout=Layout(params=dict(embed="dp")),
        axes={"params": {"table": AXES["table"]}},
        mode="inductor",
    )(*args)
    for a, b in zip(tree.leaves(got), tree.leaves(step(*args)), strict=True):
        assert torch.allclose(a.global_value(), b, rtol=1e-13)


def test_a_reduction_that_a_loop_can_hide_is_begun_before_it():
    low, values = lowered(40, Layout(batch="dp"))
    program = hasten_reductions(inline(low.program))
    program.check()
    kinds = (ALL_REDUCE, REDUCE_SCATTER)
    for p, early in ((inline(low.program), False), (program, True)):
        body = next(b for b in _bodies(p) if any(isinstance(n.op, LocalScanBackward) for n in b.nodes))
        scan = next(i for i, n in enumerate(body.nodes) if isinstance(n.op, LocalScanBackward))
        before = [n for n in body.nodes[:scan] if n.op in kinds and n.outs[0].shape == (4, 40)]
        assert bool(before) == early
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("opt", [{}, {"embed": "dp"}])
def test_gradients_of_layers_are_reduced_behind_them(opt):
    low, values = lowered(40, Layout(batch="dp", opt=opt))
    program = reduce_layers(inline(low.program))
    program.check()
    scan = next(n for n, _, _ in walk(program) if isinstance(n.op, LocalScanBackward))
    assert sum(n.op in (ALL_REDUCE, REDUCE_SCATTER) for n in scan.op.body.nodes) == 1
    reduced = lambda p: sum(len(n.outs) for n, _, _ in walk(p) if n.op in (ALL_REDUCE, REDUCE_SCATTER))
    assert reduced(program) == reduced(low.program)
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.equal(a, b)


def _bodies(program):
    return [program, *(loop_of(n).body for n, _, _ in walk(program) if loop_of(n) is not None)]


def test_gathers_that_need_nothing_of_a_loop_stand_right_behind_it():
    low, values = lowered(40, Layout(batch="dp", params=dict(vocab="dp"), opt=dict(vocab="dp")))
    program = hasten_gathers(inline(low.program))
    program.check()
    [scan] = (i for i, n in enumerate(program.nodes) if isinstance(n.op, LocalScan))
    behind = program.nodes[scan + 1]
    assert behind.op is ALL_GATHER and behind.outs[0].shape == (4, 40)
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.equal(a, b)


def test_losses_are_cut_into_chunks_where_parameters_are_sharded():
    """The backward pass norms again what the head reads, behind the head's gather: that is shared, so the five nodes of
    the loss are found."""
    cfg = llama.Config(vocab_size=2**17, embed=16, layers=2, heads=2, kv_heads=2, head_dim=8, ff=16)
    params = tree.map(lambda p: TensorType(tuple(cfg.sizes[a] for a in p.axes.split()), torch.float32),
                      llama.parameters(cfg), is_leaf=lambda x: isinstance(x, Param))  # fmt: skip
    ids, mask = TensorType((4, 4096), torch.int64), TensorType((4, 4096), torch.float32)
    f = fmeg.jit(lambda params, batch: fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch),
                 mesh=MESH, layout=SHARDED, axes={"params": llama.logical_axes(cfg)})  # fmt: skip
    low = f.lower(params, {"tokens": ids, "targets": ids, "mask": mask})
    program = lower(low.program)
    program.check()
    assert [n.op.chunks for n, _, _ in walk(program) if isinstance(n.op, ChunkedLoss)] == [4]
