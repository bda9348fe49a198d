"""Pytrees: nested dicts, lists, tuples, named tuples and registered dataclasses with tensors, or anything, as leaves.

A thin layer over `optree`, in its own namespace. Dict leaves come in sorted key order, `None` is a node without leaves,
and a leaf's path is a string such as `layers.wq` or `opt.0.mu`. Import it as a module: `from fmeg import tree`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, overload

import optree
from optree import PyTreeSpec

NAMESPACE = "fmeg"

T = TypeVar("T")
IsLeaf = Callable[[Any], bool] | None


def flatten(tree: Any, is_leaf: IsLeaf = None) -> tuple[list[Any], PyTreeSpec]:
    """Leaves of a tree and its structure; `unflatten` is the inverse.

    >>> flatten({"b": 1, "a": (2, None)})
    ([2, 1], PyTreeSpec({'a': (*, None), 'b': *}))
    """
    return optree.tree_flatten(tree, is_leaf, namespace=NAMESPACE)


def unflatten(treedef: PyTreeSpec, leaves: Iterable[Any]) -> Any:
    """The tree of a structure with these leaves. ValueError if their number differs.

    >>> leaves, treedef = flatten({"b": 1, "a": 2})
    >>> unflatten(treedef, [x * 10 for x in leaves])
    {'b': 10, 'a': 20}
    """
    return treedef.unflatten(leaves)


def leaves(tree: Any, is_leaf: IsLeaf = None) -> list[Any]:
    """The leaves of a tree, in order.

    >>> leaves([1, {"b": 2, "a": 3}, None])
    [1, 3, 2]
    """
    return optree.tree_leaves(tree, is_leaf, namespace=NAMESPACE)


def structure(tree: Any, is_leaf: IsLeaf = None) -> PyTreeSpec:
    """The structure of a tree: hashable, comparable, without leaves.

    >>> structure((1, 2)) == structure((3, 4)), structure((1, 2)) == structure([1, 2])
    (True, False)
    """
    return optree.tree_structure(tree, is_leaf, namespace=NAMESPACE)


def paths(tree: Any, is_leaf: IsLeaf = None) -> list[str]:
    """The path of each leaf, in order: keys, fields and indices joined by dots; a bare leaf has the path "".

    >>> paths({"layers": {"wq": 1}, "opt": [2, (3,)]})
    ['layers.wq', 'opt.0', 'opt.1.0']
    """
    accessors = optree.tree_accessors(tree, is_leaf, namespace=NAMESPACE)
    return [".".join(str(getattr(entry, "field", entry.entry)) for entry in a) for a in accessors]


def map(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """Apply `fn(leaf, *others)` to each leaf; the result has the structure of `tree`.

    Each of `rest` must have the structure of `tree`, but may go deeper: where `tree` has a leaf, `fn` gets the subtree.
    ValueError otherwise, which names the argument and the first path that differs.

    >>> map(lambda x, y: x + y, {"a": 1, "b": (2, None)}, {"a": 10, "b": (20, None)})
    {'a': 11, 'b': (22, None)}
    """
    first, treedef = flatten(tree, is_leaf)
    others = [_flatten_up_to(treedef, tree, r, i, is_leaf) for i, r in enumerate(rest)]
    return treedef.unflatten([fn(*xs) for xs in zip(first, *others, strict=True)])


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any, is_leaf: IsLeaf = None) -> Any:
    """As `map`, with `fn(path, leaf, *others)`.

    >>> map_with_path(lambda path, x: f"{path}={x}", {"a": 1, "b": [2]})
    {'a': 'a=1', 'b': ['b.0=2']}
    """
    names = iter(paths(tree, is_leaf))
    return map(lambda *xs: fn(next(names), *xs), tree, *rest, is_leaf=is_leaf)


def sum(values: Any) -> Any:
    """x1 + x2 + … + xn over the leaves of a tree (or over an iterator), from the left.

    Unlike Python's `sum` it adds no leading 0, so the sum is linear in its terms and may stay pending on a mesh.
    ValueError when there is no term.

    >>> sum({"a": 1, "b": [2, 3]})
    6
    """
    terms = leaves(list(values) if isinstance(values, Iterator) else values)
    if not terms:
        raise ValueError("tree.sum: expected at least one leaf, got none; a sum of nothing has no shape")
    return functools.reduce(operator.add, terms)


@overload
def register_dataclass(cls: type[T]) -> type[T]: ...
@overload
def register_dataclass(*, static: Iterable[str] = ()) -> Callable[[type[T]], type[T]]: ...
def register_dataclass(cls: type | None = None, *, static: Iterable[str] = ()) -> Any:
    """Make a dataclass a pytree node; use it above `@dataclass`.

    Fields are children, in order, except those named in `static`: they belong to the structure and must be hashable.
    Rebuilding a node sets its fields and runs neither `__init__` nor `__post_init__`, so any leaf is allowed.

    >>> @register_dataclass(static=("rate",))
    ... @dataclasses.dataclass(frozen=True)
    ... class State:
    ...     step: int
    ...     rate: float
    >>> map(lambda x: x + 1, State(step=1, rate=0.5))
    State(step=2, rate=0.5)
    """
    if cls is None:
        return functools.partial(_register, static=tuple(static))
    return _register(cls, ())


def _register(cls: type[T], static: tuple[str, ...]) -> type[T]:
    if not dataclasses.is_dataclass(cls):
        raise TypeError(
            f"register_dataclass: expected a dataclass, got {cls!r}; put @dataclass below @register_dataclass"
        )
    names = [f.name for f in dataclasses.fields(cls)]
    unknown = [s for s in static if s not in names]
    if unknown:
        raise ValueError(
            f"register_dataclass: static={unknown} are no fields of {cls.__name__}; its fields are {names}"
        )
    children = tuple(n for n in names if n not in static)

    def to_children(node: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        return tuple(getattr(node, n) for n in children), tuple(getattr(node, n) for n in static), children

    def from_children(meta: tuple[Any, ...], values: Iterable[Any]) -> Any:
        node = object.__new__(cls)
        for name, value in zip(children + static, (*values, *meta), strict=True):
            object.__setattr__(node, name, value)
        return node

    register: Any = optree.register_pytree_node
    register(cls, to_children, from_children, namespace=NAMESPACE)
    return cls


def _flatten_up_to(treedef: PyTreeSpec, tree: Any, other: Any, index: int, is_leaf: IsLeaf) -> list[Any]:
    try:
        return treedef.flatten_up_to(other)
    except ValueError as error:
        want, got = paths(tree, is_leaf), paths(other, is_leaf)
        missing = [p for p in want if not any(g == p or g.startswith(f"{p}.") for g in got)]
        extra = [g for g in got if not any(g == p or g.startswith(f"{p}.") for p in want)]
        where = (
            f"it lacks {missing[0]!r}" if missing else f"it has {extra[0]!r} too" if extra else "its containers differ"
        )
        raise ValueError(
            f"tree.map: expected argument {index + 2} to have the structure of the tree, {treedef}; {where}. "
            "Compare tree.paths of the two"
        ) from error
