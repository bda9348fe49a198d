"""The optimizer contract, and how optimizers are put together.

An optimizer is a pair of pure functions, as in optax:

    init(params) -> state
    update(grads, state, params=None) -> (updates, state)

A state is a NamedTuple. Its fields that hold one tensor a parameter have the parameters' own tree: the path of such a
tensor ends in the path of its parameter (`mu.layers.wq`), and its rank is the parameter's. Structure, shapes and dtypes
of a state never change. Steps are counted in 0-d int64 tensors; what is computed from them is 0-d float64, which never
promotes a parameter. A random key is an int64 tensor [2] in a field `key`. Arithmetic on bfloat16 and float16 leaves is
done in float32, so updates are float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from fmeg import tree

Schedule = Callable[[Float[Tensor, ""]], Float[Tensor, ""]]
Rate = float | Schedule


class Optimizer(NamedTuple):
    """Two pure functions: `init(params) -> state` and `update(grads, state, params=None) -> (updates, state)`.

    >>> def update(grads, state, params=None):
    ...     return tree.map(lambda g: g / 2, grads), state
    >>> halve = Optimizer(lambda params: (), update)
    >>> halve.update({"w": torch.tensor([2.0])}, halve.init(None))
    ({'w': tensor([1.])}, ())
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


def apply_updates(params: Any, updates: Any) -> Any:
    """`p + u` on every leaf, added in the wider dtype of the two and returned in the parameter's.

    >>> apply_updates({"w": torch.tensor([1.0])}, {"w": torch.tensor([-0.25])})
    {'w': tensor([0.7500])}
    """
    return tree.map(lambda p, u: (p + u).to(p.dtype), params, updates)


def identity() -> Optimizer:
    """Updates are the gradients, unchanged; the state is empty.

    >>> identity().update({"w": torch.tensor([1.0])}, ())
    ({'w': tensor([1.])}, ())
    """
    return Optimizer(lambda params: (), lambda grads, state, params=None: (grads, state))


def freeze() -> Optimizer:
    """Updates are zero; the state is empty. For the parameters that `partition` should leave alone.

    >>> freeze().update({"w": torch.tensor([1.0])}, ())
    ({'w': tensor([0.])}, ())
    """
    return Optimizer(lambda params: (), lambda grads, state, params=None: (tree.map(torch.zeros_like, grads), state))


def chain(*optimizers: Optimizer) -> Optimizer:
    """Feed each optimizer's updates to the next one as its gradients; the state is the tuple of their states.

    >>> from fmeg.optim import clip_by_global_norm, sgd
    >>> opt = chain(clip_by_global_norm(1.0), sgd(0.5))
    >>> params = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64)}
    >>> updates, state = opt.update(params, opt.init(params))
    >>> updates["w"]
    tensor([-0.3000, -0.4000], dtype=torch.float64)
    """

    def init(params: Any) -> Any:
        return tuple(o.init(params) for o in optimizers)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if len(state) != len(optimizers):
            raise ValueError(
                f"chain: `state` has {len(state)} entries for {len(optimizers)} optimizers; make it with its own init"
            )
        states = []
        for o, s in zip(optimizers, state, strict=True):
            grads, s = o.update(grads, s, params)
            states.append(s)
        return grads, tuple(states)

    return Optimizer(init, update)


def counter(params: Any) -> Int[Tensor, ""]:
    """A step counter at zero, on the parameters' device.

    >>> counter({"w": torch.ones(3)})
    tensor(0)
    """
    leaves = tree.leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)


def zeros_like(params: Any, dtype: torch.dtype | None = None) -> Any:
    """A tree of zeros of the parameters' shapes, in `dtype` or the parameters' own.

    >>> zeros_like({"w": torch.ones(2, dtype=torch.bfloat16)}, torch.float32)
    {'w': tensor([0., 0.])}
    """
    return tree.map(lambda p: torch.zeros_like(p, dtype=dtype), params)


def widen(x: Float[Tensor, "*dims"]) -> Float[Tensor, "*dims"]:
    """`x` in the dtype that optimizers compute in: float32 for anything narrower, else its own.

    >>> widen(torch.ones(1, dtype=torch.bfloat16)).dtype, widen(torch.ones(1, dtype=torch.float64)).dtype
    (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def cast_like(values: Any, like: Any) -> Any:
    """Each leaf of `values` in the dtype of the same leaf of `like`.

    >>> cast_like({"w": torch.ones(1)}, {"w": torch.ones(1, dtype=torch.float64)})
    {'w': tensor([1.], dtype=torch.float64)}
    """
    return tree.map(lambda x, y: x.to(y.dtype), values, like)


def at(rate: Rate, count: Int[Tensor, ""]) -> Any:
    """The value of a rate at a step: a float is itself, a schedule is called with the count in float64.

    >>> at(0.5, torch.tensor(3)), at(lambda count: count * 2, torch.tensor(3))
    (0.5, tensor(6., dtype=torch.float64))
    """
    return rate(count.to(torch.float64)) if callable(rate) else rate


def add_decay(direction: Any, params: Any, weight_decay: Any, mask: Any, who: str) -> Any:
    """`direction + weight_decay p` where `mask`, a tree of booleans, is True.

    weight_decay is a float or a 0-d tensor; who names the optimizer in errors.

    >>> w = {"w": torch.tensor([1.0])}
    >>> add_decay(w, w, 0.25, {"w": True}, "adamw"), add_decay(w, w, 0.25, {"w": False}, "adamw")
    ({'w': tensor([1.2500])}, {'w': tensor([1.])})
    """
    if isinstance(weight_decay, (int, float)) and weight_decay == 0:
        return direction
    if params is None:
        raise ValueError(f"{who}: `params` is None, but weight decay needs it; call update(grads, state, params)")
    return tree.map(lambda d, p, m: (d + weight_decay * widen(p)).to(d.dtype) if m else d, direction, params, mask)


def scale(values: Any, factor: Any) -> Any:
    """Each leaf times a float or 0-d tensor, in the leaf's dtype.

    >>> scale({"w": torch.tensor([1.0])}, -0.5)
    {'w': tensor([-0.5000])}
    """
    return tree.map(lambda x: (factor * x).to(x.dtype), values)
