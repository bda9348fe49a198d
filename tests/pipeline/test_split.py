"""I and W: what is held between them is counted before anything runs, is little, and is what really is held."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, einsum, scan, tree
from fmeg.models import llama
from fmeg.pipeline import MemoryReport, ScheduleError, memory_report, peaks, record
from fmeg.pipeline.handover import handover
from fmeg.program.trace import trace
from tests.pipeline.test_runtime import TP, batch, config

LLAMA_8B = dict(embed=4096, heads=32, kv_heads=8, head_dim=128, ff=14336)


def step_of(cfg, mesh, layout, schedule="zb_h1", microbatches=4):
    def f(params, batch):
        loss = lambda p, b: llama.loss(p, b, cfg)
        return fmeg.value_and_grad(loss, microbatches=microbatches, schedule=schedule)(params, batch)

    return fmeg.jit(f, mesh=mesh, layout=layout, axes={"params": llama.logical_axes(cfg)})


@pytest.mark.parametrize(
    ("axes", "layout"),
    [
        (dict(pp=2), Layout(layers="pp")),
        (dict(dp=2, pp=2, tp=2), Layout(layers="pp", batch="dp", res_seq="tp", **TP)),
        (dict(pp=2, dp=2), Layout(layers="pp", batch="dp", params=dict(embed="dp"))),
    ],
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zb_v"])
def test_what_is_counted_is_what_is_held(axes, layout, schedule):
    cfg = config(8, tied=False)
    step = step_of(cfg, Mesh(axes), layout, schedule)
    params, data = llama.init(fmeg.random.key(0), cfg), batch(16)
    report = memory_report(step.lower(params, data))
    with record() as recording:
        step(params, data)
    run = recording.last()
    assert report.peak == tuple(run.peak_bytes[r] for r in range(2))
    for s in report.stages if schedule != "1f1b" else ():
        assert run.split_bytes[s.stage] == (s.kept, s.after)
        assert s.after < s.kept and f"stage {s.stage} on rank {s.rank}" in repr(report)


def real_width(layout, axes, rows, **changes):
    """One layer of Llama 3 8B a stage, 4096 tokens a microbatch on a rank; nothing is computed."""
    cfg = llama.Config(**{**dict(vocab_size=1024, layers=3, dtype=torch.bfloat16), **LLAMA_8B, **changes})
    with torch.device("meta"):
        params = tree.map(lambda x: x.to("meta"), llama.init(fmeg.random.key(0), cfg))
    like = lambda dtype: torch.empty(rows, 4096, dtype=dtype, device="meta")
    data = {"tokens": like(torch.int64), "targets": like(torch.int64), "mask": like(torch.float32)}
    return memory_report(step_of(cfg, Mesh(axes), layout, microbatches=3).lower(params, data)).stages[1]


@pytest.mark.parametrize(
    ("layout", "axes", "rows", "parts"),
    [
        (Layout(layers="pp"), dict(pp=3), 3, 1),
        (Layout(layers="pp", batch="dp", params=dict(embed="dp")), dict(pp=3, dp=8), 24, 1),
        (Layout(layers="pp", batch="dp", opt=dict(embed="dp"), grads=dict(embed="dp")), dict(pp=3, dp=8), 24, 1),
        (Layout(layers="pp", res_seq="tp", **TP), dict(pp=3, tp=8), 3, 8),
    ],
)
def test_after_I_a_layer_of_llama_8b_holds_less_than_before(layout, axes, rows, parts):
    """In units of one activation (4096 tokens of width 4096 in bf16). Kept by F: x twice, q, k, v, attention's result
    and statistics, gate and up. After I: norms' results twice, the cotangents of q k v, gate, up."""
    wide, kv, ff, statistics = 1.0, 1 / 4, 3.5, 1 / 64
    s = real_width(layout, axes, rows)
    unit, table = 2 * 4096 * 4096 // parts, 4096 * 64 * 2 * 4
    assert (s.kept - table) / unit == 4 * wide + 2 * kv + 2 * ff + statistics
    assert s.after / unit == 3 * wide + 2 * kv + 2 * ff
    everything = s.kept - table + unit * (2 * wide + ff)  # and the norms' results and the product of gate and up
    assert s.after < 0.62 * everything and s.after < 0.92 * s.kept


def test_with_full_rematerialisation_the_limit_is_that_without():
    s = real_width(Layout(layers="pp"), dict(pp=3), 3, remat="full")
    assert s.after == real_width(Layout(layers="pp"), dict(pp=3), 3).after


def test_a_product_of_two_layers_that_share_everything():
    """Gradients that are one value, weights that are used twice, a weight without a product."""

    def loss(p, b):
        def layer(x, slices):
            w, v = slices
            h = torch.tanh(einsum("b d, d k -> b k", x, w)) + v
            return einsum("b d, d k -> b k", h, w + v.unsqueeze(0)), None

        y, _ = scan(layer, b["x"], (p["w"], p["v"]))
        return (y**2).sum(), 1

    g = torch.Generator().manual_seed(0)
    params = {k: torch.randn(4, *s, generator=g, dtype=torch.float64) * 0.3 for k, s in (("w", (6, 6)), ("v", (6,)))}
    data = {"x": torch.randn(8, 6, generator=g, dtype=torch.float64)}
    (want, _), grads = fmeg.value_and_grad(loss, microbatches=4)(params, data)
    f = lambda params, batch: fmeg.value_and_grad(loss, microbatches=4, schedule="zb_h1")(params, batch)
    axes = {"params": {"w": "layers d k", "v": "layers k"}, "batch": {"x": "batch d"}}
    for mesh in (Mesh(pp=2), Mesh(pp=2, dp=2)):
        layout = Layout(
            layers="pp", batch="dp" if "dp" in mesh.axes else (), params=dict(d="dp") if "dp" in mesh.axes else {}
        )
        (got, _), ours = fmeg.jit(f, mesh=mesh, layout=layout, axes=axes)(params, data)
        assert abs(float(got) - float(want)) < 1e-12
        assert all((ours[k].global_value() - grads[k]).abs().max() < 1e-12 for k in params)


def test_the_cut_takes_the_fewest_bytes_and_of_equals_the_nearest():
    def f(x, w):  # a is wide, c narrow: from x comes all
        a = torch.cat([x, x, x], 1).exp()
        c = a[:, :2].sin()
        return c.t() @ w

    p = trace(f, torch.zeros(4, 3), torch.zeros(4, 5)).program
    product = [n for n in p.nodes if n.opname == "aten.mm.default"]
    got = handover(p, set(), product, {id(p.inputs[1])})
    assert got.nbytes == 4 * 2 * 4 and not any("exp" in n.opname for n in p.nodes if id(n) in got.again)
    free = handover(p, set(), product, set(map(id, p.inputs)))
    assert free.nbytes == 0 and not free.values and len(free.again) == len(p.nodes) - 1


def test_report_in_words_and_errors():
    cfg = config(4)
    report = memory_report(
        step_of(cfg, Mesh(pp=2), Layout(layers="pp")).lower(llama.init(fmeg.random.key(0), cfg), batch(8))
    )
    assert isinstance(report, MemoryReport) and "peak" in repr(report)
    assert 0.5 < report.after_input < 1 and max(peaks(report.schedule, report.after_input)) <= 2
    f = fmeg.jit(lambda x: x * 2)
    with pytest.raises(ScheduleError, match="has 0 pipelines, expected one"):
        memory_report(f.lower(torch.zeros(2)))
