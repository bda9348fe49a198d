"""Four Gloo processes run the same action lists, and get the bits of the virtual mesh; a lost message ends with a
report."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from fmeg import Layout, Mesh
from fmeg.pipeline import ScheduleError, by_name, peaks, record
from tests.mesh import processes
from tests.pipeline.test_runtime import batch, config, run, same

pytestmark = pytest.mark.distributed


def _equal(axes, layout, schedules):
    cfg = config(8)
    for schedule in schedules:
        real, virtual = (
            run(cfg, batch(16), mesh=Mesh(axes, backend=b), layout=layout, microbatches=4, schedule=schedule)
            for b in ("distributed", "loop")
        )
        assert same(real, virtual), schedule


def pp4():
    _equal(dict(pp=4), Layout(layers="pp"), ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])


def pp2_dp2():
    layout = Layout(layers="pp", batch="dp", params=dict(embed="dp"))
    _equal(dict(pp=2, dp=2), layout, ["1f1b", "zb_v", "dualpipe_v"])


def reductions():
    """Gradients of a stage are on their way while the rank computes for another stage; bits as on the virtual mesh."""
    for layout in (Layout(layers="pp", batch="dp"), Layout(layers="pp", batch="dp", opt=dict(embed="dp"))):
        _equal(dict(dp=2, pp=2), layout, ["1f1b", "zb_v", "interleaved_1f1b"])
    once = by_name("zb_v", ranks=2, microbatches=4).with_messages(parameters=True)
    _equal(dict(dp=2, pp=2), Layout(layers="pp", batch="dp", params=dict(embed="dp")), [once])
    mesh = Mesh(dp=2, pp=2, backend="distributed")
    with record() as recording:
        run(config(8), batch(16), mesh=mesh, layout=layout, microbatches=4, schedule="interleaved_1f1b")
    events = recording.last().events
    begun = [start for _, a, start, _ in events if a.kind == "REDUCE"]
    assert len(begun) == 2
    assert sum(a.kind == "B" and start > begun[0] for _, a, start, _ in events) >= 2


def lost_message():
    """Rank 1 drops what it should send to rank 2: whoever waits for it says so, in seconds."""
    import torch.distributed as dist

    from fmeg.pipeline import op

    before, isend = op.TIMEOUT, dist.isend
    op.TIMEOUT = timedelta(seconds=3)
    if dist.get_rank() == 1:
        dist.isend = lambda t, dst, tag=0: isend(t, dst, tag=tag) if dst != 2 else _Done()
    try:
        with pytest.raises(ScheduleError, match=r"rank \d at \d[FB]\d \(\d+/\d+\)"):
            run(
                config(4),
                batch(8),
                mesh=Mesh(pp=4, backend="distributed"),
                layout=Layout(layers="pp"),
                microbatches=4,
                schedule="1f1b",
            )
    finally:
        op.TIMEOUT, dist.isend = before, isend


def recorded_runs():
    """Each process records its own rank; together they are the schedule, with the peaks that were predicted."""
    for axes, name in ((dict(pp=4), "zb_h1"), (dict(dp=2, pp=2), "interleaved_1f1b")):
        mesh = Mesh(axes, backend="distributed")
        layout = Layout(layers="pp", batch="dp" if "dp" in axes else ())
        with record() as recording:
            run(config(8), batch(16), mesh=mesh, layout=layout, microbatches=4, schedule=name)
        mine, whole = recording.last(), recording.last().gathered()
        assert len({rank for rank, *_ in mine.events}) == len(mine.peak) == 1
        assert [whole.peak[r] for r in range(axes["pp"])] == peaks(whole.schedule)
        compute = whole.schedule.compute().actions
        ran = [(r, a) for r, a, *_ in whole.events if a.kind != "REDUCE"]
        assert all(tuple(a for r, a in ran if r == rank) == line for rank, line in enumerate(compute))
        began = {(a.kind, a.stage, a.microbatch): (start, end) for _, a, start, end in whole.events}
        assert all(began["F", s, j][0] > began["F", s - 1, j][1] for k, s, j in began if k == "F" and s)


class _Done:
    def wait(self, timeout=None):
        return True


def several_scans():
    """Stages that begin and end in different scans: what travels differs from border to border."""
    from tests.pipeline import test_several_scans as several

    for schedule, stages in (("1f1b", (1, 2, 2, 1)), ("zb_h1", (3, 0, 2, 1)), ("interleaved_1f1b", "even")):
        real, virtual = (
            several.on_mesh(Mesh(pp=4, backend=b), Layout(layers="pp"), schedule, stages)
            for b in ("distributed", "loop")
        )
        assert all(torch.equal(x, y) for x, y in zip(real, virtual, strict=True)), schedule


def orders_of_groups():
    """The first stage begins with a reduction along tk, the second with a gather along tk and tr."""
    from fmeg.testing import assert_equivalent, verify

    cfg, both = verify.config(), ("tk", "tr")
    layout = Layout(layers="pp", heads=both, kv_heads="tk", ff=both, vocab="tk", res_seq=both)
    step = verify.make_step(cfg, verify.optimizer_under_test(), 2, schedule="1f1b")
    assert_equivalent(step, *verify.problem(cfg), mesh=Mesh(pp=2, tk=2, tr=2, backend="distributed"), layout=layout)


CHECKS = [pp4, pp2_dp2, several_scans, reductions, recorded_runs, lost_message]  # the last one breaks the group


@pytest.fixture(scope="module")
def results():
    return processes.run(CHECKS, 4)


@pytest.mark.parametrize("name", [c.__name__ for c in CHECKS])
def test_four_processes(name, results):
    assert not results[name], "\n".join(results[name])


def test_eight_processes():
    failures = processes.run([orders_of_groups], 8)["orders_of_groups"]
    assert not failures, failures[0]
