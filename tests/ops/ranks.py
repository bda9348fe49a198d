"""A small interpreter of sharding rules, for tests: cut the operands, run the local code of every rank, put together.

Ranks are threads and a collective is a meeting of all of them, so local code with collectives runs as written.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fmeg.ops import collectives
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule
from tests.ops.checks import astuple, node_of

Axes = tuple[str, ...]
Placement = dict[str, Axes]  # factor -> mesh axes


class Info:
    """What local code asks: see fmeg.program.rule.Local."""

    def __init__(self, rule: Rule, place: Placement, mesh: dict[str, int], at: dict[str, int], options: dict) -> None:
        self.rule, self.place, self.mesh, self.at, self.options = rule, place, mesh, at, options

    def axes(self, factor: str) -> Axes:
        return self.place.get(factor, ())

    def parts(self, factor: str) -> int:
        return group_index(self.axes(factor), self.mesh, None)[1]

    def size(self, factor: str) -> int:
        return self.rule.sizes[factor] // self.parts(factor)

    def offset(self, factor: str) -> Any:
        if not self.axes(factor):
            return 0
        return torch.tensor(group_index(self.axes(factor), self.mesh, self.at)[0] * self.size(factor))

    def option(self, name: str, default: Any = None) -> Any:
        return self.options.get(name, default)


def group_index(axes: Axes, mesh: dict[str, int], at: dict[str, int] | None) -> tuple[int, int]:
    """Index within the group of `axes`, major first, and the group's size."""
    index, n = 0, 1
    for a in axes:
        index, n = index * mesh[a] + (at[a] if at else 0), n * mesh[a]
    return index, n


class Meeting:
    """Collectives between threads."""

    def __init__(self, mesh: dict[str, int], ranks: list[dict[str, int]]) -> None:
        self.mesh, self.ranks = mesh, ranks
        self.barrier = threading.Barrier(len(ranks), timeout=30)
        self.me = threading.local()
        self.slots: list[Any] = [None] * len(ranks)
        self.counts: dict[str, int] = {}

    def exchange(self, name: str, x: Any, axes: Axes) -> tuple[list[Any], int]:
        """What the ranks of this one's group gave, in order, and this rank's index in it."""
        rank = self.me.rank
        self.slots[rank] = x
        self.barrier.wait()
        at = self.ranks[rank]
        same = [i for i, r in enumerate(self.ranks) if all(r[a] == at[a] for a in self.mesh if a not in axes)]
        same.sort(key=lambda i: group_index(axes, self.mesh, self.ranks[i])[0])
        group = [self.slots[i] for i in same]
        self.barrier.wait()
        if rank == 0:
            self.counts[name] = self.counts.get(name, 0) + 1
        return group, group_index(axes, self.mesh, at)[0]

    def all_reduce(self, x: Any, axes: Axes, op: str = "sum") -> Any:
        xs = [x] if isinstance(x, Tensor) else x
        group = self.exchange("all_reduce", xs, axes)[0]
        stacks = [torch.stack(parts) for parts in zip(*group, strict=True)]
        out = [s.sum(0) if op == "sum" else s.amax(0) for s in stacks]
        return out[0] if isinstance(x, Tensor) else out

    def all_gather(self, x: Tensor, axes: Axes, dim: int) -> Tensor:
        return torch.cat(self.exchange("all_gather", x, axes)[0], dim)

    def reduce_scatter(self, x: Tensor, axes: Axes, dim: int) -> Tensor:
        group, i = self.exchange("reduce_scatter", x, axes)
        return torch.stack(group).sum(0).chunk(len(group), dim)[i]

    def all_to_all(self, x: Tensor, axes: Axes, split_dim: int, concat_dim: int) -> Tensor:
        group, i = self.exchange("all_to_all", x, axes)
        return torch.cat([y.chunk(len(group), split_dim)[i] for y in group], concat_dim)

    def ppermute(self, x: Tensor, axes: Axes, perm: Sequence[tuple[int, int]]) -> Tensor:
        group, i = self.exchange("ppermute", x, axes)
        sources = [src for src, dst in perm if dst == i]
        return group[sources[0]] if sources else torch.zeros_like(x)

    def axis_index(self, axes: Axes) -> Tensor:
        return torch.tensor(group_index(axes, self.mesh, self.ranks[self.me.rank])[0])

    def run(self, local: Callable[[dict[str, int], int], Any]) -> list[Any]:
        """local(coordinates, rank) on every rank; raises the first error."""
        results: list[Any] = [None] * len(self.ranks)
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self.me.rank = rank
            try:
                with torch.no_grad():
                    results[rank] = local(self.ranks[rank], rank)
            except threading.BrokenBarrierError:
                pass
            except BaseException as e:
                errors.append(e)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(r,)) for r in range(len(self.ranks))]
        names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "axis_index")
        with mock.patch.multiple(collectives, **{n: getattr(self, n) for n in names}):
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        if errors:
            raise errors[0]
        return results


