"""A pipeline schedule is data: for every rank, the list of what it does, in order.

An `Action` is a kind, a stage and a microbatch, written `2F0`:

    F  B           forward; whole backward
    I  W           backward of the inputs, and of the weights: B in two parts
    SEND_F RECV_F  an activation leaves stage s for s + 1; arrives at stage s from s - 1
    SEND_B RECV_B  a cotangent leaves stage s for s - 1; arrives at stage s from s + 1
    GATHER REDUCE  a stage's parameters are brought together; its gradients are summed over their ranks

Generators write F, B, I and W alone; `fmeg.pipeline.comms` derives the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from fmeg.pipeline.errors import ScheduleError

if TYPE_CHECKING:
    from fmeg.pipeline.costs import Costs
    from fmeg.pipeline.simulate import Timeline
    from fmeg.pipeline.verify import Report

COMPUTE = ("F", "B", "I", "W")
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")
PARAMETERS = ("GATHER", "REDUCE")
KINDS = COMPUTE + MESSAGES + PARAMETERS

_TOKEN = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|GATHER|REDUCE)(\d*)(&?)")


class Action(NamedTuple):
    """One thing that a rank does.

    kind        one of `KINDS`
    stage       the stage that it belongs to
    microbatch  which one; -1 for GATHER and REDUCE, which belong to the whole step
    pair        it overlaps with the next compute action of its rank (DualPipe's F with B); written `2F0&`

    >>> Action("F", 2, 0), Action("SEND_B", 1, 3), Action("REDUCE", 1)
    (2F0, 1SEND_B3, 1REDUCE)
    >>> Action.parse("2F0&") == Action("F", 2, 0, pair=True)
    True
    """

    kind: str
    stage: int
    microbatch: int = -1
    pair: bool = False

    def __repr__(self) -> str:
        microbatch = "" if self.microbatch < 0 else self.microbatch
        return f"{self.stage}{self.kind}{microbatch}{'&' if self.pair else ''}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `str` wrote. ScheduleError if there is none such."""
        match = _TOKEN.fullmatch(text.strip())
        if match is None or (match[2] in PARAMETERS) != (match[3] == ""):
            raise ScheduleError(
                f"schedule: an action is a stage, a kind ({' '.join(KINDS)}) and a microbatch, such as 2F0, "
                f"3SEND_F1, or 2REDUCE and 2GATHER without one; given {text!r}"
            )
        return cls(match[2], int(match[1]), int(match[3] or -1), bool(match[4]))


def stage_map(kind: str, ranks: int, chunks: int = 1) -> tuple[int, ...]:
    """The rank of each of `ranks * chunks` stages.

    kind  "contiguous"  rank r has stages r·chunks … r·chunks + chunks - 1
          "cyclic"      stage s is on rank s mod ranks (interleaved schedules)
          "vee"         down the ranks and back up, again and again (ZB-V, DualPipeV)

    >>> stage_map("cyclic", 3, 2), stage_map("vee", 3, 2), stage_map("contiguous", 3, 2)
    ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0), (0, 0, 1, 1, 2, 2))
    """
    stages = range(ranks * chunks)
    if kind == "contiguous":
        return tuple(s // chunks for s in stages)
    if kind == "cyclic":
        return tuple(s % ranks for s in stages)
    if kind == "vee":
        return tuple(ranks - 1 - s % ranks if s // ranks % 2 else s % ranks for s in stages)
    raise ScheduleError(f"stage_map: kind must be 'contiguous', 'cyclic' or 'vee', given {kind!r}")


@dataclass(frozen=True, repr=False)
class Schedule:
    """Who does what, in which order.

    actions       one tuple of actions a rank
    rank_of       the rank of each stage (see `stage_map`)
    microbatches  how many
    name          for people

    >>> schedule = Schedule.from_text('''
    ...     0F0 0F1 0B0 0B1
    ...     1F0 1B0 1F1 1B1
    ... ''')
    >>> schedule
    Schedule('custom', stages=2, microbatches=2, ranks=2)
    >>> schedule.verify().bubble        # F costs 1 and B 2: 6 of 9 units are busy
    0.3333333333333333
    """

    actions: tuple[tuple[Action, ...], ...]
    rank_of: tuple[int, ...]
    microbatches: int
    name: str = field(default="custom", compare=False)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @property
    def ranks(self) -> int:
        return len(self.actions)

    @property
    def chunks(self) -> float:
        """Stages a rank, on average."""
        return self.stages / self.ranks

    @property
    def has_messages(self) -> bool:
        """Whether sends and receives are written out."""
        return any(a.kind in MESSAGES for line in self.actions for a in line)

    @property
    def gathers(self) -> bool:
        """Whether it says when a stage's parameters are brought together; else that happens at every use."""
        return any(a.kind == "GATHER" for line in self.actions for a in line)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, ascending.

        >>> Schedule.from_text("0F0 1F0 1B0 0B0").stages_of(0)
        (0, 1)
        """
        return tuple(s for s, r in enumerate(self.rank_of) if r == rank)

    def compute(self) -> Schedule:
        """The same with F, B, I and W alone."""
        lines = tuple(tuple(a for a in line if a.kind in COMPUTE) for line in self.actions)
        return Schedule(lines, self.rank_of, self.microbatches, self.name)

    def without_messages(self) -> Schedule:
        """The same without sends and receives."""
        lines = tuple(tuple(a for a in line if a.kind not in MESSAGES) for line in self.actions)
        return Schedule(lines, self.rank_of, self.microbatches, self.name)

    def with_messages(self, ahead: int = 0, parameters: bool = False) -> Schedule:
        """The same with its sends and receives written out: `fmeg.pipeline.comms.derive`."""
        from fmeg.pipeline.comms import derive

        return derive(self, ahead=ahead, parameters=parameters)

    def verify(self, costs: Costs | None = None, **options: Any) -> Report:
        """Check everything that can be checked before it runs: `fmeg.pipeline.verify.verify`."""
        from fmeg.pipeline.verify import verify

        return verify(self, costs, **options)

    def timeline(self, costs: Costs | None = None, **options: Any) -> Timeline:
        """When each action runs: `fmeg.pipeline.simulate.timeline`."""
        from fmeg.pipeline.simulate import timeline

        return timeline(self, costs, **options)

    def draw(self, costs: Costs | None = None, **options: Any) -> Any:
        """The timeline as SVG, which a notebook shows: `fmeg.pipeline.draw.draw`."""
        from fmeg.pipeline.draw import draw

        return draw(self, costs, **options)

    def _repr_svg_(self) -> str:
        return str(self.draw())

    def __repr__(self) -> str:
        return f"Schedule({self.name!r}, stages={self.stages}, microbatches={self.microbatches}, ranks={self.ranks})"

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """One line a rank, actions apart by spaces; `from_text` reads it.

        >>> print(Schedule.from_text("0F0 0B0").text())
        0F0 0B0
        """
        return "\n".join(" ".join(map(str, line)) for line in self.actions)

    def csv(self) -> str:
        """Comma-separated, one row a rank, as `torch.distributed.pipelining` writes and reads it."""
        from fmeg.pipeline.text import to_csv

        return to_csv(self)

    @classmethod
    def from_lists(cls, lists: Iterable[Iterable[Action | str]], name: str = "custom") -> Schedule:
        """A schedule of your own, one list of actions (or of their text) a rank.

        A stage lives on the rank that runs its F; the numbers of stages and microbatches are those that occur.
        """
        lines = tuple(tuple(Action.parse(a) if isinstance(a, str) else a for a in line) for line in lists)
        where: dict[int, int] = {}
        microbatches = 0
        for rank, line in enumerate(lines):
            for action in line:
                microbatches = max(microbatches, action.microbatch + 1)
                if action.kind == "F" and where.setdefault(action.stage, rank) != rank:
                    raise ScheduleError(
                        f"schedule: stage {action.stage} has forwards on ranks {where[action.stage]} and {rank} "
                        f"({action}); a stage lives on one rank"
                    )
        missing = [s for s in range(max(where, default=0) + 1) if s not in where]
        if missing:
            raise ScheduleError(f"schedule: no rank runs a forward of stage {missing[0]}")
        return cls(lines, tuple(where[s] for s in sorted(where)), microbatches, name)

    @classmethod
    def from_text(cls, text: str, name: str = "custom") -> Schedule:
        """What `text` wrote: one line a rank; blank lines and lines that start with # are skipped."""
        lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
        return cls.from_lists([line.split() for line in lines], name)

    @classmethod
    def from_csv(cls, text: str, name: str = "custom") -> Schedule:
        """What `csv` wrote, or torch's dump of a pipeline order (its RESHARD marks are dropped)."""
        from fmeg.pipeline.text import csv_lists

        return cls.from_lists(csv_lists(text), name)

    @classmethod
    def from_function(
        cls, fn: Callable[[int], Sequence[Action | str] | str], ranks: int, name: str | None = None
    ) -> Schedule:
        """A schedule of your own from `fn(rank)`: its actions, as a list or as text.

        >>> Schedule.from_function(lambda rank: f"{rank}F0 {rank}B0", ranks=3).stages
        3
        """
        lists = [fn(rank) for rank in range(ranks)]
        lists = [line.split() if isinstance(line, str) else line for line in lists]
        return cls.from_lists(lists, name or getattr(fn, "__name__", "custom").replace("<lambda>", "custom"))
