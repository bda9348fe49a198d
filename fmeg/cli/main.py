"""`fmeg`: subcommands by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro

from fmeg.cli.draw_schedule import draw_schedule
from fmeg.cli.mutate import mutate
from fmeg.cli.verify import verify

COMMANDS: dict[str, Callable[..., Any]] = {"verify": verify, "mutate": mutate, "draw-schedule": draw_schedule}


def main(args: list[str] | None = None) -> None:
    """Run a subcommand; exits with its status.

    >>> main(["verify", "--help"])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    SystemExit: 0
    """
    sys.exit(
        tyro.extras.subcommand_cli_from_dict(COMMANDS, prog="fmeg", description="Megatron as functions.", args=args)
    )
