"""Moving and adding blocks among the processes of one group: the only calls of `torch.distributed` collectives.

Every method takes a list of tensors and makes one collective for each dtype among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor

from fmeg.mesh import checks

# Their names from torch 2.13 on, else the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transport:
    """Collectives over one process group, in group order.

    order       position in the process group of each member; None when they are the same
    ordered     add members in ascending index, left to right, on every process alike (bits as in the loop backend);
                otherwise the communication library adds
    """

    def __init__(self, group: dist.ProcessGroup | None, size: int, order: Sequence[int] | None, ordered: bool) -> None:
        self.group = group
        self.size = size
        self.ordered = ordered
        self._order = None if order is None else list(order)
        self._inverse = None if order is None else sorted(range(size), key=list(order).__getitem__)

    def gather(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """[*shape] -> [members, *shape]."""

        def move(flat: Tensor) -> Tensor:
            out = flat.new_empty(self.size, flat.shape[1])
            if flat.numel():
                _all_gather(_bytes(out), _bytes(flat), group=self.group)
            return self._by_member(out)

        return _packed([x[None] for x in xs], move)

    def exchange(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """[to member, *shape] -> [from member, *shape]."""

        def move(flat: Tensor) -> Tensor:
            out = torch.empty_like(flat)
            if flat.numel():
                sent = self._by_position(flat)
                dist.all_to_all_single(
                    _bytes(out).view(self.size, -1), _bytes(sent).view(self.size, -1), group=self.group
                )
            return self._by_member(out)

        return _packed(xs, move)

    def all_reduce(self, xs: Sequence[Tensor], op: str) -> list[Tensor]:
        """[*shape] -> [*shape]."""
        if self.ordered:
            return [self._fold(x, op) for x in self.gather(xs)]

        def add(flat: Tensor) -> Tensor:
            out = flat.clone()
            dist.all_reduce(out, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self.group)
            return out

        return [x[0] for x in _packed([x[None] for x in xs], add)]

    def reduce_scatter(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """[for member, *shape] -> [*shape]."""
        if self.ordered:
            return [self._fold(x, "sum") for x in self.exchange(xs)]

        def add(flat: Tensor) -> Tensor:
            out = flat.new_empty(1, flat.shape[1])
            _reduce_scatter(out.view(-1), self._by_position(flat).view(-1), group=self.group)
            return out

        return [x[0] for x in _packed(xs, add)]

    def _fold(self, x: Tensor, op: str) -> Tensor:
        return reduce(checks.reduction(op), x.unbind(0))

    def _by_member(self, x: Tensor) -> Tensor:
        return x if self._order is None else x[self._order]

    def _by_position(self, x: Tensor) -> Tensor:
        return x if self._inverse is None else x[self._inverse]


def _packed(xs: Sequence[Tensor], move: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Apply `move`, from [m, length] to [n, length], to tensors [m, *shape], those of one dtype side by side."""
    out: list[Tensor] = list(xs)
    for dtype in dict.fromkeys(x.dtype for x in xs):
        at = [i for i, x in enumerate(xs) if x.dtype == dtype]
        flat = [xs[i].reshape(xs[i].shape[0], -1) if xs[i].numel() else xs[i].new_empty(xs[i].shape[0], 0) for i in at]
        moved = move(torch.cat(flat, 1) if len(flat) > 1 else flat[0].contiguous())
        for i, piece in zip(at, moved.split([f.shape[1] for f in flat], 1), strict=True):
            piece = piece.reshape(moved.shape[0], *xs[i].shape[1:])
            out[i] = piece.clone() if len(flat) > 1 and moved.shape[0] == 1 else piece
    return out


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat: moves any dtype on any library."""
    return x.view(-1).view(torch.uint8)
