"""The pipeline matrix: what it has, and that its rows are checked bit for bit where they must be."""

from __future__ import annotations

import pytest

from fmeg import tree
from fmeg.testing.pipelines import NAMES, PipelineCase, alone, pipeline_cases
from fmeg.testing.verify import check, config, sizes_of

CFG = config()
FOUND = list(pipeline_cases(sizes_of(CFG)))


def test_the_matrix_has_every_schedule_alone_and_pairs_triples_and_quadruples():
    assert len({c.name for c in FOUND}) == len(FOUND) >= 120
    assert max(c.mesh.size for c in FOUND) == 16
    assert {(c.schedule, c.mesh.size) for c in FOUND if c.exact} >= {(name, pp) for name in NAMES for pp in (2, 4)}
    rest = [c.name.split(maxsplit=2)[2] for c in FOUND if not c.exact]
    for others in ("tp2", "tp2+sp", "gather2", "ring2", "ulysses2", "dp2", "zero1", "zero3", "hsdp"):
        assert others in rest
    for others in ("ring2 tp2+sp", "dp2 ulysses2", "zero1 tp2+sp", "zero3 ring2", "hsdp tp2+sp", "zero3 ring2 tp2"):
        assert others in rest
    assert {c.schedule for c in FOUND if not c.exact} == set(NAMES)


def test_wider_meshes_on_request():
    wide = list(pipeline_cases(sizes_of(CFG), devices=32))
    assert max(c.mesh.size for c in wide) == 32 and len(wide) > len(FOUND)
    assert {c.mesh.sizes["pp"] for c in wide} >= {2, 3, 4, 8, 16}
    assert max(c.mesh.size for c in pipeline_cases(sizes_of(CFG), devices=4)) == 4


ENDS = ["layers 7 stages 4-1-2", "zb_v m5 rows 10 layers 8", " tp2+sp", " zero3 ring2 tp2", "5-1-0 scans 2+3+1"]


@pytest.mark.parametrize("end", ENDS)
def test_rows(end):
    case = next(c for c in FOUND if c.name.endswith(end))
    row = check(case, CFG, steps=2)
    assert row.ok and not row.error and row.schedule == case.schedule
    assert row.grad_error == 0 or not case.exact or case.preset


def test_one_bit_is_enough_to_fail(monkeypatch):
    """A gradient that is off by one bit passes where sums may be split, and not where only the pipeline differs."""
    import fmeg.testing.verify as module

    def nudged(cfg, *args):
        out = before(cfg, *args)
        ((state, metrics), *more) = out
        kept, *rest = state.opt
        kept = tree.map(lambda g: g.nextafter(2 * g), kept)
        return [(state.next(params=state.params, opt=type(state.opt)((kept, *rest))), metrics), *more]

    before = module.on_one_device
    monkeypatch.setattr(module, "on_one_device", nudged)
    exact = alone("1f1b", 2, 4)
    row = check(exact, CFG, steps=1)
    assert not row.error and 0 < row.grad_error < 1e-14 and not row.ok
    (loose,) = [c for c in FOUND if not c.exact and not c.preset and c.name.endswith(" dp2") and c.mesh.size == 4]
    assert check(loose, CFG, steps=1).ok


def test_what_does_not_fit_is_a_row_with_an_error():
    row = check(PipelineCase("x", alone("1f1b", 2).mesh, alone("1f1b", 2).layout, 4, "1f1b", stages=(1, 1)), CFG)
    assert not row.ok and "the model has 4 layers" in row.error
