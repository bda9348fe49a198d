"""Measuring on several GPUs at once, one process each: what they send one another, beside what they compute.

Milliseconds between CUDA events of what is launched on a stream, medians over repeats that take turns, of the slowest
GPU. All GPUs start together, with the launches ahead of them. On CPUs, with Gloo, it runs too: a rehearsal.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
Thunk = Callable[[], Tensor | None]
Makers = Mapping[str, Callable[[], Thunk]]
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Row:
    """table, case, how: what was measured; `why` it was not; `other_ms`: of the collectives beside products."""

    table: str
    case: str
    how: str
    ms: float | None = None
    gb_s: float | None = None
    other_ms: float | None = None
    why: str = ""


def start(device: str, repeats: int) -> Bench:
    """Joins the processes that `torchrun` started. NVLink multicast is switched off in NCCL and in symmetric memory."""
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    wait = timedelta(seconds=60)
    if device == "cpu":
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=wait)
        return Bench(torch.device("cpu"), repeats)
    here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(here)
    dist.init_process_group("nccl", timeout=wait, device_id=here)
    return Bench(here, repeats)


class Bench:
    """Where it runs, what was measured so far."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats, self.cuda = device, repeats, device.type == "cuda"
        self.rank, self.n = dist.get_rank(), dist.get_world_size()
        self.others = [(self.rank + i) % self.n for i in range(1, self.n)]
        self.group = dist.group.WORLD.group_name
        self.rows: list[Row] = []
        self.stream = torch.cuda.Stream() if self.cuda else None
        self.start = torch.zeros(1, device=device)

    def say(self, row: Row) -> None:
        self.rows.append(row)
        numbers = f"{row.ms:9.3f} ms" if row.ms is not None else f"        - {row.why}"
        numbers += f" {row.gb_s:7.1f} GB/s" if row.gb_s else ""
        numbers += f"   collectives {row.other_ms:.3f} ms" if row.other_ms else ""
        if self.rank == 0:
            print(f"{row.table:12}{row.case:26}{row.how:34}{numbers}", flush=True)

    def save(self, path: str) -> None:
        if self.rank == 0:
            facts = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if self.cuda else "cpu"}
            Path(path).write_text(
                json.dumps({**facts, "gpus": self.n, "rows": [asdict(r) for r in self.rows]}, indent=1)
            )

    def random(self, *shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
        """Others on each rank."""
        seed = torch.Generator(self.device).manual_seed(1 + self.rank)
        return torch.randn(*shape, device=self.device, generator=seed).mul_(scale).to(dtype)

    def mark(self) -> Any:
        """A point in time of the current stream."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) if self.cuda else (b - a) * 1e3

    def apart(self) -> Any:
        """Launch on the other stream, after what was launched so far."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def finish(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def slowest(self, ms: float) -> float:
        worst = torch.tensor(ms, device=self.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return float(worst)

    def together(self) -> None:
        """All GPUs from here on, when the launches are ahead."""
        self.finish()
        if self.cuda:
            torch.cuda._sleep(1_000_000)
        dist.all_reduce(self.start)

    def attempt(self, table: str, case: str, how: str, make: Callable[[], T]) -> T | None:
        """What it makes, or a row that says why not."""
        try:
            return make()
        except (RuntimeError, AttributeError, ImportError, TypeError, NotImplementedError, ValueError) as error:
            why = (str(error).splitlines() or [""])[0]
            self.say(Row(table, case, how, why=f"{type(error).__name__}: {why}"[:200]))
            return None

    def measure(self, table: str, case: str, makers: Makers, out: Tensor | None = None, nbytes: float = 0) -> None:
        """A row for each. Results must be those of the first that gives one; `out`: where they write them."""
        fns: dict[str, Thunk] = {}
        want: Tensor | None = None
        for how, make in makers.items():
            if out is not None:
                out.zero_()

            def first(make: Callable[[], Thunk] = make) -> tuple[Thunk, Tensor | None]:
                fn = make()
                got = fn()
                self.finish()
                return fn, got

            made = self.attempt(table, case, how, first)
            if made is None:
                continue
            fns[how], got = made
            if got is not None and want is None:
                want = got.clone()
            elif got is not None:
                torch.testing.assert_close(
                    got, want, rtol=2e-2, atol=5e-2, msg=lambda m, how=how: f"{case}, {how}: {m}"
                )
        spans: dict[str, list[float]] = {how: [] for how in fns}
        for _ in range(self.repeats):
            for how, fn in fns.items():
                spans[how].append(self.span(fn))
        for how, span in spans.items():
            ms = self.slowest(median(span))
            self.say(Row(table, case, how, ms, nbytes / ms * 1e-6 or None))

    def span(self, fn: Thunk) -> float:
        self.together()
        a = self.mark()
        fn()
        b = self.mark()
        self.finish()
        return self.between(a, b)

    def beside(self, product: Thunk, other: Thunk | None, products: int = 8, others: int = 10) -> tuple[float, float]:
        """Milliseconds of so many products, and of as many others that go on from the third on."""
        self.together()
        a = self.mark()
        product()
        product()
        with self.apart():
            c = self.mark()
            for _ in range(others if other else 0):
                other()  # type: ignore[misc]
            d = self.mark()
        for _ in range(products - 2):
            product()
        b = self.mark()
        self.join()
        self.finish()
        return self.between(a, b), self.between(c, d) if other else 0.0


class Peers:
    """Memory of this GPU that the others read, and theirs: symmetric memory."""

    def __init__(self, b: Bench, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if not b.cuda:
            raise NotImplementedError("CUDA only")
        import torch.distributed._symmetric_memory as symm

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            symm.enable_symm_mem_for_group(b.group)
        self.own = symm.empty(*shape, dtype=dtype, device=b.device)
        self.handle = symm.rendezvous(self.own, b.group)
        self.all = [self.handle.get_buffer(r, shape, dtype) for r in range(b.n)]

    def barrier(self) -> None:
        """On the current streams of all GPUs."""
        self.handle.barrier(channel=0)


def fused(b: Bench, name: str) -> Any:
    if not b.cuda:
        raise NotImplementedError("CUDA only")
    Peers(b, (16,), torch.uint8)
    return getattr(torch.ops.symm_mem, name)


class Pool:
    """Memory that is registered with NCCL."""

    def __init__(self, b: Bench, numel: int, dtype: torch.dtype) -> None:
        if not b.cuda:
            raise NotImplementedError("CUDA only")
        backend = dist.group.WORLD._get_backend(b.device)
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        with torch.cuda.use_mem_pool(self.pool):
            self.a, self.b = (torch.empty(numel, dtype=dtype, device=b.device) for _ in range(2))
        backend.register_mem_pool(self.pool)

    def two(self, numel: int) -> tuple[Tensor, Tensor]:
        return self.a[:numel], self.b[:numel]


def giving(out: Tensor | None, fn: Callable[[], Any]) -> Thunk:
    """`fn`, whose result is in `out`, or is not compared."""

    def run() -> Tensor | None:
        fn()
        return out

    return run
