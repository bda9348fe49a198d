"""Commands: what they print, and their exit status."""

from __future__ import annotations

import json

import pytest

import fmeg.cli.mutate as mutate_command
import fmeg.cli.verify as verify_command
from fmeg.cli import main

QUICK = ("--devices", "2", "--steps", "1", "--workers", "1")


def run(*args: str) -> int:
    with pytest.raises(SystemExit) as e:
        main(list(args))
    return e.value.code


def test_help_names_the_commands(capsys):
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert "verify" in out and "mutate" in out


def test_verify_prints_a_table(capsys):
    assert run("verify", "--model", "tricky-llama", *QUICK, "--only", "zero") == 0
    out = capsys.readouterr().out
    assert "zero3" in out and "reduce_scatter" in out and "interleaved_zero_bubble" in out
    assert "zero2" in out and "7 of 7 layouts equal one device to 1e-10" in out


def test_verify_prints_one_json_object(capsys):
    assert run("verify", "--model", "gpt2", *QUICK, "--only", "tp2", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ok"] and result["worst"]["error"] < 1e-10
    row = result["rows"][0]
    wanted = {"name", "mesh", "layout", "schedule", "collectives", "loss_error", "grad_error", "params_error", "ok"}
    assert wanted <= set(row)
    assert row["mesh"] == {"tp": 2} and row["schedule"] is None and row["collectives"]["all_reduce"] > 0


def test_verify_has_rows_with_experts(capsys):
    assert run("verify", *QUICK, "--only", "moe: one token: ep4", "--json", "--all", "--devices", "4") == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert names == [
        f"moe: one token: ep4 {way}{bound}" for bound in ("", " bound") for way in ("all_to_all", "all_gather")
    ]


def test_verify_fails_above_the_tolerance(capsys):
    """Sums in another order differ by 1e-16 or so: a tolerance below that cannot be met."""
    assert run("verify", *QUICK, "--only", "tp2", "--tolerance", "1e-20") == 1
    assert "FAILED" in capsys.readouterr().out


def test_unknown_names_are_errors():
    assert "no preset 'nope'" in run("verify", "--model", "nope")
    assert "contains 'nope'" in run("verify", "--only", "nope")
    assert "no layout 'nope'" in run("mutate", "--layouts", "nope")


def test_mutate_prints_tables_and_fails_if_a_mutant_survives(capsys, monkeypatch):
    few = lambda bench: mutate_command_run(bench, lambda i: i % 40 == 0)
    mutate_command_run = mutate_command.run
    monkeypatch.setattr(mutate_command, "run", few)
    assert run("mutate", "--layouts", "zero3 tp2+sp", "--markdown") == 0
    out = capsys.readouterr().out
    assert out.startswith("## zero3 tp2+sp") and "| all |" in out
    assert run("mutate", "--layouts", "zero3 tp2+sp", "--json") == 0
    assert json.loads(capsys.readouterr().out)["survivors"] == {"zero3 tp2+sp": []}
    monkeypatch.setattr(mutate_command.Outcome, "killed", lambda self, tolerance=0.0: False)
    assert run("mutate", "--layouts", "zero3 tp2+sp") == 1
    assert "survived: drop all_gather" in capsys.readouterr().out


def test_progress_goes_to_standard_error():
    assert verify_command.progress().stderr and not verify_command.out().stderr
