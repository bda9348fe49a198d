"""The pipeline matrix: every schedule alone, and pipelines over every layout of `fmeg.testing.matrix.cases`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from fmeg.mesh import Mesh
from fmeg.pipeline import SCHEDULES
from fmeg.sharding.spec import Layout
from fmeg.testing.matrix import Case, cases, relaid

ROWS = 16
NAMES = tuple(name for name in SCHEDULES if name != "none")


@dataclass(frozen=True)
class PipelineCase(Case):
    """A row that runs by a schedule.

    stages  as for `fmeg.value_and_grad`
    layers  of the model
    rows    of the batch
    preset  the model, where it is not the one that the matrix is for
    stacks  layers of its other scans, by the name of their axis
    """

    schedule: str | None = "1f1b"
    stages: str | tuple[int, ...] = "even"
    layers: int = 4
    rows: int = ROWS
    preset: str = ""
    stacks: tuple[tuple[str, int], ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the pipeline is all that differs from one device, so that loss and gradients must be equal bit for
        bit: no axis but `pp` splits a sum."""
        return self.mesh.axes == ("pp",)


def alone(schedule: str, pp: int, microbatches: int = 8, **changes: Any) -> PipelineCase:
    """A schedule on `pp` ranks and nothing else."""
    changes.setdefault("layers", 2 * pp)
    shape = "".join(f" {name} {_text(value)}" for name, value in changes.items())
    name = f"pp{pp} {schedule} m{microbatches}{shape}"
    return PipelineCase(name, Mesh(pp=pp), Layout(layers="pp"), microbatches, schedule, **changes)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _odd() -> Iterator[PipelineCase]:
    """Stages that are not equal, one layer a stage or none, microbatches that stages do not divide, one microbatch."""
    for stages, pp in (("cost", 3), ((4, 1, 2), 3), ("Et*3|t|(tt)*1t,L", 3), ((0, 6, 1), 3), ((1, 2, 1, 3), 4)):
        yield alone("1f1b", pp, 4, layers=7, stages=stages)
    yield alone("zb_v", 2, 4, layers=7, stages=(1, 3, 2, 1))
    yield alone("interleaved_1f1b", 2, 4, layers=7, stages="cost")
    for schedule, layers in (("gpipe", 4), ("1f1b", 4), ("zb_h1", 4), ("interleaved_1f1b", 8), ("zb_v", 8)):
        yield alone(schedule, 4, 4, layers=layers)  # one layer a stage
    for schedule in ("gpipe", "1f1b", "zb_h1", "zb_v", "interleaved_zero_bubble", "breadth_first"):
        yield alone(schedule, 4, 1)
    for schedule, microbatches in (("1f1b", 7), ("zb_h1", 6), ("zb_v", 5), ("greedy", 3), ("eager_1f1b", 2)):
        yield alone(schedule, 4, microbatches, rows=2 * microbatches)


SCANS = (("dense_layers", 2), ("mtp_layers", 1))


def several(schedule: str, pp: int, stages: str | tuple[int, ...] = "even", **changes: Any) -> PipelineCase:
    """A model with three scans over layers, 2 dense ones, 3 with experts, 1 that predicts a further token, whose stages
    are cut anywhere; `changes`: mesh axes, and what else of the layout."""
    axes: dict[str, int] = {name: changes.pop(name) for name in ("dp", "tp") if name in changes}
    layout = Layout(layers="pp", dense_layers="pp", mtp_layers="pp", **changes)
    name = " ".join(["scans 2+3+1", *(f"{axis}{n}" for axis, n in axes.items()), *map(str, changes.get("params", ()))])
    about: dict[str, Any] = dict(schedule=schedule, stages=stages, layers=3, preset="deepseek-v3", stacks=SCANS)
    return PipelineCase(
        f"pp{pp} {schedule} stages {_text(stages)} {name}", Mesh({"pp": pp, **axes}), layout, microbatches=4, **about
    )


def _several() -> Iterator[PipelineCase]:
    """Every schedule over several scans, then cuts of every kind, then with other axes."""
    yield from (several(name, 2) for name in NAMES)
    for stages in ("cost", (1, 2, 3), (0, 2, 4), (5, 1, 0), (2, 0, 4), "Ett|ttt|mL"):
        yield several("1f1b", 3, stages)
    yield several("zb_h1", 3, (3, 3, 0))
    yield several("zb_v", 2, (1, 2, 2, 1))
    tensor: dict[str, Any] = dict(heads="tp", ff="tp", vocab="tp", shared_ff="tp", res_seq="tp", experts="tp")
    yield several("1f1b", 2, (4, 2), dp=2, batch="dp", experts="dp")
    yield several("zb_v", 2, tp=2, **tensor)
    yield several("interleaved_1f1b", 2, dp=2, batch="dp", params=dict(embed="dp", expert_embed="dp"))
    yield several("dualpipe_v", 2, dp=2, tp=2, batch="dp", opt=dict(embed="dp"), **tensor)


def over(case: Case, pp: int, schedule: str, microbatches: int) -> PipelineCase:
    """A case of the other matrix on each of `pp` ranks."""
    layout = relaid(case.layout, layers="pp")
    outer = {axis: n for axis, n in case.mesh.sizes.items() if axis in ("pod", "replica")}
    mesh = Mesh({**outer, "pp": pp, **{axis: n for axis, n in case.mesh.sizes.items() if axis not in outer}})
    chunks = SCHEDULES[schedule][1] or 2
    name = f"pp{pp} {schedule} {case.name}"
    return PipelineCase(name, mesh, layout, microbatches, schedule, layers=pp * chunks)


def pipeline_cases(sizes: Mapping[str, int], devices: int = 16) -> Iterator[PipelineCase]:
    """The pipeline matrix for a model whose other matrix is `cases(sizes)`, on meshes of at most `devices`.

    Every schedule alone on 2 and 4 ranks; what is odd about stages and microbatches; a model with several scans over
    layers; then pp=2 over every layout of the
    other matrix without microbatches of its own, and pp=4 over those that then have 16 devices or, with devices=32, 32:
    schedules take turns.

    >>> sizes = dict(batch=8, seq=16, res_seq=16, embed=16, heads=8, kv_heads=4, ff=32, vocab=64)
    >>> found = list(pipeline_cases(sizes, devices=16))
    >>> len(found) > 100, {case.schedule for case in found} == set(NAMES)
    (True, True)
    """
    every = [*(alone(name, pp) for pp in (2, 4) for name in NAMES), *_odd(), *_several()]
    if devices >= 32:
        every += [alone(name, pp, 16, layers=16) for pp, name in ((8, "zb_v"), (8, "dualpipe_v"), (16, "1f1b"))]
    yield from (case for case in every if case.mesh.size <= devices)
    for pp, microbatches, least in ((2, 4, 0), (4, 8, 16)):
        turn = cycle(NAMES)
        for case in cases({**sizes, "batch": ROWS // microbatches}, devices // pp):
            if 1 < case.mesh.size and case.microbatches == 1 and case.mesh.size * pp >= least:
                yield over(case, pp, next(turn), microbatches)


def configured(case: Case, cfg: Any) -> Any:
    """The model that a case is about, given the one of its preset."""
    return replace(cfg, layers=case.layers, **dict(case.stacks)) if isinstance(case, PipelineCase) else cfg
