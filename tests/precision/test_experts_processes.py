"""Experts in FP8 on four real processes (Gloo), against four virtual ranks, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fmeg import Layout, Mesh, jit, precision, tree, value_and_grad
from tests.mesh import processes
from tests.ops.experts import AXES, BATCH_AXES, loss, problem

ALL = dict(match="*w_*", skip_first=0, skip_last=0)
CASES = [
    (precision.fp8(**ALL), dict(dp=4), dict(batch="dp", experts="dp")),
    (precision.fp8("rowwise", **ALL), dict(dp=2, cp=2), dict(batch="dp", seq="cp", experts=("cp", "dp"))),
    (precision.fp8("blockwise", block=2, **ALL), dict(dp=2, tp=2), dict(batch="dp", expert_ff="tp")),
    (precision.fp8("delayed", **ALL), dict(dp=4), dict(batch="dp", experts="dp", dispatch_bound=4.0)),
]


def low_precision() -> None:
    rank = dist.get_rank()
    for recipe, mesh, layout in CASES:
        params, batch = problem(layers=2, drop=True)
        axes = {"p": AXES, "b": {k: BATCH_AXES[k] for k in batch}}

        def step(p, b, recipe=recipe):
            return value_and_grad(lambda p, b: loss(p, b, "rows"), precision=recipe)(p, b)

        runs = [
            jit(step, mesh=Mesh(mesh, backend=backend), layout=Layout(**layout), axes=axes)(params, batch)
            for backend in ("distributed", "loop")
        ]
        for path, a, b in zip(tree.paths(runs[0]), *map(tree.leaves, runs), strict=True):
            if hasattr(a, "addressable_shards"):
                [mine] = a.addressable_shards
                assert torch.equal(mine.data, b.addressable_shards[rank].data), (recipe.name, path)


@pytest.mark.distributed
def test_real_processes():
    failures = processes.run([low_precision], world=4)["low_precision"]
    assert not failures, "\n".join(failures)
