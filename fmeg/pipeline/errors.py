"""What is wrong with a schedule, in words that name the rank, the action and what to try."""

from __future__ import annotations

from fmeg.program.errors import FmegError


class ScheduleError(FmegError, ValueError):
    """A schedule that cannot be built, read or run."""


class DeadlockError(ScheduleError):
    """A cycle of waits: no order of execution gets past it.

    cycle  the waits, one line each
    """

    def __init__(self, message: str, cycle: tuple[str, ...]):
        super().__init__(message)
        self.cycle = cycle
