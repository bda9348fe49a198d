"""How many residuals a rank holds at once."""

from __future__ import annotations

from fmeg.pipeline.schedule import Schedule


def peaks(schedule: Schedule, after_input: float = 1.0) -> list[float]:
    """The most residuals that each rank holds at once, in microbatches of that rank's share of the model.

    An F of one of a rank's v stages adds 1/v; its B, or its W, takes that away. Between I and W a part `after_input`
    stays: what `fmeg.pipeline.memory_report(…).after_input` counts, 0.91 for a layer of Llama 3 8B.

    >>> from fmeg.pipeline.one_f_one_b import one_f_one_b
    >>> peaks(one_f_one_b(4, 8))
    [4.0, 3.0, 2.0, 1.0]
    """
    change = {"F": 1.0, "B": -1.0, "I": after_input - 1.0, "W": -after_input}
    result = []
    for rank, line in enumerate(schedule.actions):
        live = peak = 0.0
        for action in line:
            if action[0] in change:
                live += change[action[0]]
                if live > peak:
                    peak = live
        result.append(peak / max(1, schedule.rank_of.count(rank)))
    return result
