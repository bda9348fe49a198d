"""Four real processes (Gloo) against four virtual ranks: a whole training step, bit for bit in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fmeg import Array, Layout, Mesh, jit, random, tree
from fmeg.models import llama
from fmeg.testing.verify import config, make_batch, make_state, make_step, optimizer_under_test, run_steps
from tests.mesh import processes

TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
LAYOUTS = {
    "zero3 sp": (dict(dp=2, tp=2), Layout(batch="dp", **TP, res_seq="tp", params=dict(embed="dp")), 2),
    "zero1": (dict(dp=2, tp=2), Layout(batch="dp", **TP, opt=dict(embed="dp")), 1),
    "ring": (dict(cp=4), Layout(seq="cp", res_seq="cp", attention="ring"), 1),
    "ulysses": (dict(dp=2, cp=2), Layout(batch="dp", seq="cp", res_seq="cp", attention="ulysses"), 1),
}


def training_steps() -> None:
    """Each rank's own blocks of every parameter, moment, gradient and metric after two steps are the virtual rank's."""
    cfg, opt = config(), optimizer_under_test()
    state, batch = make_state(cfg, opt), make_batch(cfg)
    rank = dist.get_rank()
    for name, (axes, layout, microbatches) in LAYOUTS.items():
        step = make_step(cfg, opt, microbatches)
        runs = [
            run_steps(jit(step, mesh=Mesh(axes, backend=kind), layout=layout, strict=True), state, batch, 2)
            for kind in ("distributed", "loop")
        ]
        real, virtual = (tree.leaves(run) for run in runs)
        for path, a, b in zip(tree.paths(runs[0]), real, virtual, strict=True):
            assert a.spec == b.spec, (name, path)
            [mine] = a.addressable_shards
            theirs = b.addressable_shards[rank]
            assert mine.rank == rank and mine.index == theirs.index, (name, path)
            assert torch.equal(mine.data, theirs.data), (name, path)


def the_whole_equals_one_device() -> None:
    """And the tensors put together are those of one device, to rounding."""
    cfg, opt = config(), optimizer_under_test()
    state, batch = make_state(cfg, opt), make_batch(cfg)
    axes, layout, microbatches = LAYOUTS["zero3 sp"]
    step = make_step(cfg, opt, microbatches)
    got = jit(step, mesh=Mesh(axes), layout=layout)(state, batch)
    want = step(state, batch)
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(a.global_value(), b, rtol=1e-11, atol=1e-14, msg=path)


def initial_values() -> None:
    """Each process draws its own blocks only; together they are one device's bits."""
    cfg = config()
    axes, layout, _ = LAYOUTS["zero3 sp"]
    made = jit(lambda key: llama.init(key, cfg), mesh=Mesh(axes), layout=layout, out_axes=llama.logical_axes(cfg))
    for a, b in zip(tree.leaves(made(random.key(5))), tree.leaves(llama.init(random.key(5), cfg)), strict=True):
        assert isinstance(a, Array)
        [shard] = a.addressable_shards
        assert torch.equal(shard.data, b[shard.index])


CHECKS = [training_steps, the_whole_equals_one_device, initial_values]


@pytest.fixture(scope="module")
def failures():
    return processes.run(CHECKS, world=4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [c.__name__ for c in CHECKS])
def test_real_processes(check, failures):
    assert not failures[check], "\n".join(failures[check])
