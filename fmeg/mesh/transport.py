"""Moving and adding blocks among the processes of one group: the only calls of `torch.distributed` collectives.

Every method takes a list of tensors and makes one collective for each dtype among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from fmeg.mesh import checks

T = TypeVar("T")

# Their names from torch 2.13 on, else the older ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_COALESCED: dict[str, tuple[tuple[str, str], Any]] = {
    "all_gather": (("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), c10d.AllgatherOptions),
    "reduce_scatter": (
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
        c10d.ReduceScatterOptions,
    ),
}

PIECES, PIECE_BYTES = 64, 2**20  # see `in_pieces`

Started = Callable[[], list[Tensor]]
"""A collective that has begun: call it to wait for the results."""


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

    def gather(self, xs: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
        """The members' tensors side by side along `dims[i]`."""
        return self.start_gather(xs, dims, later=False)()

    def exchange(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """[to member, *shape] -> [from member, *shape]."""
        return self._exchange(xs)()

    def start_exchange(self, xs: Sequence[Tensor]) -> Started:
        """`exchange`, begun."""
        return self._exchange(xs, later=True)

    def start_gather(self, xs: Sequence[Tensor], dims: Sequence[int], later: bool = True) -> Started:
        """`gather`, begun: it goes on while other things run; `later` False: it is waited for at once."""
        if not self.ordered and self._order is None:
            return self._gather_in_place(xs, dims, later)
        gathered = self._gather(xs, later)
        return lambda: [merge(x, d) for x, d in zip(gathered(), dims, strict=True)]

    def all_reduce(self, xs: Sequence[Tensor], op: str) -> list[Tensor]:
        """[*shape] -> [*shape]."""
        return self.start_all_reduce(xs, op, later=False)()

    def reduce_scatter(self, xs: Sequence[Tensor], dims: Sequence[int]) -> list[Tensor]:
        """The sum over members of this member's block of `dims[i]`."""
        return self.start_reduce_scatter(xs, dims, later=False)()

    def start_all_reduce(self, xs: Sequence[Tensor], op: str, later: bool = True) -> Started:
        """`all_reduce`, begun: it goes on while other things run; `later` False: it is waited for at once."""
        if self.ordered:
            gathered = self._gather(xs, later)
            return lambda: [self._fold(x, op) for x in gathered()]

        def add(flat: Tensor) -> Callable[[], Tensor]:
            out = flat.clone()
            kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
            return waiting([dist.all_reduce(out, kind, group=self.group, async_op=later)], out)

        return _firsts(_packed([x[None] for x in xs], add))

    def start_reduce_scatter(
        self, xs: Sequence[Tensor], dims: Sequence[int], later: bool = True, outs: Sequence[Tensor | None] = ()
    ) -> Started:
        """`reduce_scatter`, begun. `outs`: contiguous memory for results, where the communication library adds."""
        if self.ordered:
            exchanged = self._exchange([cut(x, d, self.size) for x, d in zip(xs, dims, strict=True)], later)
            return lambda: [self._fold(x, "sum") for x in exchanged()]

        given, results, held = [*outs] or [None] * len(xs), [], []
        pairs: list[tuple[Tensor, Tensor]] = []
        for x, d, out in zip(xs, dims, given, strict=True):
            shape = (*x.shape[:d], x.shape[d] // self.size, *x.shape[d + 1 :])
            result = x.new_empty(shape) if out is None else out
            whole = self._order is None and in_pieces(x, d)
            sent = x.contiguous() if whole else self._by_position(cut(x, d, self.size)).contiguous()
            results.append(result)
            held.append(sent)
            if sent.numel():
                n = prod(x.shape[:d]) if whole else 1
                pairs += zip(result.view(n, -1), sent.view(n, -1), strict=True)
        return waiting(self._all_at_once("reduce_scatter", pairs, later), results, held)

    def _gather_in_place(self, xs: Sequence[Tensor], dims: Sequence[int], later: bool) -> Started:
        """Where few large pieces make up the result, each arrives where it belongs."""
        outs: list[Tensor] = []
        held = [x.contiguous() for x in xs]
        pairs: list[tuple[Tensor, Tensor]] = []
        whole = [in_pieces(x, d) for x, d in zip(xs, dims, strict=True)]
        for x, d, here in zip(held, dims, whole, strict=True):
            merged = (*x.shape[:d], self.size * x.shape[d], *x.shape[d + 1 :])
            outs.append(x.new_empty(merged if here else (self.size, *x.shape)))
            if x.numel():
                n = prod(x.shape[:d]) if here else 1
                pairs += zip(_bytes(outs[-1]).view(n, -1), _bytes(x).view(n, -1), strict=True)
        done = waiting(self._all_at_once("all_gather", pairs, later), outs, held)
        return lambda: [x if here else merge(x, d) for x, d, here in zip(done(), dims, whole, strict=True)]

    def _gather(self, xs: Sequence[Tensor], later: bool = False) -> Started:
        def move(flat: Tensor) -> Callable[[], Tensor]:
            out, work = flat.new_empty(self.size, flat.shape[1]), None
            if flat.numel():
                work = _all_gather(_bytes(out), _bytes(flat), group=self.group, async_op=later)
            done = waiting([work], out, flat)
            return lambda: self._by_member(done())

        return _packed([x[None] for x in xs], move)

    def _exchange(self, xs: Sequence[Tensor], later: bool = False) -> Started:
        def move(flat: Tensor) -> Callable[[], Tensor]:
            out, sent, work = torch.empty_like(flat), self._by_position(flat), None
            if flat.numel():
                there, here = _bytes(out).view(self.size, -1), _bytes(sent).view(self.size, -1)
                work = dist.all_to_all_single(there, here, group=self.group, async_op=later)
            done = waiting([work], out, sent)
            return lambda: self._by_member(done())

        return _packed(xs, move)

    def _all_at_once(self, kind: str, pairs: Sequence[tuple[Tensor, Tensor]], later: bool) -> list[Any]:
        """A collective for each (result, operand), those of one dtype launched as one, with no copy to bring them
        together."""
        group = dist.group.WORLD if self.group is None else self.group
        names, make = _COALESCED[kind]
        launch = getattr(group, names[0], None) or getattr(group, names[1])
        options = make()
        options.asyncOp = later
        works = []
        for dtype in dict.fromkeys(s.dtype for _, s in pairs):
            here = [p for p in pairs if p[1].dtype == dtype]
            works.append(launch([o for o, _ in here], [s for _, s in here], options))
        if later:
            return works
        return waiting(works, [])()

    def start_exchange_rows(
        self, out: Tensor, x: Tensor, send: Sequence[int], receive: Sequence[int], later: bool = True
    ) -> Callable[[], Tensor]:
        """Rows of x, `send[i]` to member i, into those of `out`, `receive[i]` from it; both contiguous. Begun; `later`
        False: waited for at once."""
        if self._order is None:
            work = dist.all_to_all_single(out, x, list(receive), list(send), group=self.group, async_op=later)
            return waiting([work], out, x)
        order = self._order  # position of a member in the process group
        by_position = sorted(range(self.size), key=list(order).__getitem__)
        blocks = x.split(list(send))
        x = torch.cat([blocks[i] for i in by_position])
        send, given = [send[i] for i in by_position], [receive[i] for i in by_position]
        there = torch.empty_like(out)
        work = dist.all_to_all_single(there, x, given, list(send), group=self.group, async_op=later)
        done = waiting([work], there, x)

        def finish() -> Tensor:
            blocks = done().split(given)
            return torch.cat([blocks[p] for p in order], out=out)

        return finish

    def _fold(self, x: Tensor, op: str) -> Tensor:
        return reduce(checks.reduction(op), x.unbind(0))

    def _by_member(self, x: Tensor) -> Tensor:
        return x if self._order is None else x[self._order]

    def _by_position(self, x: Tensor) -> Tensor:
        return x if self._inverse is None else x[self._inverse]


def cut(x: Tensor, dim: int, n: int) -> Tensor:
    """[..., n * k, ...] -> [n, ..., k, ...]."""
    return x.unflatten(dim, (n, x.shape[dim] // n)).movedim(dim, 0)


def merge(x: Tensor, dim: int) -> Tensor:
    """[n, ..., k, ...] -> [..., n * k, ...]."""
    return x.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def in_pieces(x: Tensor, dim: int) -> bool:
    """Whether a collective for each index of the dimensions before `dim` is better than a copy: few, and large."""
    n = prod(x.shape[:dim])
    return n == 1 or (n <= PIECES and x.nbytes >= n * PIECE_BYTES)


def waiting(works: Sequence[Any], out: T, *in_flight: Any) -> Callable[[], T]:
    """A function that waits for `works` and gives `out`; until then it keeps what is being read."""
    held = [*in_flight]

    def done() -> T:
        for work in works:
            if work is not None:
                work.wait()
        held.clear()
        return out

    return done


def _firsts(started: Started) -> Started:
    return lambda: [x[0] for x in started()]


def _packed(xs: Sequence[Tensor], move: Callable[[Tensor], Callable[[], Tensor]]) -> Started:
    """Begin `move`, from [m, length] to [n, length], on tensors [m, *shape], those of one dtype side by side."""
    begun: list[tuple[list[int], list[int], Callable[[], Tensor]]] = []
    for dtype in dict.fromkeys(x.dtype for x in xs):
        at = [i for i, x in enumerate(xs) if x.dtype == dtype]
        flat = [xs[i].reshape(xs[i].shape[0], -1) if xs[i].numel() else xs[i].new_empty(xs[i].shape[0], 0) for i in at]
        begun.append(
            (at, [f.shape[1] for f in flat], move(torch.cat(flat, 1) if len(flat) > 1 else flat[0].contiguous()))
        )
    shapes = [x.shape[1:] for x in xs]

    def finish() -> list[Tensor]:
        out: dict[int, Tensor] = {}
        for at, lengths, done in begun:
            moved = done()
            for i, piece in zip(at, moved.split(lengths, 1), strict=True):
                piece = piece.reshape(moved.shape[0], *shapes[i])
                out[i] = piece.clone() if len(at) > 1 and moved.shape[0] == 1 else piece
        return [out[i] for i in range(len(shapes))]

    return finish


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor, flat: moves any dtype on any library."""
    return x.view(-1).view(torch.uint8)
