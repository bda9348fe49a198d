"""Functions of plain torch alone: value and gradients equal one device in every layout."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg import Layout, Mesh, jit, value_and_grad

_gen = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_gen, dtype=torch.float64) * 0.5


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_gen)


def mlp(p: dict, batch: dict) -> tuple[Tensor, int]:
    h = F.gelu(batch["x"] @ p["w1"] + p["b1"])
    y = F.layer_norm(h @ p["w2"], (8,), p["g"], p["c"])
    return (torch.where(y > 0, y, 0.1 * y) ** 2).sum(), 1


def attention(p: dict, batch: dict) -> tuple[Tensor, int]:
    """By hand: heads by view and transpose, a mask of -inf, softmax."""
    x = batch["x"]
    b, s, _ = x.shape
    q, k, v = (z.view(b, s, 4, 2).transpose(1, 2) for z in (x @ p["w1"]).split(8, dim=-1))
    scores = q @ k.transpose(-1, -2) / 2.0**0.5
    causal = torch.ones(s, s, dtype=torch.bool, device=x.device).tril()
    a = scores.masked_fill(~causal, float("-inf")).softmax(-1) @ v
    out = a.transpose(1, 2).reshape(b, s, 8) @ p["w2"]
    return (out + x).square().mean() * 3, 1


def language_model(p: dict, batch: dict) -> tuple[Tensor, Tensor]:
    h = F.rms_norm(F.embedding(batch["ids"], p["table"]), (8,), p["g"], 1e-6)
    gate, up = (h @ p["w1"]).chunk(2, -1)
    h = h + (F.silu(gate) * up) @ p["w2"]
    logits = h @ p["table"].T
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="none")
    return losses.sum(), losses.numel()


def log_probabilities(p: dict, batch: dict) -> tuple[Tensor, int]:
    """Gather from a log-softmax, whose classes may be sharded."""
    logp = (batch["x"] @ p["w1"]).log_softmax(-1)
    picked = logp.gather(-1, batch["ids"].unsqueeze(-1)).squeeze(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    return (entropy - picked).sum(), 1


def statistics(p: dict, batch: dict) -> tuple[Tensor, int]:
    x = batch["x"] * p["g"]
    parts = [
        x.std(1).sum(),
        x.var(),
        x.amax(-1).sum(),
        x.logsumexp(1).sum(),
        torch.linalg.vector_norm(x),
        x.cumsum(1).mean(),
    ]
    return torch.stack(parts).dot(torch.arange(1.0, 7.0, dtype=x.dtype, device=x.device)), 1


def rearranged(p: dict, batch: dict) -> tuple[Tensor, int]:
    x = batch["x"] * p["g"]
    y = torch.cat([x[:, 1:], x[:, :1]], 1).roll(1, 2).flip(0)
    z = torch.stack([x, y], 1).flatten(0, 1).unfold(1, 2, 2).permute(0, 3, 1, 2)
    top = z.topk(2, -1).values.sum() + z.sort(1).values[:, 0].sum()
    return top + (F.pad(x, (1, 0)) ** 2)[..., 1:].sum() + x[:, -1].sum() * x[0].tril().sum(), 1


def scattered(p: dict, batch: dict) -> tuple[Tensor, int]:
    """Tokens added into slots by index, as a histogram of vectors."""
    x = (batch["x"] @ p["w1"]).flatten(0, 1)
    slots = torch.zeros(8, 24, dtype=x.dtype, device=x.device).index_add(0, batch["ids"].flatten(), x)
    one_hot = F.one_hot(batch["ids"], 8).to(x.dtype)
    return (slots**2).sum() + (one_hot.sum((0, 1)) * p["c"]).sum(), 1


def convolved(p: dict, batch: dict) -> tuple[Tensor, int]:
    x = F.conv1d(batch["x"].transpose(1, 2), p["kernel"], p["c"], padding=1)
    return F.group_norm(F.relu(x), 4, p["g"], p["b"]).square().sum(), 1


PARAMS = {
    "w1": (f(8, 24), "embed ff"),
    "b1": (f(24), "ff"),
    "w2": (f(24, 8), "ff embed"),
    "g": (f(8) + 1, "embed"),
    "c": (f(8), "embed"),
    "b": (f(8), "embed"),
    "table": (f(16, 8), "vocab embed"),
    "kernel": (f(8, 8, 3), "out embed tap"),
}
BATCH = {"x": f(4, 4, 8), "ids": ids(8, 4, 4)}
BATCH_AXES = {"x": "batch seq embed", "ids": "batch seq"}

PROGRAMS: dict[Callable[..., Any], str] = {
    mlp: "w1 b1 w2 g c",
    attention: "w1 w2",
    language_model: "table g w1 w2",
    log_probabilities: "w1",
    statistics: "g",
    rearranged: "g",
    scattered: "w1 c",
    convolved: "kernel c g b",
}
OVERRIDES = {attention: {"w2": (f(8, 8), "ff embed")}, language_model: {"w2": (f(12, 8), "half embed")}}
LAYOUTS = [
    {"batch": ("x", "y")},
    {"batch": "x", "seq": "y"},
    {"seq": ("x", "y")},
    {"batch": "x", "embed": "y"},
    {"ff": "x", "vocab": "x", "out": "x", "half": "x"},
    {"batch": "y", "ff": "x", "vocab": "x", "out": "x"},
    {"batch": "x", "params": {"embed": "x", "ff": "y"}, "opt": {}},
]


@pytest.mark.parametrize(
    ("fn", "layout"), list(itertools.product(PROGRAMS, LAYOUTS)), ids=lambda x: getattr(x, "__name__", str(x))
)
def test_equals_one_device(fn: Callable[..., Any], layout: dict[str, Any]) -> None:
    chosen = {n: OVERRIDES.get(fn, {}).get(n, PARAMS[n]) for n in PROGRAMS[fn].split()}
    params, axes = {n: x for n, (x, _) in chosen.items()}, {n: a for n, (_, a) in chosen.items()}
    known = {a for text in (*axes.values(), *BATCH_AXES.values()) for a in text.split()}
    views = {k: {a: m for a, m in v.items() if a in known} if isinstance(v, dict) else v for k, v in layout.items()}
    views = {k: v for k, v in views.items() if isinstance(v, dict) or k in known}

    def step(params: dict, batch: dict) -> Any:
        (loss, _), grads = value_and_grad(fn)(params, batch)
        return loss, grads

    want = step(params, BATCH)
    got = jit(step, mesh=Mesh(x=2, y=2), layout=Layout(**views), axes={"params": axes, "batch": BATCH_AXES})(
        params, BATCH
    )
    torch.testing.assert_close(got[0].global_value(), want[0], rtol=1e-10, atol=1e-10)
    for name, g in want[1].items():
        torch.testing.assert_close(
            got[1][name].global_value(), g, rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
