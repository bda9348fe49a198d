"""Every operation under `jit` on a virtual mesh: value and gradients equal one device, layout by layout."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fmeg import Layout, Mesh, einsum, jit, ops, random, value_and_grad
from fmeg.program.errors import ShardingError
from tests.ops.checks import close, ints, rand

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 1, 1, 1, 1, 1, 1]])


def _check(loss, params, axes, batch, batch_axes, /, **layout):
    """Equal to eager; returns how many collectives of each kind ran."""

    def step(params, batch):
        return value_and_grad(loss)(params, batch)

    (expected, _), grads = step(params, batch)
    f = jit(step, mesh=Mesh(x=2, y=2), layout=Layout(**layout), axes={"params": axes, "batch": batch_axes})
    (value, _), given = f(params, batch)
    close(value.global_value(), expected)
    for name, g in grads.items():
        close(given[name].global_value(), g)
    return Counter(n.op.name for n in _nodes(f.lower(params, batch).program) if type(n.op).__name__ == "Collective")


def _nodes(program):
    for node in program.nodes:
        yield node
        if hasattr(node.op, "body"):
            yield from _nodes(node.op.body)


ATTENTION = [
    {"heads": "x"},
    {"heads": "x", "kv_heads": "x", "batch": "y"},
    {"heads": ("x", "y"), "kv_heads": "x"},
    {"heads": ("x", "y")},
    {"seq": "x"},
    {"kv_seq": "x"},
    {"seq": "x", "kv_seq": "x", "batch": "y"},
    {"seq": "x", "kv_seq": "x", "heads": "y", "kv_heads": "y"},
    {"seq": ("x", "y"), "kv_seq": ("x", "y")},
]


CASES = [
    (x, kind) for x in ATTENTION for kind in ("all_gather", "ring", "ulysses") if kind == "all_gather" or "seq" in x
]


@pytest.mark.parametrize(("layout", "kind"), CASES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_attention(layout, kind, masked):
    params = {"q": rand(2, 8, 4, 6), "k": rand(2, 8, 4, 6, seed=1), "v": rand(2, 8, 4, 6, seed=2)}
    kv = "batch kv_seq kv_heads head_dim"
    batch = {"weight": rand(2, 8, 4, 6, seed=5), "segments": SEGMENTS, "kv_segments": SEGMENTS}
    batch_axes = {"weight": "batch seq heads head_dim", "segments": "batch seq", "kv_segments": "batch kv_seq"}
    if not masked:
        batch = {"weight": batch["weight"]}

    def loss(p, batch):
        masks = {"segments": batch["segments"], "kv_segments": batch["kv_segments"], "window": 4} if masked else {}
        return (ops.attention(p["q"], p["k"], p["v"], **masks) * batch["weight"]).sum(), 1

    axes = {"q": "batch seq heads head_dim", "k": kv, "v": kv}
    _check(loss, params, axes, batch, batch_axes, attention=kind, **layout)


def test_ulysses_exchanges_four_times_each_way_and_says_when_it_cannot():
    axes = dict.fromkeys("qkv", "batch seq heads head_dim")

    def loss(p, batch):
        return (ops.attention(p["q"], p["k"], p["v"]) * batch).sum(), 1

    params = {n: rand(2, 8, 4, 6, seed=i) for i, n in enumerate("qkv")}
    args = (loss, params, axes, rand(2, 8, 4, 6, seed=9), "batch seq heads head_dim")
    assert _check(*args, attention="ulysses", seq=("x", "y"))["all_to_all"] == 8
    params |= {n: params[n][:, :, :2] for n in "kv"}
    with pytest.raises(ShardingError, match="needs the 2 heads .* to divide by 4"):
        _check(*args, attention="ulysses", seq=("x", "y"))


MODEL = [
    {},
    {"batch": ("x", "y")},
    {"batch": "x", "vocab": "y", "ff": "y"},
    {"vocab": ("x", "y"), "ff": ("x", "y")},
    {"seq": "x", "vocab": "y"},
    {"batch": "x", "ff": "y"},
]


@pytest.mark.parametrize("layout", MODEL, ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_small_model(layout, smoothing):
    """Embedding, norms, gated products, dropout and the loss, with 7 real classes of 8."""
    params = {
        "embed": rand(8, 6),
        "norm": rand(6, seed=1),
        "bias": rand(6, seed=2),
        "gate": rand(6, 8, seed=3),
        "up": rand(6, 8, seed=4),
        "down": rand(8, 6, seed=5),
    }
    axes = {"embed": "vocab embed", "norm": "embed", "bias": "embed"}
    axes |= {"gate": "embed ff", "up": "embed ff", "down": "ff embed"}
    batch = {"tokens": ints(7, 4, 4), "targets": ints(7, 4, 4, seed=1), "key": random.key(5)}
    batch_axes = {"tokens": "batch seq", "targets": "batch seq", "key": "key"}

    def loss(p, batch):
        x = ops.embedding(p["embed"], batch["tokens"])
        x = ops.dropout(x, 0.25, batch["key"])
        h = ops.rms_norm(x, p["norm"])
        gate, up = (einsum("b s d, d f -> b s f", h, p[n]) for n in ("gate", "up"))
        h = ops.swiglu(gate, up) + ops.geglu(up, gate) + ops.gelu(gate)
        x = x + einsum("b s f, f d -> b s d", h, p["down"])
        x = ops.layer_norm(x, p["norm"], p["bias"])
        logits = einsum("b s d, v d -> b s v", x, p["embed"])
        losses = ops.cross_entropy(logits, batch["targets"], z_loss=0.01, label_smoothing=smoothing, vocab=7)
        return losses.sum(), batch["targets"].numel()

    _check(loss, params, axes, batch, batch_axes, **layout)


def test_vocabulary_parallel_loss_costs_two_reductions_and_moves_no_logits():
    params, axes = {"head": rand(8, 6)}, {"head": "vocab embed"}
    batch = {"x": rand(4, 4, 6, seed=1), "targets": ints(8, 4, 4)}
    batch_axes = {"x": "batch seq embed", "targets": "batch seq"}

    def loss(p, batch):
        return ops.cross_entropy(einsum("b s d, v d -> b s v", batch["x"], p["head"]), batch["targets"]).sum(), 1

    counts = _check(loss, params, axes, batch, batch_axes, vocab=("x", "y"))
    assert {k: n for k, n in counts.items() if k != "axis_index"} == {"all_reduce": 2}


@pytest.mark.parametrize("layout", [{"seq": "x"}, {"batch": "x", "heads": "y"}, {"seq": ("x", "y")}], ids=str)
def test_rope(layout):
    params, axes = {"x": rand(2, 8, 4, 6)}, {"x": "batch seq heads head_dim"}
    batch = {"positions": torch.arange(16.0, dtype=torch.float64).view(2, 8), "weight": rand(2, 8, 4, 6, seed=1)}
    batch_axes = {"positions": "batch seq", "weight": "batch seq heads head_dim"}

    def loss(p, batch):
        return (ops.rope(p["x"], ops.rope_table(batch["positions"], 6)) * batch["weight"]).sum(), 1

    _check(loss, params, axes, batch, batch_axes, **layout)


def test_one_device_compiled_equals_eager_bit_for_bit():
    shapes = {"embed": (16, 12), "norm": (12,), "wq": (12, 4, 6), "wk": (12, 2, 6), "wv": (12, 2, 6), "wo": (4, 6, 12)}
    params = {n: rand(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    batch = {"tokens": ints(16, 2, 9), "targets": ints(16, 2, 9, seed=1)}

    def loss(p, batch):
        x = ops.embedding(p["embed"], batch["tokens"])
        h = ops.rms_norm(x, p["norm"])
        q, k, v = (einsum("b s d, d h e -> b s h e", h, p[n]) for n in ("wq", "wk", "wv"))
        table = ops.rope_table(torch.arange(9), 6)
        o = ops.attention(ops.rope(q, table), ops.rope(k, table), v, window=4)
        x = x + einsum("b s h e, h e d -> b s d", o, p["wo"])
        x = ops.swiglu(x, ops.layer_norm(x, p["norm"]))
        logits = einsum("b s d, v d -> b s v", x, p["embed"])
        return ops.cross_entropy(logits, batch["targets"], z_loss=0.1, label_smoothing=0.1).sum(), 18

    def step(params, batch):
        return value_and_grad(loss)(params, batch)

    (expected, _), grads = step(params, batch)
    (value, _), given = jit(step)(params, batch)
    assert torch.equal(value.global_value(), expected)
    assert all(torch.equal(given[n].global_value(), g) for n, g in grads.items())
