"""Collectives a layer, by layout: how many and how many bytes, against what hand-written Megatron needs.

The model is the library's Llama under `strict`. With n ranks on an axis and b bytes of input on a rank, a rank receives
(n-1)·b in a gather, (n-1)/n·b in a reduce-scatter or exchange, 2(n-1)/n·b in an all-reduce.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from fmeg import Layout, Mesh, TensorType, jit, tree, value_and_grad
from fmeg.models import llama
from fmeg.step import Lowered

F64 = 8
L, B, S, D, H, K, E, FF, V = 3, 4, 8, 16, 8, 4, 4, 32, 64
CFG = llama.Config(
    vocab_size=V, vocab_multiple=V, embed=D, layers=L, heads=H, kv_heads=K, head_dim=E, ff=FF, dtype=torch.float64
)
TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
ACT = B * S * D * F64  # the residual stream of the whole batch
HEADS = B * S * H * E * F64  # queries
KV = B * S * K * E * F64  # keys, and values
ROWS = B * S * F64  # a number a token
NORM = D * F64
MATRICES = (2 * D * H * E + 2 * D * K * E + 3 * D * FF) * F64
LAYER = MATRICES + 2 * NORM
TABLE = V * D * F64
ALL = L * LAYER + 2 * TABLE + NORM  # every parameter

FORWARD, BACKWARD = dict(segment="scan body"), dict(segment="scan body backward")
MICROBATCH, STEP = dict(segment="microbatch"), dict(segment="step")


@cache
def lowered(mesh: Mesh, layout: Layout, microbatches: int = 1, strict: bool = True) -> Lowered:
    def step(params, batch):
        return value_and_grad(lambda p, b: llama.loss(p, b, CFG), microbatches=microbatches)(params, batch)

    params = tree.map(lambda p: TensorType(p.shape(CFG.sizes), torch.float64), llama.parameters(CFG))
    tokens = TensorType((B, S), torch.int64)
    batch = {"tokens": tokens, "targets": tokens, "mask": TensorType((B, S), torch.float64)}
    axes = {"params": llama.logical_axes(CFG)}
    return jit(step, mesh=mesh, layout=layout, axes=axes, strict=strict).lower(params, batch)


def explained(mesh: Mesh, layout: Layout, microbatches: int = 1):
    e = lowered(mesh, layout, microbatches).explain()
    assert not e.implicit
    return e


def gather(whole: int, n: int) -> int:
    """Bytes received when a value of `whole` bytes, sharded over n ranks, is gathered."""
    return whole * (n - 1) // n


scatter = exchange = gather  # of `whole` bytes on each rank; and of n ranks' parts of them


def reduce(whole: int, n: int) -> int:
    return 2 * gather(whole, n)


@pytest.mark.parametrize("n", [2, 4])
def test_tensor_parallel(n):
    """Two all-reduces forward (after attention and MLP), two backward (before them)."""
    e = explained(Mesh(tp=n), Layout(**TP))
    for half in (FORWARD, BACKWARD):
        assert e.counts(**half) == {"all_reduce": 2}
        assert e.nbytes(**half) == {"all_reduce": 2 * reduce(ACT, n)}
    # the embedding's lookup, the loss's max and sum; the cotangent of the head's input
    assert e.counts(**MICROBATCH, phase="F") == {"all_reduce": 3}
    assert e.counts(**MICROBATCH, phase="B") == {"all_reduce": 1}
    assert e.nbytes(**MICROBATCH) == {"all_reduce": 2 * reduce(ACT, n) + 3 * reduce(ROWS, n)}
    assert e.counts(**STEP) == {}


def test_vocabulary_parallel_loss(n=4):
    """Two all-reduces of numbers a token: the max; the sum of exponentials with the target's logit. No logit moves."""
    e = explained(Mesh(tp=n), Layout(**TP))
    loss = e.select(**MICROBATCH, reason="rule")
    assert [(r.kind, r.phase, r.nbytes) for r in loss.rows] == [
        ("all_reduce", "F", reduce(ROWS, n)),
        ("all_reduce", "F", reduce(2 * ROWS, n)),
    ]
    assert not any(f"{B}, {S}, {V}" in v for r in e.rows for v in r.values)


