"""What the backward pass keeps and what it does again, by policy: arithmetic, collectives, and the same gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from fmeg import Layout, Mesh, jit, random, save_names, tree, value_and_grad
from fmeg.models import llama
from fmeg.step import Lowered

CFG = llama.Config(
    vocab_size=32, vocab_multiple=32, embed=16, layers=3, heads=4, kv_heads=2, head_dim=4, ff=32, dtype=torch.float64
)
TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
MESHES = {
    "tp+sp": (Mesh(tp=2), Layout(**TP, res_seq="tp")),
    "ulysses": (Mesh(cp=2), Layout(seq="cp", res_seq="cp", attention="ulysses")),
    "zero-3": (Mesh(dp=2), Layout(batch="dp", params=dict(embed="dp"))),
}
POLICIES = {"none": None, "full": "full", "dots": "dots", "names": save_names("attention")}
FORWARD, BACKWARD = dict(segment="scan body"), dict(segment="scan body backward")


def example():
    g = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, CFG.vocab_size, (4, 8), generator=g) for _ in range(2))
    mask = (torch.rand(4, 8, generator=g) > 0.3).double()
    return llama.init(random.key(0), replace(CFG, init_std=0.3)), dict(tokens=tokens, targets=targets, mask=mask)


@cache
def lowered(mesh: str, policy: str) -> Lowered:
    cfg = replace(CFG, remat=POLICIES[policy])

    def step(params, batch):
        return value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch)

    where, layout = MESHES[mesh]
    jitted = jit(step, mesh=where, layout=layout, axes={"params": llama.logical_axes(cfg)}, strict=True)
    return jitted.lower(*example())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_do_not_depend_on_the_policy(mesh, policy):
    params, batch = example()
    (loss, _), grads = value_and_grad(lambda p, b: llama.loss(p, b, CFG))(params, batch)
    (got, _), got_grads = lowered(mesh, policy).compile()(tree.leaves((params, batch)))
    torch.testing.assert_close(got.global_value(), loss, rtol=1e-13, atol=0)
    for a, b in zip(tree.leaves(got_grads), tree.leaves(grads), strict=True):
        torch.testing.assert_close(a.global_value(), b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("mesh", MESHES)
def test_products_and_attention_done_again(mesh):
    none, full, dots, names = (lowered(mesh, p).cost().by_op for p in POLICIES)
    assert full["attention"] == 2 * none["attention"]
    assert dots["attention"] == names["attention"] == none["attention"]
    assert dots["einsum"] == none["einsum"]
    # the six products before the last, whose result nothing needs, and of which wo's gives the second norm's input
    weights = CFG.embed * CFG.head_dim * 2 * (CFG.heads + CFG.kv_heads) + 2 * CFG.embed * CFG.ff
    again = CFG.layers * 2 * 4 * 8 * weights // 2
    assert full["einsum"] - none["einsum"] == names["einsum"] - none["einsum"] == again


def test_collectives_done_again():
    def backward(mesh, policy):
        return lowered(mesh, policy).explain().counts(**BACKWARD)

    for mesh in MESHES:
        forward = [lowered(mesh, p).explain().counts(**FORWARD) for p in POLICIES]
        assert forward == 4 * forward[:1]
    # the second gather of each half is there anyway; the attention's sum is made again, the last sum is not needed
    assert backward("tp+sp", "none") == {"all_gather": 4, "reduce_scatter": 2}
    assert backward("tp+sp", "full") == backward("tp+sp", "names") == {"all_gather": 4, "reduce_scatter": 3}
    # parameters are gathered once in each pass, whatever is done again
    assert all(backward("zero-3", p) == {"all_gather": 1, "reduce_scatter": 1} for p in POLICIES)
    # q, k, v and the output are exchanged again; a kept output is not
    assert [backward("ulysses", p) for p in ("none", "full", "names")] == [{"all_to_all": n} for n in (4, 8, 7)]


def test_memory_falls_with_what_is_kept():
    def kept(policy):
        (loop,) = [n.op.loop() for n in body(lowered("zero-3", policy).program) if n.opname == "scan"]
        return sum(v.type.nbytes for v in loop.body.outputs[loop.carried :])

    def body(program):
        return [n for node in program.nodes if node.opname == "accumulate" for n in node.op.body.nodes]

    rows = 2 * 8 * 8  # bytes of one number a token on a rank
    assert kept("full") == rows * CFG.embed
    assert kept("names") == kept("full") + rows * (CFG.heads * CFG.head_dim + CFG.heads)  # attention's output and lse
    assert kept("none") >= kept("dots") > kept("names")
