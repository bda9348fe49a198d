"""Checkpoints: read, written again, the same bytes; errors say what does not fit."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fmeg import random, tree
from fmeg.models import hf, llama, model_of, presets
from tests.models.oracle import CONFIGS, random_model, state


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_same_bytes(name, dtype, tmp_path):
    model = random_model(name).to(dtype)
    model.save_pretrained(tmp_path / "theirs")
    params, cfg = hf.load(tmp_path / "theirs")
    assert {p.dtype for p in tree.leaves(params)} == {dtype}
    assert cfg.padded_vocab == 128 and not params["embed"][cfg.vocab_size :].any()
    hf.save(params, cfg, tmp_path / "ours")
    a, b = ((tmp_path / d / "model.safetensors").read_bytes() for d in ("theirs", "ours"))
    assert a == b


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_we_write(name, tmp_path):
    random_model(name).float().save_pretrained(tmp_path / "theirs")
    params, cfg = hf.load(tmp_path / "theirs")
    hf.save(params, cfg, tmp_path / "ours")
    theirs, again = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / d, attn_implementation="eager").eval()
        for d in ("theirs", "ours")
    )
    assert type(again) is type(theirs)
    tokens = torch.randint(cfg.vocab_size, (1, 19))
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)


def test_many_files(tmp_path):
    cfg = presets.get("tiny")
    params = llama.init(random.key(1), cfg)
    hf.save(params, cfg, tmp_path, max_file_bytes=100_000)
    files = sorted(p.name for p in tmp_path.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all(sum(t.nbytes for t in load_file(tmp_path / f).values()) <= 100_000 for f in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * llama.num_params(cfg)
    again, cfg2 = hf.load(tmp_path)
    assert cfg2 == cfg
    other = llama.init(random.key(2), cfg)
    hf.save(other, cfg, tmp_path)  # one file now, in the same place
    assert torch.equal(hf.load(tmp_path)[0]["layers"]["wq"], other["layers"]["wq"])
    real = tree.map(lambda p, a: p[: cfg.vocab_size] if a.startswith("vocab") else p, params, llama.logical_axes(cfg))
    got = tree.map(lambda p, a: p[: cfg.vocab_size] if a.startswith("vocab") else p, again, llama.logical_axes(cfg))
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(got), tree.leaves(real), strict=True))


def test_older_checkpoints():
    """Tied heads written out, constants among the parameters, GPT-2 without its prefix."""
    model = random_model("gpt2")
    cfg = model_of(presets.get("gpt2")).from_hf_config(model.config.to_dict())
    want = hf.from_hf(state(model), cfg)
    bare = {n.removeprefix("transformer."): p for n, p in state(model).items()}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    got = hf.from_hf(bare, cfg)
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(got), tree.leaves(want), strict=True))

    model = random_model("llama3-tied")
    cfg = llama.from_hf_config(model.config.to_dict())
    with_head = state(model) | {
        "lm_head.weight": model.lm_head.weight,
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    assert "head" not in hf.from_hf(with_head, cfg)


def test_rope_of_both_config_styles():
    model = random_model("llama3")
    new = model.config.to_dict()
    assert "rope_parameters" in new
    rope = dict(new.pop("rope_parameters"))
    old = new | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert llama.from_hf_config(old) == llama.from_hf_config(model.config.to_dict())
    assert llama.from_hf_config(old).rope_scaling is not None


def test_errors_name_the_tensor(tmp_path):
    model = random_model("llama2")
    cfg = llama.from_hf_config(model.config.to_dict())
    tensors = state(model)
    with pytest.raises(ValueError, match=r"missing \['model.norm.weight'\], left over \['odd'\]"):
        hf.from_hf({n: p for n, p in tensors.items() if n != "model.norm.weight"} | {"odd": torch.ones(1)}, cfg)
    with pytest.raises(ValueError, match=r"k_proj.weight.*layers.wk.*kv_heads.*\(16, 32\)"):
        hf.from_hf(tensors | {"model.layers.1.self_attn.k_proj.weight": torch.ones(16, 32)}, cfg)
    save_file({n: p.contiguous() for n, p in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict() | {"model_type": "mamba"}))
    with pytest.raises(ValueError, match="'mamba' is not one of llama"):
        hf.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        {"model_type": "qwen3", "use_sliding_window": True},
    ],
)
def test_configs_that_mean_another_function_are_refused(change):
    with pytest.raises(ValueError, match="this model has no"):
        llama.from_hf_config(random_model("llama2").config.to_dict() | change)


def test_config_round_trip():
    for name in presets.PRESETS:
        cfg = presets.get(name)
        assert model_of(cfg).from_hf_config(model_of(cfg).to_hf_config(cfg)) == cfg, name
    with pytest.raises(ValueError, match="qwen2 and qwen3"):
        llama.to_hf_config(presets.get("qwen3-8b", qkv_bias=True))
