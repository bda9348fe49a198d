"""A rank alone, whose peers hold what it holds: collectives as among ranks that do."""

from __future__ import annotations

import pytest
import torch

import fmeg
from benchmarks.alone import alone
from benchmarks.gpu import random_state
from benchmarks.gpu_two import LAYOUTS, TINY, TINY_MOE, make_step
from fmeg import Mesh
from fmeg.mesh.transport import PIECE_BYTES

CPU = torch.device("cpu")


@pytest.mark.parametrize("n", [2, 3])
def test_collectives_are_those_of_ranks_that_hold_the_same(n):
    here, mesh = alone("a", n, CPU).backend(), Mesh(a=n, backend="loop")
    there = mesh.backend()
    g = torch.Generator().manual_seed(0)
    whole = lambda *shape: torch.randint(-9, 9, shape, generator=g).double()
    xs = [whole(n, 2 * n), whole(2, n, PIECE_BYTES // 16), whole(3 * n, n, 2)]  # the second moves in pieces
    for name, args in (
        ("all_reduce", ("sum",)),
        ("all_reduce", ("max",)),
        ("all_gather", ([1, 1, 2],)),
        ("reduce_scatter", ([1, 1, 0],)),
        ("all_to_all", ([0, 1, 0], [1, 0, 2])),
    ):
        values = [there.from_local([x] * n, ((),) * x.ndim) for x in xs]
        want = [there.local(v)[0] for v in getattr(there, name)(values, ("a",), *args)]
        got = getattr(here, name)(xs, ("a",), *args)
        begun = getattr(here, f"start_{name}")(xs, ("a",), *args)()
        for a, b, c in zip(got, begun, want, strict=True):
            assert torch.equal(a, c) and torch.equal(b, c) and a.is_contiguous(), name


@pytest.mark.parametrize("name", ["fsdp", "tensor", "experts", "experts-gathered"])
def test_layouts_run(name):
    cfg, (_, seq) = TINY_MOE if name.startswith("experts") else TINY
    axis, layout, _ = LAYOUTS[name]
    mesh = alone(axis, 2, CPU)
    step, optimizer = make_step(cfg)
    ids = torch.randint(0, cfg.vocab_size, (2, seq + 1), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous(), "mask": torch.ones(2, seq)}
    state, metrics = fmeg.jit(step, mesh=mesh, layout=layout)(random_state(cfg, optimizer, mesh), batch)
    assert torch.isfinite(metrics["loss"].addressable_shards[0].data)
