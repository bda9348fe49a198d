"""Experts in FP8 in fewer passes: the same numbers, matrices quantised once a step, rows turned as they are made."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, precision, tree
from fmeg.lower import lower
from fmeg.lower.experts import fuse_experts, gated_rows_bwd_p
from fmeg.lower.hoist import hoist_casts
from fmeg.lower.quantised_experts import (
    add_rows,
    quantise_matrices,
    quantise_turned,
    turn_ahead,
    turn_rows,
    widen_experts,
)
from fmeg.lower.rewrite import everywhere
from fmeg.models import moe, presets
from fmeg.precision.formats import Format, quantize_p
from fmeg.precision.grouped import scaled_grouped_add_p, scaled_grouped_dw_p, scaled_grouped_p
from fmeg.precision.pairs import pair_p
from fmeg.precision.ragged import rows_amax_p, rows_quantize_p
from fmeg.precision.turned import turn, turn_rows_p, turned_dw_p, turned_p
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScan, LocalScanBackward
from fmeg.step.lowered import Compiled

EXPERTS = dict(match="*layers*w_*", skip_first=0, skip_last=0)
PASSES = (hoist_casts, fuse_experts, widen_experts, turn_rows, turn_ahead, quantise_turned, quantise_matrices, add_rows)


def lowered(name, dtype=torch.float64, compute=None, mesh=None, layout=None, microbatches=1, **options):
    cfg = presets.get(
        "tiny-moe", embed=16, layers=3, heads=2, kv_heads=2, head_dim=8, experts=4, expert_ff=24, vocab_size=50,
        vocab_multiple=2, dtype=dtype, compute_dtype=compute,
    )  # fmt: skip
    recipe = precision.fp8(name, **{**EXPERTS, **options})
    params = moe.init(fmeg.random.key(0), cfg)
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(4, 8, dtype=dtype)}
    axes = {"params": moe.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    loss = lambda p, b: moe.loss(p, b, cfg)
    grad = fmeg.value_and_grad(loss, precision=recipe, microbatches=microbatches)
    known = {}
    if name == "delayed":
        known = {k: torch.full_like(h, 3.0) for k, h in fmeg.amax_history(loss, recipe, params, batch).items()}

    def step(params, batch, known):
        (value, aux), grads = grad(params, batch, **(dict(amax=known) if known else {}))
        return value, grads, aux.get("amax") if known else None

    low = fmeg.jit(step, mesh=mesh, layout=layout, axes=axes).lower(params, batch, known)
    leaves = [x for x in tree.leaves((params, batch, known)) if isinstance(x, torch.Tensor)]
    if mesh is not None:
        return low, leaves
    return low, [x.unflatten(0, (b, -1)) if b > 1 else x for x, b in zip(leaves, low.blocks, strict=True)]


def passes(program):
    for step in PASSES:
        program = everywhere(step, program)
    program.check()
    return program


def results(low, program, values):
    return [x for x in Executable(program, low.mesh.backend())(values) if isinstance(x, torch.Tensor)]


def count(program, *ops):
    return sum(n.op in ops for n, _, _ in walk(program))


def bodies(program):
    return [n.op.body for n, _, _ in walk(program) if isinstance(n.op, (LocalScan, LocalScanBackward))]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("options", [{}, dict(weight_gradient=False), dict(skip_first=1)])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_the_numbers_are_the_same(name, options, microbatches):
    low, values = lowered(name, microbatches=microbatches, **options)
    program = passes(low.program)
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_each_is_quantised_once(name):
    low, _ = lowered(name, torch.float32, torch.bfloat16)
    program = passes(low.program)
    forward, backward = bodies(program)
    assert count(program, rows_quantize_p, scaled_grouped_dw_p) == 0
    assert count(program, pair_p) == 3 and not count(forward, pair_p) and not count(backward, pair_p)
    for body, made in ((forward, 1), (backward, 2)):  # of tokens, sent and turned; gated rows, or their two cotangents
        assert count(body, quantize_p) == count(body, turn_rows_p) == 1 and count(body, turned_p) == made
    assert [count(b, scaled_grouped_p) for b in (forward, backward)] == [3, 2] and count(
        backward, scaled_grouped_add_p
    ) == 1
    assert count(backward, turned_dw_p) == 3 and count(program, gated_rows_bwd_p) == 1
    products = [n for b in (forward, backward) for n in b.nodes if n.op in (scaled_grouped_p, scaled_grouped_add_p)]
    assert all(n.args[6] for n in products)  # all matrices are read with what is contracted innermost
    assert all(n.args[6] is torch.float32 for n in backward.nodes if n.op is turned_dw_p)
    lies = sorted(n.args[6] for n in backward.nodes if n.op is turned_p)
    assert lies == [True, True]


def test_rows_of_the_gradient_alone_are_turned_alone():
    low, _ = lowered("rowwise", torch.float32, torch.bfloat16)
    program = passes(low.program)
    assert {n.args[6] for n, _, _ in walk(program) if n.op is turned_p} == {False}
    assert count(program, turned_dw_p) == 3 and count(program, scaled_grouped_dw_p, turn_rows_p) == 0


@pytest.mark.parametrize("name", ["tensorwise", "delayed", "blockwise"])
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [
        (dict(dp=2), dict(batch="dp")),
        (dict(dp=2), dict(batch="dp", experts="dp")),
        (dict(dp=2, tp=2), dict(batch="dp", experts="dp", expert_ff="tp")),
        (dict(dp=2), dict(batch="dp", experts="dp", dispatch_bound=2.0)),
    ],
)
def test_on_a_mesh(name, mesh, layout):
    low, values = lowered(name, mesh=Mesh(mesh), layout=Layout(**layout))
    program = passes(low.program)
    assert count(program, turned_p) > 0 or (name == "blockwise" and "experts" not in layout)
    want, got = (Compiled(low, Executable(p, low.mesh.backend()))(values) for p in (low.program, program))
    whole = lambda out: [x.global_value() for x in tree.leaves(out) if hasattr(x, "global_value")]
    for a, b in zip(whole(want), whole(got), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_all_of_it_lowers():
    for name in ("tensorwise", "delayed", "rowwise", "blockwise"):
        low, _ = lowered(name, torch.float32, torch.bfloat16, match="*layers*")
        lower(low.program, fused_fp8=True).check()


@pytest.mark.parametrize("sizes", [[3, 0, 130, 1], [0, 0], [5]])
def test_turned_rows(sizes):
    n = sum(sizes)
    x = torch.randn(n + 2, 8, generator=torch.Generator().manual_seed(0)).double()
    x[n:] = torch.nan
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    for grid in ((-1, 0), (-1, 1), (0, 0), (128, 1)):
        q, s = rows_quantize_p(x, rows_amax_p(x, ends, grid), None, ends, grid, Format("e4m3"))
        t, first = turn(q, ends).float(), 0
        for start, size in zip([0, *ends.tolist()], sizes, strict=False):
            tiles = -(-size // 128) * 128
            assert torch.equal(t[:, first : first + size].t(), q[start : start + size].float())
            assert t[:, first + size : first + tiles].eq(0).all()
            first += tiles
        want = scaled_grouped_dw_p(q, s, q, s, ends, (grid, grid), torch.float64)
        turned = turn(q, ends)
        got = turned_dw_p(turned, s, turned, s, ends, (grid, grid), torch.float64)
        torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)
