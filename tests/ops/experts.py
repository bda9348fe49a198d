"""A layer of experts as the tests use it, and the same without any routing: every expert on every token."""

from __future__ import annotations

import torch

from fmeg import P, einsum, ops, scan, shard, value_and_grad
from tests.ops.checks import rand

AXES = {
    "x": "batch seq embed",
    "router": "layers embed _",
    "w_gate": "layers experts embed expert_ff",
    "w_up": "layers experts embed expert_ff",
    "w_down": "layers experts expert_ff embed",
    "bias": "layers experts embed",
}
BATCH_AXES = {"indices": "batch seq _", "keep": "batch seq _", "target": "batch seq embed"}


def problem(batch=4, seq=8, embed=6, ff=4, experts=4, k=2, layers=1, routing="random", drop=False):
    """(params, batch) in float64; `routing` names how tokens choose their experts."""
    slots = (batch, seq, k)
    scores = rand(batch, seq, experts, seed=7)
    if routing == "skewed":
        scores[..., 0] += 3
    elif routing == "empty":  # the last half of the experts gets no token
        scores[..., (experts + 1) // 2 :] -= 100
    elif routing == "one expert":
        scores[..., 1 % experts] += 100
    elif routing == "in order":  # each block of tokens to one expert: ranks exchange everything or nothing
        ids = torch.arange(batch * seq) * experts // (batch * seq)
        scores = torch.nn.functional.one_hot(ids, experts).double().view(scores.shape) + 0.01 * scores
    params = {
        "x": rand(batch, seq, embed),
        "router": rand(layers, embed, experts, seed=1),
        "w_gate": rand(layers, experts, embed, ff, seed=2),
        "w_up": rand(layers, experts, embed, ff, seed=3),
        "w_down": rand(layers, experts, ff, embed, seed=4),
        "bias": rand(layers, experts, embed, seed=5),
    }
    data = {"indices": scores.topk(k).indices, "target": rand(batch, seq, embed, seed=6)}
    if drop:
        data["keep"] = rand(*slots, seed=8) > -0.4
    return params, data


def _weights(p, x, batch):
    probs = torch.softmax(einsum("b s d, d e -> b s e", x, p["router"]), -1)
    return probs.gather(-1, batch["indices"])


def layer(p, x, batch, weighted="combine"):
    """x + Σ_j weight_j · expert_j(x), through rows."""
    weights = _weights(p, x, batch)
    rows, routing = ops.dispatch(x, batch["indices"], experts=p["w_gate"].shape[0], keep=batch.get("keep"))
    gate, up = (ops.grouped_matmul(rows, p[w], routing) for w in ("w_gate", "w_up"))
    h = ops.swiglu(gate, up)
    if weighted == "rows":
        h = ops.scale_rows(h, ops.dispatch_weights(weights, routing))
        out = ops.combine(ops.grouped_matmul(h, p["w_down"], routing), routing)
    else:
        out = ops.grouped_bias(ops.grouped_matmul(h, p["w_down"], routing), p["bias"], routing)
        out = ops.combine(out, routing, weights)
    return x + shard(out, P("batch", "seq", None))


def dense_layer(p, x, batch, weighted="combine"):
    """The same by every expert on every token, weighted by zero where it was not chosen."""
    weights = _weights(p, x, batch)
    if "keep" in batch:
        weights = weights * batch["keep"]
    experts = p["w_gate"].shape[0]
    chosen = torch.nn.functional.one_hot(batch["indices"], experts).to(weights.dtype)
    per_expert = torch.einsum("bsk,bske->bse", weights, chosen)
    gate = torch.einsum("bsd,edf->bsef", x, p["w_gate"])
    up = torch.einsum("bsd,edf->bsef", x, p["w_up"])
    out = torch.einsum("bsef,efd->bsed", torch.nn.functional.silu(gate) * up, p["w_down"])
    if weighted == "combine":
        out = out + p["bias"]
    return x + torch.einsum("bsed,bse->bsd", out, per_expert)


def loss(params, batch, weighted="combine", layer=layer):
    layers = {k: v for k, v in params.items() if k != "x"}
    x, _ = scan(lambda x, p, b: (layer(p, x, b, weighted), None), params["x"], layers, batch)
    return (x * batch["target"]).sum(), x.shape[0] * x.shape[1]


def step(params, batch, weighted="combine"):
    return value_and_grad(lambda p, b: loss(p, b, weighted))(params, batch)
