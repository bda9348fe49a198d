"""Different parameters, different treatment: masks, partitions, and which weights decay.

All take a rule (`fmeg.optim.rules`). Parameters that an inner optimizer does not get are None in the trees it sees:
nodes without leaves, so that its state has no tensor for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fmeg import tree
from fmeg.optim.base import Optimizer
from fmeg.optim.matrix import BATCH, JOIN, in_stack, matrices, parse_matrix
from fmeg.optim.rules import Rule, resolve


def masked(inner: Optimizer, mask: Rule) -> Optimizer:
    """Apply `inner` where `mask` is True and pass the gradients through elsewhere; the state is `inner`'s.

    Reference: `optax.masked`.

    >>> import torch
    >>> from fmeg.optim import sgd
    >>> grads = {"w": torch.ones(2, 2), "b": torch.ones(1)}
    >>> opt = masked(sgd(0.5), lambda path, leaf: path == "b")
    >>> updates, _ = opt.update(grads, opt.init(grads))
    >>> updates["b"], updates["w"].sum()
    (tensor([-0.5000]), tensor(4.))
    """

    def keep(values: Any, mask_tree: Any) -> Any:
        return None if values is None else tree.map(lambda x, m: x if m else None, values, mask_tree)

    def init(params: Any) -> Any:
        return inner.init(keep(params, resolve(mask, params, "masked")))

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        chosen = resolve(mask, grads, "masked")
        updates, state = inner.update(keep(grads, chosen), state, keep(params, chosen))
        return tree.map(lambda g, u, m: u if m else g, grads, updates, chosen), state

    return Optimizer(init, update)


def partition(optimizers: Mapping[str, Optimizer], labels: Rule) -> Optimizer:
    """Give each parameter to the optimizer that its label names; the state is a dict of their states.

    Reference: `optax.partition` (formerly `multi_transform`).

    >>> import torch
    >>> from fmeg.optim import freeze, sgd
    >>> opt = partition({"train": sgd(0.5), "rest": freeze()}, lambda path, leaf: "train" if path == "b" else "rest")
    >>> grads = {"w": torch.ones(1), "b": torch.ones(1)}
    >>> opt.update(grads, opt.init(grads))[0]
    {'w': tensor([0.]), 'b': tensor([-0.5000])}
    """

    def parts(params: Any) -> dict[str, Optimizer]:
        names = resolve(labels, params, "partition")
        for path, label in zip(tree.paths(names), tree.leaves(names), strict=True):
            if label not in optimizers:
                raise ValueError(
                    f"partition: parameter {path!r} is labelled {label!r}; the optimizers are {', '.join(optimizers)}"
                )
        return {k: masked(o, tree.map(lambda label, k=k: label == k, names)) for k, o in optimizers.items()}

    def init(params: Any) -> dict[str, Any]:
        return {k: o.init(params) for k, o in parts(params).items()}

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        states = {}
        for k, o in parts(grads).items():
            grads, states[k] = o.update(grads, state[k], params)
        return grads, states

    return Optimizer(init, update)


def decay_matrices(path: str, leaf: Tensor) -> bool:
    """Weight decay rule by path: True for leaves with two dimensions or more, that of a stack of layers not counted.

    Stacks are what lies below a name that ends in `layers`.

    >>> import torch
    >>> decay_matrices("layers.w1", torch.ones(2, 3, 4)), decay_matrices("layers.norm", torch.ones(2, 3))
    (True, False)
    """
    return leaf.ndim - in_stack(path) >= 2


def decay_by_axes(axes: Any, batch: tuple[str, ...] = BATCH, join: tuple[str, ...] = JOIN) -> Any:
    """Weight decay mask from logical axes: True for matrices, False for vectors (norms and biases, stacked or not).

    >>> decay_by_axes({"wq": "layers embed heads head_dim", "bq": "layers heads head_dim", "norm": "layers embed"})
    {'wq': True, 'bq': False, 'norm': False}
    """
    specs = matrices(axes, batch, join, skip=())
    return tree.map(lambda spec: parse_matrix(spec).is_matrix, specs)
