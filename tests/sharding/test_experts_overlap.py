"""Exchanges of tokens go on while products run that need none of what comes."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, TrainState, ops, optim, tree
from fmeg.mesh.loop import LoopBackend
from fmeg.models import moe
from fmeg.ops.collectives import EXCHANGE_ROWS
from fmeg.sharding import groups
from fmeg.sharding.early import early
from fmeg.sharding.local import LocalScan, LocalScanBackward
from tests.sharding.test_overlap import Beginning, bodies, run

SIZES = dict(vocab_size=32, embed=16, layers=3, heads=4, kv_heads=2, head_dim=4, experts=8, expert_ff=24)
LAYOUTS = {
    "dp": (dict(dp=2), Layout(batch="dp", experts="dp")),
    "zero3": (dict(dp=2), Layout(batch="dp", experts="dp", params=dict(embed="dp"))),
    "folded": (dict(dp=2, tp=2), Layout(batch="dp", heads="tp", kv_heads="tp", res_seq="tp", experts=("tp", "dp"))),
}


def lowered(name, **more):
    cfg = moe.Config(**SIZES, router=ops.Router(top_k=3), **more)
    opt = optim.adamw(1e-2)
    params = tree.map(lambda x: x.double(), moe.init(fmeg.random.key(0), cfg))
    state = TrainState.create(params, opt, moe.logical_axes(cfg))
    ids = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(4, 16, dtype=torch.float64)}

    def step(state, batch):
        (loss, _), grads = fmeg.value_and_grad(lambda p, b: moe.loss(p, b, cfg))(state.params, batch)
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), loss

    sizes, layout = LAYOUTS[name]
    mesh = Mesh(sizes, backend="loop")
    return fmeg.jit(step, mesh=mesh, layout=layout).lower(state, batch), mesh, (state, batch)


def beside(op):
    """Of each exchange of a body as wide as the stream, in order: the operations between its begin and its wait."""
    found, _ = groups.grouped(early(op.body.nodes), begin=True)
    out = []
    for i, g in enumerate(found):
        n = g.nodes[0]
        if n.op is EXCHANGE_ROWS and n.outs[0].shape[-1] == SIZES["embed"]:
            until = next((j for j, later in enumerate(found) if i in later.waits), i + 1)
            out.append([m.opname for between in found[i + 1 : until] for m in between.nodes])
    return out


def test_gradients_of_weights_are_made_while_tokens_go_home():
    low, _, _ = lowered("dp")
    [op] = bodies(low.program, LocalScanBackward)
    there, back = beside(op)
    assert back.count("grouped_matmul_dw") == 3
    assert "grouped_matmul_dw" not in there  # they need what comes


def test_shared_experts_run_while_tokens_travel():
    low, _, _ = lowered("dp", shared_ff=64)
    [op] = bodies(low.program, LocalScan)
    assert sum(names.count("einsum") for names in beside(op)) == 3


def test_the_host_waits_once_tokens_are_packed():
    """The GPU packs while the host reads sizes; then they travel before anything else is done."""
    low, _, _ = lowered("dp")
    [op] = bodies(low.program, LocalScan)
    nodes = early(op.body.nodes)
    [read] = [i for i, n in enumerate(nodes) if n.opname == "to_host"]
    wide = next(i for i, n in enumerate(nodes) if n.op is EXCHANGE_ROWS and n.outs[0].shape[-1] == SIZES["embed"])
    assert any(nodes[i].outs[0] is nodes[wide].args[0][0] for i in range(read))
    assert not any(n.op is EXCHANGE_ROWS for n in nodes[:wide])
    assert {n.opname for n in nodes[read + 1 : wide]} <= {"aten.slice.Tensor"}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_bit_changes(name, late):
    low, mesh, args = lowered(name, shared_ff=8)
    backend = Beginning(mesh)
    backend.late = late
    got, want = run(low, mesh, args, backend), run(low, mesh, args, LoopBackend(mesh))
    for a, b in zip(got, want, strict=True):
        assert all(map(torch.equal, backend.local(a), backend.local(b)))
    assert backend.flying == 0 and backend.begun >= 2 * SIZES["layers"]
