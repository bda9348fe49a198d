"""Pipelines between GPUs: four processes, NCCL; reductions and gathers on their way while stages compute."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fmeg import Layout, Mesh
from fmeg.mesh import init_distributed
from fmeg.pipeline import by_name, record
from tests.pipeline.test_runtime import batch, close, config, run

pytestmark = pytest.mark.gpu

LAYOUTS = {
    "data parallel": Layout(layers="pp", batch="dp"),
    "ZeRO-1": Layout(layers="pp", batch="dp", opt=dict(embed="dp")),
    "ZeRO-3": Layout(layers="pp", batch="dp", params=dict(embed="dp")),
}


def check() -> None:
    """Loss and gradients of every schedule and layout equal one device's; REDUCE begins before other stages' work."""
    cfg, data = config(8), batch(16)
    want = run(cfg, data, microbatches=4)
    want = want[0].cpu(), [g.cpu() for g in want[1]]
    for name, layout in LAYOUTS.items():
        for schedule in ("1f1b", "zb_h1", "zb_v", "dualpipe_v", "interleaved_1f1b"):
            made = by_name(schedule, ranks=2, microbatches=4)
            for once in (False, True) if name == "ZeRO-3" else (False,):
                got = run(
                    cfg,
                    data,
                    mesh=Mesh(dp=2, pp=2, backend="distributed"),
                    layout=layout,
                    microbatches=4,
                    schedule=made.with_messages(parameters=True) if once else made,
                )
                assert close((got[0].cpu(), [g.cpu() for g in got[1]]), want), (name, schedule, once)
    with record() as recording:
        run(
            cfg,
            data,
            mesh=Mesh(dp=2, pp=2, backend="distributed"),
            layout=LAYOUTS["ZeRO-1"],
            microbatches=4,
            schedule="interleaved_1f1b",
        )
    events = recording.last().gathered().events
    assert sum(a.kind == "REDUCE" for _, a, *_ in events) == 2 * 2


def _work(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="localhost", MASTER_PORT=str(port)
    )
    init_distributed(timeout=timedelta(seconds=120))
    check()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_four_gpus():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    mp.start_processes(_work, (port,), nprocs=4, start_method="spawn")
