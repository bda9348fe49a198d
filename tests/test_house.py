"""The house itself: what the first lines of the README promise, and what must not be in the tree."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_readme_opens_with_two_commands_that_make_knows():
    block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    commands = [line.split("#")[0].split() for line in block[1].splitlines()]
    assert [c[:2] for c in commands] == [["make", "train"], ["make", "test"]]
    rules = re.findall(r"^([a-z-]+):(?! export)", (ROOT / "Makefile").read_text(), re.M)
    assert {"train", "test", "test-slow", "lint", "format"} <= set(rules)
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()


def test_extras_and_dependencies():
    assert {"dev", "examples", "gpu", "te"} <= set(PROJECT["optional-dependencies"])
    name = lambda requirement: re.match(r"[A-Za-z0-9-]+", requirement)[0]
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    wanted = PROJECT["dependencies"] + [r for e in ("dev", "examples") for r in PROJECT["optional-dependencies"][e]]
    assert {name(r) for r in wanted} - {"fmeg"} <= set(pinned)
    assert f"torch=={pinned['torch']}" in (ROOT / "Makefile").read_text()


def test_the_version_is_one():
    import fmeg

    assert fmeg.__version__ == PROJECT["version"]


def test_tracked_files_name_no_place_of_one_machine():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    place = re.compile(r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me|op" + r"t)/\w")
    found = []
    for name in filter(None, files.split("\0")):
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{name}:{i}: {line.strip()}" for i, line in enumerate(text.splitlines(), 1) if place.search(line)]
    assert not found, "\n".join(found)
