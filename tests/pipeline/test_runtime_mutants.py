"""A schedule with one action changed, given by a user: refused before it runs; and where that check is passed by, the
runtime itself ends with a report that names rank, action and what is missing, or with the gradients of the original.
Never a hang."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh
from fmeg.models import llama
from fmeg.pipeline import Action, Schedule, ScheduleError, by_name
from fmeg.pipeline.runtime import Pieces, Worker, run_virtual
from fmeg.pipeline.weights import Halves
from tests.pipeline.test_mutants import replaced
from tests.pipeline.test_runtime import batch, config, run

NAMES = ["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "dualpipe_v"]
ORIGINALS = {name: by_name(name, ranks=2, microbatches=4) for name in NAMES}


def mutants(schedule: Schedule) -> Iterator[tuple[str, Schedule]]:
    """Drop, double or swap an action, or give it to the other rank, another stage or another microbatch."""
    for rank, line in enumerate(schedule.actions):
        other = 1 - rank
        for i, a in enumerate(line):
            without = [*line[:i], *line[i + 1 :]]
            yield "drop", replaced(schedule, rank, without)
            yield "double", replaced(schedule, rank, [*line[: i + 1], a, *line[i + 1 :]])
            theirs = schedule.actions[other]
            yield "wrong rank", replaced(replaced(schedule, rank, without), other, [*theirs[:i], a, *theirs[i:]])
            stage = a._replace(stage=(a.stage + 1) % schedule.stages)
            yield "wrong stage", replaced(schedule, rank, [*line[:i], stage, *line[i + 1 :]])
            late = a._replace(microbatch=(a.microbatch + 1) % schedule.microbatches)
            yield "wrong microbatch", replaced(schedule, rank, [*line[:i], late, *line[i + 1 :]])
        draw = random.Random(rank)
        for _ in range(12):
            i, j = sorted(draw.sample(range(len(line)), 2))
            far = list(line)
            far[i], far[j] = far[j], far[i]
            yield "swap", replaced(schedule, rank, far)


class Piece:
    """Says what it was given: activations are numbers that each stage moves on."""

    def __init__(self, fn):
        self.run = fn


def workers(schedule: Schedule) -> list[Worker]:
    """Workers of the runtime whose pieces compute with numbers: y = 2 x + w s + m forward, and its gradient back."""
    n = schedule.stages
    plain = Mesh(backend="loop").backend()
    t = lambda x: torch.as_tensor(x, dtype=torch.float64)

    def pieces(s: int) -> Pieces:
        first, last = s == 0, s == n - 1

        def forward(inputs):
            m, x = inputs[0], inputs[1] if not first else t(1.0)
            y = 2 * x + m * (s + 1)
            return [y.clone(), x + m] if last else [y, x + m]  # the sum or the carry, then the residual

        def both(inputs):
            m, kept, ct = inputs[0], inputs[1], inputs[2] if not last else t(1.0)
            return [*([] if first else [2 * ct + 0 * m]), ct * kept * 1.1 ** int(m)]

        def inputs_part(inputs):
            ct = inputs[2] if not last else t(1.0)
            return [] if first else [2 * ct]

        cts = 0 if first else 1
        halves = Halves(None, SimpleNamespace(nodes=[], outputs=[], inputs=[]), tuple(range(cts)), (cts,))

        def first_half(inputs):
            m, kept, ct = inputs[0], inputs[1], inputs[2] if not last else t(1.0)
            return [*inputs_part(inputs), m, kept, ct]

        def second_half(given):
            m, kept, ct = [x for x in given if x is not None]
            return [ct * kept * 1.1 ** int(m)]

        return Pieces(Piece(forward), Piece(both), Piece(first_half), Piece(second_half), halves)

    def stage(s: int):
        return SimpleNamespace(
            n_carry=int(s < n - 1), n_cts=int(s > 0), sums=(0,) if s == n - 1 else (), gradients=(1,)
        )

    out = []
    for r in range(schedule.ranks):
        mine = schedule.stages_of(r)
        inputs = {s: [[t(m)] for m in range(schedule.microbatches)] for s in mine}
        out.append(Worker({s: stage(s) for s in mine}, plain, inputs, {s: pieces(s) for s in mine}))
    return out


def result(schedule: Schedule) -> dict:
    """Loss and gradients by stage."""
    ranks = workers(schedule)
    run_virtual(schedule, ranks)
    found = {("sum", i): x.result().item() for w in ranks for i, x in w.sums.items()}
    return found | {s: x.result().item() for w in ranks for (_, s), x in w.gradients.items()}


@pytest.mark.parametrize("name", NAMES)
def test_the_verifier_refuses_or_the_result_is_the_same(name):
    """With no verifier before it, the runtime still reports all that it can see; what it cannot see (an action that is
    missing on every stage, gradients summed in another order) the verifier refuses."""
    original = ORIGINALS[name]
    want, seen = result(original), Counter()
    for kind, mutant in mutants(original):
        try:
            mutant.verify()
            refused = False
        except ScheduleError:
            refused = True
        try:
            got = result(mutant)
            assert refused or got == want, mutant.text()
            outcome = "same" if got == want else "other"
        except ScheduleError as error:
            assert refused, (str(error), mutant.text())
            outcome = "reported"
            text = str(error)
            assert text.startswith("pipeline: ") and ("rank " in text or "at the end" in text), text
        seen[kind, outcome] += 1
    assert {kind for kind, _ in seen} == {"drop", "double", "wrong rank", "wrong stage", "wrong microbatch", "swap"}
    assert seen["drop", "same"] == seen["wrong rank", "same"] == 0
    assert seen["drop", "reported"] == sum(map(len, original.actions)), seen  # every action that is missing
    assert seen["wrong rank", "reported"] == sum(map(len, original.actions)), seen
    assert seen["swap", "reported"] > 0


def test_reports_name_rank_action_and_what_is_missing():
    def report(text: str) -> str:
        with pytest.raises(ScheduleError) as error:
            result(Schedule.from_lists([line.split() for line in text.strip().splitlines()]))
        return str(error.value)

    assert report("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0") == (
        "pipeline: deadlock. rank 0 at action 1 of 4: 0B0 waits for the cotangent of 1B0 of rank 1 (action 3); "
        "rank 1 at action 0 of 4: 1F1 waits for the activation of 0F1 of rank 0 (action 2)"
    )
    assert "1F1 waits for the activation of 0F1, which no rank runs" in report("0F0 0B0 0B1\n1F0 1B0 1F1 1B1")
    assert "rank 1 at 1B0 (action 0 of 2): it needs what 1F0 keeps, which has not run" in report("0F0 0B0\n1B0 1F0")
    assert "at the end no backward has used what was kept by 0F1 of rank 0; 1F1 of rank 1" in report(
        "0F0 0F1 0B0\n1F0 1B0 1F1"
    )
    assert "rank 0 at 1W0 (action 2 of 4): stage 1 is not on this rank, which has 0" in report(
        "0F0 0I0 1W0 0W0\n1F0 1I0"
    )
    with pytest.raises(ScheduleError, match="at the end no backward has used what was kept by 1I0"):
        result(Schedule.from_text("0F0 0I0 0W0\n1F0 1I0"))


def test_a_user_is_refused_before_anything_runs():
    """Through jit, in the words of the verifier."""
    refused = {}
    for kind, mutant in mutants(ORIGINALS["zb_h1"]):
        try:
            mutant.verify()
        except ScheduleError as error:
            refused.setdefault(kind, (mutant, str(error)))
    assert set(refused) >= {"drop", "double", "wrong rank", "wrong stage", "wrong microbatch", "swap"}
    for mutant, text in refused.values():
        with pytest.raises(ScheduleError) as error:
            run(config(2), batch(8), mesh=Mesh(pp=2), layout=Layout(layers="pp"), microbatches=4, schedule=mutant)
        assert str(error.value) == text and text.startswith("schedule: ")


@pytest.mark.parametrize(
    ("kind", "text"), [("swap", "deadlock"), ("drop", "no rank runs"), ("drop B", "1F3 of rank 1")]
)
def test_the_real_workers_report_too(kind, text, monkeypatch):
    """The same through jit with the verifier taken out."""
    monkeypatch.setattr(Schedule, "verify", lambda self: None)
    first, second = map(list, by_name("1f1b", ranks=2, microbatches=4).actions)
    if kind == "swap":
        second[:4] = second[2:4] + second[:2]
        first[1:3] = first[2], first[1]
    elif kind == "drop":
        first.remove(Action("F", 0, 2))
    else:
        second.remove(Action("B", 1, 3))
        first.remove(Action("B", 0, 3))
    cfg = config(2)
    params = llama.init(fmeg.random.key(0), cfg)
    mine = Schedule((tuple(first), tuple(second)), (0, 1), 4)

    def f(params, batch):
        loss = lambda p, b: llama.loss(p, b, cfg)
        return fmeg.value_and_grad(loss, microbatches=4, schedule=mine)(params, batch)

    step = fmeg.jit(f, mesh=Mesh(pp=2), layout=Layout(layers="pp"), axes={"params": llama.logical_axes(cfg)})
    with pytest.raises(ScheduleError, match=text):
        step(params, batch(8))
