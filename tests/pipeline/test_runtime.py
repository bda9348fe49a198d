"""Pipelines run: equal to accumulation on one device bit for bit, on every schedule, with what makes cutting hard."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, einsum, ops, scan, tree
from fmeg.models import llama
from fmeg.pipeline import ScheduleError
from fmeg.pipeline.schedule import Schedule

TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
SCHEDULES = [
    "gpipe",
    "1f1b",
    "eager_1f1b",
    "zb_h1",
    "interleaved_1f1b",
    "breadth_first",
    "interleaved_zero_bubble",
    "zb_v",
    "dualpipe_v",
]


def config(layers, **changes):
    sizes = dict(vocab_size=37, embed=16, layers=layers, heads=4, kv_heads=2, head_dim=4, ff=32, vocab_multiple=8)
    return llama.Config(**{**sizes, "dtype": torch.float64, "tied": True, "init_std": 0.2, **changes})


def batch(rows=8, seq=6):
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 37, (rows, seq + 1), generator=g)
    mask = (torch.rand(rows, seq, generator=g) > 0.3).double()
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}


def run(cfg, data, *, mesh=None, layout=None, strict=True, **how):
    def f(params, batch):
        return fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), **how)(params, batch)

    params = llama.init(fmeg.random.key(0), cfg)
    mesh = mesh or Mesh(backend="loop")
    axes = {"params": llama.logical_axes(cfg)}
    (loss, _), grads = fmeg.jit(f, mesh=mesh, layout=layout, axes=axes, strict=strict)(params, data)
    return loss.global_value(), [g.global_value() for g in tree.leaves(grads)]


def same(a, b):
    return torch.equal(a[0], b[0]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def close(a, b):
    worst = max(float((x - y).abs().max() / y.abs().max()) for x, y in zip((a[0], *a[1]), (b[0], *b[1]), strict=True))
    return worst <= 1e-10


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bit_for_bit_accumulation(schedule, pp):
    cfg = config(8)
    want = run(cfg, batch(16), microbatches=8)
    got = run(cfg, batch(16), mesh=Mesh(pp=pp), layout=Layout(layers="pp"), microbatches=8, schedule=schedule)
    assert same(got, want)


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (dict(pp=2, dp=2), Layout(layers="pp", batch="dp", params=dict(embed="dp"))),
        (
            dict(dp=2, pp=2, tp=2),
            Layout(layers="pp", batch="dp", res_seq="tp", opt=dict(embed="dp"), **(TP | {"kv_heads": "tp"})),
        ),
        (dict(cp=2, pp=2), Layout(layers="pp", seq="cp", res_seq="cp", attention="ring")),
        (dict(replica=2, pp=2, dp=2), Layout(layers="pp", batch=("replica", "dp"), params=dict(embed="dp"))),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_composes(axes, layout, schedule):
    cfg = config(4)
    want = run(cfg, batch(16), microbatches=4)
    assert close(run(cfg, batch(16), mesh=Mesh(axes), layout=layout, microbatches=4, schedule=schedule), want)


@pytest.mark.parametrize("stages", ["even", "cost", (4, 1, 2), "Et*3|t|(tt)*1t,L", (0, 6, 1)])
def test_uneven_stages(stages):
    cfg = config(7)
    want = run(cfg, batch(), microbatches=4)
    got = run(cfg, batch(), mesh=Mesh(pp=3), layout=Layout(layers="pp"), microbatches=4, schedule="1f1b", stages=stages)
    assert same(got, want)


@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_microbatches_not_a_multiple_of_the_stages(microbatches):
    cfg = config(4)
    want = run(cfg, batch(14), microbatches=microbatches)
    how = dict(microbatches=microbatches, schedule="zb_h1")
    assert same(run(cfg, batch(14), mesh=Mesh(pp=4), layout=Layout(layers="pp"), **how), want)


def test_a_schedule_of_ones_own_and_without_an_axis_it_changes_nothing():
    cfg = config(2)
    mine = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
    want = run(cfg, batch(), microbatches=2)
    assert same(run(cfg, batch(), microbatches=2, schedule=mine), want)
    assert same(run(cfg, batch(), mesh=Mesh(pp=2), layout=Layout(layers="pp"), microbatches=2, schedule=mine), want)


def skipping(p, b):
    """A value that skips over the layers, an auxiliary loss, a shared parameter in every layer, a mask, two losses."""
    x0 = ops.embedding(p["e"], b["x"])
    mask, temperature = b["m"].unsqueeze(-1) * 2, torch.exp(p["t"])

    def body(carry, w, x0, temperature, mask):
        x, aux = carry
        h = torch.tanh(einsum("b s d, d k -> b s k", x, w)) * temperature
        return (x + h * mask + 0.1 * x0, aux + (h**2).sum()), None

    zero = torch.zeros((), dtype=torch.float64)
    (x, aux), _ = scan(body, (x0, zero), p["w"], x0, temperature, mask)
    losses = ops.cross_entropy(einsum("b s d, v d -> b s v", x + x0, p["e"]), b["y"])
    return [((losses * b["m"]).sum(), b["m"].sum()), (aux * 0.01, 40)], {"raw": losses.sum()}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v", "dualpipe_v"])
def test_what_skips_over_stages(schedule):
    g = torch.Generator().manual_seed(0)
    r = lambda *s: torch.randn(*s, generator=g, dtype=torch.float64) * 0.4
    params = dict(e=r(10, 6), w=r(4, 6, 6), t=r(1)[0])
    axes = {"params": dict(e="v d", w="layers d d2", t="")}
    ids = lambda: torch.randint(0, 10, (8, 5), generator=g)
    data = dict(x=ids(), y=ids(), m=(torch.rand(8, 5, generator=g) > 0.3).double())
    (loss, aux), grads = fmeg.value_and_grad(skipping, microbatches=4)(params, data)

    def f(params, batch):
        return fmeg.value_and_grad(skipping, microbatches=4, schedule=schedule)(params, batch)

    for mesh in (Mesh(pp=2), Mesh(dp=2, pp=2)):
        layout = Layout(layers="pp", batch="dp" if "dp" in mesh.axes else ())
        (got, got_aux), got_grads = fmeg.jit(f, mesh=mesh, layout=layout, axes=axes, strict=True)(params, data)
        assert abs(float(got) - float(loss)) < 1e-12 and abs(float(got_aux["raw"]) - float(aux["raw"])) < 1e-12
        for a, b in zip(tree.leaves(got_grads), tree.leaves(grads), strict=True):
            assert (a.global_value() - b).abs().max() < 1e-13


def test_the_weights_part_repeats_nothing_but_cheap_operations_and_holds_products():
    from fmeg.pipeline.cut import Cutter
    from fmeg.pipeline.op import LocalPipeline
    from fmeg.pipeline.weights import ScanInputs, ScanWeights, halve_stage
    from fmeg.sharding.residuals import is_cheap

    cfg = config(4, tied=False)
    params = llama.init(fmeg.random.key(0), cfg)

    def f(params, batch):
        return fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=2, schedule="zb_h1")(params, batch)

    lowered = fmeg.jit(f, mesh=Mesh(pp=2), layout=Layout(layers="pp"), axes={"params": llama.logical_axes(cfg)}).lower(
        params, batch()
    )
    (op,) = [n.op for n in lowered.program.nodes if isinstance(n.op, LocalPipeline)]
    cutter = Cutter(op.body, op.params, op.layered, op.n_sums, op.stacked)
    stage = cutter.stage((2, 4), False, True)
    halves = halve_stage(stage, len(op.body.inputs))
    first = {id(n) for n in halves.first.nodes}
    assert all(is_cheap(n) for n in halves.second.nodes if id(n) in first)
    (scan_i,) = [n.op for n in halves.first.nodes if isinstance(n.op, ScanInputs)]
    assert any(isinstance(n.op, ScanWeights) for n in halves.second.nodes)
    inner_i, inner_w = scan_i.halves.first.nodes, scan_i.halves.second.nodes
    assert all(is_cheap(n) for n in inner_w if any(n is m for m in inner_i))
    # the gradients of wq wk wv w_gate w_up; those of wo and w_down need most bytes for what they cost
    assert sum(n.opname == "einsum" for n in inner_w) == 5 and sum(n.opname == "einsum" for n in inner_i) == 9
    assert not any(n.opname == "rms_norm_bwd" for n in inner_w)


def test_clear_errors():
    cfg = config(4)
    how = dict(mesh=Mesh(pp=2), layout=Layout(layers="pp"))
    with pytest.raises(ScheduleError, match="3 layers in 2 stages; the model has 4 layers"):
        run(cfg, batch(), microbatches=2, schedule="1f1b", stages=(1, 2), **how)
    with pytest.raises(ScheduleError, match="for 2 ranks and 2 microbatches, but the mesh has 2 and value_and_grad"):
        mine = Schedule.from_text("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1")
        run(cfg, batch(), microbatches=4, schedule=mine, **how)
    with pytest.raises(ScheduleError, match="did you mean"):
        run(cfg, batch(), microbatches=2, schedule="1f1bb", **how)
    with pytest.raises(ScheduleError, match="must have a scan over the layers"):
        params = {"w": torch.zeros(2, 3)}
        f = fmeg.value_and_grad(lambda p, b: ((p["w"] * b.sum()).sum(), 1), microbatches=2, schedule="1f1b")
        fmeg.jit(lambda params, batch: f(params, batch), axes={"params": {"w": "layers d"}, "batch": "_"}, **how)(
            params, torch.ones(4)
        )
