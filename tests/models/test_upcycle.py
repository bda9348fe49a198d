"""An upcycled model computes what the dense one does, and trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, ops, random, tree
from fmeg.models import llama, moe, presets, upcycle

F64 = torch.float64


def _dense(**changes):
    cfg = presets.get("tiny", dtype=F64, **changes)
    params = llama.init(random.key(0), cfg)
    noise = lambda path, p: p + 0.1 * random.normal(random.fold_in(random.key(1), path), p.shape, dtype=F64)
    return cfg, tree.map_with_path(noise, params)


@pytest.mark.parametrize(("experts", "top_k", "g"), [(4, 1, 1), (8, 2, 1), (8, 2, 2), (8, 4, 2), (16, 8, 8), (4, 4, 4)])
@pytest.mark.parametrize("traits", [{}, {"tied": True, "qkv_bias": True}, {"qk_norm": True, "window": 3}])
def test_computes_the_same(experts, top_k, g, traits):
    dense, params = _dense(**traits)
    sparse = upcycle.config(dense, experts, top_k, g)
    got = upcycle.upcycle(params, dense, sparse, random.key(2))
    tokens = torch.randint(257, (2, 11))
    torch.testing.assert_close(
        moe.apply(got, tokens, sparse), llama.apply(params, tokens, dense), rtol=1e-10, atol=1e-12
    )
    axes = moe.logical_axes(sparse)
    assert tree.paths(axes) == tree.paths(got)
    for path, a, p in zip(tree.paths(axes), tree.leaves(axes), tree.leaves(got), strict=True):
        assert tuple(sparse.sizes[n] for n in a.split()) == p.shape, path


@pytest.mark.parametrize(
    "router",
    [
        ops.Router(4, renormalize=True),
        ops.Router(4, "sigmoid", renormalize=True, scale=2.5),
        ops.Router(4, "softmax_of_top_k", scale=0.5),
    ],
)
def test_other_routers(router):
    """Whatever the scores are, weights that sum to a constant are enough."""
    dense, params = _dense()
    sparse = upcycle.config(dense, 8, 4, 2, router=router, shared_ff=16, shared_gate=True)
    got = upcycle.upcycle(params, dense, sparse, random.key(2))
    tokens = torch.randint(257, (2, 11))
    torch.testing.assert_close(
        moe.apply(got, tokens, sparse), llama.apply(params, tokens, dense), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize(
    "kept",
    [(0,), (0, 1), (4,), (0, 2, 4), (1, 3), (0, 2, 3), (0, 1, 2, 3)],
    ids=lambda kept: "dense " + "".join(map(str, kept)),
)
@pytest.mark.parametrize("g", [1, 2])
def test_layers_that_stay_dense(kept, g):
    dense, params = _dense(layers=5, qk_norm=True)
    router = ops.Router(2 * g, "sigmoid", renormalize=True, scale=1.5)
    sparse = upcycle.config(dense, 4 * g, 2 * g, g, dense=kept, router=router, shared_ff=16)
    got = upcycle.upcycle(params, dense, sparse, random.key(2))
    tokens = torch.randint(257, (2, 11))
    torch.testing.assert_close(
        moe.apply(got, tokens, sparse), llama.apply(params, tokens, dense), rtol=1e-9, atol=1e-11
    )
    axes = moe.logical_axes(sparse)
    assert tree.paths(axes) == tree.paths(got)
    for path, a, p in zip(tree.paths(axes), tree.leaves(axes), tree.leaves(got), strict=True):
        assert tuple(sparse.sizes[n] for n in a.split()) == p.shape, path


def test_into_a_config_of_hugging_face():
    """Qwen2-MoE's, where every second layer has experts, and one more has none."""
    dense, params = _dense(layers=6, qkv_bias=True, head_dim=16)
    like = upcycle.config(
        dense, 8, 4, 2, dense=(0,), shared_ff=16, shared_gate=True, router=ops.Router(4, renormalize=True)
    )
    hf = {**moe.to_hf_config(like), "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    sparse = moe.from_hf_config(hf, max_seq=dense.max_seq, vocab_multiple=dense.vocab_multiple, dtype=F64)
    assert sparse.dense == (0, 2, 3, 4)
    got = upcycle.upcycle(params, dense, sparse, random.key(2))
    tokens = torch.randint(257, (2, 11))
    torch.testing.assert_close(
        moe.apply(got, tokens, sparse), llama.apply(params, tokens, dense), rtol=1e-9, atol=1e-11
    )


def test_tokens_use_different_copies_and_every_part_of_one():
    dense, params = _dense()
    sparse = upcycle.config(dense, 16, 4, 2)
    got = upcycle.upcycle(params, dense, sparse, random.key(2))
    tokens = torch.randint(257, (4, 16))
    mask = torch.ones(4, 16, dtype=F64)
    pairs, aux = moe.loss(got, {"tokens": tokens, "targets": tokens, "mask": mask}, sparse)
    parts = aux["counts"].view(2, 8, 2)
    assert torch.equal(parts[..., 0], parts[..., 1]) and (parts[..., 0] > 0).sum() > 8
    leaves = [x.requires_grad_() for x in tree.leaves(got)]
    pairs, _ = moe.loss(got, {"tokens": tokens, "targets": tokens, "mask": mask}, sparse)
    grads = torch.autograd.grad(sum(total for total, _ in pairs), leaves)
    assert all(g.isfinite().all() for g in grads) and got["layers"]["w_gate"].shape == (2, 16, 64, 64)


@pytest.mark.parametrize("kept", [(), (0, 2)])
def test_dtype_and_on_a_mesh(kept):
    """In a jitted function parameters arrive and leave sharded; the values are those of one device."""
    dense, params = _dense(layers=4)
    sparse = replace(upcycle.config(dense, 8, 2, 2, dense=kept), dtype=torch.float32)
    want = upcycle.upcycle(params, dense, sparse, random.key(2))
    assert {p.dtype for p in tree.leaves(want)} == {torch.float32}
    jitted = fmeg.jit(
        lambda params, key: upcycle.upcycle(params, dense, sparse, key),
        mesh=Mesh(dp=2, tp=2),
        layout=Layout(experts="dp", ff="tp", expert_ff="tp"),
        axes={"params": llama.logical_axes(dense)},
        out_axes=moe.logical_axes(sparse),
    )
    got = jitted(params, random.key(2))
    experts = got["layers"]["1"] if kept else got["layers"]
    assert experts["w_up"].spec == ((), ("dp",), (), ("tp",))
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a.global_value(), b), path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embed": 32}, "the configs differ in embed"),
        ({"expert_ff": 48}, "expert_ff=48 must divide ff=128"),
        ({"expert_ff": 256}, "must divide"),
        ({"expert_ff": 32}, "must be multiples of ff / expert_ff = 4"),
        ({"dense": (1,), "ff": 64}, "layers \\[1\\] keep their MLP: ff=64 must be 128"),
        ({"router": ops.Router(2)}, "weights must sum to one"),
        ({"router": ops.Router(2, renormalize=True, groups=2, top_groups=1)}, "groups"),
        ({"router": ops.Router(2, renormalize=True, capacity_factor=1.0)}, "capacity"),
    ],
)
def test_errors(change, message):
    dense, params = _dense()
    sparse = replace(upcycle.config(dense, 8, 2), **change)
    with pytest.raises(ValueError, match=message):
        upcycle.upcycle(params, dense, sparse, random.key(0))
    with pytest.raises(ValueError, match="granularity=3 does not divide"):
        upcycle.config(dense, 6, 3, 3)
