"""Memory that the GPUs of one host read of one another: `Peers` by torch's symmetric memory.

Source: torch.distributed._symmetric_memory; the schedules are those of `fmeg.mesh.beside`.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fmeg.program.errors import MeshError


class SymmetricMemory:
    """Memory of every member of a process group, allocated when first asked for, and again if more is; what was there
    before is kept, because a recorded graph may read it.

    order    position in the process group of each member
    index    of this member

    All members must come here, and ask for memory, in the same order. Raises MeshError where they are on several hosts,
    and where their GPUs cannot map one another's memory.
    """

    def __init__(self, group: dist.ProcessGroup, order: Sequence[int], index: int, device: torch.device) -> None:
        self.size, self.index = len(order), index
        self._group, self._order, self._device = group, list(order), device
        self._least = self._have = 0
        self._held: list[tuple[Tensor, Any]] = []
        self._known: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        check_hosts(hosts(group))
        self._stream = torch.cuda.Stream(device, priority=-1)  # barriers start as soon as a multiprocessor is free

    def reserve(self, nbytes: int) -> None:
        self._least = max(self._least, nbytes)

    def buffers(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        need = prod(shape) * dtype.itemsize
        if need > self._have:
            self._allocate(max(need, self._least))
        key = tuple(shape), dtype
        if key not in self._known:
            handle = self._held[-1][1]
            self._known[key] = [handle.get_buffer(p, list(shape), dtype) for p in self._order]
        return self._known[key]

    def barrier(self) -> None:
        self._held[-1][1].barrier(channel=0)

    @contextmanager
    def apart(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event:
        return self._stream.record_event()

    def wait(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _allocate(self, nbytes: int) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise MeshError(
                f"symmetric memory: {nbytes} bytes are needed while a CUDA graph is recorded, {self._have} are there. "
                "Run the step once before it is recorded"
            )
        try:
            import torch.distributed._symmetric_memory as symm

            if (enable := getattr(symm, "enable_symm_mem_for_group", None)) is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # older versions of torch need the call, newer ones deprecate it
                    enable(self._group.group_name)
            own = symm.empty(nbytes, dtype=torch.uint8, device=self._device)
            handle = symm.rendezvous(own, self._group.group_name)
        except (ImportError, AttributeError, RuntimeError) as error:
            raise MeshError(
                f"symmetric memory: {nbytes} bytes that the GPUs of this group read of one another cannot be had "
                f"({(str(error).splitlines() or [''])[0]}). Leave `overlap` out; or free memory, or run the axis on "
                "GPUs of one host that NVLink joins"
            ) from error
        self._held.append((own, handle))
        self._have, self._known = nbytes, {}


def hosts(group: dist.ProcessGroup) -> list[str]:
    """Where the members of a group run."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, socket.gethostname(), group=group)
    return found


def check_hosts(found: Sequence[str]) -> None:
    """MeshError unless there is one host.

    >>> check_hosts(["a", "a"])
    >>> check_hosts(["a", "b"])
    Traceback (most recent call last):
    fmeg.program.errors.MeshError: symmetric memory: the axis spans 2 hosts (a, b); its ranks must be GPUs of one. \
Name an axis that stays within a host, the last of the mesh, or leave `overlap` out
    """
    if len(set(found)) > 1:
        names = ", ".join(dict.fromkeys(found))
        raise MeshError(
            f"symmetric memory: the axis spans {len(set(found))} hosts ({names}); its ranks must be GPUs of one. "
            "Name an axis that stays within a host, the last of the mesh, or leave `overlap` out"
        )
