"""Every generator at every size, for tests that range over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fmeg.pipeline import Costs, Schedule, by_name

MAKERS: dict[str, Callable[[int, int], Schedule]] = {
    **{
        name: lambda ranks, microbatches, name=name: by_name(name, ranks=ranks, microbatches=microbatches)
        for name in (
            "gpipe",
            "breadth_first",
            "1f1b",
            "eager_1f1b",
            "interleaved_1f1b",
            "zb_h1",
            "interleaved_zero_bubble",
            "zb_v",
            "dualpipe_v",
            "greedy",
        )
    },
    "none": lambda ranks, microbatches: by_name("none", stages=ranks, microbatches=microbatches),
    "interleaved of 3": lambda r, m: by_name("interleaved_1f1b", ranks=r, microbatches=m, chunks=3),
    "interleaved, overlapping": lambda r, m: by_name("interleaved_1f1b", ranks=r, microbatches=m, overlap=True),
    "interleaved, one group": lambda r, m: by_name("interleaved_1f1b", ranks=r, microbatches=m, group=m),
    "zero bubble of 3": lambda r, m: by_name("interleaved_zero_bubble", ranks=r, microbatches=m, chunks=3),
    "greedy on a V": lambda r, m: by_name("greedy", ranks=r, microbatches=m, chunks=2, shape="vee", limit=1),
    "greedy, contiguous": lambda r, m: by_name("greedy", ranks=r, microbatches=m, chunks=2, shape="contiguous"),
    "greedy, whole backwards": lambda r, m: by_name(
        "greedy", ranks=r, microbatches=m, chunks=2, split=False, costs=Costs(F=2, B=3, hop=0.3)
    ),
}


def can(name: str, ranks: int, microbatches: int) -> bool:
    """Whether the generator takes these sizes."""
    return name != "dualpipe_v" or microbatches >= 2 * ranks


def small() -> Iterator[Schedule]:
    """One of each at a few small sizes."""
    for name, make in MAKERS.items():
        for ranks, microbatches in ((1, 2), (2, 4), (3, 6), (4, 5)):
            if can(name, ranks, microbatches):
                yield make(ranks, microbatches)
