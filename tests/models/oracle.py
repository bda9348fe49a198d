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
CONFIGS: dict[str, transformers.PretrainedConfig] = {
    "llama2": transformers.LlamaConfig(**SMALL | {"num_key_value_heads": 4}),
    "llama3": transformers.LlamaConfig(**SMALL, rope_parameters=LLAMA3_ROPE),
    "llama3-tied": transformers.LlamaConfig(**SMALL, head_dim=6, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=5),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen2-tied": transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=12),
    "gpt2": transformers.GPT2Config(vocab_size=101, n_embd=32, n_layer=3, n_head=4, n_positions=32),
    "gpt2-untied": transformers.GPT2Config(
        vocab_size=101, n_embd=32, n_layer=2, n_head=2, n_positions=32, n_inner=40, tie_word_embeddings=False
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
    with Float64():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape, dtype=torch.float64) + (1.0 if p.ndim == 1 else 0.0)
    return model


def ours(model: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(module, config, parameters) here with the weights of a Hugging Face model."""
    config = model.config.to_dict()
    module = model_of_hf(config["model_type"])
    cfg = module.from_hf_config(config, dtype=torch.float64)
    return module, cfg, hf.from_hf(state(model), cfg)


def state(model: Any) -> dict[str, Tensor]:
    """Its parameters by name, each once."""
    return {n: p.detach() for n, p in model.named_parameters()}
