"""fmeg: Megatron as functions, on PyTorch."""

__version__ = "0.1.0"
