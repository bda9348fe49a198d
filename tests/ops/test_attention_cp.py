"""Attention on several ranks, every kind, against one device: placements of batch, heads and both sequences."""

from __future__ import annotations

import pytest
import torch

from fmeg.ops.attention import attention_bwd_p, attention_p
from fmeg.program.errors import ShardingError
from tests.ops.checks import close, rand
from tests.ops.ranks import spmd

MESH = {"x": 2, "y": 2}
S = 8
SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1, 1, 2]])
MASKS = {
    "causal": {"causal": True, "window": None},
    "full": {"causal": False, "window": None},
    "window1": {"causal": True, "window": 1},
    "window2": {"causal": True, "window": 2},
    "window5": {"causal": True, "window": 5},
    "segments": {"causal": True, "window": None, "segments": SEGMENTS},
    "segments_window": {"causal": True, "window": 3, "segments": SEGMENTS},
    "segments_disjoint": {"causal": False, "window": None, "segments": SEGMENTS, "kv_segments": SEGMENTS + 1},
}
KINDS = ["all_gather", "ring"]


def _case(mask, h=4, k=4, s=S, t=S, e=3, f=2):
    options = {**MASKS[mask], "scale": 0.7}
    q, kk, v = rand(2, s, h, e), rand(2, t, k, e, seed=1), rand(2, t, k, f, seed=2)
    seg = options.pop("segments", None)
    kv = options.pop("kv_segments", seg)
    masks = () if seg is None else (seg[:, -s:], kv[:, -t:])
    return (q, kk, v), masks, options


def _check(place, mask="causal", kind="all_gather", mesh=None, **sizes):
    qkv, masks, options = _case(mask, **sizes)
    layout = {"attention": kind}
    o, lse = attention_p(*qkv, *masks, **options)
    (o_spmd, lse_spmd), fwd = spmd(attention_p, (*qkv, *masks), options, place, mesh or MESH, layout)
    close(o_spmd, o)
    close(lse_spmd, lse)
    do = rand(*o.shape, seed=3)
    args = (*qkv, o, lse, do, *masks)
    grads, bwd = spmd(attention_bwd_p, args, options, place, mesh or MESH, layout)
    for g, e in zip(grads, attention_bwd_p(*args, **options), strict=True):
        close(g, e)
    return fwd, bwd


@pytest.mark.parametrize(
    "place",
    [
        {"b": ("x",)},
        {"h": ("x",), "k": ("x",)},
        {"b": ("y",), "h": ("x",), "k": ("x",)},
        {"s": ("x",)},
        {"s": ("x",), "b": ("y",)},
        {"h": ("x", "y"), "k": ("x", "y")},
    ],
)
@pytest.mark.parametrize("mask", ["causal", "segments_window", "full"])
def test_without_context_parallelism_nothing_moves(place, mask):
    fwd, bwd = _check(place, mask)
    assert fwd == bwd == {}


@pytest.mark.parametrize("place", [{"h": ("x",)}, {"h": ("x", "y")}, {"h": ("x", "y"), "k": ("x",)}])
@pytest.mark.parametrize(("h", "k"), [(4, 2), (8, 2), (4, 4), (12, 6)])
def test_kv_heads_replicated_or_on_a_prefix_of_the_axes(place, h, k):
    """12 heads over 4 ranks in groups of 2: a rank's 3 heads begin in the middle of a group."""
    fwd, bwd = _check(place, h=h, k=k)
    assert fwd == bwd == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask", MASKS)
def test_context_parallel(kind, mask):
    _check({"s": ("x",), "t": ("x",)}, mask, kind)
    _check({"s": ("x", "y"), "t": ("x", "y")}, mask, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_context_parallel_with_heads_and_batch(kind):
    _check({"s": ("x",), "t": ("x",), "h": ("y",), "k": ("y",)}, "segments", kind, h=8, k=4)
    _check({"s": ("y",), "t": ("y",), "b": ("x",)}, "window2", kind, h=4, k=2)
    _check({"s": ("x",), "t": ("x",), "h": ("y",)}, "causal", kind, h=8, k=4)


@pytest.mark.parametrize("kind", ["all_gather", "ring"])
@pytest.mark.parametrize("mask", ["causal", "window2", "segments"])
def test_fewer_queries_than_keys(kind, mask):
    _check({"s": ("x", "y"), "t": ("x", "y")}, mask, kind, s=4, t=8)


@pytest.mark.parametrize("mask", MASKS)
def test_only_keys_sharded(mask):
    fwd, bwd = _check({"t": ("x", "y")}, mask, s=3 if mask != "segments_disjoint" else 8)
    assert fwd == {"all_reduce": 2} and bwd == {"all_reduce": 1}


def test_collectives_of_each_kind():
    place = {"s": ("x", "y"), "t": ("x", "y")}
    assert _check(place, kind="all_gather") == ({"all_gather": 2}, {"all_gather": 2, "reduce_scatter": 2})
    # keys and values three hops; in the backward pass with their gradients, which then go home
    assert _check(place, kind="ring") == ({"ppermute": 6}, {"ppermute": 6 + 6 + 2})
    # a window of 2 needs one predecessor only
    assert _check(place, "window2", "ring")[0] == {"ppermute": 2}
    assert _check(place, "window1", "ring") == ({}, {})


@pytest.mark.parametrize(
    ("place", "kind", "sizes", "message"),
    [
        ({"s": ("x",), "t": ("y",)}, "ring", {}, "must have the same axes, or one of them none"),
        ({"k": ("x",)}, "ring", {}, r"must be a prefix .* kv_heads=\(\)"),
        ({"h": ("x",), "k": ("y",)}, "ring", {}, "split the mesh axis"),
        ({"h": ("x",), "t": ("x",)}, "ring", {}, "cannot shard both the heads and the keys' sequence"),
    ],
)
def test_errors(place, kind, sizes, message):
    with pytest.raises(ShardingError, match=message):
        _check(place, kind=kind, **sizes)
