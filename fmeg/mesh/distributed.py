"""The distributed backend: one process a device, `torch.distributed` collectives between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmeg.mesh import blocks, checks
from fmeg.mesh.backend import NO_KWARGS, Axes, Dims, Source, Value
from fmeg.mesh.index import RankIndex
from fmeg.mesh.mesh import Mesh
from fmeg.mesh.rows import BYTES, sent_and_received
from fmeg.mesh.symmetric import SymmetricMemory
from fmeg.mesh.transport import Started, Transport, cut, merge, waiting
from fmeg.program.errors import MeshError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def init_distributed(timeout: timedelta | None = None, *, ctas: int | None = None, high_priority: bool = False) -> None:
    """Join the process group that `torchrun` describes: NCCL on CUDA (device `LOCAL_RANK`), else Gloo. Idempotent.

    ctas           how many thread blocks, each on a multiprocessor (SM) of its own, a collective of NCCL may take at
                   most; None: NCCL decides. Fewer leave more to the products beside it, and move less a second
    high_priority  NCCL's kernels start before others that wait for a multiprocessor

    Meshes make their groups alike. Neither means anything to Gloo. Raises MeshError where the environment describes no
    group, for `ctas` that is no positive int, and where either is asked of a group that was made before.

    Source: NCCL user guide, ncclConfig_t.maxCTAs.
    """
    if ctas is not None and (isinstance(ctas, bool) or not isinstance(ctas, int) or ctas < 1):
        raise MeshError(f"init_distributed: ctas must be an int >= 1, or None, given {ctas!r}")
    if dist.is_initialized():
        if ctas is not None or high_priority:
            raise MeshError(
                "init_distributed: the processes have joined already, so ctas and high_priority come too late. "
                "Call init_distributed before a Mesh is used"
            )
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise MeshError(
            f"init_distributed: {', '.join(missing)} not set in the environment. Launch with "
            "`torchrun --nproc-per-node=N script.py`, or use a virtual mesh: Mesh(..., backend='loop')"
        )
    if torch.cuda.is_available():
        device = _cuda_device()
        if (device.index or 0) >= torch.cuda.device_count():
            raise MeshError(
                f"init_distributed: process {os.environ['RANK']} has LOCAL_RANK {device.index}, but this machine has "
                f"{torch.cuda.device_count()} GPUs. "
                "Start one process a GPU, or set CUDA_VISIBLE_DEVICES= (empty) to run on CPUs with Gloo"
            )
        torch.cuda.set_device(device)
        options = _nccl_options(None, ctas, high_priority) if ctas is not None or high_priority else None
        if options is not None and timeout is not None:
            options._timeout = timeout
        dist.init_process_group("nccl", timeout=timeout, device_id=device, pg_options=options)
    else:
        dist.init_process_group("gloo", timeout=timeout)


@dataclass(frozen=True)
class Group:
    """This process's group over some axes: its ranks in group order, its own index, how to reach them."""

    ranks: tuple[int, ...]
    index: int
    transport: Transport


