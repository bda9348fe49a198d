"""The command line: `fmeg verify`, `fmeg mutate`."""

from fmeg.cli.main import main

__all__ = ["main"]
