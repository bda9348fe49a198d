"""Which layers each stage has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from fmeg.pipeline.costs import LayerCosts
from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import Schedule

Span = tuple[int, int]
Stages = str | Sequence[int] | LayerCosts
"""What `stages=` takes; see `plan`."""


def even(layers: int, stages: int) -> list[Span]:
    """Layers of each stage, (first, past the last), as equal as can be, the longer stages first.

    >>> even(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    return _spans([layers // stages + (s < layers % stages) for s in range(stages)])


def by_cost(
    layers: int,
    stages: int,
    before: float,
    layer: float | Sequence[float],
    after: float,
) -> list[Span]:
    """The cut whose longest stage is shortest, when the embedding costs `before`, a layer `layer` (one number, or one a
    layer), the head and loss `after`. Every stage has a layer, if there are enough.

    Among such cuts, layers go to the earlier stages last, so that the later ones, which keep fewer activations, have
    more.

    >>> by_cost(8, 4, before=0.0, layer=1.0, after=2.0)
    [(0, 1), (1, 4), (4, 7), (7, 8)]
    >>> by_cost(5, 2, before=0.0, layer=[1, 1, 1, 4, 4], after=0.0)
    [(0, 4), (4, 5)]
    """
    each = [float(layer)] * layers if isinstance(layer, (int, float)) else [float(c) for c in layer]
    total = [0.0, *accumulate(each)]
    least = int(layers >= stages)

    def fits(limit: float) -> list[int] | None:
        counts, left = [], layers
        for s in reversed(range(stages)):
            extra = (before if s == 0 else 0.0) + (after if s == stages - 1 else 0.0)
            take, most = 0, left - s * least
            while take < most and extra + total[left] - total[left - take - 1] <= limit * (1 + 1e-9):
                take += 1
            if take < least or extra > limit * (1 + 1e-9):
                return None
            counts.append(take)
            left -= take
        return None if left else counts[::-1]

    runs = {total[b] - total[a] for b in range(layers + 1) for a in range(b + 1)}
    limits = sorted({e + run for e in (0.0, before, after, before + after) for run in runs})
    lo, hi = 0, len(limits) - 1
    while lo < hi:
        middle = (lo + hi) // 2
        lo, hi = (lo, middle) if fits(limits[middle]) is not None else (middle + 1, hi)
    counts = fits(limits[lo])
    assert counts is not None
    return _spans(counts)


def parse(text: str, lengths: Sequence[int] | None = None) -> list[int]:
    """Layers of each stage from a drawing in Megatron's manner: `|` between stages, E the embedding, t a layer, m a
    layer of a multi-token-prediction block, L the loss, `*n` repeats what is before it, parentheses group, commas mean
    nothing.

    Layers are those of all scans over layers, one after the other; m stands for those of the last scans, t for the
    others. `lengths`, the number of layers of each scan, is what the letters are held against.

    >>> parse("Et*3|(tt|)*2,t|L")
    [3, 2, 2, 1, 0]
    >>> parse("Ettt|ttm|L", lengths=[2, 3, 1])
    [3, 3, 0]
    """
    flat = _expand(re.sub(r"[\s,]", "", text))
    stages = flat.split("|")
    for i, s in enumerate(stages):
        bad = sorted(set(s) - set("EtmL"))
        if bad:
            raise ScheduleError(
                f"stages {text!r}: stage {i} has {bad[0]!r}; known are E (embedding), t (layer), m (layer of a "
                "multi-token-prediction block) and L (loss)"
            )
        if "E" in s and (i or s.index("E")):
            raise ScheduleError(
                f"stages {text!r}: E stands in stage {i} as {s!r}; the embedding begins the first stage"
            )
        if "L" in s and (i != len(stages) - 1 or s.index("L") != len(s) - 1):
            raise ScheduleError(f"stages {text!r}: L stands in stage {i} as {s!r}; the loss ends the last stage")
    order = "".join(c for c in flat if c in "tm")
    if "mt" in order:
        raise ScheduleError(f"stages {text!r}: t stands behind m; multi-token prediction comes after the layers")
    n, m = len(order), order.count("m")
    if m and lengths is not None and n == sum(lengths) and m not in accumulate(reversed(lengths[1:])):
        raise ScheduleError(
            f"stages {text!r}: m stands for {m} layers; the scans over layers have {', '.join(map(str, lengths))}, and "
            "m are those of the last ones"
        )
    return [s.count("t") + s.count("m") for s in stages]


def _expand(text: str) -> str:
    repeated = re.compile(r"\(([^()]*)\)\*(\d+)|([^()|*])\*(\d+)|\(([^()]*)\)")
    while (m := repeated.search(text)) is not None:
        group, n, one, k, plain = m.groups()
        new = group * int(n) if group is not None else one * int(k) if one is not None else plain
        text = text[: m.start()] + new + text[m.end() :]
    if any(c in text for c in "()*"):
        raise ScheduleError(f"stages: cannot read {text!r}; write it as Et*3|(tt|)*6,t|L")
    return text


def _spans(counts: Sequence[int]) -> list[Span]:
    out, at = [], 0
    for n in counts:
        out.append((at, at + n))
        at += n
    return out


@dataclass(frozen=True)
class Plan:
    """A schedule and its stages' layers.

    spans    of each stage (first, past the last) in the list of all layers, those of one scan after those of another
    lengths  how many layers each scan has
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    lengths: tuple[int, ...]

    def part(self, stage: int, scan: int) -> Span:
        """The layers of a scan that a stage has.

        >>> from fmeg.pipeline.names import by_name
        >>> p = plan(by_name("1f1b", ranks=2, microbatches=2), [3, 4], (4, 3))
        >>> p.part(0, 0), p.part(0, 1), p.part(1, 1)
        ((0, 3), (0, 1), (1, 4))
        """
        start, n = sum(self.lengths[:scan]), self.lengths[scan]
        lo, hi = (min(max(at - start, 0), n) for at in self.spans[stage])
        return lo, hi

    @property
    def cut(self) -> tuple[tuple[tuple[int, int, int], ...], ...]:
        """For each stage what it has of the scans: (scan, first, past the last), ….

        >>> from fmeg.pipeline.names import by_name
        >>> plan(by_name("1f1b", ranks=2, microbatches=2), [3, 4], (4, 3)).cut
        (((0, 0, 3), (1, 0, 1)), ((1, 1, 4),))
        """
        parts = [[(k, *self.part(s, k)) for k in range(len(self.lengths))] for s in range(len(self.spans))]
        return tuple(tuple(p for p in own if p[1] < p[2]) for own in parts)

    def mine(self, rank: int, scan: int) -> list[int]:
        """The layers of a scan that a rank stores, in the order of its stages."""
        return [i for s in self.schedule.stages_of(rank) for i in range(*self.part(s, scan))]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """For each scan how many rows every rank stores: the most that one has; scans of one length store alike."""
        ranks = range(self.schedule.ranks)
        most = [max(len(self.mine(r, k)) for r in ranks) for k in range(len(self.lengths))]
        return tuple(max(m for m, n in zip(most, self.lengths, strict=True) if n == mine) for mine in self.lengths)

    @cached_property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """For each scan the global layer of each stored row, rank after rank; -1 for padding."""
        orders = []
        for k, rows in enumerate(self.rows):
            own = [self.mine(r, k) for r in range(self.schedule.ranks)]
            orders.append(tuple(i for layers in own for i in (*layers, *(-1 for _ in range(rows - len(layers))))))
        return tuple(orders)


def plan(
    schedule: Schedule,
    lengths: int | Sequence[int],
    stages: Stages,
    costs: tuple[float, Sequence[float], float] | None = None,
) -> Plan:
    """Lay out the layers of all scans on the stages of a schedule.

    lengths  how many layers each scan has; a number where there is one
    stages   "even", "cost" (with `costs` of what is before, of each layer, of what is after), `LayerCosts`, numbers of
             layers, or a drawing (`parse`)
    """
    lengths = [lengths] if isinstance(lengths, int) else lengths
    n, layers = schedule.stages, sum(lengths)
    if stages == "even":
        spans = even(layers, n)
    elif stages == "cost":
        spans = by_cost(layers, n, *(costs or (0.0, 1.0, 0.0)))
    elif isinstance(stages, LayerCosts):
        spans = by_cost(layers, n, stages.before, stages.layer, stages.after)
    else:
        counts = parse(stages, lengths) if isinstance(stages, str) else list(stages)
        if len(counts) != n or sum(counts) != layers or min(counts) < 0:
            several = f", {' + '.join(map(str, lengths))}," if len(lengths) > 1 else ""
            raise ScheduleError(
                f"stages {stages!r} give {counts}, {sum(counts)} layers in {len(counts)} stages; the model has "
                f"{layers} layers{several} and the schedule {schedule.name!r} {n} stages"
            )
        spans = _spans(counts)
    return Plan(schedule, tuple(spans), tuple(lengths))
