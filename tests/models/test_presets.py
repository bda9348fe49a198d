"""Presets have the published sizes, and FLOPs are counted as Megatron counts them."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from fmeg import ops, random, tree
from fmeg.models import model_of, presets

# Parameters as each model's card or its checkpoint's index counts them (tied heads once).
PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_630_071_296,
    "qwen2-57b-a14b": 57_408_658_944,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    # 671,026,404,352 and the routers' biases, and 11,610,067,968 of multi-token prediction
    "deepseek-v3": 671_026_404_352 + 58 * 256 + 11_610_067_968 + 256,
}
MIXTURES = [n for n, c in presets.PRESETS.items() if hasattr(c, "experts") and n in PUBLISHED]
# Billions of parameters a token meets, embedding and head counted, as published.
ACTIVE = {"mixtral-8x7b": 12.9, "mixtral-8x22b": 39.2, "qwen2-57b-a14b": 14.2, "qwen3-30b-a3b": 3.35}
ACTIVE |= {"qwen3-235b-a22b": 22.2, "deepseek-v2": 21.4, "deepseek-v2-lite": 2.66, "deepseek-v3": 37.6}


def test_every_published_preset_is_here():
    assert set(presets.PRESETS) - set(PUBLISHED) == {
        "tiny",
        "tiny-gpt2",
        "tiny-moe",
        "tiny-deepseek",
        "small-llama",
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    cfg = presets.get(name)
    assert model_of(cfg).num_params(cfg) == PUBLISHED[name]


@pytest.mark.parametrize("name", ["llama3.2-1b", "mistral-7b", "qwen2.5-0.5b", "qwen3-0.6b", "gpt2", *MIXTURES])
def test_transformers_counts_the_same(name):
    """But for modules of multi-token prediction and routers' biases, which are no parameters there."""
    cfg = presets.get(name)
    if name == "deepseek-v3":
        cfg = presets.get(name, mtp_layers=0)
    config = model_of(cfg).to_hf_config(cfg)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    biases = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
    assert sum(p.numel() for p in model.parameters()) + biases == model_of(cfg).num_params(cfg)


@pytest.mark.parametrize("name", MIXTURES)
def test_active_parameters(name):
    cfg = presets.get(name, **({"mtp_layers": 0} if name == "deepseek-v3" else {}))
    model = model_of(cfg)
    idle = cfg.layers * 3 * cfg.embed * cfg.expert_ff * (cfg.experts - cfg.router.top_k)
    assert (model.num_params(cfg) - idle) / 1e9 == pytest.approx(ACTIVE[name], rel=0.005)
    # the products of a forward pass are with these, but for norms, biases and the embedding
    per_token = model.flops_per_token(cfg, 1) / 6
    assert per_token == pytest.approx(model.num_params(cfg) - idle - cfg.vocab_size * cfg.embed, rel=2e-3)


def test_multi_token_prediction_counts():
    """A layer, a product of both streams, three norms; and in FLOPs the head once more."""
    with_, without = presets.get("deepseek-v3"), presets.get("deepseek-v3", mtp_layers=0)
    layer = presets.get("deepseek-v3", layers=59, mtp_layers=0)
    model = model_of(with_)
    one = model.num_params(layer) - model.num_params(without)
    assert model.num_params(with_) - model.num_params(without) == one + 2 * 7168**2 + 3 * 7168
    flops = [model.flops_per_token(c, 4096) for c in (with_, layer)]
    assert flops[0] - flops[1] == 6 * (2 * 7168**2 + 129280 * 7168)


def test_small_ones_are_small():
    sizes = {n: model_of(presets.get(n)).num_params(presets.get(n)) for n in ("tiny", "tiny-gpt2", "small-llama")}
    assert sizes["tiny"] < 150_000 and sizes["tiny-gpt2"] < 150_000 and 3e6 < sizes["small-llama"] < 8e6


def test_flops_by_hand():
    """Llama-3-8B at 8,192: 6 · (matmul parameters) + 6 · layers · seq · width."""
    cfg = presets.get("llama3-8b")
    model = model_of(cfg)
    weights = model.num_params(cfg) - cfg.vocab_size * cfg.embed - 65 * cfg.embed  # the embedding and 65 norms
    assert model.flops_per_token(cfg, 8192) == 6 * weights + 6 * 32 * 8192 * 4096


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt2", "tiny-moe", "tiny-deepseek"])
def test_flops_as_torch_counts_them(name, monkeypatch):
    """torch counts the whole of a plain attention; the difference is the half that causality saves."""

    def attention(q, k, v, **kw):
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
        return torch.einsum("bhst,bthe->bshe", torch.einsum("bshe,bthe->bhst", q, k).softmax(-1), v)

    monkeypatch.setattr(ops, "attention", attention)
    cfg = presets.get(name)
    model = model_of(cfg)
    params = tree.map(lambda p: p.requires_grad_(), model.init(random.key(0), cfg))
    seq = 32
    tokens = torch.zeros(2, seq, dtype=torch.long)
    rows = torch.ops.fmeg
    counter = FlopCounterMode(
        display=False,
        custom_mapping={
            rows.grouped_matmul: lambda x, w, *_, **__: 2 * x[0] * w[1] * w[2],
            rows.grouped_matmul_dw: lambda x, y, *_, **__: 2 * x[0] * x[1] * y[1],
        },
    )
    with counter:
        out = model.loss(params, {"tokens": tokens, "targets": tokens, "mask": torch.ones(2, seq)}, cfg)
        (out[0] if isinstance(out[0], torch.Tensor) else sum(total for total, _ in out[0])).backward()
    per_token = counter.get_total_flops() / tokens.numel()
    layers, further = cfg.layers + getattr(cfg, "dense_layers", 0), getattr(cfg, "mtp_layers", 0)
    head = cfg.nope_dim + cfg.rope_dim + cfg.v_dim if hasattr(cfg, "kv_latent") else 2 * cfg.head_dim
    half = 3 * (layers + further) * seq * cfg.heads * head
    padding = 6 * (cfg.padded_vocab - cfg.vocab_size) * cfg.embed * (1 + further)
    assert per_token - padding - half == model.flops_per_token(cfg, seq)


def test_a_window_saves_flops():
    cfg = presets.get("mistral-7b")
    model = model_of(cfg)
    full = presets.get("mistral-7b", window=None)
    assert model.flops_per_token(cfg, 4096) == model.flops_per_token(full, 4096)
    seq, w = 8192, 4096
    pairs = sum(min(i + 0.5, w) for i in range(seq)) / seq  # keys that query i sees, half of its own counted
    saved = 12 * cfg.layers * cfg.heads * cfg.head_dim * (seq / 2 - pairs)
    got = model.flops_per_token(full, seq) - model.flops_per_token(cfg, seq)
    assert got == pytest.approx(saved, rel=1e-6)


def test_unknown_name():
    with pytest.raises(ValueError, match="no preset 'llama9'; there are llama2-7b"):
        presets.get("llama9")


@pytest.mark.parametrize("change", [{"kv_heads": 3}, {"head_dim": 15}])
def test_impossible_sizes(change):
    with pytest.raises(ValueError, match="|".join(change)):
        presets.get("tiny", **change)
