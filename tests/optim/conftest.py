"""The same training loop for fmeg, torch.optim and optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fmeg import tree
from fmeg.optim import Optimizer, apply_updates
from tests.optim.problem import STEPS, make_grads, make_params


@pytest.fixture
def params() -> dict[str, Any]:
    return make_params()


@pytest.fixture
def train() -> Callable[..., list[Any]]:
    """train(opt, params, steps) -> the parameters after each step."""

    def run(opt: Optimizer, params: Any, steps: int = STEPS) -> list[Any]:
        state, history = opt.init(params), []
        for step in range(steps):
            updates, state = opt.update(make_grads(params, step), state, params)
            params = apply_updates(params, updates)
            history.append(params)
        return history

    return run


@pytest.fixture
def train_torch() -> Callable[..., list[Any]]:
    """train_torch(make, params, steps) with `make(list of torch parameters) -> torch.optim.Optimizer`."""

    def run(make: Callable[[list], torch.optim.Optimizer], params: Any, steps: int = STEPS) -> list[Any]:
        leaves, treedef = tree.flatten(params)
        leaves = [torch.nn.Parameter(p.clone()) for p in leaves]
        opt, history = make(leaves), []
        for step in range(steps):
            now = tree.unflatten(treedef, [p.detach() for p in leaves])
            for p, g in zip(leaves, tree.leaves(make_grads(now, step)), strict=True):
                p.grad = g
            opt.step()
            history.append(tree.unflatten(treedef, [p.detach().clone() for p in leaves]))
        return history

    return run


@pytest.fixture
def train_optax() -> Callable[..., list[Any]]:
    """train_optax(make, params, steps) in float64, with `make() -> optax.GradientTransformation`."""
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")

    def run(make: Callable[[], Any], params: Any, steps: int = STEPS) -> list[Any]:
        to_jax = lambda t: tree.map(lambda x: jax.numpy.asarray(x.numpy()), t)
        to_torch = lambda t: tree.map(lambda x: torch.from_numpy(np.array(x)), t)
        with jax.enable_x64(True):
            opt = make()
            now, history = to_jax(params), []
            state, update = opt.init(now), jax.jit(opt.update)
            for step in range(steps):
                updates, state = update(to_jax(make_grads(to_torch(now), step)), state, now)
                now = optax.apply_updates(now, updates)
                history.append(to_torch(now))
        return history

    return run


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Two histories agree to `tol`, relative and absolute, in float64."""

    def check(got: list[Any], want: list[Any], tol: float = 1e-12) -> None:
        assert len(got) == len(want) > 0
        for a, b in zip(got, want, strict=True):
            tree.map(lambda x, y: torch.testing.assert_close(x, y, rtol=tol, atol=tol), a, b)

    return check
