"""Random tiny Hugging Face models in float64, and a model here with the same weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fmeg.models import hf
from fmeg.models.registry import model_of_hf

SMALL: dict[str, Any] = dict(
    vocab_size=101,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=500.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(
    rope_type="yarn",
    rope_theta=500.0,
    factor=4.0,
    original_max_position_embeddings=16,
    beta_fast=4.0,
    beta_slow=0.5,
    mscale=0.8,
    mscale_all_dim=0.5,
)
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama2": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "llama3": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama3-tied": transformers.LlamaConfig(**SMALL, head_dim=6, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen2-tied": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen2-yarn": transformers.Qwen2Config(**SMALL, rope_parameters=YARN | {"mscale": None, "mscale_all_dim": None}),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=12),
    "gpt2": transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=3, n_head=4, n_positions=32),
    "gpt2-untied": transformers.GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=32, n_inner=40, tie_word_embeddings=False
    ),
}

MOE = SMALL | dict(num_hidden_layers=2, num_experts_per_tok=2)
MLA = dict(num_key_value_heads=4, kv_lora_rank=12, qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=8)
DEEPSEEK = SMALL | MLA | dict(num_experts_per_tok=3, n_routed_experts=8, moe_intermediate_size=20, rope_parameters=YARN)
V2_GROUPS = dict(n_group=4, topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=16.0)
CONFIGS |= {
    "mixtral": transformers.MixtralConfig(**MOE, num_local_experts=5),
    "mixtral-window": transformers.MixtralConfig(**MOE, num_local_experts=4, sliding_window=5),
    "qwen2-moe": transformers.Qwen2MoeConfig(
        **MOE, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=28
    ),
    "qwen3-moe": transformers.Qwen3MoeConfig(
        **MOE | {"num_experts_per_tok": 3}, num_experts=6, moe_intermediate_size=24, head_dim=12, norm_topk_prob=True
    ),
    "qwen3-moe-tied": transformers.Qwen3MoeConfig(
        **MOE, rope_parameters=YARN, num_experts=4, moe_intermediate_size=24, head_dim=12, tie_word_embeddings=True
    ),
}
ALTERNATING = MOE | dict(num_hidden_layers=6, num_experts=4, moe_intermediate_size=24)
CONFIGS |= {
    "qwen3-moe-every-second": transformers.Qwen3MoeConfig(**ALTERNATING, head_dim=12, decoder_sparse_step=2),
    "qwen3-moe-some": transformers.Qwen3MoeConfig(**ALTERNATING, head_dim=12, mlp_only_layers=[0, 1, 5]),
    "qwen2-moe-both": transformers.Qwen2MoeConfig(
        **ALTERNATING | {"num_hidden_layers": 5},
        shared_expert_intermediate_size=28,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
    ),
}
CONFIGS |= {
    "deepseek-v2-lite": transformers.DeepseekV2Config(**DEEPSEEK, q_lora_rank=None, first_k_dense_replace=1),
    "deepseek-v2": transformers.DeepseekV2Config(**DEEPSEEK, **V2_GROUPS, q_lora_rank=14, first_k_dense_replace=0),
    "deepseek-v3": transformers.DeepseekV3Config(
        **DEEPSEEK,
        q_lora_rank=14,
        first_k_dense_replace=2,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        num_mtp_layers=0,
    ),
}


class Float64(TorchFunctionMode):
    """Their rotary tables, norms and softmax go to float32 whatever comes in; under this mode they go to float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


def random_model(name: str, seed: int = 0) -> Any:
    """A Hugging Face model with every parameter random, all in float64."""
    torch.manual_seed(seed)
    config = CONFIGS[name]
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with Float64():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for n, p in model.named_parameters():
        one = p.ndim == 1 and not n.endswith("sinks")
        p.data = 0.3 * torch.randn(p.shape, dtype=torch.float64) + (1.0 if one else 0.0)
    for n, b in model.named_buffers():
        if n.endswith("e_score_correction_bias"):
            b.data = 0.1 * torch.randn(b.shape, dtype=torch.float64)
    return model


def ours(model: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(module, config, parameters) here with the weights of a Hugging Face model."""
    config = model.config.to_dict()
    module = model_of_hf(config["model_type"])
    cfg = module.from_hf_config(config, dtype=torch.float64)
    return module, cfg, hf.from_hf(state(model), cfg)


def state(model: Any) -> dict[str, Tensor]:
    """Its parameters, and biases of routers, by the names of its checkpoints, each once."""
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    tensors |= {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
    return published(model, tensors)


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients of its parameters by the names of its checkpoints."""
    return published(model, {n: p.grad for n, p in model.named_parameters()})


def published(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names that checkpoints have, where each expert's matrix is one: in memory they are stacked."""
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, x in tensors.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if mixtral else name
        base, _, last = name.rpartition(".")
        if last not in ("gate_up_proj", "down_proj"):
            out[name] = x
            continue
        parts = dict(zip((gate, up), x.chunk(2, 1), strict=True)) if last == "gate_up_proj" else {down: x}
        out |= {f"{base}.{i}.{w}.weight": y for w, all_ in parts.items() for i, y in enumerate(all_)}
    return out
