"""Checkpoints: read, written again, the same bytes; errors say what does not fit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from fmeg import ops, random, tree
from fmeg.models import deepseek, hf, llama, model_of, presets
from fmeg.models.registry import model_of_hf
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
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"model_type": "qwen3", "use_sliding_window": True},
    ],
)
def test_configs_that_mean_another_function_are_refused(change):
    with pytest.raises(ValueError, match="this model has no"):
        llama.from_hf_config(random_model("llama2").config.to_dict() | change)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen2-moe", {"qkv_bias": False}),
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("qwen3-moe", {"attention_bias": True}),
        ("deepseek-v2", {"norm_topk_prob": True}),
        ("deepseek-v2", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}),
        ("deepseek-v3", {"rope_interleave": False}),
        ("deepseek-v3", {"moe_layer_freq": 2}),
        ("deepseek-v3", {"attention_bias": True}),
    ],
)
def test_mixtures_that_mean_another_function_are_refused(name, change):
    config = random_model(name).config.to_dict()
    with pytest.raises(ValueError, match="this model has no"):
        model_of_hf(config["model_type"]).from_hf_config(config | change)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mixtral-8x7b", dict(sinks=True)),
        ("mixtral-8x7b", dict(router=ops.Router(2))),
        ("qwen3-30b-a3b", dict(shared_ff=64)),
        ("qwen2-57b-a14b", dict(shared_gate=False)),
        ("qwen2-57b-a14b", dict(window=4096)),
        ("deepseek-v2", dict(router_bias=True)),
        ("deepseek-v2", dict(shared_ff=1000)),
        ("deepseek-v3", dict(router=ops.Router(8, "sigmoid", capacity_factor=1.0))),
        ("llama3-8b", dict(attn_gate=True)),
    ],
)
def test_what_no_hugging_face_model_is(name, change):
    cfg = presets.get(name, **change)
    with pytest.raises(ValueError, match="no Hugging Face model of this family has"):
        model_of(cfg).to_hf_config(cfg)


def test_published_configs():
    """What the files say, of those whose every field matters here."""
    yarn = dict(type="yarn", factor=40, beta_fast=32, beta_slow=1, original_max_position_embeddings=4096)
    lite = dict(
        model_type="deepseek_v2", vocab_size=102400, hidden_size=2048, intermediate_size=10944, num_hidden_layers=27,
        moe_intermediate_size=1408, n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1,
        topk_group=1, topk_method="greedy", routed_scaling_factor=1.0, first_k_dense_replace=1, norm_topk_prob=False,
        scoring_func="softmax", aux_loss_alpha=0.001, seq_aux=True, moe_layer_freq=1, num_attention_heads=16,
        num_key_value_heads=16, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
        v_head_dim=128, hidden_act="silu", max_position_embeddings=163840, rms_norm_eps=1e-6, rope_theta=10000,
        rope_scaling=yarn | dict(mscale=0.707, mscale_all_dim=0.707), attention_bias=False, tie_word_embeddings=False,
    )  # fmt: skip
    assert deepseek.from_hf_config(lite) == presets.get("deepseek-v2-lite")
    v3 = lite | dict(
        model_type="deepseek_v3", vocab_size=129280, hidden_size=7168, intermediate_size=18432, num_hidden_layers=61,
        moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, n_group=8,
        topk_group=4, topk_method="noaux_tc", routed_scaling_factor=2.5, first_k_dense_replace=3, norm_topk_prob=True,
        scoring_func="sigmoid", num_attention_heads=128, q_lora_rank=1536, num_nextn_predict_layers=1,
        rope_scaling=yarn | dict(mscale=1.0, mscale_all_dim=1.0),
    )  # fmt: skip
    want = presets.get("deepseek-v3")
    assert deepseek.from_hf_config(v3) == replace(want, router=replace(want.router, sequence_loss=0.001))


def test_config_round_trip():
    for name in presets.PRESETS:
        cfg = presets.get(name)
        assert model_of(cfg).from_hf_config(model_of(cfg).to_hf_config(cfg)) == cfg, name
    with pytest.raises(ValueError, match="qwen2 and qwen3"):
        llama.to_hf_config(presets.get("qwen3-8b", qkv_bias=True))
