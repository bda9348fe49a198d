"""Which module a config or a Hugging Face model type belongs to."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from fmeg.models import deepseek, gpt2, llama, moe

MODELS: tuple[ModuleType, ...] = (llama, gpt2, moe, deepseek)


def model_of(cfg: Any) -> ModuleType:
    """The module whose functions take this config.

    >>> from fmeg.models import presets
    >>> model_of(presets.get("gpt2")).__name__
    'fmeg.models.gpt2'
    """
    for model in MODELS:
        if isinstance(cfg, model.Config):
            return model
    known = ", ".join(f"{m.__name__}.Config" for m in MODELS)
    raise TypeError(f"model_of: expected one of {known}, got {type(cfg).__name__}")


def model_of_hf(model_type: str) -> ModuleType:
    """The module that reads this `model_type` of a Hugging Face `config.json`.

    >>> model_of_hf("qwen3").__name__
    'fmeg.models.llama'
    """
    for model in MODELS:
        if model_type in model.HF_TYPES:
            return model
    known = ", ".join(t for m in MODELS for t in m.HF_TYPES)
    raise ValueError(f"model_of_hf: model_type {model_type!r} is not one of {known}")
