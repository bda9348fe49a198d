"""Published sizes by name, and small ones for tests and first runs.

`llama3-8b` and `llama3-70b` are the first release (8,192 positions); `llama3.1-*` scale the rotary embedding to
131,072. Qwen2.5 is Qwen2's architecture; its sizes here are the base models'.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fmeg import ops
from fmeg.models import deepseek, gpt2, llama, moe

Config = llama.Config | gpt2.Config | moe.Config | deepseek.Config


def _llama(vocab: int, layers: int, embed: int, heads: int, kv: int, ff: int, **kw: Any) -> llama.Config:
    fields: dict[str, Any] = {"head_dim": embed // heads, **kw}
    return llama.Config(vocab_size=vocab, embed=embed, layers=layers, heads=heads, kv_heads=kv, ff=ff, **fields)


def _llama2(*sizes: int) -> llama.Config:
    return _llama(32000, *sizes, max_seq=4096)


def _llama3(*sizes: int, factor: float | None = None, **kw: Any) -> llama.Config:
    scaling = None if factor is None else ops.Llama3Scaling(factor, 1.0, 4.0, 8192)
    seq = 8192 if factor is None else 131072
    return _llama(128256, *sizes, max_seq=seq, rope_base=500000.0, rope_scaling=scaling, **kw)


def _qwen2(vocab: int, *sizes: int, **kw: Any) -> llama.Config:
    return _llama(vocab, *sizes, **({"max_seq": 131072, "rope_base": 1e6, "norm_eps": 1e-6, "qkv_bias": True} | kw))


def _qwen3(*sizes: int, tied: bool) -> llama.Config:
    return _llama(151936, *sizes, head_dim=128, max_seq=40960, rope_base=1e6, norm_eps=1e-6, qk_norm=True, tied=tied)


def _gpt2(layers: int, embed: int, heads: int) -> gpt2.Config:
    return gpt2.Config(vocab_size=50257, embed=embed, layers=layers, heads=heads, head_dim=embed // heads, ff=4 * embed)


def _mixtral(vocab: int, layers: int, embed: int, heads: int, ff: int, seq: int) -> moe.Config:
    sizes = dict(layers=layers, embed=embed, heads=heads, kv_heads=8, head_dim=128, experts=8, expert_ff=ff)
    router = ops.Router(2, renormalize=True, batch_loss=0.02)
    return moe.Config(vocab_size=vocab, **sizes, router=router, max_seq=seq, norm_eps=1e-5)  # type: ignore[arg-type]


def _qwen3_moe(layers: int, embed: int, heads: int, ff: int) -> moe.Config:
    sizes = dict(layers=layers, embed=embed, heads=heads, kv_heads=4, head_dim=128, experts=128, expert_ff=ff)
    router = ops.Router(8, renormalize=True, batch_loss=0.001)
    return moe.Config(vocab_size=151936, **sizes, router=router, max_seq=40960, qk_norm=True)  # type: ignore[arg-type]


def _deepseek(mscale: float, dense: int, layers: int, embed: int, heads: int, **kw: Any) -> deepseek.Config:
    fields = dict(dense_layers=dense, layers=layers, embed=embed, heads=heads, kv_latent=512, nope_dim=128)
    yarn = ops.YarnScaling(40.0, mscale=mscale, mscale_all_dim=mscale)
    return deepseek.Config(**{**fields, "rope_dim": 64, "v_dim": 128, "rope_scaling": yarn, **kw})  # type: ignore[arg-type]


#                                            layers embed heads kv ff
PRESETS: dict[str, Config] = {
    "llama2-7b": _llama2(32, 4096, 32, 32, 11008),
    "llama2-13b": _llama2(40, 5120, 40, 40, 13824),
    "llama2-70b": _llama2(80, 8192, 64, 8, 28672),
    "llama3-8b": _llama3(32, 4096, 32, 8, 14336),
    "llama3-70b": _llama3(80, 8192, 64, 8, 28672),
    "llama3.1-8b": _llama3(32, 4096, 32, 8, 14336, factor=8.0),
    "llama3.1-70b": _llama3(80, 8192, 64, 8, 28672, factor=8.0),
    "llama3.1-405b": _llama3(126, 16384, 128, 8, 53248, factor=8.0),
    "llama3.2-1b": _llama3(16, 2048, 32, 8, 8192, factor=32.0, tied=True),
    "llama3.2-3b": _llama3(28, 3072, 24, 8, 8192, factor=32.0, tied=True),
    "mistral-7b": _llama(32000, 32, 4096, 32, 8, 14336, max_seq=32768, window=4096),
    "qwen2.5-0.5b": _qwen2(151936, 24, 896, 14, 2, 4864, tied=True, max_seq=32768),
    "qwen2.5-1.5b": _qwen2(151936, 28, 1536, 12, 2, 8960, tied=True),
    "qwen2.5-3b": _qwen2(151936, 36, 2048, 16, 2, 11008, tied=True, max_seq=32768),
    "qwen2.5-7b": _qwen2(152064, 28, 3584, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(152064, 48, 5120, 40, 8, 13824, norm_eps=1e-5),
    "qwen2.5-32b": _qwen2(152064, 64, 5120, 40, 8, 27648, norm_eps=1e-5),
    "qwen2.5-72b": _qwen2(152064, 80, 8192, 64, 8, 29568, norm_eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 8, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 8, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 8, 25600, tied=False),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "mixtral-8x7b": _mixtral(32000, 32, 4096, 32, 14336, 32768),
    "mixtral-8x22b": _mixtral(32768, 56, 6144, 48, 16384, 65536),
    "qwen2-57b-a14b": moe.Config(
        vocab_size=151936,
        embed=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        experts=64,
        expert_ff=2560,
        router=ops.Router(8, batch_loss=0.001),
        shared_ff=20480,
        shared_gate=True,
        max_seq=131072,
        qkv_bias=True,
    ),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
    "deepseek-v2-lite": _deepseek(
        0.707,
        1,
        26,
        2048,
        16,
        vocab_size=102400,
        q_latent=None,
        ff=10944,
        experts=64,
        expert_ff=1408,
        shared_ff=2816,
        router=ops.Router(6, sequence_loss=1e-3),
    ),
    "deepseek-v2": _deepseek(
        0.707,
        1,
        59,
        5120,
        128,
        vocab_size=102400,
        q_latent=1536,
        ff=12288,
        experts=160,
        expert_ff=1536,
        shared_ff=3072,
        router=ops.Router(6, scale=16.0, groups=8, top_groups=3, sequence_loss=1e-3),
    ),
    "deepseek-v3": _deepseek(
        1.0,
        3,
        58,
        7168,
        128,
        vocab_size=129280,
        q_latent=1536,
        ff=18432,
        experts=256,
        expert_ff=2048,
        shared_ff=2048,
        router=ops.Router(
            8, "sigmoid", renormalize=True, scale=2.5, groups=8, top_groups=4, group_score="top2sum", sequence_loss=1e-4
        ),
        router_bias=True,
        mtp_layers=1,
    ),
    # A vocabulary of 257 (the bytes and an end) is prime, so that padding is always put to the test.
    "tiny": _llama(257, 2, 64, 4, 2, 128, max_seq=64),
    "tiny-gpt2": gpt2.Config(vocab_size=257, embed=64, layers=2, heads=4, head_dim=16, ff=256, max_seq=64),
    "tiny-moe": moe.Config(
        vocab_size=257,
        embed=64,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        experts=8,
        expert_ff=32,
        router=ops.Router(2, renormalize=True, batch_loss=0.01),
        max_seq=64,
        rope_base=1e4,
    ),
    "tiny-deepseek": deepseek.Config(
        vocab_size=257,
        embed=64,
        dense_layers=1,
        layers=2,
        mtp_layers=1,
        heads=4,
        q_latent=24,
        kv_latent=16,
        nope_dim=16,
        rope_dim=8,
        v_dim=16,
        ff=128,
        experts=8,
        expert_ff=32,
        shared_ff=32,
        router_bias=True,
        max_seq=64,
        router=ops.Router(
            2, "sigmoid", renormalize=True, scale=2.5, groups=4, top_groups=2, group_score="top2sum", sequence_loss=1e-4
        ),
    ),
    "small-llama": _llama(4096, 6, 256, 8, 4, 704, max_seq=1024, tied=True),
}


def get(name: str, **changes: Any) -> Any:
    """The config of that name, with `changes` to its fields.

    >>> get("llama3-8b").kv_heads
    8
    >>> get("tiny", layers=3).layers
    3
    """
    if name not in PRESETS:
        raise ValueError(f"presets.get: no preset {name!r}; there are {', '.join(PRESETS)}")
    return replace(PRESETS[name], **changes)
