from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg import tree

trees = st.recursive(
    st.integers() | st.none(),
    lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text("abc", min_size=1), t, max_size=3) | st.tuples(t, t),
    max_leaves=12,
)


class Moments(NamedTuple):
    mu: object
    nu: object


@tree.register_dataclass(static=("name",))
@dataclasses.dataclass(frozen=True)
class State:
    params: object
    name: str
    step: object = 0

    def __post_init__(self) -> None:
        assert isinstance(self.name, str)


@given(trees)
def test_flatten_and_unflatten_are_inverse(t):
    leaves, treedef = tree.flatten(t)
    assert tree.unflatten(treedef, leaves) == t
    assert leaves == tree.leaves(t)
    assert treedef == tree.structure(t)
    assert len(tree.paths(t)) == len(leaves) == len(set(tree.paths(t)))
    assert None not in leaves


@given(trees)
def test_map_is_leafwise_and_keeps_the_structure(t):
    doubled = tree.map(lambda x, y: x + y, t, t)
    assert tree.leaves(doubled) == [2 * x for x in tree.leaves(t)]
    assert tree.structure(doubled) == tree.structure(t)


def test_paths_name_keys_fields_and_indices():
    t = {
        "b": [1, (2,)],
        "a": Moments({"wq": 3}, 4),
        "s": State({"w": 5}, "x", 6),
        "o": OrderedDict(z=7, y=8),
        "n": None,
    }
    assert tree.paths(t) == ["a.mu.wq", "a.nu", "b.0", "b.1.0", "o.z", "o.y", "s.params.w", "s.step"]
    assert tree.leaves(t) == [3, 4, 1, 2, 7, 8, 5, 6]
    assert tree.paths(3) == [""]
    assert tree.map_with_path(lambda p, x, y: (p, x, y), {"a": [1]}, {"a": [2]}) == {"a": [("a.0", 1, 2)]}


def test_is_leaf_stops_at_a_node():
    t = {"a": (1, 2), "b": ((3, 4), 5)}
    pair = lambda x: isinstance(x, tuple) and all(isinstance(y, int) for y in x)
    assert tree.map(len, {"a": t["a"]}, is_leaf=pair) == {"a": 2}
    assert tree.leaves(t, is_leaf=pair) == [(1, 2), (3, 4), 5]
    assert tree.paths(t, is_leaf=pair) == ["a", "b.0", "b.1"]


def test_map_passes_deeper_subtrees_whole():
    assert tree.map(lambda x, y: (x, y), {"a": 1}, {"a": {"b": 2}}) == {"a": (1, {"b": 2})}


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": 1}, r"argument 2 .*lacks 'b\.0'"),
        ({"a": 1, "b": [2], "c": 3}, r"argument 2 .*has 'c' too"),
        ({"a": 1, "b": (2,)}, r"argument 2 .*containers differ"),
    ],
)
def test_map_says_what_differs(other, message):
    with pytest.raises(ValueError, match=message):
        tree.map(lambda x, y: x, {"a": 1, "b": [2]}, other)


def test_an_error_in_fn_is_not_hidden():
    def fn(x, y):
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        tree.map(fn, [1], [2])


def test_dataclass_children_and_static_fields():
    s = State({"w": torch.ones(2)}, "net", torch.tensor(3))
    t = tree.map(lambda x: x + 1, s)
    assert isinstance(t, State) and t.name == "net" and t.step == 4
    assert torch.equal(t.params["w"], torch.full((2,), 2.0))
    assert tree.structure(s) != tree.structure(dataclasses.replace(s, name="other"))
    assert hash(tree.structure(s)) == hash(tree.structure(t))
    assert tree.unflatten(tree.structure(s), [object(), None]).step is None


def test_register_dataclass_errors():
    with pytest.raises(TypeError, match="expected a dataclass"):
        tree.register_dataclass(type("Plain", (), {}))
    with pytest.raises(ValueError, match=r"static=\['nam'\] are no fields of Bad; its fields are \['name'\]"):
        tree.register_dataclass(static=("nam",))(dataclasses.make_dataclass("Bad", ["name"]))


def test_sum_has_no_leading_zero():
    class Term:
        def __init__(self, text):
            self.text = text

        def __add__(self, other):
            return Term(f"({self.text}+{other.text})")

        def __radd__(self, other):
            raise AssertionError("a leading 0 was added")

    assert tree.sum([Term("a"), Term("b"), Term("c")]).text == "((a+b)+c)"
    assert tree.sum({"y": 1, "x": (2, None)}) == 3
    assert tree.sum(x * x for x in (1, 2, 3)) == 14
    with pytest.raises(ValueError, match="at least one leaf"):
        tree.sum([])
