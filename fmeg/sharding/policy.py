"""Who decides a placement: from a rule and the operands' placements to one assignment of mesh axes to factors.

Claims are heard in this order, and an axis belongs to the factor that claimed it first:

    1. parameters in use             weights stay, activations move
    2. the result's mirror           a cotangent goes where its primal lives
    3. activations, largest first    the same factor on both: stays; on one only: the other is sliced locally

Whatever an operand loses is a movement, with a reason; `strict` lets pass only the owed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fmeg.program.errors import ShardingError
from fmeg.program.rule import Dims, Rule
from fmeg.sharding.value import DimAxes, Placed, Placement, count, local_size

OWED = frozenset(
    {
        "shard",
        "parameter",
        "weights stay",
        "mirror",
        "rule",
        "border",
        "scalar",
        "sum",
        "gradient",
        "output",
        "shard_map",
    }
)
CONFLICT = "conflict"
PENDING = "pending sum"


@dataclass
class Solution:
    """axes of each factor; target placement and reason of movement per operand; placement of each result."""

    axes: dict[str, tuple[str, ...]]
    targets: list[Placement] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    outs: list[Placement] = field(default_factory=list)


def split_dims(
    dims: Dims, axes: DimAxes, sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> dict[str, tuple[str, ...]]:
    """Axes of each factor, from axes of each dimension: a merged dimension gives them to its major factor first.

    Axes that fit no factor are left out.

    >>> split_dims((("b", "s"),), (("dp", "cp"),), {"b": 2, "s": 8}, {"dp": 2, "cp": 4})
    {'b': ('dp',), 's': ('cp',)}
    """
    out: dict[str, tuple[str, ...]] = {}
    for factors, dim_axes in zip(dims, axes, strict=True):
        todo = list(dim_axes)
        for f in factors:
            mine: tuple[str, ...] = ()
            while todo and local_size(sizes[f], (*mine, todo[0]), mesh) is not None:
                mine = (*mine, todo.pop(0))
            if mine:
                out[f] = mine
            if todo and count(mine, mesh) != sizes[f]:
                break
    return out


def drop_minor(
    axes: Mapping[str, tuple[str, ...]], terms: Sequence[Dims], sizes: Mapping[str, int], mesh: Mapping[str, int]
) -> list[str]:
    """Factors that may not be sharded as `axes` says: in a merged dimension a minor one may only where the major ones
    are one element locally.

    >>> drop_minor({"e": ("tp",)}, [(("h", "e"),)], {"h": 4, "e": 2}, {"tp": 2})
    ['e']
    """
    left = dict(axes)
    merged = [factors for dims in terms for factors in dims if len(factors) > 1]
    dropped: list[str] = []
    changed = True
    while changed:
        changed = False
        for factors in merged:
            for major, minor in zip(factors, factors[1:], strict=False):
                if left.get(minor) and count(left.get(major, ()), mesh) != sizes[major]:
                    del left[minor]
                    dropped.append(minor)
                    changed = True
    return dropped


class Solver:
    """One node's assignment. See the module docstring for the order of claims."""

    def __init__(
        self,
        rule: Rule,
        operands: Sequence[Placed],
        hints: Sequence[Placement | None],
        mesh: Mapping[str, int],
        backward: bool,
    ):
        self.rule, self.operands, self.hints, self.mesh, self.backward = rule, operands, hints, mesh, backward
        self.axes: dict[str, tuple[str, ...]] = {}
        self.owner: dict[str, tuple[str, str]] = {}  # mesh axis -> (factor, who: weight | mirror | activation)

    def solve(self) -> Solution:
        order = self._order()
        for i in [i for i in order if self.operands[i].weight]:
            self._claim(self.rule.ins[i], self._home(i).dims, "weight")
        for out, hint in zip(self.rule.outs, self.hints, strict=True):
            if hint is not None:
                self._claim(out, hint.dims, "mirror")
        for i in [i for i in order if not self.operands[i].weight]:
            self._claim(self.rule.ins[i], self._home(i).dims, "activation")
        self._drop_minor()
        return self._results()

    def exchanged(self, moves: Mapping[str, str]) -> Solution:
        """The solution with the axes of each factor `from` added to those of `to`; after `solve`."""
        for src, dst in moves.items():
            axes = self.axes.pop(src, ())
            grown = self.axes.get(dst, ()) + axes
            if local_size(self.rule.sizes[dst], grown, self.mesh) is None:
                raise ShardingError(
                    f"the exchange of {axes} from the sequence to the heads needs the {self.rule.sizes[dst]} heads "
                    "(or kv heads) to divide by "
                    f"{count(grown, self.mesh)}, the size of {grown}. Use attention='ring' or 'all_gather', or "
                    "smaller axes"
                )
            self.axes[dst] = grown
        sol = self._results()
        sol.reasons = ["rule"] * len(sol.reasons)
        return sol

    def _order(self) -> list[int]:
        def key(i: int) -> tuple:
            p = self.operands[i]
            return (not p.weight, p.guest, -p.type.nbytes, i)

        return sorted(range(len(self.operands)), key=key)

    def _home(self, i: int) -> Placement:
        p = self.operands[i]
        return p.use if p.use is not None else p.home

    def _claim(self, dims: Dims, axes: DimAxes, who: str) -> None:
        for f, want in split_dims(dims, axes, self.rule.sizes, self.mesh).items():
            if f in self.rule.whole:
                if (g := self.rule.prefer.get(f)) is not None:
                    self._take(g, self.axes.get(g, ()) + tuple(a for a in want if a not in self.axes.get(g, ())), who)
                continue
            self._take(f, want, who)

    def _take(self, f: str, want: tuple[str, ...], who: str) -> None:
        have = self.axes.get(f, ())
        if want[: len(have)] != have:
            return
        for a in want[len(have) :]:
            grown = (*self.axes.get(f, ()), a)
            if not self._free(a, f) or local_size(self.rule.sizes[f], grown, self.mesh) is None:
                return
            self.axes[f] = grown
            self.owner.setdefault(a, (f, who))

    def _free(self, axis: str, f: str) -> bool:
        holder = self.owner.get(axis)
        return holder is None or any(f in group and holder[0] in group for group in self.rule.tied)

    def _drop_minor(self) -> None:
        for f in drop_minor(self.axes, (*self.rule.ins, *self.rule.outs), self.rule.sizes, self.mesh):
            for a in self.axes.pop(f):
                self.owner.pop(a, None)

    def _results(self) -> Solution:
        rule, sol = self.rule, Solution(self.axes)
        stays = self._staying()
        for i in range(len(self.operands)):
            dims = self._dims(rule.ins[i])
            target = Placement(dims, frozenset(stays.get(i, ())))
            sol.targets.append(target)
            sol.reasons.append(self._reason(i, target))
        passed = frozenset(a for axes in stays.values() for a in axes)
        given = {f for dims in rule.ins for d in dims for f in d} - set(rule.resolved) - set(rule.whole)
        for dims in rule.outs:
            kept = {f for d in dims for f in d}
            summed = {a for f in given - kept for a in self.axes.get(f, ())}
            placed = self._dims(dims)
            sol.outs.append(Placement(placed, (passed | summed) - {a for d in placed for a in d}))
        return sol

    def _dims(self, dims: Dims) -> DimAxes:
        return tuple(tuple(a for f in factors for a in self.axes.get(f, ())) for factors in dims)

    def _staying(self) -> dict[int, tuple[str, ...]]:
        """For each operand, the mesh axes over which it may stay a pending sum."""
        rule = self.rule
        pending = {
            i: [a for a in self.mesh if a in p.home.pending and a not in self.owner]
            for i, p in enumerate(self.operands)
        }
        out: dict[int, tuple[str, ...]] = {}
        if rule.joint:
            scalars = all(self.operands[i].type.shape == () for i in rule.linear)
            some_or_all = any if scalars else all  # a whole 0-d value becomes pending for free
            everyone = [a for a in self.mesh if some_or_all(a in pending[i] for i in rule.linear)]
            outside = any(self.operands[i].home.pending for i in pending if i not in rule.linear)
            if everyone and not outside:
                for i in rule.linear:
                    out[i] = tuple(everyone)
            return out
        for i in rule.linear:
            mine = tuple(
                a for a in pending[i] if all(a not in self.operands[j].home.pending for j in pending if j != i)
            )
            if mine:
                out[i] = mine
        return out

    def _reason(self, i: int, target: Placement) -> str:
        p = self.operands[i]
        home = p.home
        if home == target:
            return ""
        if p.use is not None and home != p.use:
            return "parameter"
        lost = [a for d, axes in enumerate(home.dims) for a in axes if a not in target.dims[d]]
        if not lost:
            resolved = home.pending - target.pending
            if not resolved:
                return "slice"
            return "scalar" if p.type.shape == () else "mirror" if self.backward else "sum" if p.reduced else PENDING
        whole = {
            a
            for f, axes in split_dims(self.rule.ins[i], home.dims, self.rule.sizes, self.mesh).items()
            if f in self.rule.whole
            for a in axes
        }
        if all(a in whole for a in lost):
            return "rule" if self.rule.declared else "needs a whole dimension"
        if all(self.owner.get(a, ("", ""))[1] == "weight" for a in lost):
            return "weights stay"
        if all(self.owner.get(a, ("", ""))[1] in ("weight", "mirror") for a in lost):
            return "mirror"
        return "rule" if p.guest else CONFLICT
