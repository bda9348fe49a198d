"""Each rewrite keeps what a step computes, and does what it is for."""

from __future__ import annotations

import torch

import fmeg
from fmeg import ops, optim, tree
from fmeg.lower import lower
from fmeg.lower.added import add_products, einsum_add_p
from fmeg.lower.common import share
from fmeg.lower.hoist import hoist_casts
from fmeg.lower.late import delay
from fmeg.lower.norms import add_residual, rms_norm_bwd_add_p
from fmeg.lower.rewrite import everywhere, in_order
from fmeg.lower.wide import widen
from fmeg.models import llama
from fmeg.ops.einsum import einsum_p
from fmeg.ops.rms_norm import rms_norm_bwd_p, rms_norm_p
from fmeg.program.ir import Node, TensorType, Value
from fmeg.program.structured import walk
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScan, LocalScanBackward

CFG = llama.Config(
    vocab_size=50, embed=16, layers=3, heads=4, kv_heads=2, head_dim=8, ff=24, vocab_multiple=2,
    dtype=torch.float64, compute_dtype=torch.bfloat16,
)  # fmt: skip
cast = torch.ops.aten._to_copy.default


def lowered(compute_dtype=torch.bfloat16, dtype=torch.float32):
    cfg = llama.Config(**{**vars(CFG), "compute_dtype": compute_dtype, "dtype": dtype})
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))

    def step(params, state, batch):
        (loss, _), grads = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=2)(params, batch)
        updates, state = opt.update(grads, state, params)
        return optim.apply_updates(params, updates), state, loss

    params = llama.init(fmeg.random.key(0), cfg)
    ids = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(4, 8, dtype=dtype)}
    args = (params, opt.init(params), batch)
    low = fmeg.jit(step).lower(*args)
    leaves = [x for x in tree.leaves(args) if isinstance(x, torch.Tensor)]
    values = [x.unflatten(0, (b, -1)) if b > 1 else x for x, b in zip(leaves, low.blocks, strict=True)]
    return low, values


def results(low, program, values):
    return [x for x in Executable(program, low.mesh.backend())(values) if isinstance(x, torch.Tensor)]


def count(program, what):
    return sum(n.op is what for n, _, _ in walk(program))


def bodies(program):
    return [n.op.body for n, _, _ in walk(program) if isinstance(n.op, (LocalScan, LocalScanBackward))]


def test_all_of_them_in_float64_change_nothing_but_the_order_of_sums():
    low, values = lowered(None, torch.float64)
    program = lower(low.program)
    program.check()
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-15)


def test_all_of_them_in_bfloat16_are_near():
    low, values = lowered()
    program = lower(low.program)
    program.check()
    loss, mine = (results(low, p, values)[-1] for p in (low.program, program))
    assert abs(float(loss) - float(mine)) < 2e-3 * float(loss)


def test_casts_leave_the_scans():
    low, values = lowered()
    program = everywhere(hoist_casts, low.program)
    program.check()
    to_half = [
        n for b in bodies(program) for n in b.nodes if n.op is cast and n.kwargs["dtype"] is torch.bfloat16
        and any(v is n.args[0] for v in b.inputs)
    ]  # fmt: skip
    assert len(bodies(low.program)) == 2
    assert not to_half
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.equal(a, b)


def test_casts_leave_a_scan_that_takes_the_stack_whole_too_and_casts_again():
    def fn(x):
        def layer(c, r):
            narrow = r.float()
            return c + narrow.double() + (narrow + 1 / 3).double(), (narrow * 3).sum()

        return fmeg.scan(lambda c, r: layer(c + x, r), x, x)

    x = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    program = fmeg.jit(fn).lower(x).program
    hoisted = everywhere(hoist_casts, program)
    hoisted.check()
    assert [n.op for n in hoisted.nodes][0] is cast
    backend = fmeg.Mesh().backend()
    for p in (program, hoisted):
        got = [y for y in Executable(p, backend)([x]) if isinstance(y, torch.Tensor)]
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, fn(x), strict=True))


def test_a_cast_of_the_head_waits_and_repeated_norms_are_one():
    low, values = lowered()
    program = everywhere(share, everywhere(delay, low.program))
    program.check()
    assert count(low.program, rms_norm_p) - count(program, rms_norm_p) == 1  # the last norm, for the head's gradient
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.equal(a, b)


def test_gradients_of_weights_are_summed_into_float32():
    low, values = lowered()
    program = everywhere(widen, low.program)
    program.check()
    wide = [n for n, _, _ in walk(program) if n.op is einsum_p and n.kwargs.get("dtype") is torch.float32]
    assert len(wide) == 8  # q k v o gate up down, and the head
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=0.1, atol=2e-2)


def test_residual_and_norm_gradients_meet_in_one_operation():
    low, values = lowered(None, torch.float64)
    program = everywhere(add_residual, low.program)
    program.check()
    assert count(program, rms_norm_bwd_add_p) == 2
    assert count(program, rms_norm_bwd_p) == count(low.program, rms_norm_bwd_p) - 2
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-16)


def test_norm_gradients_are_not_added_to_what_needs_them():
    def step(params):
        norm = lambda p, k: ops.rms_norm(p["x" + k], p["w" + k]).sin().sum()
        _, g = fmeg.value_and_grad(lambda p, _: (norm(p, "0") + norm(p, "1"), 1))(params, torch.zeros(1))
        return g["x0"] + g["w0"], g["x0"] + g["w1"].sin(), g["x1"] + g["w0"], params["x1"] + g["x1"] * 2

    def crossed(params):
        norm = lambda p, k: ops.rms_norm(p["x" + k], p["w" + k]).sin().sum()
        _, g = fmeg.value_and_grad(lambda p, _: (norm(p, "0") + norm(p, "1"), 1))(params, torch.zeros(1))
        return g["x0"] + g["w1"], g["x1"] + g["w0"]

    random = torch.Generator().manual_seed(0)
    params = {k: torch.randn(3, dtype=torch.float64, generator=random) for k in ("x0", "w0", "x1", "w1")}
    for fn in (step, crossed, lambda p: crossed(p)[0] * step(p)[0]):
        program = lower(fmeg.jit(fn).lower(params).program)
        got = Executable(program, fmeg.Mesh().backend())(list(tree.leaves(params)))
        for a, b in zip(got, tree.leaves(fn(params)), strict=True):
            assert torch.allclose(a, b, rtol=1e-12)


def test_sums_of_products_begin_from_what_was_there():
    low, values = lowered()
    program = everywhere(add_products, low.program)
    program.check()
    added = [n for n, _, _ in walk(program) if n.op is einsum_add_p]
    assert len(added) == 5  # two blocks onto the residual stream; gradients through q k v and gate up
    assert [n.kwargs["free"] for n in added].count(True) == 3
    for a, b in zip(results(low, low.program, values), results(low, program, values), strict=True):
        assert torch.allclose(a.double(), b.double(), rtol=0.1, atol=2e-2)


def test_order():
    def node(*operands):
        made = Node(cast, operands, {})
        made.outs = (Value(TensorType((1,), torch.float32), made),)
        return made

    a = node(Value(TensorType((1,), torch.float32)))
    b = node(a.outs[0])
    c = node(a.outs[0], b.outs[0])
    assert in_order([c, b, a]) == [a, b, c]
    assert in_order([a, c, b]) == [a, b, c]
    a.args = (c.outs[0],)
    assert in_order([a, b, c]) is None
