"""Four real processes (Gloo): a step of a model with everything equals one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fmeg import Layout, Mesh, jit
from fmeg.testing.equivalent import errors
from fmeg.testing.verify import config, make_batch, make_state, make_step, optimizer_under_test
from tests.mesh import processes

REST = dict(embed="dp", expert_embed="cp")
LAYOUTS = {
    "zero3 ring ep": (
        dict(dp=2, cp=2),
        Layout(batch="dp", seq="cp", res_seq="cp", experts="dp", attention="ring", params=REST),
        {},
    ),
    "pipeline ep": (
        dict(pp=2, dp=2),
        Layout(layers="pp", batch="dp", experts="dp"),
        dict(microbatches=2, schedule="1f1b"),
    ),
}


def deepseek_steps() -> None:
    """Latent attention, groups of experts, a further prediction across shards: every block that this process has of
    parameters, moments, gradients and counts."""
    cfg, opt = replace(config("deepseek-v3"), layers=3), optimizer_under_test()
    state, batch = make_state(cfg, opt), make_batch(cfg)
    for name, (axes, layout, how) in LAYOUTS.items():
        step = make_step(cfg, opt, **how)
        found = errors(jit(step, mesh=Mesh(axes), layout=layout)(state, batch), step(state, batch))
        assert max(found.values()) < 1e-10, (name, found)


CHECKS = [deepseek_steps]


@pytest.fixture(scope="module")
def failures():
    return processes.run(CHECKS, world=4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [c.__name__ for c in CHECKS])
def test_real_processes(check, failures):
    assert not failures[check], "\n".join(failures[check])
