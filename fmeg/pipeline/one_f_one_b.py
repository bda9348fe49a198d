"""Schedules that are a warm-up count: some forwards, then one forward and one backward in turn, then what is left.

With `w` warm-up forwards on rank r of R, M microbatches, v chunks (stages a rank) in groups of g microbatches:

    gpipe, breadth_first      w = M·v                       all forwards first
    1f1b                      w = R - r - 1
    eager_1f1b                w = 2(R - r - 1)              a message may take as long as a forward
    interleaved_1f1b          w = 2(R - r - 1) + (v - 1)g   Megatron's counts
    zb_h1                     w = R - r - 1                 B in two, W delayed by r microbatches
    interleaved_zero_bubble   w = R - r - 1 + (v - 1)g      the same with chunks

A rank never warms up with more than there is. Interleaved ranks visit the microbatches group by group, each group all
chunks: small groups are depth-first, one group of all is breadth-first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.schedule import Action, Schedule, stage_map


def none(stages: int, microbatches: int) -> Schedule:
    """No pipeline: one rank runs all stages, each microbatch forward and backward. Gradient accumulation.

    >>> print(none(2, 2))
    0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
    """
    _at_least_one(ranks=stages, microbatches=microbatches)
    line: list[Action] = []
    for m in range(microbatches):
        line += [Action("F", s, m) for s in range(stages)]
        line += [Action("B", s, m) for s in reversed(range(stages))]
    return Schedule((tuple(line),), (0,) * stages, microbatches, "none")


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    >>> print(gpipe(2, 2))
    0F0 0F1 0B0 0B1
    1F0 1F1 1B0 1B1
    """
    return _build("gpipe", ranks, microbatches, 1, [microbatches], lambda r: microbatches)


def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """GPipe with several stages a rank, stage by stage (Lamy-Poirier 2023, arXiv:2211.05953).

    Each stage's parameters are in use once forward and once backward, for all microbatches: what a stage sharded over
    data ranks wants.

    >>> print(breadth_first(2, 2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1
    """
    return _build("breadth_first", ranks, microbatches, chunks, [microbatches], lambda r: chunks * microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B (Narayanan et al. 2021, arXiv:2104.04473): GPipe's bubble with at most R microbatches alive.

    >>> print(one_f_one_b(2, 3))
    0F0 0F1 0B0 0F2 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    return _build("1f1b", ranks, microbatches, 1, [microbatches], lambda r: ranks - r - 1)


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with twice the warm-up, so that messages overlap with computation (Zhuang et al. 2022, arXiv:2211.05322).

    >>> print(eager_1f1b(2, 3))
    0F0 0F1 0F2 0B0 0B1 0B2
    1F0 1B0 1F1 1B1 1F2 1B2
    """
    return _build("eager_1f1b", ranks, microbatches, 1, [microbatches], lambda r: 2 * (ranks - r - 1))


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with B in two parts, W filling the bubble (Qi et al. 2023, arXiv:2401.10241, ZB-H1).

    A third of 1F1B's bubble where F = I = W, with R microbatches alive on every rank.

    >>> print(zb_h1(2, 3))
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return _build("zb_h1", ranks, microbatches, 1, [microbatches], lambda r: ranks - r - 1, lambda r: r)


def interleaved_1f1b(
    ranks: int, microbatches: int, chunks: int = 2, group: int | None = None, overlap: bool = False
) -> Schedule:
    """1F1B with `chunks` stages a rank, block-cyclic: the bubble is divided by `chunks` (arXiv:2104.04473).

    group    microbatches that visit a chunk before the next one; by default `ranks`, or, where these don't divide the
             microbatches, groups as equal as can be that hold at least `ranks`. `microbatches` is breadth-first.
    overlap  one more forward in flight, so that forward and backward of the steady part don't depend on each other:
             they are marked as a pair, and one computes while the other exchanges tokens with its experts

    ScheduleError if a group is given that cannot be: other than `ranks` ≤ group ≤ `microbatches`, or a last group that
    is not full and has fewer than `ranks`.

    >>> print(interleaved_1f1b(2, 2))
    0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    groups = _groups(ranks, microbatches, group)
    warmup = lambda r: 2 * (ranks - r - 1) + (chunks - 1) * groups[0] + overlap
    return _build("interleaved_1f1b", ranks, microbatches, chunks, groups, warmup, pair=overlap)


def interleaved_zero_bubble(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Schedule:
    """ZB-H1 with `chunks` stages a rank, block-cyclic; `group` as in `interleaved_1f1b`.

    >>> print(interleaved_zero_bubble(2, 2))
    0F0 0F1 2F0 2F1 2I0 2W0 2I1 2W1 0I0 0W0 0I1 0W1
    1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1
    """
    groups = _groups(ranks, microbatches, group)
    warmup = lambda r: ranks - r - 1 + (chunks - 1) * groups[0]
    return _build("interleaved_zero_bubble", ranks, microbatches, chunks, groups, warmup, lambda r: r)


def _build(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    groups: Sequence[int],
    warmup: Callable[[int], int],
    delay: Callable[[int], int] | None = None,
    pair: bool = False,
) -> Schedule:
    """`warmup(rank)` forwards, then forwards and backwards in turn.

    delay  of W, in backwards of the rank; None: B instead of I and W
    pair   mark the forwards of the steady part as pairs with what follows
    """
    _at_least_one(ranks=ranks, microbatches=microbatches, chunks=chunks)
    visits, begin = [], 0
    for size in groups:
        visits += [(c, m) for c in range(chunks) for m in range(begin, begin + size)]
        begin += size
    count, back = len(visits), "B" if delay is None else "I"
    lines = []
    for rank in range(ranks):
        w = min(warmup(rank), count)
        line = [Action("F", c * ranks + rank, m) for c, m in visits[:w]]
        backs = [((chunks - 1 - c) * ranks + rank, m) for c, m in visits]
        for k, (stage, m) in enumerate(backs):
            if w + k < count:
                c, forward = visits[w + k]
                line.append(Action("F", c * ranks + rank, forward, pair))
            line.append(Action(back, stage, m))
            if delay is not None and k >= delay(rank):
                line.append(Action("W", *backs[k - delay(rank)]))
        if delay is not None:
            line += [Action("W", *back) for back in backs[max(0, count - delay(rank)) :]]
        lines.append(tuple(line))
    return Schedule(tuple(lines), stage_map("cyclic", ranks, chunks), microbatches, name)


def _groups(ranks: int, microbatches: int, group: int | None) -> list[int]:
    _at_least_one(ranks=ranks, microbatches=microbatches)
    if group is None:
        rounds = max(1, microbatches // ranks)
        size, more = divmod(microbatches, rounds)
        return [size + 1] * more + [size] * (rounds - more)
    full, last = divmod(microbatches, group) if group > 0 else (0, 0)
    if not min(ranks, microbatches) <= group <= microbatches or 0 < last < ranks:
        raise ScheduleError(
            f"interleaved: groups of {group} microbatches must have at least {min(ranks, microbatches)}, the ranks, "
            f"and at most {microbatches}, all, and so must the last, which has {last or group}; leave `group` out, or "
            f"change the number of microbatches"
        )
    return [group] * full + [last] * (last > 0)


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ScheduleError(f"schedule: {name} must be at least 1, given {size}")