def test_sequence_parallel(n=2):
    """Each all-reduce becomes a gather and a reduce-scatter; two gathers are repeated backward, as in Megatron."""
    e = explained(Mesh(tp=n), Layout(**TP, res_seq="tp"))
    assert e.counts(**FORWARD) == {"all_gather": 2, "reduce_scatter": 2}
    assert e.counts(**BACKWARD) == {"all_gather": 4, "reduce_scatter": 2}
    assert e.counts(**BACKWARD, again=True) == {"all_gather": 2}
    assert e.nbytes(**FORWARD) == {"all_gather": 2 * gather(ACT, n), "reduce_scatter": 2 * scatter(ACT, n)}
    assert e.nbytes(**BACKWARD) == {"all_gather": 4 * gather(ACT, n), "reduce_scatter": 2 * scatter(ACT, n)}
    # embedding and head, each way, and the loss
    assert e.counts(**MICROBATCH) == {"reduce_scatter": 2, "all_gather": 2, "all_reduce": 2}
    # gradients of the norms, which saw a part of the sequence: all at once
    (norms,) = e.select(**STEP).rows
    assert (norms.kind, norms.tensors, norms.reason) == ("all_reduce", 3, "gradient")
    assert norms.nbytes == reduce(2 * L * NORM, n) + reduce(NORM, n)


def test_zero_3(n=2):
    """A layer's parameters in one gather forward, one backward, and their gradients in one reduce-scatter."""
    e = explained(Mesh(dp=n), Layout(batch="dp", params=dict(embed="dp")))
    assert e.counts(**FORWARD) == {"all_gather": 1}
    assert e.counts(**BACKWARD) == {"all_gather": 1, "reduce_scatter": 1}
    assert {r.tensors for half in (FORWARD, BACKWARD) for r in e.select(**half).rows} == {9}
    assert e.nbytes(**FORWARD) == {"all_gather": gather(LAYER, n)}
    assert e.nbytes(**BACKWARD) == {"all_gather": gather(LAYER, n), "reduce_scatter": scatter(LAYER, n)}
    rest = gather(2 * TABLE + NORM, n)
    assert e.counts(**MICROBATCH) == {"all_gather": 3, "reduce_scatter": 3}
    assert e.nbytes(**MICROBATCH) == {"all_gather": rest, "reduce_scatter": rest}
    # the number of tokens, and the loss
    assert e.counts(**STEP) == {"all_reduce": 2} and e.nbytes(**STEP) == {"all_reduce": 2 * reduce(F64, n)}


