"""Which layers each stage has."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

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


def by_cost(layers: int, stages: int, before: float, layer: float, after: float) -> list[Span]:
    """The cut whose longest stage is shortest, when the embedding costs `before`, a layer `layer`, the head and loss
    `after`.

    Among such cuts, layers go to the earlier stages last, so that the later ones, which keep fewer activations, have
    more.

    >>> by_cost(8, 4, before=0.0, layer=1.0, after=2.0)
    [(0, 1), (1, 4), (4, 7), (7, 8)]
    """

    def fits(limit: float) -> list[int] | None:
        counts = []
        left = layers
        for s in reversed(range(stages)):
            extra = (before if s == 0 else 0.0) + (after if s == stages - 1 else 0.0)
            room = int((limit - extra) / layer + 1e-9) if layer else layers
            if limit - extra < -1e-9 * max(limit, 1.0):
                return None
            take = min(left, max(room, 0))
            counts.append(take)
            left -= take
        return None if left else counts[::-1]

    limits = sorted({e + k * layer for e in (0.0, before, after, before + after) for k in range(layers + 1)})
    best = next(limit for limit in limits if fits(limit) is not None)
    counts = fits(best)
    assert counts is not None
    while layers >= stages and min(counts) == 0:  # a stage without layers only where there are too few
        i = counts.index(0)
        j = max(range(stages), key=lambda k: counts[k])
        counts[i], counts[j] = 1, counts[j] - 1
    return _spans(counts)


def parse(text: str) -> list[int]:
    """Layers of each stage from a drawing in Megatron's manner: `|` between stages, E the embedding, t a layer, L the
    loss, `*n`
    repeats what is before it, parentheses group, commas mean nothing.

    >>> parse("Et*3|(tt|)*2,t|L")
    [3, 2, 2, 1, 0]
    """
    flat = _expand(re.sub(r"[\s,]", "", text))
    stages = flat.split("|")
    for i, s in enumerate(stages):
        bad = sorted(set(s) - set("EtL"))
        if bad:
            raise ScheduleError(
                f"stages {text!r}: stage {i} has {bad[0]!r}; known are E (embedding), t (layer) and L (loss)"
            )
        if "E" in s and (i or s.index("E")):
            raise ScheduleError(
                f"stages {text!r}: E stands in stage {i} as {s!r}; the embedding begins the first stage"
            )
        if "L" in s and (i != len(stages) - 1 or s.index("L") != len(s) - 1):
            raise ScheduleError(f"stages {text!r}: L stands in stage {i} as {s!r}; the loss ends the last stage")
    return [s.count("t") for s in stages]


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

    rows   stored on each rank: the layers of its stages, in stage order, padded to the same number
    order  the global layer of each stored row, rank after rank; -1 for padding
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    rows: int
    order: tuple[int, ...]


def plan(schedule: Schedule, layers: int, stages: Stages, costs: tuple[float, float, float] | None = None) -> Plan:
    """Lay out `layers` on the stages of a schedule.

    stages  "even", "cost" (with `costs` of what is before, one layer, what is after), `LayerCosts`, numbers of layers,
            or a drawing (`parse`)
    """
    n = schedule.stages
    if stages == "even":
        spans = even(layers, n)
    elif stages == "cost":
        spans = by_cost(layers, n, *(costs or (0.0, 1.0, 0.0)))
    elif isinstance(stages, LayerCosts):
        spans = by_cost(layers, n, stages.before, stages.layer, stages.after)
    else:
        counts = parse(stages) if isinstance(stages, str) else list(stages)
        if len(counts) != n or sum(counts) != layers or min(counts) < 0:
            raise ScheduleError(
                f"stages {stages!r} give {counts}, {sum(counts)} layers in {len(counts)} stages; the model has "
                f"{layers} layers and the schedule {schedule.name!r} {n} stages"
            )
        spans = _spans(counts)
    mine = [[i for s in schedule.stages_of(r) for i in range(*spans[s])] for r in range(schedule.ranks)]
    rows = max(map(len, mine))
    order = tuple(i for own in mine for i in (*own, *(-1 for _ in range(rows - len(own)))))
    return Plan(schedule, tuple(spans), rows, order)
