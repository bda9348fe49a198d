"""Masks and partitions: who is moved by whom, and whose state has what."""

import pytest
import torch

from fmeg import tree
from fmeg.optim import adamw, decay_by_axes, decay_matrices, freeze, lion, masked, partition, sgd
from fmeg.optim.rules import function, resolve

AXES = {
    "layers": {"w": "layers embed ff", "norm": "layers embed"},
    "embed": "vocab embed",
    "bias": "ff",
    "head": "embed vocab",
    "temperature": "",
}


def test_decay_rules_agree_on_the_model(params):
    by_path = tree.map_with_path(decay_matrices, params)
    assert by_path == decay_by_axes(AXES)
    assert [p for p, m in zip(tree.paths(by_path), tree.leaves(by_path), strict=True) if m] == [
        "embed",
        "head",
        "layers.w",
    ]


def test_decay_by_axes_knows_stacked_biases_and_experts():
    axes = {"bq": "layers heads head_dim", "w1": "layers experts embed ff", "b1": "layers experts ff"}
    assert decay_by_axes(axes) == {"bq": False, "w1": True, "b1": False}


def test_masked_state_holds_only_the_chosen(params):
    state = masked(adamw(0.1), decay_matrices).init(params)
    assert tree.paths(state) == ["step"] + [f"{m}.{p}" for m in ("mu", "nu") for p in ("embed", "head", "layers.w")]


def test_masked_equals_the_inner_optimizer_there_and_passes_the_rest(params):
    opt = masked(adamw(0.1), decay_matrices)
    updates, _ = opt.update(params, opt.init(params), params)
    inner = adamw(0.1)
    want, _ = inner.update(params, inner.init(params), params)
    for path, u, w, g in zip(*map(tree.leaves, (tree.paths(params), updates, want, params)), strict=True):
        assert torch.equal(u, w if path in ("embed", "head", "layers.w") else g), path


@pytest.mark.parametrize("labels", ["function", "tree"])
def test_partition_runs_each_part_as_if_alone(params, train, assert_same, labels):
    rule = lambda path, leaf: "decay" if decay_matrices(path, leaf) else "still" if path == "bias" else "plain"
    opt = partition(
        {"decay": adamw(0.1, weight_decay=0.2), "plain": lion(0.05), "still": freeze()},
        rule if labels == "function" else tree.map_with_path(rule, params),
    )
    got = train(opt, params)
    alone = {"decay": train(adamw(0.1, weight_decay=0.2), params), "plain": train(lion(0.05), params)}
    alone["still"] = [params] * len(got)
    names = tree.map_with_path(rule, params)
    assert {"decay", "plain", "still"} == set(tree.leaves(names))
    want = [
        tree.map(lambda label, *parts: dict(zip(alone, parts, strict=True))[label], names, *step)
        for step in zip(*alone.values(), strict=True)
    ]
    # The noise of a leaf depends on its place in the tree alone, so the runs see the same gradients.
    assert_same(got, want, tol=0)


def test_partition_inside_has_rules_of_the_whole_tree(params):
    """A mask given as the whole model's tree still fits the part that an inner optimizer sees."""
    mask = tree.map_with_path(decay_matrices, params)
    whole = adamw(0.1, weight_decay=0.5, mask=mask)
    parts = partition({"a": whole, "b": whole}, lambda path, leaf: "a" if path < "c" else "b")
    got, _ = parts.update(params, parts.init(params), params)
    want, _ = whole.update(params, whole.init(params), params)
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(got), tree.leaves(want), strict=True))


def test_unknown_labels_and_missing_entries_are_named(params):
    with pytest.raises(ValueError, match="parameter 'bias' is labelled 'sdg'; the optimizers are sgd"):
        partition({"sgd": sgd(0.1)}, lambda path, leaf: "sdg").init(params)
    with pytest.raises(ValueError, match="adamw: no entry for parameter 'b'; the tree has a, c"):
        resolve({"a": True, "c": True}, {"a": torch.ones(1), "b": torch.ones(1)}, "adamw")


def test_a_flat_dict_of_paths_is_a_rule_too():
    assert function({"layers.wq": 1}, "muon", optional=True)("layers.wq", torch.ones(1)) == 1
