"""What actions cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import COMPUTE, Action

Cost = float | Sequence[float]
Event = tuple[int, Action, float, float]
"""(rank, action, start, end)."""


@dataclass(frozen=True)
class Costs:
    """Durations, in any unit: a number, or one a stage.

    F B I W  of a forward, a whole backward, and its two parts
    hop      of a message between two ranks
    REDUCE   of a stage's sum of gradients over ranks, beside what its rank computes; a rank's run one after the other
    pair     None: the two actions of a pair run one after the other. A number: they begin and end together, and take
             this part of their sum

    >>> Costs(F=[1, 2]).of(Action("F", 1, 0))
    2
    """

    F: Cost = 1.0
    B: Cost = 2.0
    I: Cost = 1.0
    W: Cost = 1.0
    hop: float = 0.0
    pair: float | None = None
    REDUCE: Cost = 0.0

    def of(self, action: Action) -> float:
        """Of one action; messages and GATHER take no time."""
        cost = getattr(self, action.kind, 0.0)
        return cost if isinstance(cost, (int, float)) else cost[action.stage]

    def per_stage(self, kind: str, stages: int) -> list[float]:
        """Of a kind, one number a stage. ScheduleError if there are not as many."""
        cost: Cost = getattr(self, kind)
        if isinstance(cost, (int, float)):
            return [cost] * stages
        if len(cost) != stages:
            raise ScheduleError(f"Costs: {kind} must be a number or have one a stage, {stages}; given {len(cost)}")
        return list(cost)

    def shared(self, chunks: float) -> Costs:
        """The costs of one of a rank's `chunks` stages, where these are of all of them; messages stay as they are.

        >>> Costs(hop=0.5).shared(2)
        Costs(F=0.5, B=1.0, I=0.5, W=0.5, hop=0.5, pair=None, REDUCE=0.0)
        """
        share = lambda cost: cost / chunks if isinstance(cost, (int, float)) else cost
        return replace(self, **{kind: share(getattr(self, kind)) for kind in (*COMPUTE, "REDUCE")})

    @classmethod
    def measured(cls, events: Iterable[Event], stages: int, hop: float = 0.0) -> Costs:
        """The median duration of each kind and stage among (rank, action, start, end); B is I + W where none was seen,
        and I and W half of B each. Messages and REDUCE go on beside what is computed: when they were waited for does
        not say how long they take.

        >>> Costs.measured([(0, Action("F", 0, 0), 0.0, 1.0), (0, Action("B", 0, 0), 1.0, 4.0)], stages=1).I
        (1.5,)
        """
        seen: dict[tuple[str, int], list[float]] = {}
        for _, action, start, end in events:
            seen.setdefault((action.kind, action.stage), []).append(end - start)
        middle = {key: median(times) for key, times in seen.items()}

        def of(kind: str, stage: int) -> float:
            if (kind, stage) in middle or kind == "F":
                return middle.get((kind, stage), 0.0)
            if kind == "B":
                return middle.get(("I", stage), 0.0) + middle.get(("W", stage), 0.0)
            return middle.get(("B", stage), 0.0) / 2

        f, b, i, w = (tuple(of(kind, stage) for stage in range(stages)) for kind in "FBIW")
        return cls(f, b, i, w, hop)


@dataclass(frozen=True)
class LayerCosts:
    """What one microbatch costs, forward and backward together, in any unit: what comes `before` the layers (the
    embedding), one `layer`, what comes `after` them (the head and the loss). What `stages=` takes to cut by cost;
    `Recording.layer_costs` measures it.

    >>> LayerCosts.fitted([(2, True, False, 2.5), (3, False, False, 3.0), (1, False, True, 3.0)])
    LayerCosts(before=0.5, layer=1.0, after=2.0)
    """

    before: float
    layer: float
    after: float

    @classmethod
    def fitted(cls, seen: Iterable[tuple[int, bool, bool, float]]) -> LayerCosts:
        """By least squares, from (layers, whether it is the first stage, the last one, cost) of stages.

        Where that leaves the embedding open, as two stages do, it counts as nothing. No part is negative. ScheduleError
        if the stages do not tell a layer from the rest.
        """
        stages = list(seen)
        if not any(layers for layers, *_ in stages):
            raise ScheduleError("LayerCosts: no stage has a layer, so nothing says what one costs")
        rows = torch.tensor([[n, last, first] for n, first, last, _ in stages], dtype=torch.float64)
        costs = torch.tensor([cost for *_, cost in stages], dtype=torch.float64)
        parts = [0]  # columns of `rows` that are known apart: layers, then the head, then the embedding
        for column in (1, 2):
            if torch.linalg.matrix_rank(rows[:, [*parts, column]]) > len(parts):
                parts.append(column)
        while True:
            found = torch.linalg.lstsq(rows[:, parts], costs[:, None]).solution[:, 0]
            if len(parts) == 1 or found.min() >= 0:
                break
            del parts[int(found.argmin())]
        value = dict(zip(parts, found.tolist(), strict=True))
        return cls(*(round(max(value.get(k, 0.0), 0.0), 12) for k in (2, 0, 1)))
