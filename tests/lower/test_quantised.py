"""FP8 operands in fewer passes: the same numbers, and each value read and written as often as it must."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, precision, tree
from fmeg.lower import lower
from fmeg.lower.norms import add_residual, rms_norm_bwd_sum_p, sum_cotangents
from fmeg.lower.quantised import quantise_once, quantise_stacks
from fmeg.lower.rewrite import everywhere
from fmeg.models import llama
from fmeg.ops.activations import swiglu_bwd_p, swiglu_p
from fmeg.ops.einsum import parse_equation
from fmeg.ops.rms_norm import rms_norm_p
from fmeg.precision.formats import amax_p, quantize_p
from fmeg.precision.pairs import largest_p, pair_p
from fmeg.precision.scaled import as_matmul, scaled_einsum_p
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScan, LocalScanBackward
from fmeg.step.lowered import Compiled

SIZES = dict(vocab_size=50, embed=16, layers=4, heads=4, kv_heads=2, head_dim=8, ff=24, vocab_multiple=2)


def lowered(name, dtype=torch.float64, compute=None, mesh=None, layout=None, microbatches=1, **options):
    cfg = llama.Config(**SIZES, dtype=dtype, compute_dtype=compute)
    recipe = precision.fp8(name, **options)
    params = llama.init(fmeg.random.key(0), cfg)
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(4, 8, dtype=dtype)}
    axes = {"params": llama.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    loss = lambda p, b: llama.loss(p, b, cfg)
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
    return everywhere(quantise_once, everywhere(quantise_stacks, program))


def results(low, program, values):
    return [x for x in Executable(program, low.mesh.backend())(values) if isinstance(x, torch.Tensor)]


def count(program, *ops):
    return sum(n.op in ops for n, _, _ in walk(program))


def bodies(program):
    return [n.op.body for n, _, _ in walk(program) if isinstance(n.op, (LocalScan, LocalScanBackward))]


ALL = dict(skip_first=0, skip_last=0)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("options", [ALL, {}, dict(weight_gradient=False)])
@pytest.mark.parametrize("name", ["tensorwise", "delayed", "rowwise", "blockwise"])
def test_the_numbers_are_the_same(name, options, microbatches):
    block = dict(block=8) if name == "blockwise" else {}
    low, values = lowered(name, microbatches=microbatches, **options, **block)
    program = passes(low.program)
    program.check()
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-16)


def test_bfloat16_parameters_are_quantised_from_what_they_were_before_the_cast():
    low, values = lowered("tensorwise", torch.float32, torch.bfloat16, **ALL)
    program = lower(low.program, fused_fp8=True)
    program.check()
    stacks = [n for n in program.nodes if n.op is pair_p]
    assert len(stacks) == 7 and all(n.args[1][0] in program.inputs and n.args[9] is torch.bfloat16 for n in stacks)
    (loss, *grads), (got, *others) = (results(low, p, values) for p in (low.program, program))
    assert torch.equal(loss, got)
    for a, b in zip(grads, others, strict=True):
        assert (a - b).norm() < 4e-3 * a.norm()


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_passes_over_memory(name):
    low, _ = lowered(name, **ALL)
    program = passes(low.program)
    forward, backward = bodies(program)
    assert count(program, quantize_p, swiglu_p, swiglu_bwd_p) == 0
    assert count(program, rms_norm_p) == 2  # before the head, and again for its gradient
    kinds = [n.args[0] for b in (forward, backward) for n in b.nodes if n.op is pair_p]
    # residual stream's norms, attention's result and swiglu forward; two cotangents, q k v and swiglu's backward
    assert sorted(kinds) == ["plain"] * 6 + ["rms_norm"] * 2 + ["swiglu", "swiglu_bwd"]
    found = [n.args[0] for b in (forward, backward) for n in b.nodes if n.op is largest_p]
    if name == "delayed":
        assert count(program, amax_p) == 0 and found == ["rms_norm"] * 2
    else:
        assert count(program, amax_p) == 6 and sorted(found) == ["rms_norm", "rms_norm", "swiglu", "swiglu_bwd"]


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_products_read_what_lies_right(name):
    """The contracted dimension of each operand comes last, as the hardware wants it."""
    low, _ = lowered(name, **ALL)
    products = [n for n, _, _ in walk(passes(low.program)) if n.op is scaled_einsum_p]
    assert len(products) == 21
    for n in products:
        mm = as_matmul(n.args[0])
        for names in parse_equation(n.args[0])[0]:
            rows = tuple(x for x in names if x not in mm.contracted)
            assert names == (*rows, *mm.contracted)


def test_one_layer_and_nothing_to_do():
    low, values = lowered("tensorwise", match="*wo*", **ALL)
    program = passes(low.program)
    assert count(program, pair_p) == 3  # parameter, attention's result, its cotangent
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-16)


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
def test_on_a_mesh(name):
    tp = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
    layout = Layout(batch="dp", res_seq="tp", params=dict(embed="dp"), **tp)
    low, values = lowered(name, mesh=Mesh(dp=2, tp=2), layout=layout, **ALL)
    program = passes(low.program)
    program.check()
    assert count(program, pair_p) > 0
    want, got = (Compiled(low, Executable(p, low.mesh.backend()))(values) for p in (low.program, program))
    for a, b in zip(tree.leaves(want), tree.leaves(got), strict=True):
        assert torch.allclose(a.global_value(), b.global_value(), rtol=1e-12, atol=1e-15)


def test_a_gradient_is_written_where_it_belongs():
    low, _ = lowered("tensorwise", torch.float32, torch.bfloat16, **ALL)
    program = lower(low.program, fused_fp8=True)
    backward = bodies(program)[1]
    written = 0
    for n in backward.nodes:
        write = scaled_einsum_p.lowerings["into"](n) if n.op is scaled_einsum_p else None
        if write is None:
            continue
        written += 1
        args = [torch.randn(v.shape).to(v.dtype) for v in n.operands()]
        want = scaled_einsum_p.run()(n.args[0], *args, *n.args[5:])
        result = torch.ones_like(want)
        write(result, *args, False)
        assert torch.equal(result, want)
        write(result, *args, True)
        assert torch.equal(result, want + want)
    assert written == 7


def test_cotangents_are_summed_where_the_norm_reads_them():
    low, values = lowered("tensorwise", **ALL)
    program = everywhere(sum_cotangents, everywhere(add_residual, low.program))
    program.check()
    found = [len(n.args[2]) for n, _, _ in walk(program) if n.op is rms_norm_bwd_sum_p]
    assert sorted(found) == [2, 3]  # gate and up; q, k and v
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-16)
