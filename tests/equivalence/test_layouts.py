"""The property itself: a training step under any mesh and layout equals one device."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fmeg.models import gpt2, llama, presets
from fmeg.testing import assert_equivalent, cases, layouts
from fmeg.testing.verify import (
    BATCH,
    check,
    config,
    make_batch,
    make_state,
    make_step,
    optimizer_under_test,
    shrink,
    sizes_of,
)

MODELS = {
    "tricky-llama": config(),
    "llama2": shrink(presets.get("llama2-7b")),
    "qwen2": shrink(presets.get("qwen2.5-0.5b")),
    "mistral": shrink(presets.get("mistral-7b")),
    "gpt2": shrink(presets.get("gpt2")),
}


def holds(data, cfg, max_devices):
    microbatches = data.draw(st.sampled_from([1, 2]))
    sizes = {
        k: n for k, n in sizes_of(cfg).items() if k in ("batch", "seq", "embed", "heads", "kv_heads", "ff", "vocab")
    }
    mesh, layout = data.draw(layouts(max_devices, sizes, microbatches=microbatches))
    opt = optimizer_under_test()
    step, state = make_step(cfg, opt, microbatches), make_state(cfg, opt)
    assert_equivalent(step, state, make_batch(cfg), mesh=mesh, layout=layout, tol=1e-11)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_layout_of_a_training_step(data):
    """Loss, every gradient leaf, every parameter and moment; meshes of up to 8."""
    holds(data, MODELS["tricky-llama"], 8)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_layout_of_every_kind_of_model(model, data):
    holds(data, MODELS[model], 16)


def test_models_are_what_their_names_say():
    assert MODELS["qwen2"].qkv_bias and MODELS["qwen2"].tied
    assert MODELS["mistral"].window == 5
    assert isinstance(MODELS["gpt2"], gpt2.Config) and isinstance(MODELS["llama2"], llama.Config)


FEW = (
    "dp2 tp2",
    "zero1 gather2 tp2+sp",
    "zero3 m2 ring4",
    "zero3 ulysses2 tp2+sp",
    "hsdp tk2,tr2+sp",
    "hsdp ring2 tp2+sp",
)


@pytest.mark.parametrize("name", FEW)
def test_rows_of_the_matrix(name):
    """The whole matrix is `fmeg verify`."""
    row = check({case.name: case for case in cases(sizes_of(config()))}[name], config())
    assert row.ok, row
    assert row.collectives


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_whole_matrix(model):
    cfg = MODELS[model]
    rows = [check(case, cfg) for case in cases(sizes_of(cfg))]
    assert len(rows) > (60 if model != "llama2" else 50)
    assert not [row for row in rows if not row.ok]
    assert BATCH == 8
