"""Where commands print."""

from __future__ import annotations

from rich.console import Console


def out() -> Console:
    """Standard output; wide enough for a table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def progress() -> Console:
    """Standard error, for what is only to be watched."""
    return Console(stderr=True)