class DistributedBackend:
    """Runs this process's rank. A value is the local tensor.

    Sums: on CPU members are added in ascending group index, left to right, by every process, so the bits are those of
    the loop backend; on CUDA NCCL adds, in its own order. Process groups are made once for each set of axes, when first
    used: all processes must come to that collective (see `Backend.prepare`).

    overlap     whether steps begin collectives early and wait for them late (`start_…`), so that they go on beside
                computation: NCCL's on a stream of its own, Gloo's on a thread. Set it to False before `jit` to compare
    leaves      `start_reduce_scatter` takes memory in which it may leave its results

    Raises MeshError when the mesh is not as large as the world.
    """

    name = "distributed"
    plain = True
    overlap = True
    leaves = True

    def __init__(self, mesh: Mesh) -> None:
        init_distributed()
        world = dist.get_world_size()
        if world != mesh.size:
            raise MeshError(
                f"{mesh} has {mesh.size} devices, but {world} processes are running. Launch "
                f"{mesh.size} (torchrun --nproc-per-node={mesh.size}), make the axis sizes multiply to {world}, or "
                "use a virtual mesh: Mesh(..., backend='loop')"
            )
        self.mesh = mesh
        self.index = RankIndex(mesh)
        self.rank = dist.get_rank()
        self.ranks: tuple[int, ...] = (self.rank,)
        self._nccl = "nccl" in str(dist.get_backend_config())
        self._device = _cuda_device() if self._nccl else torch.device("cpu")
        self._process_groups: dict[int, dist.ProcessGroup | None] = {}
        self._groups: dict[Axes, Group] = {}
        self._peers: dict[Axes, SymmetricMemory] = {}
        self._indices: dict[Axes, Tensor] = {}
        self._device_meshes: dict[Axes, DeviceMesh] = {}

    @property
    def device(self) -> torch.device:
        return self._device

    def call(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] = NO_KWARGS) -> Any:
        return fn(*args, **kwargs)

    def varies(self, value: Value) -> int:
        return 0

    def all_reduce(self, xs: Sequence[Value], axes: Axes, op: str = "sum") -> list[Value]:
        checks.reduction(op)
        group = self.group(axes)
        return list(xs) if len(group.ranks) == 1 else group.transport.all_reduce(xs, op)

    def all_gather(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        dims = checks.dimensions("all_gather", dims, [x.shape for x in xs])
        group = self.group(axes)
        if len(group.ranks) == 1:
            return list(xs)
        return group.transport.gather(xs, dims)

    def reduce_scatter(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> list[Value]:
        group = self.group(axes)
        n = len(group.ranks)
        dims = checks.split_dimensions("reduce_scatter", dims, [x.shape for x in xs], axes, n)
        if n == 1:
            return list(xs)
        return group.transport.reduce_scatter(xs, dims)

    def start_all_reduce(self, xs: Sequence[Value], axes: Axes, op: str = "sum") -> Started:
        """`all_reduce`, begun; the result waits for it. Members must begin and wait in the same order."""
        checks.reduction(op)
        group, same = self.group(axes), list(xs)
        return (lambda: same) if len(group.ranks) == 1 else group.transport.start_all_reduce(xs, op)

    def start_all_gather(self, xs: Sequence[Value], axes: Axes, dims: Sequence[int]) -> Started:
        """`all_gather`, begun, likewise."""
        dims = checks.dimensions("all_gather", dims, [x.shape for x in xs])
        group, same = self.group(axes), list(xs)
        return (lambda: same) if len(group.ranks) == 1 else group.transport.start_gather(xs, dims)

    def start_reduce_scatter(
        self, xs: Sequence[Value], axes: Axes, dims: Sequence[int], outs: Sequence[Tensor | None] = ()
    ) -> Started:
        """`reduce_scatter`, begun, likewise. `outs`: memory in which results may be left."""
        group, same = self.group(axes), list(xs)
        n = len(group.ranks)
        dims = checks.split_dimensions("reduce_scatter", dims, [x.shape for x in xs], axes, n)
        if n == 1:
            return lambda: same
        return group.transport.start_reduce_scatter(xs, dims, outs=outs)

    def all_to_all(
        self, xs: Sequence[Value], axes: Axes, split_dims: Sequence[int], concat_dims: Sequence[int]
    ) -> list[Value]:
        group = self.group(axes)
        n = len(group.ranks)
        split = checks.split_dimensions("all_to_all", split_dims, [x.shape for x in xs], axes, n)
        concat = checks.dimensions("all_to_all", concat_dims, [x.shape for x in xs])
        if n == 1:
            return list(xs)
        moved = group.transport.exchange([cut(x, d, n) for x, d in zip(xs, split, strict=True)])
        return [merge(x, d) for x, d in zip(moved, concat, strict=True)]

    def start_all_to_all(
        self, xs: Sequence[Value], axes: Axes, split_dims: Sequence[int], concat_dims: Sequence[int]
    ) -> Started:
        """`all_to_all`, begun, likewise."""
        group, same = self.group(axes), list(xs)
        n = len(group.ranks)
        split = checks.split_dimensions("all_to_all", split_dims, [x.shape for x in xs], axes, n)
        concat = checks.dimensions("all_to_all", concat_dims, [x.shape for x in xs])
        if n == 1:
            return lambda: same
        started = group.transport.start_exchange([cut(x, d, n) for x, d in zip(xs, split, strict=True)])
        return lambda: [merge(x, d) for x, d in zip(started(), concat, strict=True)]

    def ppermute(self, x: Value, axes: Axes, perm: Sequence[tuple[int, int]]) -> Value:
        return self.start_ppermute([x], axes, perm)()[0]

    def start_ppermute(self, xs: Sequence[Value], axes: Axes, perm: Sequence[tuple[int, int]]) -> Started:
        """`ppermute` of each, begun, likewise."""
        started = [self._ppermute(x, axes, perm) for x in xs]
        return lambda: [done() for done in started]

    def _ppermute(self, x: Value, axes: Axes, perm: Sequence[tuple[int, int]]) -> Callable[[], Value]:
        group = self.group(axes)
        source = checks.permutation(perm, axes, len(group.ranks))
        target = {s: d for d, s in source.items()}
        me, x = group.index, x.contiguous()
        if source.get(me) == me:
            return lambda: x
        out = torch.empty_like(x) if me in source else torch.zeros_like(x)
        pg = group.transport.group
        moves = []
        if me in source:
            moves.append(dist.P2POp(dist.irecv, out, group.ranks[source[me]], pg))
        if me in target:
            moves.append(dist.P2POp(dist.isend, x, group.ranks[target[me]], pg))
        return waiting(dist.batch_isend_irecv(moves) if moves and x.numel() else [], out, x)

    def exchange_rows(
        self, x: Value, table: Value, axes: Axes, back: bool, rows: int, width: int | None = None
    ) -> Value:
        return self._exchange_rows(x, table, axes, back, rows, later=False)()

    def start_exchange_rows(
        self, xs: Sequence[Value], axes: Axes, back: bool, rows: int, width: int | None = None
    ) -> Started:
        """`exchange_rows` of [x, table], begun, likewise."""
        x, table = xs
        done = self._exchange_rows(x, table, axes, back, rows, later=True)
        return lambda: [done()]

    def _exchange_rows(
        self, x: Value, table: Value, axes: Axes, back: bool, rows: int, later: bool
    ) -> Callable[[], Value]:
        if x.dtype in BYTES:
            kind, done = x.dtype, self._exchange_rows(x.view(torch.uint8), table, axes, back, rows, later)
            return lambda: done().view(kind)
        group, (send, receive) = self.group(axes), sent_and_received(table, back)
        x, n = x[: sum(send)], sum(receive)
        out = x.new_empty((max(rows, n) if back else n), *x.shape[1:])
        out[n:] = 0
        if len(group.ranks) == 1:
            out[:n] = x
            return lambda: out
        moved = group.transport.start_exchange_rows(out[:n], x.contiguous(), send, receive, later)

        def finish() -> Value:
            moved()
            return out

        return finish

    def axis_index(self, axes: Axes) -> Value:
        if axes not in self._indices:
            self._indices[axes] = torch.tensor(self.index.index(self.rank, axes), device=self._device)
        return self._indices[axes]

    def scatter(self, source: Source, dims: Dims, shape: Sequence[int] | None = None) -> Value:
        return blocks.reader(self.index, source, dims, shape)(self.rank).to(self._device)

    def gather(self, value: Value, dims: Dims) -> Tensor:
        checks.placement(self.mesh, dims, value.ndim, "gather")
        for d, axes in enumerate(dims):
            [value] = self.all_gather([value], axes, [d])
        return value

    def local(self, value: Value) -> list[Tensor]:
        return [value]

    def from_local(self, tensors: Sequence[Tensor], dims: Dims) -> Value:
        blocks.check_local(self.mesh, tensors, dims, self.ranks)
        return tensors[0].to(self._device)

    def prepare(self, axes: Axes) -> None:
        self.group(axes)

    def group(self, axes: Axes) -> Group:
        """This process's group over `axes`."""
        if axes not in self._groups:
            position = self.index.index(self.rank, axes)
            ranks = next(g for g in self.index.groups(axes) if self.rank in g)
            order = [sorted(ranks).index(r) for r in ranks]
            transport = Transport(
                self._process_group(self.index.mask(axes)),
                len(ranks),
                None if order == sorted(order) else order,
                ordered=not self._nccl,
            )
            self._groups[axes] = Group(ranks, position, transport)
        return self._groups[axes]

    def peers(self, axes: Axes) -> SymmetricMemory | None:
        """Memory that the members of this process's group over `axes` read of one another; None on CPUs, and for a
        group of one. All of them must come here. Raises MeshError where they are on several hosts."""
        group = self.group(axes)
        if not self._nccl or len(group.ranks) == 1:
            return None
        if axes not in self._peers:
            assert group.transport.group is not None
            order = [sorted(group.ranks).index(r) for r in group.ranks]
            self._peers[axes] = SymmetricMemory(group.transport.group, order, group.index, self._device)
        return self._peers[axes]

    def device_mesh(self, axes: Axes | None = None) -> DeviceMesh:
        """The `DeviceMesh` over the same ranks, with its dimensions in the order of `axes` (default: the mesh's)."""
        from torch.distributed.device_mesh import DeviceMesh

        axes = self.mesh.axes if axes is None else axes
        if axes not in self._device_meshes:
            self._device_meshes[axes] = DeviceMesh(self._device.type, self.rank_tensor(axes), mesh_dim_names=axes)
        return self._device_meshes[axes]

    def rank_tensor(self, axes: Axes) -> Tensor:
        """Ranks by coordinate, one dimension for each of `axes`, which are all of the mesh's in any order."""
        ranks = torch.arange(self.mesh.size).view(tuple(self.mesh.sizes.values()))
        return ranks.permute([self.mesh.axes.index(a) for a in axes])

    def _process_group(self, mask: int) -> dist.ProcessGroup | None:
        if mask == self.index.all:
            return dist.group.WORLD
        if mask and mask not in self._process_groups:
            groups = self.index.groups(self.index.axes(mask))
            ranks, options = [list(g) for g in groups], self._options()
            self._process_groups[mask] = dist.new_subgroups_by_enumeration(ranks, pg_options=options)[0]
        return self._process_groups.get(mask)

    def _options(self) -> Any:
        """Of a new group: multiprocessors and priority as all processes' group has them."""
        if not self._nccl or dist.group.WORLD is None:
            return None
        world: Any = getattr(dist.group.WORLD._get_backend(self._device), "options", None)
        if not isinstance(world, dist.ProcessGroupNCCL.Options):  # wrapped, for debugging
            return None
        return _nccl_options(world.config.min_ctas, world.config.max_ctas, world.is_high_priority_stream)


def _nccl_options(min_ctas: int | None, max_ctas: int | None, high_priority: bool) -> Any:
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority)
    if min_ctas is not None:
        options.config.min_ctas = min_ctas
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def _cuda_device() -> torch.device:
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
