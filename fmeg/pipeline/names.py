"""Schedules by name."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from inspect import signature
from typing import Any

from fmeg.pipeline.errors import ScheduleError
from fmeg.pipeline.greedy import greedy
from fmeg.pipeline.one_f_one_b import (
    breadth_first,
    eager_1f1b,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    none,
    one_f_one_b,
    zb_h1,
)
from fmeg.pipeline.schedule import Schedule
from fmeg.pipeline.vee import dualpipe_v, zb_v

SCHEDULES: dict[str, tuple[Callable[..., Schedule], int | None]] = {
    "none": (none, None),
    "gpipe": (gpipe, 1),
    "breadth_first": (breadth_first, None),
    "1f1b": (one_f_one_b, 1),
    "eager_1f1b": (eager_1f1b, 1),
    "interleaved_1f1b": (interleaved_1f1b, None),
    "zb_h1": (zb_h1, 1),
    "interleaved_zero_bubble": (interleaved_zero_bubble, None),
    "zb_v": (zb_v, 2),
    "dualpipe_v": (dualpipe_v, 2),
    "greedy": (greedy, None),
}
"""Name -> generator, and the number of chunks (stages a rank) if there is but one."""

_TORCH = {"loopedbfs": "breadth_first", "zbvzerobubble": "zb_v"}


def by_name(
    name: str,
    *,
    microbatches: int,
    stages: int | None = None,
    ranks: int | None = None,
    chunks: int | None = None,
    **options: Any,
) -> Schedule:
    """The schedule of that name; case, `-` and `_` don't matter, and torch's names are known.

    stages, ranks  one of them: the stages of the whole model, or the ranks that share them
    chunks         stages a rank; 1, or for `breadth_first`, the interleaved and the V-shaped schedules 2
    options        of the generator, such as `group` of interleaved_1f1b or `costs` of greedy

    ScheduleError if there is no such name or option, the stages do not divide by the chunks, or the generator refuses.

    >>> by_name("1f1b", stages=4, microbatches=8)
    Schedule('1f1b', stages=4, microbatches=8, ranks=4)
    >>> by_name("ZBV", ranks=4, microbatches=8)
    Schedule('zb_v', stages=8, microbatches=8, ranks=4)
    >>> by_name("interleaved_1f1b", stages=12, chunks=3, microbatches=8)
    Schedule('interleaved_1f1b', stages=12, microbatches=8, ranks=4)
    """
    generator, only = _find(name)
    known = signature(generator).parameters
    if unknown := sorted(set(options) - set(known)):
        allowed = sorted(set(known) - {"ranks", "stages", "microbatches", "chunks"})
        raise ScheduleError(f"schedule {name!r}: no option {unknown[0]!r}; it has {', '.join(allowed) or 'none'}")
    if (stages is None) == (ranks is None):
        raise ScheduleError(f"schedule {name!r}: give either stages (of the model) or ranks, given {stages=}, {ranks=}")
    if generator is none:
        if (ranks or 1) != 1:
            raise ScheduleError(f"schedule 'none': has one rank, given ranks={ranks}; use gpipe or 1f1b")
        return none(stages or chunks or 1, microbatches, **options)
    if only is not None and chunks not in (None, only):
        raise ScheduleError(
            f"schedule {name!r}: has {only} stage{'s' * (only > 1)} a rank, given chunks={chunks}; "
            f"interleaved_1f1b and interleaved_zero_bubble take any number"
        )
    if chunks is None:
        default = known["chunks"].default if "chunks" in known else only
        chunks = default if isinstance(default, int) else 1
    if chunks < 1 or (stages or 0) % chunks:
        raise ScheduleError(f"schedule {name!r}: stages={stages} must divide by the {chunks} chunks of each rank")
    ranks = stages // chunks if stages is not None else ranks
    return generator(ranks, microbatches, **({"chunks": chunks} if only is None else {}), **options)


def _find(name: str) -> tuple[Callable[..., Schedule], int | None]:
    plain = {key.replace("_", ""): key for key in SCHEDULES} | _TORCH
    wanted = "".join(c for c in name.lower() if c.isalnum())
    if wanted not in plain:
        close = get_close_matches(wanted, plain, 1)
        hint = f"; did you mean {plain[close[0]]!r}?" if close else ""
        raise ScheduleError(f"schedule: no schedule is called {name!r}; there are {', '.join(SCHEDULES)}{hint}")
    return SCHEDULES[plain[wanted]]
