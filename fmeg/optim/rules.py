"""Rules: one value a parameter.

A rule is a function `(path, leaf) -> value` with paths such as "layers.wq", or a tree of values with the parameters'
structure. Masks, labels and matrix specifications are rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fmeg import tree

Rule = Any
Function = Callable[[str, Tensor], Any]


def everywhere(path: str, leaf: Tensor) -> bool:
    """The rule that is True for every parameter.

    >>> everywhere("layers.wq", None)
    True
    """
    return True


def function(rule: Rule, who: str, optional: bool = False) -> Function:
    """A rule as a function `(path, leaf) -> value`; `who` names the caller in errors.

    Where a tree has no value for a parameter the function raises ValueError, or gives None if `optional`.

    >>> function({"w": True}, "adamw")("w", None)
    True
    """
    if callable(rule):
        return rule
    values = dict(zip(tree.paths(rule), tree.leaves(rule), strict=True))

    def value(path: str, leaf: Tensor) -> Any:
        if path not in values and not optional:
            raise ValueError(
                f"{who}: no entry for parameter {path!r}; the tree has {', '.join(values) or 'no leaves'}. "
                "Give a tree with the parameters' structure, or a function (path, leaf) -> value"
            )
        return values.get(path)

    return value


def resolve(rule: Rule, params: Any, who: str) -> Any:
    """The tree of values of a rule, in the structure of `params`, which may be a part of the rule's tree.

    >>> import torch
    >>> resolve(lambda path, leaf: leaf.ndim > 1, {"w": torch.ones(2, 2), "b": torch.ones(2)}, "adamw")
    {'w': True, 'b': False}
    >>> resolve({"w": True, "b": False}, {"w": torch.ones(2, 2), "b": None}, "adamw")
    {'w': True, 'b': None}
    """
    return tree.map_with_path(function(rule, who), params)
