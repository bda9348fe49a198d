"""What the tests of equivalence share: a model with all that is easy to get wrong, layouts, and the comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh
from fmeg.models import llama
from fmeg.testing import Case, assert_equivalent
from fmeg.testing.verify import check, config, make_batch, make_params

TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
CP = dict(seq="cp", res_seq="cp")
KINDS = ("all_gather", "ring", "ulysses")
CFG = config()

ONE = (Mesh(), Layout())
DP = (Mesh(dp=2), Layout(batch="dp"))
ZERO1 = (Mesh(dp=2), Layout(batch="dp", opt=dict(embed="dp")))
ZERO3 = (Mesh(dp=2), Layout(batch="dp", params=dict(embed="dp")))
HSDP = (Mesh(replica=2, dp=2), Layout(batch=("replica", "dp"), params=dict(embed="dp")))
TENSOR = (Mesh(tp=2), Layout(**TP))
SEQUENCE = (Mesh(tp=2), Layout(**TP, res_seq="tp"))
EVERYTHING = (
    Mesh(dp=2, cp=2, tp=2),
    Layout(batch="dp", seq="cp", res_seq=("cp", "tp"), **TP, params=dict(embed="dp"), attention="ring"),
)


def each(**layouts: tuple[Mesh, Layout]) -> Any:
    """A test for each named pair of mesh and layout."""
    return pytest.mark.parametrize(("mesh", "layout"), list(layouts.values()), ids=list(layouts))


def context(kind: str, size: int = 2) -> tuple[Mesh, Layout]:
    return Mesh(cp=size), Layout(**CP, attention=kind)


def changed(**changes: Any) -> llama.Config:
    """The model with other traits."""
    return replace(CFG, **changes)


def train(
    mesh: Mesh, layout: Layout, cfg: Any = CFG, microbatches: int = 1, steps: int = 1, tol: float = 1e-12
) -> None:
    """Optimizer steps on the mesh equal those on one device: loss, every gradient leaf, every parameter."""
    row = check(Case("", mesh, layout, microbatches), cfg, steps, tol)
    assert row.ok, row


def loss_and_grads(loss: Any, microbatches: int = 1) -> Any:
    """`(params, batch) -> ((loss, aux), grads)` of a loss function `(params, batch) -> (sum, count)`."""

    def step(params: Any, batch: Any) -> Any:
        return fmeg.value_and_grad(loss, microbatches=microbatches)(params, batch)

    return step


def gradients(
    mesh: Mesh, layout: Layout, batch: Any, loss: Any = None, cfg: Any = CFG, microbatches: int = 1, tol: float = 1e-12
) -> dict[str, float]:
    """Loss and gradients on the mesh equal those on one device, under strict; returns the errors by path."""
    loss = loss or (lambda params, batch: llama.loss(params, batch, cfg))
    axes = {"params": llama.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    step = loss_and_grads(loss, microbatches)
    return assert_equivalent(step, make_params(cfg), batch, mesh=mesh, layout=layout, axes=axes, tol=tol, strict=True)


def on_mesh(fn: Any, mesh: Mesh, layout: Layout, *args: Any, cfg: Any = CFG, **options: Any) -> Any:
    """`fn(params, batch)` on the mesh, as global tensors."""
    axes = {"params": llama.logical_axes(cfg)}
    out = fmeg.jit(fn, mesh=mesh, layout=layout, axes=axes, **options)(*args)
    return fmeg.tree.map(lambda x: x.global_value() if isinstance(x, fmeg.Array) else x, out)


def batch_of(rows: int = 8, seq: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    return make_batch(CFG, rows, seq, seed)
