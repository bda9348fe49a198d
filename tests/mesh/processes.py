"""Run functions on real Gloo processes, one a rank, many checks in one start."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from fmeg.mesh import init_distributed

Check = Callable[[], None]


def run(checks: Sequence[Check], world: int) -> dict[str, list[str]]:
    """Each check's tracebacks, one for each process on which it raised. `checks` are functions of a module.

    A check that hangs because another process raised ends with Gloo's timeout.
    """
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        # One clean process imports torch, the ranks are its forks: a quarter of the start of four.
        multiprocessing.set_forkserver_preload(["torch.distributed.tensor"])
        mp.start_processes(_work, (list(checks), world, port, folder), nprocs=world, start_method="forkserver")
        out: dict[str, list[str]] = {c.__name__: [] for c in checks}
        for rank in range(world):
            for name, error in torch.load(Path(folder, str(rank))).items():
                out[name] += [f"rank {rank}: {error}"] if error else []
        return out


def _work(rank: int, checks: list[Check], world: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), CUDA_VISIBLE_DEVICES="")
    init_distributed(timeout=timedelta(seconds=60))
    results = {}
    for check in checks:
        try:
            check()
            results[check.__name__] = ""
        except Exception:
            results[check.__name__] = traceback.format_exc()
    torch.save(results, Path(folder, str(rank)))
    with contextlib.suppress(RuntimeError):  # a check may break the group on purpose
        dist.barrier()
    dist.destroy_process_group()
