"""Ways to hide what GPUs send each other behind matrix products, beside one another.

    torchrun --nproc_per_node=2 -m benchmarks.overlap [--only products …] [--json FILE]
    torchrun --nproc_per_node=2 -m benchmarks.overlap --device cpu --tiny          # a rehearsal, Gloo

products      the four products of a layer with tensor and sequence parallelism, D2's widths, 16384 tokens in all:
              tokens are gathered, then multiplied (qkv, gate and up), or multiplied, then summed and scattered (out,
              down). "chunks": of rows, each multiplied while another travels. "own rows": first (last) those that need
              not travel. "copies": from the other GPU's memory by the copy engines, no SM
collectives   alone, GB/s of bus bandwidth as nccl-tests counts it: buffers from torch's allocator, registered with
              NCCL, and copies. MiB are those of the whole tensor
beside        eight products of gate and up's size, and ten collectives on another stream meanwhile: what one costs the
              other, by the number of SMs (CTAs) that NCCL may take

Every result is compared with that of the plain way. NVLink multicast stays off. How times are taken: `together`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.together import Bench, Makers, Peers, Pool, Row, Thunk, all_gather, fused, giving, reduce_scatter, start

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    """heads: width of all queries; kv_heads: of all keys; whole, beside: MiB."""

    tokens: int = 16384
    embed: int = 4096
    heads: int = 4096
    kv_heads: int = 1024
    ff: int = 14336
    whole: tuple[float, ...] = (16, 64, 256)
    beside: float = 256
    dtype: torch.dtype = torch.bfloat16


TINY = Sizes(64, 32, 32, 16, 64, (0.01, 0.02), 0.02, torch.float32)


def gathered(b: Bench, x: Tensor, w: Tensor) -> tuple[Makers, Tensor]:
    """x [m, k] of this rank, w [k, f]: the product [n m, f] of all ranks' rows; where it is written."""
    n, (m, k), f = b.n, x.shape, w.shape[1]
    whole, y = x.new_empty(n, m, k), x.new_empty(n, m, f)
    flat, out = whole.view(n * m, k), y.view(n * m, f)

    def plain() -> None:
        all_gather(flat, x)
        torch.mm(flat, w, out=out)

    def chunked(c: int) -> Thunk:
        parts, xs, ys = whole.view(c, n, m // c, k), x.chunk(c), y.view(n, c, m // c, f)

        def run() -> None:
            works = [all_gather(p.flatten(0, 1), a, async_op=True) for p, a in zip(parts, xs, strict=True)]
            for i, work in enumerate(works):
                work.wait()
                torch.bmm(parts[i], w.expand(n, -1, -1), out=ys[:, i])

        return giving(out, run)

    def own_first() -> None:
        work = all_gather(flat, x, async_op=True)
        torch.mm(x, w, out=y[b.rank])
        work.wait()
        for r in b.others:
            torch.mm(whole[r], w, out=y[r])

    def copied() -> Thunk:
        peers = Peers(b, (m, k), x.dtype)
        peers.own.copy_(x)

        def run() -> None:
            peers.barrier()
            with b.apart():
                for r in b.others:
                    whole[r].copy_(peers.all[r])
            torch.mm(x, w, out=y[b.rank])
            b.join()
            for r in b.others:
                torch.mm(whole[r], w, out=y[r])
            peers.barrier()

        return giving(out, run)

    def of_torch() -> Thunk:
        op = fused(b, "fused_all_gather_matmul")
        return lambda: op(x, [w], 0, b.group)[1][0]

    return {
        "collective alone": lambda: giving(None, lambda: all_gather(flat, x)),
        "product alone": lambda: giving(None, lambda: torch.mm(flat, w, out=out)),
        "one after the other": lambda: giving(out, plain),
        **{f"{c} chunks": partial(chunked, c) for c in (2, 4, 8)},
        "own rows first": lambda: giving(out, own_first),
        "own rows first, copies": copied,
        "torch's fused_all_gather_matmul": of_torch,
    }, out


def scattered(b: Bench, x: Tensor, w: Tensor) -> tuple[Makers, Tensor]:
    """x [n m, k], w [k, f], both a part of k: this rank's rows [m, f] of the product summed over ranks; likewise."""
    n, m, k, f = b.n, x.shape[0] // b.n, x.shape[1], w.shape[1]
    part, y, xs = x.new_empty(n * m, f), x.new_empty(m, f), x.view(n, m, k)

    def plain() -> None:
        torch.mm(x, w, out=part)
        reduce_scatter(y, part)

    def chunked(c: int) -> Thunk:
        parts, rows, ys = part.view(c, n, m // c, f), x.view(n, c, m // c, k), y.chunk(c)

        def run() -> None:
            works = []
            for i in range(c):
                torch.bmm(rows[:, i], w.expand(n, -1, -1), out=parts[i])
                works.append(reduce_scatter(ys[i], parts[i].flatten(0, 1), async_op=True))
            for work in works:
                work.wait()

        return giving(y, run)

    def copied() -> Thunk:
        peers, got = Peers(b, (n, m, f), x.dtype), x.new_empty(n, m, f)

        def run() -> None:
            for r in b.others:
                torch.mm(xs[r], w, out=peers.own[r])
            peers.barrier()
            with b.apart():
                for r in b.others:
                    got[r].copy_(peers.all[r][b.rank])
            torch.mm(xs[b.rank], w, out=y)
            b.join()
            for r in b.others:
                y.add_(got[r])
            peers.barrier()

        return giving(y, run)

    def of_torch() -> Thunk:
        op = fused(b, "fused_matmul_reduce_scatter")
        return lambda: op(x, w, "sum", 0, b.group)

    return {
        "collective alone": lambda: giving(None, lambda: reduce_scatter(y, part)),
        "product alone": lambda: giving(None, lambda: torch.mm(x, w, out=part)),
        "one after the other": lambda: giving(y, plain),
        **{f"{c} chunks": partial(chunked, c) for c in (2, 4, 8)},
        "own rows last, copies": copied,
        "torch's fused_matmul_reduce_scatter": of_torch,
    }, y


def products(b: Bench, s: Sizes) -> None:
    n, t = b.n, s.tokens
    columns = {"qkv": (s.heads + 2 * s.kv_heads) // n, "gate and up": 2 * s.ff // n}
    rows = {"out": s.heads // n, "down": s.ff // n}
    random = partial(b.random, dtype=s.dtype)
    for name, f in columns.items():
        x, w = random(t // n, s.embed), random(s.embed, f, scale=s.embed**-0.5)
        b.measure("products", name, *gathered(b, x, w))
    for name, k in rows.items():
        x, w = random(t, k), random(k, s.embed, scale=(n * k) ** -0.5)
        b.measure("products", name, *scattered(b, x, w))


def collectives(b: Bench, s: Sizes) -> None:
    registered = cache(lambda: Pool(b, int(max(s.whole) * MIB) // s.dtype.itemsize, s.dtype))
    for mib in s.whole:
        m = int(mib * MIB) // s.dtype.itemsize // b.n
        data = b.random(b.n * m, dtype=s.dtype)
        once = data.nbytes * (b.n - 1) / b.n
        for name, makers in of_size(b, data, registered).items():
            nbytes = 2 * once if name == "all_reduce" else once
            b.measure("collectives", f"{name} {mib:g} MiB", makers, nbytes=nbytes)


def of_size(b: Bench, data: Tensor, registered: Callable[[], Pool]) -> dict[str, Makers]:
    """data [n m], another on each rank: its first m elements gathered; all reduced and scattered; all reduced."""
    n, m, d = b.n, data.numel() // b.n, data.dtype

    def moved(name: str, special: bool) -> Thunk:
        sent, got = registered().two(n * m) if special else (torch.empty_like(data), torch.empty_like(data))
        sent.copy_(data)
        got.zero_()
        if name == "all_gather":
            return giving(got, lambda: all_gather(got, sent[:m]))
        if name == "reduce_scatter":
            return giving(got[:m], lambda: reduce_scatter(got[:m], sent))
        return giving(sent, lambda: dist.all_reduce(sent))  # in place: twice as much each time

    def copied(name: str) -> Thunk:
        """Each GPU fetches what it needs; sums are a kernel of their own."""
        whole, part = Peers(b, (n, m), d), Peers(b, (m,), d)
        whole.own.copy_(data.view(n, m))
        part.own.copy_(data[:m])
        got, out = torch.empty_like(whole.own), torch.empty_like(whole.own)

        def run() -> None:
            whole.barrier()
            if name != "all_gather":
                for r in range(n):
                    got[r].copy_(whole.all[r][b.rank])
                torch.sum(got, 0, out=part.own)
                part.barrier()
            if name != "reduce_scatter":
                for r in range(n):
                    out[r].copy_(part.all[r])
                part.barrier()

        return giving(part.own if name == "reduce_scatter" else out.view(-1), run)

    ways = {"plain": partial(moved, special=False), "registered": partial(moved, special=True), "copies": copied}
    names = ("all_gather", "reduce_scatter", "all_reduce")
    return {name: {how: partial(way, name) for how, way in ways.items()} for name in names}


def beside(b: Bench, s: Sizes) -> None:
    d, m = s.dtype, int(s.beside * MIB) // s.dtype.itemsize // b.n
    x, w = b.random(s.tokens // 2, s.embed, dtype=d), b.random(s.embed, s.ff, dtype=d, scale=s.embed**-0.5)
    y, whole, part = x.new_empty(x.shape[0], s.ff), b.random(b.n * m, dtype=d), b.random(m, dtype=d)

    def of_nccl(ctas: int | None = None, urgent: bool = False) -> dict[str, Thunk]:
        group = dist.group.WORLD
        if ctas is not None or urgent:
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=urgent)
            if ctas is not None:
                options.config.min_ctas = options.config.max_ctas = ctas
            group = dist.new_group(pg_options=options)
        return {
            "all_gather": giving(None, lambda: all_gather(whole, part, group=group)),
            "reduce_scatter": giving(None, lambda: reduce_scatter(part, whole, group=group)),
        }

    def of_copies() -> dict[str, Thunk]:
        peers, got = Peers(b, (b.n, m), d), whole.view(b.n, m)

        def pull(sums: bool) -> None:
            for r in b.others:
                got[r].copy_(peers.all[r][b.rank])
            if sums:
                torch.sum(got, 0, out=part)

        return {"all_gather": lambda: pull(False), "reduce_scatter": lambda: pull(True)}

    ways: dict[str, Callable[[], dict[str, Thunk]]] = {"NCCL": of_nccl}
    if b.cuda:
        ways |= {f"NCCL, {c} CTAs": partial(of_nccl, c) for c in (1, 2, 4, 8, 16)}
        ways |= {"NCCL, high priority": partial(of_nccl, urgent=True), "copies": of_copies}
    fns: dict[tuple[str, str], Thunk | None] = {("nothing", ""): None}
    for how, make in ways.items():
        fns |= {(kind, how): fn for kind, fn in (b.attempt("beside", "", how, make) or {}).items()}
    product = giving(None, lambda: torch.mm(x, w, out=y))
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in fns}
    for _ in range(b.repeats):
        for name, fn in fns.items():
            spans[name].append(b.beside(product, fn))
    for (kind, how), pairs in spans.items():
        ms, other_ms = (b.slowest(median(p)) for p in zip(*pairs, strict=True))
        b.say(Row("beside", kind, how, ms, other_ms=other_ms))


TABLES: dict[str, Callable[[Bench, Sizes], None]] = {"products": products, "collectives": collectives, "beside": beside}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--only", choices=TABLES, nargs="+", default=list(TABLES))
    parser.add_argument("--json")
    args = parser.parse_args()
    bench = start(args.device, args.repeats)
    for table in args.only:
        TABLES[table](bench, TINY if args.tiny else Sizes())
    if args.json:
        bench.save(args.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
