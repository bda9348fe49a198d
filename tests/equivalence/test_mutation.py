"""Break any one collective of a training step: the comparison with one device must see it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fmeg import Layout, Mesh, jit
from fmeg.program.structured import walk
from fmeg.testing.mutate import EXCHANGES, LAYOUTS, Bench, Mutant, applied, bench, known, mutants, mutate, table

JOBS = known()


def everything_is_noticed(name, share=1):
    outcomes = list(mutate(bench(*JOBS[name]), lambda i: i % share == 0))
    survivors = [str(o.mutant) for o in outcomes if not o.killed()]
    assert not survivors, survivors
    return outcomes


def test_every_mutant_of_one_layout_is_noticed():
    """ZeRO-3 with tensor and sequence parallelism on four ranks."""
    outcomes = everything_is_noticed("zero3 tp2+sp")
    assert len(outcomes) > 100
    kinds = Counter((o.mutant.node.op.name, o.mutant.kind) for o in outcomes)
    assert {k for k, _ in kinds} == {"all_gather", "all_reduce", "reduce_scatter"}
    assert {k for _, k in kinds} == {"drop", "twice", "axis"}
    by_loss = sum(o.seen_by("loss") for o in outcomes)
    assert by_loss < len(outcomes) / 2, "a comparison of the loss of one step is blind to most"


@pytest.mark.parametrize("name", LAYOUTS[1:])
def test_some_mutants_of_others_are_noticed(name):
    assert len(everything_is_noticed(name, share=11)) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS[1:])
def test_every_mutant_of_others_is_noticed(name):
    everything_is_noticed(name)


def test_the_layouts_have_every_kind_of_collective():
    names = {n.op.name for name in LAYOUTS for n, _, _ in walk(bench(*JOBS[name]).lowered.program) if n.op in EXCHANGES}
    assert names == {op.name for op in EXCHANGES}


def test_every_mutant_of_an_exchange_of_rows_is_noticed():
    """Left out, done twice, over other axes, in another order, with wrong splits: of rows there, back, and
    gradients."""
    b = bench(*JOBS["moe: zero1 ulysses2 all_to_all"])
    every = list(mutants(b.lowered.program, b.mesh))
    outcomes = list(mutate(b, lambda i: every[i].node.op.name == "exchange_rows"))
    assert {o.mutant.kind for o in outcomes} == {"drop", "twice", "order", "splits"} and len(outcomes) >= 16
    assert all(o.killed() for o in outcomes), [str(o.mutant) for o in outcomes if not o.killed()]
    numbers = [o for o in outcomes if o.errors is not None]
    assert {o.mutant.kind for o in numbers} == {"drop", "twice", "order", "splits"}, "not by a crash alone"


def small():
    """x sharded over a, summed over both axes; only the sum over b matters to the second result."""
    mesh = Mesh(a=2, b=2)

    def fn(batch):
        return {"sum": batch.sum(), "rows": batch.sum(1)}

    x = torch.arange(32, dtype=torch.float64).reshape(4, 8)
    lowered = jit(fn, mesh=mesh, layout=Layout(batch="a", seq="b")).lower(x)
    return Bench(lowered, (x,), fn(x), groups=lambda path: path)


def test_errors_of_mutants_are_those_that_one_would_compute():
    """Rows of 8 over two ranks: left out, a rank has half of each; twice, double."""
    b = small()
    assert b.run() == {"rows": 0.0, "sum": 0.0}
    outcomes = list(mutate(b))
    assert all(o.killed() for o in outcomes)
    twice = [o for o in outcomes if o.mutant.kind == "twice" and o.mutant.node.op.name == "all_reduce"]
    assert {max(o.errors.values()) for o in twice} <= {1.0, 3.0}


def test_a_program_is_whole_again_after_a_mutant():
    b = small()
    before = str(b.lowered.program)
    for m in mutants(b.lowered.program, b.mesh):
        with applied(m, b.mesh):
            assert str(b.lowered.program) != before
        assert str(b.lowered.program) == before
    assert b.run() == {"rows": 0.0, "sum": 0.0}


def test_a_mutant_that_changes_nothing_survives_and_a_crash_is_told_apart():
    b = small()
    m = next(mutants(b.lowered.program, b.mesh))
    harmless = Mutant(m.program, m.node, m.index, "axis", tuple(m.node.args[1]))  # over its own axes
    assert not b.outcome(harmless).killed()
    broken = Mutant(m.program, m.node, m.index, "axis", ("nowhere",))
    outcome = b.outcome(broken)
    assert outcome.errors is None and outcome.killed()
    rows = table([b.outcome(harmless), outcome])
    assert [(r["mutants"], r["killed"], r["crashed"], r["survived"]) for r in rows] == [(2, 0, 1, 1)]
