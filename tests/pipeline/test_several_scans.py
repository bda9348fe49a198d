"""Models with several scans over layers: dense layers, then experts, then multi-token prediction; cut anywhere."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, einsum, ops, scan, shard, tree
from fmeg.pipeline import SCHEDULES
from fmeg.sharding.spec import P

D, V, E = 8, 12, 4
NAMES = [name for name in SCHEDULES if name != "none"]
AXES = dict(
    e="vocab embed",
    dense=dict(w="layers embed ff", v="layers ff embed"),
    middle="embed",
    moe=dict(router="layers embed _", w="layers _ embed ff", v="layers _ ff embed"),
    mtp=dict(join="layers _ embed", w="layers embed ff", v="layers ff embed"),
    norm="embed",
)


def init(dense=2, moe=3, mtp=1):
    g = torch.Generator().manual_seed(0)
    r = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64) * 0.4
    return dict(
        e=r(V, D),
        dense=dict(w=r(dense, D, 16), v=r(dense, 16, D)),
        middle=1 + r(D),
        moe=dict(router=r(moe, D, E), w=r(moe, E, D, 4), v=r(moe, E, 4, D)),
        mtp=dict(join=r(mtp, 2 * D, D), w=r(mtp, D, 16), v=r(mtp, 16, D)),
        norm=1 + r(D),
    )


def batch(rows=8):
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, V, (rows, 7), generator=g)
    mask = (torch.rand(rows, 5, generator=g) > 0.3).double()
    return dict(x=ids[:, :5], y=ids[:, 1:6], next=ids[:, 2:7], m=mask)


BATCH_AXES = dict(x="batch seq", y="batch seq", next="batch seq", m="batch seq")


def mlp(x, p):
    h = torch.tanh(einsum("b s d, d f -> b s f", ops.rms_norm(x), p["w"]))
    return x + shard(einsum("b s f, f d -> b s d", h, p["v"]), P("batch", "res_seq", None))


def experts(carry, p):
    """Every expert on every token; the sum of scores squared is an auxiliary loss, scores are counted a layer."""
    x, aux = carry
    scores = torch.softmax(einsum("b s d, d e -> b s e", x, p["router"]), -1)
    h = torch.tanh(einsum("b s d, e d f -> b s e f", x, p["w"]))
    y = einsum("b s e f, e f d, b s e -> b s d", h, p["v"], scores)
    chosen = (scores > 1 / E).double().sum((0, 1))
    return (x + shard(y, P("batch", "res_seq", None)), aux + (scores**2).sum()), dict(chosen=chosen, size=(y**2).sum())


def model(p, b):
    """Three scans; between them a norm; two losses with one head, an auxiliary one, a penalty, statistics a layer."""
    embed = lambda ids: shard(ops.embedding(p["e"], ids), P("batch", "res_seq", None))
    x, _ = scan(lambda x, w: (mlp(x, w), None), embed(b["x"]), p["dense"])
    x = ops.rms_norm(x, p["middle"])
    (x, aux), stats = scan(experts, (x, torch.zeros((), dtype=torch.float64)), p["moe"])
    nxt = embed(b["next"])

    def predict(h, w, nxt):
        both = torch.cat([ops.rms_norm(h), ops.rms_norm(nxt)], -1)
        return mlp(einsum("b s c, c d -> b s d", both, w["join"]), w), None

    h, _ = scan(predict, x, p["mtp"], nxt)

    def loss(x, y):
        logits = einsum("b s d, v d -> b s v", ops.rms_norm(x, p["norm"]), p["e"])
        return (ops.cross_entropy(logits, y) * b["m"]).sum()

    penalty = (p["moe"]["w"] ** 2).sum() * b["m"].sum() + stats["size"].mean()
    n = b["m"].sum()
    main, second = loss(x, b["y"]), loss(h, b["next"])
    metrics = {"chosen": stats["chosen"], "log": torch.log(1 + stats["size"]), "main": main}
    return [(main, n), (second * 0.3, n), (aux * 0.01 + penalty * 0.001, 40)], metrics


def step(schedule=None, stages="even", microbatches=4, fn=model):
    how = {} if schedule is None else dict(schedule=schedule, stages=stages)
    return lambda params, batch: fmeg.value_and_grad(fn, microbatches=microbatches, **how)(params, batch)


@cache
def one_device(dense=2, moe=3, mtp=1, microbatches=4, rows=8):
    (loss, aux), grads = step(microbatches=microbatches)(init(dense, moe, mtp), batch(rows))
    return [loss, *tree.leaves(aux), *tree.leaves(grads)]


def on_mesh(mesh, layout, schedule, stages="even", microbatches=4, strict=True, **sizes):
    rows = sizes.pop("rows", 8)
    f = fmeg.jit(
        step(schedule, stages, microbatches),
        mesh=mesh,
        layout=layout,
        axes={"params": AXES, "batch": BATCH_AXES},
        strict=strict,
    )
    (loss, aux), grads = f(init(**sizes), batch(rows))
    return [x.global_value() for x in (loss, *tree.leaves(aux), *tree.leaves(grads))]


def worst(got, want):
    assert all(a.shape == b.shape for a, b in zip(got, want, strict=True))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("schedule", NAMES)
def test_every_schedule(schedule):
    assert worst(on_mesh(Mesh(pp=2), Layout(layers="pp"), schedule), one_device()) < 1e-12


@pytest.mark.parametrize(
    "stages",
    ["cost", (1, 2, 3), (0, 2, 4), (5, 1, 0), (3, 3, 0), (2, 0, 4), (6, 0, 0), (0, 0, 6), "Ett|ttt|mL", "Et|(t)*4|m,L"],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_stages(stages, schedule):
    assert worst(on_mesh(Mesh(pp=3), Layout(layers="pp"), schedule, stages), one_device()) < 1e-12
