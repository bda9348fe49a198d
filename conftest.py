"""What every test run shares: hypothesis settings, and what to leave out on a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os

import hypothesis
import pytest
import torch

# The first example of a property may trace a model: no deadline. In CI the examples are the same on every run.
hypothesis.settings.register_profile("fmeg", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("fmeg")

collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["fmeg/kernels/*"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