def cut(x: Tensor, dims: tuple, place: Placement, mesh: dict[str, int], at: dict[str, int]) -> Tensor:
    """This rank's block of a global tensor."""
    for d, factors in enumerate(dims):
        axes = tuple(a for f in factors for a in place.get(f, ()))
        i, n = group_index(axes, mesh, at)
        assert x.shape[d] % n == 0, "choose sizes that divide"
        x = x.chunk(n, d)[i]
    return x


def spmd(
    op: Primitive, args: tuple, kwargs: dict, place: Placement, mesh: dict[str, int], options: dict | None = None
) -> tuple[tuple[Tensor, ...], dict[str, int]]:
    """Results of `op` under a placement of its factors, put together from all ranks; and how many collectives ran."""
    rule = op.rule(node_of(op, *args, **kwargs))
    ranks = [dict(zip(mesh, c, strict=True)) for c in itertools.product(*map(range, mesh.values()))]
    meeting = Meeting(mesh, ranks)

    def local(at: dict[str, int], rank: int) -> tuple:
        dims = iter(rule.ins)
        here = [cut(x, next(dims), place, mesh, at) if isinstance(x, Tensor) else x for x in args]
        info = Info(rule, place, mesh, at, options or {})
        return astuple(rule.local(info, *here, **kwargs) if rule.local else op(*here, **kwargs))

    results = meeting.run(local)
    outs = tuple(_join([r[i] for r in results], dims, rule, place, mesh, ranks) for i, dims in enumerate(rule.outs))
    return outs, meeting.counts


def _join(blocks: list[Tensor], dims: tuple, rule: Rule, place: Placement, mesh: dict[str, int], ranks: list) -> Tensor:
    """Blocks of one result: sum over the axes that it is pending over, check that replicas agree, concatenate."""
    own = {a for factors in dims for f in factors for a in place.get(f, ())}
    named = {f for factors in dims for f in factors}
    used = {f for d in rule.ins for factors in d for f in factors} - named - rule.resolved
    pending = {a for f in used for a in place.get(f, ())} - own
    groups: dict[tuple, list[Tensor]] = {}
    for x, at in zip(blocks, ranks, strict=True):
        groups.setdefault(tuple(at[a] if a in own or a in pending else 0 for a in mesh), []).append(x)
    for same in groups.values():
        for x in same[1:]:
            torch.testing.assert_close(x, same[0], atol=1e-12, rtol=1e-12, equal_nan=True)
    shape = [global_size(x, factors, place, mesh) for x, factors in zip(blocks[0].shape, dims, strict=True)]
    out = blocks[0].new_zeros(shape)
    for key, same in groups.items():
        cut(out, dims, place, mesh, dict(zip(mesh, key, strict=True))).add_(same[0])
    return out


def global_size(local: int, factors: tuple, place: Placement, mesh: dict[str, int]) -> int:
    return local * group_index(tuple(a for f in factors for a in place.get(f, ())), mesh, None)[1]


def placements(rule: Rule, choices: Sequence[Axes], share: Sequence[set[str]] = ()) -> Iterator[Placement]:
    """Every assignment of axes to the factors that may be sharded, no axis on two factors (but those in `share`)."""
    factors = sorted({f for dims in (*rule.ins, *rule.outs) for d in dims for f in d} - rule.whole)
    for combo in itertools.product(choices, repeat=len(factors)):
        place = {f: axes for f, axes in zip(factors, combo, strict=True) if axes}
        pairs = itertools.combinations(place, 2)
        if all(not set(place[f]) & set(place[g]) or {f, g} in share for f, g in pairs):
            yield place


def check_rule(
    op: Primitive, *args: Any, mesh: dict[str, int] | None = None, tol: float = 1e-12, **kwargs: Any
) -> None:
    """Under every placement the rule gives what the plain operation gives; it is linear where it says so."""
    mesh = mesh or {"x": 2, "y": 2}
    expected = astuple(op.reference(*args, **kwargs))
    rule = op.rule(node_of(op, *args, **kwargs))
    count = 0
    for place in placements(rule, [(), ("x",), ("x", "y")]):
        outs, _ = spmd(op, args, kwargs, place, mesh)
        for out, e in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, e, atol=tol, rtol=tol, msg=lambda m, p=place: f"{p}: {m}")
        count += 1
    assert count > 1
    for i in rule.linear:
        check_linear(op, args, kwargs, i, expected, tol)


def check_linear(op: Primitive, args: tuple, kwargs: dict, i: int, expected: tuple[Tensor, ...], tol: float) -> None:
    """Parts of operand i give parts of every result: a pending sum may pass through."""
    place = [n for n, x in enumerate(args) if isinstance(x, Tensor)][i]
    part = torch.sin(3 * args[place])
    both = [astuple(op.reference(*args[:place], x, *args[place + 1 :], **kwargs)) for x in (part, args[place] - part)]
    for a, b, e in zip(*both, expected, strict=True):
        torch.testing.assert_close(a + b, e, atol=tol, rtol=tol)
