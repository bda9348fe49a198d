"""What eager `value_and_grad` costs on one device, against plain torch.

    python -m benchmarks.eager [--repeats 15] [--json out.json]

Three ways to one loss and its gradient: `fmeg.value_and_grad` eager, `torch.autograd.grad` on the very same loss
function, and a Llama written by hand in plain torch. A fourth is the compiled step on a mesh of one. Bar: the first is
within 5 % of the second in time and in peak memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fmeg
from benchmarks.measure import Row, arguments, compare, finish
from fmeg import Layout, Mesh, tree
from fmeg.models import llama

SIZES = {
    "tiny": (llama.Config(vocab_size=256, embed=64, layers=2, heads=4, kv_heads=2, head_dim=16, ff=128), (2, 32)),
    "vocabulary": (
        llama.Config(vocab_size=16384, embed=64, layers=1, heads=4, kv_heads=2, head_dim=16, ff=128),
        (2, 128),
    ),
    "small": (llama.Config(vocab_size=1024, embed=256, layers=4, heads=8, kv_heads=4, head_dim=32, ff=704), (4, 256)),
}


def plain_loss(p: dict[str, Any], batch: dict[str, Tensor], cfg: llama.Config) -> Tensor:
    """The sum of token losses, as one would write it without a library."""
    b, s = batch["tokens"].shape
    half = torch.arange(0, cfg.head_dim, 2, dtype=torch.float64)
    angle = torch.outer(torch.arange(s, dtype=torch.float64), cfg.rope_base ** (-half / cfg.head_dim))
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    x = F.embedding(batch["tokens"], p["embed"])
    layers = {k: w.unbind(0) for k, w in p["layers"].items()}
    for i in range(cfg.layers):
        x = plain_block({k: w[i] for k, w in layers.items()}, x, cos, sin, cfg)
    logits = F.rms_norm(x, (cfg.embed,), p["final_norm"], cfg.norm_eps) @ p["head"][: cfg.vocab_size].t()
    losses = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none").view(b, s)
    return (losses * batch["mask"]).sum()


def plain_block(w: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor, cfg: llama.Config) -> Tensor:
    b, s, d = x.shape

    def turn(t: Tensor) -> Tensor:
        a, c = t.chunk(2, -1)
        return torch.cat([a * cos - c * sin, c * cos + a * sin], -1)

    h = F.rms_norm(x, (d,), w["norm1"], cfg.norm_eps)
    q, k, v = ((h @ w[n].flatten(1)).view(b, s, -1, cfg.head_dim) for n in ("wq", "wk", "wv"))
    q, k, v = turn(q).transpose(1, 2), turn(k).transpose(1, 2), v.transpose(1, 2)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=cfg.heads != cfg.kv_heads)
    x = x + o.transpose(1, 2).flatten(2) @ w["wo"].flatten(0, 1)
    h = F.rms_norm(x, (d,), w["norm2"], cfg.norm_eps)
    return x + (F.silu(h @ w["w_gate"]) * (h @ w["w_up"])) @ w["w_down"]


def by_autograd(loss: Callable[[Any], Tensor], params: Any) -> Any:
    """Loss and gradient by torch alone; `loss` gives the mean."""
    leaves, treedef = tree.flatten(params)
    active = [p.detach().requires_grad_(True) for p in leaves]
    value = loss(tree.unflatten(treedef, active))
    return value.detach(), tree.unflatten(treedef, torch.autograd.grad(value, active))


def main() -> None:
    args = arguments("costs of the eager gradient", 15)
    rows: list[Row] = []
    for size, (cfg, (b, s)) in SIZES.items():
        if args.only and args.only not in size:
            continue
        torch.manual_seed(0)
        params = llama.init(fmeg.random.key(0), cfg)
        ids = torch.randint(0, cfg.vocab_size, (2, b, s))
        batch = {"tokens": ids[0], "targets": ids[1], "mask": torch.ones(b, s)}

        def loss_fn(p: Any, batch: Any, cfg: Any = cfg) -> Any:
            return llama.loss(p, batch, cfg)

        def mean(p: Any, batch: Any = batch, loss_fn: Any = loss_fn) -> Tensor:
            total, count = loss_fn(p, batch)
            return total * torch.reciprocal(count)

        def plain(p: Any, batch: Any = batch, cfg: Any = cfg) -> Tensor:
            return plain_loss(p, batch, cfg) / batch["mask"].sum()

        grad = fmeg.value_and_grad(loss_fn)
        step = fmeg.jit(grad, mesh=Mesh(), layout=Layout())
        check(grad(params, batch), by_autograd(plain, params))
        fns = {
            "torch.autograd.grad, same function": lambda p=params, f=mean: by_autograd(f, p),
            "fmeg.value_and_grad": lambda p=params, x=batch, f=grad: f(p, x),
            "plain torch, by hand": lambda p=params, f=plain: by_autograd(f, p),
            "fmeg.jit on one device": lambda p=params, x=batch, f=step: f(p, x),
        }
        rows += compare(size, fns, "torch.autograd.grad, same function", args.repeats, fns, warmup=2)
    finish(rows, args)


def check(ours: Any, plain: Any) -> None:
    """Both compute the same gradient, but for float32's rounding."""
    for path, a, b in zip(tree.paths(plain[1]), tree.leaves(ours[1]), tree.leaves(plain[1]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6, msg=lambda m, path=path: f"{path}: {m}")


if __name__ == "__main__":
    main()
