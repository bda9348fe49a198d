"""A whole training step on one device: loss, gradient, clipping, AdamW; time, and the most memory held with the state.

    python -m benchmarks.step [--repeats 9] [--json out.json]

Against plain torch: the same Llama by hand, `clip_grad_norm_` and `torch.optim.AdamW`, which write in place. The peak
is that of making a state and taking two steps: parameters, moments, gradients and activations all count.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fmeg
from benchmarks.eager import plain_loss
from benchmarks.measure import Row, arguments, compare, finish
from benchmarks.trace import make_step
from fmeg import Array, Mesh, TrainState, optim, tree
from fmeg.models import llama

SIZES = {
    "activations": (
        llama.Config(vocab_size=1024, embed=256, layers=4, heads=8, kv_heads=4, head_dim=32, ff=704),
        (4, 256),
    ),
    "parameters": (
        llama.Config(vocab_size=1024, embed=256, layers=8, heads=8, kv_heads=8, head_dim=32, ff=704),
        (1, 32),
    ),
}


class Torch:
    """The plain step: parameters and optimizer in place."""

    def __init__(self, params: Any, batch: Any, cfg: llama.Config) -> None:
        leaves, treedef = tree.flatten(params)
        self.leaves = [p.clone().requires_grad_(True) for p in leaves]
        self.params, self.batch, self.cfg = tree.unflatten(treedef, self.leaves), batch, cfg
        self.optimizer = torch.optim.AdamW(self.leaves, lr=3e-4, weight_decay=0.0)

    def step(self) -> None:
        loss = plain_loss(self.params, self.batch, self.cfg) / self.batch["mask"].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.leaves, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Functional:
    """The step as a function of the state."""

    def __init__(self, run: Callable[..., Any], state: Any, batch: Any) -> None:
        self.run, self.state, self.batch = run, state, batch

    def step(self) -> None:
        self.state, _ = self.run(self.state, self.batch)


def copied(state: Any, placed: bool) -> Any:
    """The state in memory of its own; placed: as Arrays on one device."""
    one = tree.map(lambda x: x.clone(), state)
    return tree.map(lambda x: Array.from_global(x, Mesh()), one) if placed else one


def main() -> None:
    args = arguments("costs of a training step", 9)
    rows: list[Row] = []
    for size, (cfg, (b, s)) in SIZES.items():
        if args.only and args.only not in size:
            continue
        optimizer = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(3e-4))
        axes = llama.logical_axes(cfg)
        torch.manual_seed(0)
        ids = torch.randint(0, cfg.vocab_size, (2, b, s))
        batch = {"tokens": ids[0], "targets": ids[1], "mask": torch.ones(b, s)}
        state = TrainState.create(llama.init(fmeg.random.key(0), cfg), optimizer, axes)
        step = make_step(cfg, optimizer)
        jitted, donating = fmeg.jit(step, mesh=Mesh()), fmeg.jit(step, mesh=Mesh(), donate=("state",))

        makers: dict[str, Callable[[], Any]] = {
            "plain torch, in place": lambda p=state.params, x=batch, c=cfg: Torch(p, x, c),
            "fmeg eager": lambda st=state, f=step, x=batch: Functional(f, copied(st, False), x),
            "fmeg.jit": lambda st=state, f=jitted, x=batch: Functional(f, copied(st, True), x),
            "fmeg.jit, state donated": lambda st=state, f=donating, x=batch: Functional(f, copied(st, True), x),
        }
        runners = {name: make() for name, make in makers.items()}

        def two_steps(make: Callable[[], Any]) -> None:
            runner = make()
            runner.step()
            runner.step()

        memory = {name: lambda make=make, two_steps=two_steps: two_steps(make) for name, make in makers.items()}
        fns = {name: r.step for name, r in runners.items()}
        rows += compare(size, fns, "plain torch, in place", args.repeats, memory, warmup=2)
    finish(rows, args)


if __name__ == "__main__":
    main()
