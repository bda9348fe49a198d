"""Models as functions of a pytree of parameters, and their published sizes."""

from fmeg.models import deepseek, gpt2, hf, llama, mixture, mla, moe, mtp, padding, presets, runs, upcycle
from fmeg.models.generate import generate
from fmeg.models.registry import model_of
from fmeg.models.table import batch_axes
