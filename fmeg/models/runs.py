"""Layers of several kinds as few scans: what repeats is scanned, whatever its period.

Kinds are letters, a layer each: "dsdsds" is one scan over three periods of two layers, "dsssss" one over the first and
one over the rest. A scan's body holds a period, so what is traced grows with the periods, not with the layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from fmeg.models.table import Param


@dataclass(frozen=True)
class Run:
    """One scan.

    name      of its stack, and of the logical axis along which this lies
    kinds     of the layers of a period
    repeats   how many periods
    first     number of its first layer
    """

    name: str
    kinds: str
    repeats: int
    first: int

    def table(self, j: int, rows: Mapping[str, Param]) -> dict[str, Param]:
        """A layer's rows, of axes "layers …", as those of the j-th layer of each period."""
        first, step = self.first + j, len(self.kinds)
        its = lambda p: replace(p, axes=self.name + p.axes.removeprefix("layers"), first=first, step=step)
        return {name: its(p) for name, p in rows.items()}


@cache
def runs(kinds: str) -> tuple[Run, ...]:
    """The scans of these layers, in order: "layers", and what does not fit it before ("first_layers") and after it
    ("last_layers"). Of all ways the one with the fewest layers traced, then the most in "layers", then the earliest.

    >>> [(r.name, r.kinds, r.repeats) for r in runs("dssssdssssd")]
    [('layers', 'dssss', 2), ('last_layers', 'd', 1)]
    >>> [(r.name, r.kinds, r.repeats) for r in runs("ddsss")]
    [('first_layers', 'd', 2), ('layers', 's', 3)]
    """
    best: tuple[Run, ...] = ()
    for start in range(len(kinds)):
        for period in range(1, len(kinds) - start + 1):
            one = kinds[start : start + period]
            n = 1
            while kinds.startswith(one, start + n * period):
                n += 1
            end = start + n * period
            before, after = _whole("first_layers", kinds, 0, start), _whole("last_layers", kinds, end, len(kinds))
            found = (*before, Run("layers", one, n, start), *after)
            if not best or _cost(found) < _cost(best):
                best = found
            if len(best) == len(best[0].kinds) == 1:
                return best
    return best


def _cost(found: tuple[Run, ...]) -> tuple[int, int]:
    return sum(len(r.kinds) for r in found), -max(len(r.kinds) * r.repeats for r in found if r.name == "layers")


def _whole(name: str, kinds: str, start: int, end: int) -> tuple[Run, ...]:
    """Layers start … end as one scan, of the smallest period; none if there are none."""
    part, n = kinds[start:end], end - start
    periods = (p for p in range(1, n + 1) if n % p == 0 and part == part[:p] * (n // p))
    return tuple(Run(name, part[:p], n // p, start) for p in list(periods)[:1])
