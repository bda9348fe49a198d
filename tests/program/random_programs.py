"""Random programs on 4 x 4 matrices: every step takes values already made and adds one.

`draw` gives a list of steps, `build` the function they describe: (three float matrices, one matrix of integers) -> all
values made, a random linear function of the last of them first. The function is plain torch and fmeg, so that autograd
says what its gradient is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from fmeg import P, einsum, name, ops, random, remat, save_names, scan, shard

N = 4
FLOATS = 3

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "silu": F.silu,
    "gelu": ops.gelu,
    "relu": torch.relu,
    "square": lambda x: x * x,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: F.log_softmax(x, 0),
    "transpose": lambda x: x.t(),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 1),
    "cumsum": lambda x: x.cumsum(0),
    "merge": lambda x: x.reshape(16).view(2, 8).reshape(4, 4),
    "cat": lambda x: torch.cat([x[2:], x[:2]]),
    "split": lambda x: torch.cat(x.split(2, 1)[::-1], 1),
    "chunk, one unused": lambda x: x.chunk(2)[1].repeat(2, 1),
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1]),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 0).values.sum(0) + x,
    "max": lambda x: x.max(1, keepdim=True).values * x,
    "var_mean": lambda x: (lambda v, m: (x - m) * v)(*torch.var_mean(x, 1, keepdim=True)),
    "logsumexp": lambda x: x - x.logsumexp(0),
    "mean": lambda x: x.mean(1)[:, None] + x.sum(0),
    "norm": lambda x: x / (x.norm() + 1),
    "rms_norm": lambda x: ops.rms_norm(x, None),
    "layer_norm": lambda x: F.layer_norm(x, (N,)),
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "tril": lambda x: x.tril(),
    "detached": lambda x: x * x.detach(),
    "rounded": lambda x: x + (x * 3).round().long(),
    "gone": lambda x: torch.zeros_like(x) + 1,
    "written": lambda x: _written(x),
    "dropout": lambda x: ops.dropout(x, 0.5, random.key(3)),
    "shard rows": lambda x: shard(x, P("a", None)),
    "shard columns": lambda x: shard(x, P(None, ("a", "b"))),
    "whole": lambda x: shard(x, P(None, None)),
    "remat": lambda x: remat(lambda y: (y.sin() @ y).tanh())(x),
    "remat dots": lambda x: remat(lambda y: (y.sin() @ y).tanh(), "dots")(x),
    "remat names": lambda x: remat(lambda y: name(y.sin(), "k").cos() * y, save_names("k"))(x),
    "attention": lambda x: ops.attention(*(x.reshape(1, 4, 2, 2).roll(i, 1) for i in range(3))).reshape(4, 4),
    "scan over rows": lambda x: scan(lambda c, r: (c * 0.5 + r, c.sin() * r), x[0], x)[1],
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - 2 * y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / (y * y + 1),
    "matmul": lambda x, y: x @ y / 2,
    "linear": F.linear,
    "einsum": lambda x, y: einsum("a b, c b -> c a", x, y),
    "where": lambda x, y: torch.where(x > y, x, y.exp() * 0.1),
    "outer": lambda x, y: x[:, 0, None] * y[1],
    "swiglu": ops.swiglu,
    "both": lambda x, y: torch.stack([x, y]).sum(0),
    "scan": lambda x, y: scan(lambda c, r: (c @ x * 0.3 + r, None), y, y[:3, None])[0],
    "scan, carries": lambda x, y: _scan(x, y),
    "scan in scan": lambda x, y: scan(lambda c, r: scan(lambda d, s: (d * 0.5 + s * x, d[0]), c, r), y, x[:2])[0],
}
INDEXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, i: x[i[0]],
    "embedding": lambda x, i: ops.embedding(x, i[1]),
    "gather": lambda x, i: x.gather(1, i),
    "cross_entropy": lambda x, i: x * ops.cross_entropy(x, i[2])[:, None],
    "times": lambda x, i: x * i,
    "scan, int carry": lambda x, i: scan(lambda c, r: ((c[0] * 0.5 + c[1] * r, c[1] + 1), None), (x, i[0]), x)[0][0],
}


def _written(x: Tensor) -> Tensor:
    y = x * 1
    y[1] = y[0] * 2
    y[:, 2].add_(x[:, 1])
    return y


def _scan(x: Tensor, y: Tensor) -> Tensor:
    def body(carry: Any, layer: Any, w: Tensor) -> Any:
        a, b = carry
        return (b + layer["r"], (a * w).tanh()), {"u": a.sum(), "v": b * layer["r"], "unused": b}

    (a, b), ys = scan(body, (x, y), {"r": x[:3], "n": torch.arange(3)}, y.sin())
    return a - b + ys["v"].sum(0) * ys["u"].mean()


Step = tuple[str, int, int]


def draw(max_steps: int = 6) -> st.SearchStrategy[list[Step]]:
    """Lists of (operation, index of the first value, index of the second one)."""
    kinds = st.sampled_from([*UNARY, *BINARY, *INDEXED])
    return st.lists(st.tuples(kinds, st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=max_steps)


def build(steps: list[Step]) -> Callable[..., tuple[Tensor, ...]]:
    """The function that the steps describe."""

    def fn(*args: Tensor) -> tuple[Tensor, ...]:
        values, ints = list(args[:FLOATS]), args[FLOATS]
        for op, i, j in steps:
            x, y = values[-1 - i % len(values)], values[-1 - j % len(values)]
            if op in UNARY:
                values.append(UNARY[op](x))
            elif op in BINARY:
                values.append(BINARY[op](x, y))
            else:
                values.append(INDEXED[op](x, ints))
        weights = torch.arange(16, dtype=torch.float64).reshape(4, 4).cos()
        loss = (values[-1] * weights).sum() + (values[-2] * 0.1).sum()
        return loss, *values[FLOATS:]

    return fn


def inputs() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    floats = [torch.randn(N, N, generator=g, dtype=torch.float64) * 0.7 for _ in range(FLOATS)]
    return [*floats, torch.randint(0, N, (N, N), generator=g)]


def with_gradient(fn: Callable[..., Any], args: list[Tensor], wrt: list[int]) -> list[Tensor]:
    """The values of `fn`, and the gradient of the first by the arguments `wrt`; zeros where there is no influence."""
    leaves = [a.clone().requires_grad_(i in wrt) for i, a in enumerate(args)]
    out = fn(*leaves)
    out = list(out) if isinstance(out, tuple) else [out]
    wanted = [leaves[i] for i in wrt]
    if out[0].requires_grad:
        grads = torch.autograd.grad(out[0], wanted, materialize_grads=True)
    else:
        grads = tuple(map(torch.zeros_like, wanted))
    return [*(o.detach() for o in out), *grads]
