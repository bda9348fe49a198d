"""Language models of random layers, in random layouts and microbatches: loss, sums and gradients are one device's."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmeg import Layout, Mesh, P, einsum, jit, name, ops, random, remat, save_names, scan, shard, tree, value_and_grad

_g = torch.Generator().manual_seed(0)
B, S, D, E, V = 8, 4, 4, 8, 8


def f(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_g, dtype=torch.float64) * 0.6


PARAMS = {"a": f(D, E), "b": f(E, D), "v": f(D), "t": f(V, D), "l": {"w": f(2, D, D), "n": f(2, D)}}
IDS, MASK = torch.randint(0, V, (B, S), generator=_g), (torch.rand(B, S, generator=_g) < 0.7).double()
BATCH = {"x": f(B, S, D), "i": IDS, "m": MASK}
AXES = {
    "params": {"a": "d e", "b": "e d", "v": "d", "t": "vocab d", "l": {"w": "layers d d2", "n": "layers d2"}},
    "batch": {"x": "batch seq _", "i": "batch seq", "m": "batch seq"},
}
RES, SEQ = P("batch", "res", None), P("batch", "seq", None)


def stacked(x: Tensor, p: dict, wrap=lambda f: f) -> tuple[Tensor, Tensor]:
    layer = wrap(lambda c, q: torch.tanh(c @ q["w"]) + c * q["n"])
    return scan(lambda c, q: (layer(c, q), c * q["n"]), x, p["l"])


def attended(x: Tensor, p: dict) -> Tensor:
    q, k, v = ((x @ p["l"]["w"][i]).reshape(*x.shape[:2], 2, 2) for i in (0, 1, 0))
    return x + ops.attention(q, k, v).reshape(x.shape)


def named(x: Tensor, p: dict) -> Tensor:
    return remat(lambda x: name(torch.sin(x @ p["a"]), "k") @ p["b"], save_names("k"))(x)


# (value, parameters, batch) -> value
LAYERS: dict[str, Callable[[Tensor, dict, dict], Tensor]] = {
    "mlp": lambda x, p, b: x + shard(F.gelu(x @ p["a"]) @ p["b"], RES),
    "mlp, pending": lambda x, p, b: x + einsum("b s e, e d -> b s d", torch.tanh(x @ p["a"]), p["b"]),
    "rms_norm": lambda x, p, b: ops.rms_norm(x, p["v"]),
    "layer_norm": lambda x, p, b: F.layer_norm(x, (D,), p["v"], None),
    "embedding": lambda x, p, b: x + F.embedding(b["i"], p["t"]),
    "scan": lambda x, p, b: stacked(x, p)[0],
    "scan, stacked": lambda x, p, b: (lambda c, ys: c + ys.sum(0))(*stacked(x, p)),
    "scan, remat": lambda x, p, b: stacked(x, p, remat)[0],
    "remat, names": lambda x, p, b: named(x, p),
    "attention": lambda x, p, b: attended(x, p),
    "along the sequence": lambda x, p, b: x - x.mean(1, keepdim=True) + x.cumsum(1) * 0.1,
    "shifted": lambda x, p, b: torch.cat([x[:, 1:], x[:, :1]], 1) + x[:, -1:],
    "softmax": lambda x, p, b: x.softmax(-1) * 2,
    "where": lambda x, p, b: torch.where(b["m"][..., None] > 0, x, p["v"]),
    "flat": lambda x, p, b: torch.tanh(x.flatten(0, 1) @ p["a"] @ p["b"]).reshape(x.shape),
    "halves": lambda x, p, b: torch.cat([x[..., 2:], x[..., :2] * p["v"][:2]], -1),
    "a parameter's sum": lambda x, p, b: x * (p["v"] ** 2).sum() + p["a"].mean(),
    "a loss inside": lambda x, p, b: x * ops.cross_entropy(x @ p["t"].T, b["i"])[..., None],
    "unit": lambda x, p, b: x / (x.norm(dim=-1, keepdim=True) + 1),
    "to seq": lambda x, p, b: shard(x, SEQ),
    "to res": lambda x, p, b: shard(x, P("batch", "res", "d")),
    "to seq alone": lambda x, p, b: shard(x, P(None, "seq", None)),
    "dropout": lambda x, p, b: ops.dropout(x, 0.3, random.key(2)),
}


def step_of(layers: list[str], microbatches: int, pairs: bool):
    def loss(p: dict, b: dict):
        x = shard(b["x"], RES)
        for layer in layers:
            x = LAYERS[layer](x, p, b)
        losses = ops.cross_entropy(einsum("b s d, v d -> b s v", x, p["t"]), b["i"])
        main = ((losses * b["m"]).sum(), b["m"].sum())
        if not pairs:
            return main
        return [main, ((x**2).sum(), x.shape[0])], {"large": (losses > 2).sum(), "sum": losses.sum(0).sum()}

    return lambda params, batch: value_and_grad(loss, microbatches=microbatches)(params, batch)


@st.composite
def layouts(draw, axes: tuple[str, ...]) -> Layout:
    """Any assignment in which no tensor meets a mesh axis twice."""

    def one(free) -> tuple[str, ...]:
        return draw(st.sampled_from([(), *((a,) for a in free)]))

    def others(*taken: tuple[str, ...]) -> list[str]:
        return [a for a in axes if not any(a in t for t in taken)]

    batch = tuple(draw(st.permutations(axes))[: draw(st.integers(0, 2))])
    seq, e, vocab = one(others(batch)), one(axes), one(axes)
    res = draw(st.sampled_from([seq, *((a,) for a in others(batch))]))
    d = one(others(e, vocab, res, batch)) if draw(st.booleans()) else ()
    d2 = one(others(d)) if draw(st.booleans()) else ()
    rest = {v: dict(d=one(others(e, vocab, d2))) for v in ("params", "opt") if draw(st.booleans())}
    kind = draw(st.sampled_from(["all_gather", "ring"]))
    return Layout(batch=batch, seq=seq, res=res, e=e, vocab=vocab, d=d, d2=d2, attention=kind, **rest)


MESHES = [Mesh(p=2, q=2), Mesh(p=2, q=2, r=2), Mesh(p=4), Mesh(q=2, p=2, backend="vmap")]


@settings(max_examples=12)
@given(st.data(), st.sampled_from(MESHES), st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4))
def test_random_steps(data, mesh, layers):
    layout = data.draw(layouts(mesh.axes))
    fits = [m for m in (1, 2, 4) if B // m % mesh.axis_size(dict(layout.compute)["batch"]) == 0]
    microbatches = data.draw(st.sampled_from(fits)) if "dropout" not in layers else 1  # its draw is of a whole batch
    step = step_of(layers, microbatches, data.draw(st.booleans()))
    before = [x.clone() for x in tree.leaves((PARAMS, BATCH))]
    got = jit(step, mesh=mesh, layout=layout, axes=AXES)(PARAMS, BATCH)
    assert all(map(torch.equal, before, tree.leaves((PARAMS, BATCH))))
    for a, b in zip(tree.leaves(got), tree.leaves(step(PARAMS, BATCH)), strict=True):
        assert torch.allclose(a.global_value(), b, rtol=1e-11, atol=1e-11)
