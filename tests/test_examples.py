"""The examples run, small: the same losses in every layout and on real processes; Ctrl-C leaves everything behind."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fmeg.data.corpus import python_library

EXAMPLES = Path(__file__).parents[1] / "examples"
FLAGS = ["--steps", "3", "--batch", "4", "--seq", "32", "--vocab", "300", "--sample", "8", "--eval-every", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for document in [d for d in python_library() if "/" not in d.name and d.num_bytes < 3000][:30]:
        (folder / document.name).write_bytes(document.text.encode())
    return folder


@pytest.fixture
def pretrain(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("pretrain")


def records(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def losses(out):
    return [r["loss"] for r in records(out) if "loss" in r]


def run(pretrain, text, out, **changes):
    args = pretrain.tyro.cli(pretrain.Args, args=[*FLAGS, "--text", str(text), "--out", str(out)])
    assert pretrain.main(pretrain.dataclasses.replace(args, **changes)) == 0
    return losses(out)


def test_a_mesh_has_the_losses_of_one_device_and_leaves_everything_behind(pretrain, text, tmp_path):
    expected = run(pretrain, text, tmp_path / "single", layout="single", dtype="float64")
    assert len(expected) == 3 and expected[-1] < expected[0]
    out = tmp_path / "megatron"
    assert run(pretrain, text, out, dtype="float64") == pytest.approx(expected, rel=1e-9)
    assert {p.name for p in out.iterdir()} == {"config.json", "metrics.jsonl", "loss.png", "sample.py"}
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "sample.py").read_text().startswith("class ")
    evals = [r for r in records(out) if "bits_per_byte" in r]
    assert [e["step"] for e in evals] == [2, 3] and evals[-1]["final"]
    assert json.loads((out / "config.json").read_text())["layout"] == "megatron"


def test_experts_on_a_mesh_have_the_losses_of_one_device_and_a_picture_of_their_load(pretrain, text, tmp_path):
    how = dict(model="moe-tiny", dtype="float64")
    expected = run(pretrain, text, tmp_path / "single", layout="single", **how)
    assert len(expected) == 3 and expected[-1] < expected[0]
    out = tmp_path / "ep"
    assert run(pretrain, text, out, layout="ep", beside=tmp_path / "single", **how) == pytest.approx(expected, rel=1e-9)
    assert (out / "experts.png").read_bytes().startswith(b"\x89PNG") and (out / "loss.png").exists()
    loads = [[r["max_load"] for r in records(o) if "max_load" in r] for o in (out, tmp_path / "single")]
    assert len(loads[0]) == 3 and loads[0] == pytest.approx(loads[1], rel=1e-6) and min(loads[0]) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron", "ep", "fsdp", "hsdp"])
@pytest.mark.parametrize("model", ["moe-tiny", "tiny-deepseek"])
def test_experts_in_every_layout(pretrain, text, tmp_path, model, layout):
    """DeepSeek's has a further prediction and a loss by sequence: what is reported is the cross entropy alone."""
    how = dict(model=model, dtype="float64")
    expected = run(pretrain, text, tmp_path / "single", layout="single", **how)
    assert run(pretrain, text, tmp_path / "mesh", layout=layout, **how) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(microbatches=2), dict(layout="fsdp"), dict(layout="hsdp"), dict(mesh="cp=2")])
def test_layouts_and_microbatches_do_not_change_the_losses(pretrain, text, tmp_path, changes):
    expected = run(pretrain, text, tmp_path / "single", layout="single", dtype="float64")
    assert run(pretrain, text, tmp_path / "changed", dtype="float64", **changes) == pytest.approx(expected, rel=1e-9)


def command(text, out, *more):
    return [str(EXAMPLES / "pretrain.py"), *FLAGS, "--text", str(text), "--out", str(out), *more]


def test_ctrl_c_finishes_the_step_and_writes(text, tmp_path):
    process = subprocess.Popen(
        [sys.executable, *command(text, tmp_path, "--steps", "10000")], stdout=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 60
    while not ((tmp_path / "metrics.jsonl").exists() and records(tmp_path)):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert records(tmp_path)[-1]["final"] and len(losses(tmp_path)) < 10000
    assert "bits per byte" in output and (tmp_path / "loss.png").exists() and (tmp_path / "sample.py").exists()


@pytest.mark.slow
@pytest.mark.distributed
def test_real_processes_have_the_same_losses(pretrain, text, tmp_path):
    expected = run(pretrain, text, tmp_path / "virtual", dtype="float64")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, *command(text, tmp_path / "real", "--dtype", "float64")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert losses(tmp_path / "real") == pytest.approx(expected, rel=1e-12)