def test_hybrid_sharding():
    """As ZeRO-3 within a replica; between replicas one all-reduce a step, of the shards of all gradients."""
    r, n = 2, 2
    e = explained(Mesh(replica=r, dp=n), Layout(batch=("replica", "dp"), params=dict(embed="dp")))
    alone = explained(Mesh(dp=n), Layout(batch="dp", params=dict(embed="dp")))
    for half in (FORWARD, BACKWARD, MICROBATCH):
        assert e.counts(**half) == alone.counts(**half)
        assert e.nbytes(**half) == alone.nbytes(**half)
    (gradients,) = e.select(reason="gradient").rows
    assert (gradients.kind, gradients.axes, gradients.count) == ("all_reduce", ("replica",), 1)
    assert gradients.tensors == len(tree.leaves(llama.parameters(CFG)))
    assert gradients.nbytes == reduce(ALL // n, r)


def test_zero_1():
    """Gradients go straight into the optimizer's placement: a reduce-scatter a step, nothing in the layers."""
    e = explained(Mesh(dp=2), Layout(batch="dp", opt=dict(embed="dp")))
    assert e.counts(**FORWARD) == e.counts(**BACKWARD) == e.counts(**MICROBATCH) == {}
    (gradients,) = e.select(reason="gradient").rows
    assert (gradients.kind, gradients.nbytes) == ("reduce_scatter", scatter(ALL, 2))


def test_tensor_sequence_and_zero_3():
    """The sum of the two: over tp what TP+SP moves of a rank's batch, over dp what ZeRO-3 moves of a rank's weights."""
    tp, dp = 2, 2
    e = explained(Mesh(dp=dp, tp=tp), Layout(batch="dp", **TP, res_seq="tp", params=dict(embed="dp")))
    sp = explained(Mesh(tp=tp), Layout(**TP, res_seq="tp"))
    zero = explained(Mesh(dp=dp), Layout(batch="dp", params=dict(embed="dp")))
    for half in (FORWARD, BACKWARD):
        assert e.counts(**half, axes=("tp",)) == sp.counts(**half)
        assert e.counts(**half, axes=("dp",)) == zero.counts(**half)
        assert e.nbytes(**half, axes=("tp",)) == {k: v // dp for k, v in sp.nbytes(**half).items()}
        weights = MATRICES // tp + 2 * NORM
        assert e.nbytes(**half, axes=("dp",)) == {k: gather(weights, dp) for k in zero.counts(**half)}
    assert e.counts(**FORWARD) == {"all_gather": 3, "reduce_scatter": 2}
    assert e.counts(**BACKWARD) == {"all_gather": 5, "reduce_scatter": 3}


def test_gathered_context_parallel(n=4):
    """Keys and values: two gathers forward; two again backward, and two reduce-scatters."""
    e = explained(Mesh(cp=n), Layout(seq="cp", res_seq="cp"))
    assert e.counts(**FORWARD) == {"all_gather": 2}
    assert e.counts(**BACKWARD) == {"all_gather": 2, "reduce_scatter": 2}
    assert e.nbytes(**FORWARD) == {"all_gather": 2 * gather(KV, n)}
    assert e.nbytes(**BACKWARD) == {"all_gather": 2 * gather(KV, n), "reduce_scatter": 2 * scatter(KV, n)}
    assert e.counts(**MICROBATCH) == {}


def test_ulysses(n=4):
    """Four exchanges each way: q, k, v and the output; their cotangents."""
    e = explained(Mesh(cp=n), Layout(seq="cp", res_seq="cp", attention="ulysses"))
    for half in (FORWARD, BACKWARD):
        assert e.counts(**half) == {"all_to_all": 4}
        assert e.nbytes(**half) == {"all_to_all": exchange(2 * HEADS // n + 2 * KV // n, n)}
    assert e.counts(**MICROBATCH) == {}


def test_ring(n=4):
    """Keys and values make n-1 hops each way; their cotangents n, the last one home."""
    e = explained(Mesh(cp=n), Layout(seq="cp", res_seq="cp", attention="ring"))
    assert e.counts(**FORWARD) == {"ppermute": 2 * (n - 1)}
    assert e.counts(**BACKWARD) == {"ppermute": 2 * (n - 1) + 2 * n}
    assert e.nbytes(**FORWARD) == {"ppermute": 2 * (n - 1) * KV // n}
    assert e.nbytes(**BACKWARD) == {"ppermute": (4 * n - 2) * KV // n}


def test_data_parallel():
    """One all-reduce a step, of all gradients; it takes the loss with it."""
    e = explained(Mesh(dp=2), Layout(batch="dp"))
    assert e.counts(**FORWARD) == e.counts(**BACKWARD) == e.counts(**MICROBATCH) == {}
    assert e.counts() == {"all_reduce": 2}
    assert e.total == reduce(ALL, 2) + 2 * reduce(F64, 2)


def test_a_model_annotated_at_its_embedding_alone(monkeypatch):
    """The same counts: each pending sum goes where the residual stream is, which `strict` then calls unasked."""
    mesh, layout = Mesh(tp=2), Layout(**TP, res_seq="tp")
    asked = explained(mesh, layout)
    rest = iter([llama.shard])
    monkeypatch.setattr(llama, "shard", lambda x, spec: next(rest, lambda x, _: x)(x, spec))
    e = lowered(mesh, layout, strict=False).explain()
    for where in (FORWARD, BACKWARD, MICROBATCH, STEP):
        assert e.counts(**where) == asked.counts(**where) and e.nbytes(**where) == asked.nbytes(**where)
    assert [(r.kind, r.segment, r.reason) for r in e.implicit] == 2 * [("reduce_scatter", "scan body", "pending sum")]


def test_loops_multiply():
    """Layers run L times a microbatch; what a step does once it does once, however many microbatches."""
    layout = Layout(batch="dp", **TP, res_seq="tp", params=dict(embed="dp"))
    one, two = (explained(Mesh(dp=2, tp=2), layout, m) for m in (1, 2))
    assert one.counts() == two.counts()
    for half in (FORWARD, BACKWARD):
        assert {r.count for r in one.select(**half).rows} == {L}
        assert {r.count for r in two.select(**half).rows} == {2 * L}
        # half the rows a microbatch, all of the weights
        assert two.nbytes(**half, axes=("tp",)) == {k: v // 2 for k, v in one.nbytes(**half, axes=("tp",)).items()}
        assert two.nbytes(**half, axes=("dp",)) == one.nbytes(**half, axes=("dp",))
    assert two.executed(**MICROBATCH) == {k: 2 * v for k, v in one.executed(**MICROBATCH).items()}
    assert two.executed(**STEP) == one.executed(**STEP)


def test_nothing_moves_on_one_device():
    assert explained(Mesh(), Layout()).rows == ()


def test_arithmetic_is_shared():
    """Products: 2 for a multiply-add; forward once, backward twice; a tensor-parallel rank does its part exactly."""
    tokens, causal = B * S, B * S * (S + 1) // 2
    weights = L * (MATRICES // F64) + V * D
    products = 3 * 2 * tokens * weights
    whole = lowered(Mesh(), Layout()).cost().by_op
    assert whole["einsum"] == products
    assert whole["attention"] == L * 2 * causal * H * 2 * E and whole["attention_bwd"] == L * 2 * causal * H * 5 * E
    part = lowered(Mesh(tp=4), Layout(**TP)).cost().by_op
    assert part["einsum"] == products // 4 and part["attention"] == whole["attention"] // 4
    assert part["rms_norm_bwd"] == whole["rms_norm_bwd"]  # norms are repeated on every rank
