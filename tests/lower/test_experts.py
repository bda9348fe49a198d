"""A layer of experts in fewer passes: fewer operations, the same numbers."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fmeg import Layout, Mesh, jit, random, tree, value_and_grad
from fmeg.kernels.grouped import beside
from fmeg.lower import lower
from fmeg.models import moe, presets
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScan, LocalScanBackward
from fmeg.step.lowered import Compiled
from tests.ops.experts import AXES, BATCH_AXES, layer, problem, step


def bodies(program):
    yield program
    for n in program.nodes:
        if hasattr(n.op, "body"):
            yield from bodies(n.op.body)


def counts(program):
    found = {}
    for body in bodies(program):
        for n in body.nodes:
            found[n.opname] = found.get(n.opname, 0) + 1
    return found


def jitted(weighted, mode="inductor", mesh=None, **layout):
    axes = {"params": AXES, "batch": BATCH_AXES}
    return jit(partial(step, weighted=weighted), mesh=mesh or Mesh(), layout=Layout(**layout), axes=axes, mode=mode)


def values(x):
    return [leaf.global_value() if hasattr(leaf, "global_value") else leaf for leaf in tree.leaves(x)]


@pytest.mark.parametrize(("weighted", "forward"), [("rows", 2), ("combine", 3)])
def test_operations_of_a_layer(weighted, forward):
    """One pair of products each way; the activation's gradient in one operation, with the weights where it has some."""
    program = lower(jitted(weighted).lower(*problem(layers=2, drop=True)).program)
    found = counts(program)
    assert found["grouped_pair"] == 2 and found["grouped_matmul"] == 2 and found["grouped_matmul_dw"] == 3
    assert found["gated_rows_bwd"] == 1 and "swiglu_bwd" not in found and "row_dot" not in found
    assert (found.get("gated_rows", 0), found.get("swiglu", 0)) == ((1, 0) if weighted == "rows" else (0, 1))
    assert "scale_rows" not in found


def rewritten(fn, *given):
    """What a step computes once its Program is rewritten, without a compiler."""
    low = fn.lower(*given)
    run = Compiled(low, Executable(lower(low.program), low.mesh.backend()))
    return values(run([x for x in tree.leaves(given) if isinstance(x, torch.Tensor)]))


@pytest.mark.parametrize("weighted", ["rows", "combine"])
@pytest.mark.parametrize("routing", ["random", "empty"])
def test_same_numbers(weighted, routing):
    """On one device, and on virtual meshes whose experts are sharded and are not."""
    given = problem(layers=2, drop=True, routing=routing)
    want = values(step(*given, weighted=weighted))
    loop = Mesh(dp=2, backend="loop")
    for mesh, layout in ((Mesh(), {}), (loop, dict(batch="dp", experts="dp")), (loop, dict(batch="dp"))):
        for a, b in zip(rewritten(jitted(weighted, "eager", mesh, **layout), *given), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("weighted", ["rows", "combine"])
def test_layers_outside_a_loop(weighted):
    """The activation of the forward pass, whose gradient needs what comes of it, stays."""

    def loss(p, b):
        x = p["x"]
        for i in range(2):
            x = layer({k: v[i] for k, v in p.items() if k != "x"}, x, b, weighted)
        return ((x - b["target"]) ** 2).sum(), 1

    given = problem(layers=2, drop=True)
    step = lambda params, batch: value_and_grad(loss)(params, batch)
    axes = {"params": AXES, "batch": BATCH_AXES}
    for mesh, layout in ((Mesh(), {}), (Mesh(dp=2, backend="loop"), dict(batch="dp", experts="dp"))):
        fn = jit(step, mesh=mesh, layout=Layout(**layout), axes=axes)
        for a, b in zip(rewritten(fn, *given), values(step(*given)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_compiled():
    """Sizes of experts are not read while the step is compiled: other routings run through the same code."""
    fn = jitted("rows")
    for routing in ("random", "skewed", "empty"):
        given = problem(layers=2, drop=True, routing=routing)
        for a, b in zip(values(fn(*given)), values(step(*given, weighted="rows")), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_casts_of_a_pair_share_memory():
    """In bf16 both stacks are cast into one tensor, outside the loops, and gradients come out of products in
    float32."""
    cfg = presets.get("tiny-moe", compute_dtype=torch.bfloat16)
    params = moe.init(random.key(0), cfg)
    ids = torch.randint(0, 257, (2, 4, 16), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[0], "targets": ids[1], "mask": torch.ones(4, 16)}
    axes = {"params": moe.logical_axes(cfg), "batch": moe.batch_axes()}

    def step(params, batch):
        return value_and_grad(lambda p, b: moe.loss(p, b, cfg))(params, batch)

    fn = jit(step, mesh=Mesh(), layout=Layout(), axes=axes)
    program = lower(fn.lower(params, batch).program)
    assert counts(program)["beside"] == 1
    for body in bodies(program):
        for n in body.nodes:
            assert n.opname != "grouped_matmul_dw" or n.outs[0].dtype == torch.float32
            if isinstance(n.op, (LocalScan, LocalScanBackward)):
                assert not any(m.opname == "beside" for m in n.op.body.nodes)
    for a, b in zip(rewritten(fn, params, batch), values(fn(params, batch)), strict=True):
        assert float((a - b).double().norm()) <= 0.03 * float(b.double().norm())


def test_beside():
    both = torch.arange(24.0).view(2, 3, 4)
    a, b = both[..., :2], both[..., 2:]
    assert beside(a, b).data_ptr() == both.data_ptr() and torch.equal(beside(a, b), both)
    for x, y in ((b, a), (a.contiguous(), b), (a, a), (a, b + 0)):
        assert torch.equal(beside(x, y), torch.cat([x, y], 2)) and beside(x, y).data_ptr() != both.data_ptr()
