"""Experts in low precision on a mesh: in float64 the numbers are those of one device, wherever experts and rows lie."""

from __future__ import annotations

import pytest

import fmeg
from fmeg import Layout, Mesh, precision
from fmeg.program.errors import ShardingError
from fmeg.testing import assert_equivalent
from tests.ops import experts

AXES = {k: a.replace("experts embed", "experts expert_embed") for k, a in experts.AXES.items()}
AXES |= {"w_down": "layers experts expert_ff expert_embed"}
BATCH_AXES, loss, problem = experts.BATCH_AXES, experts.loss, experts.problem

ALL = dict(match="*w_*", skip_first=0, skip_last=0)
RECIPES = {
    "tensorwise": precision.fp8(**ALL),
    "rowwise": precision.fp8("rowwise", **ALL),
    "blockwise": precision.fp8("blockwise", block=4, **ALL),
    "mxfp8": precision.mxfp8(block=2, **ALL),
    "nvfp4": precision.nvfp4(block=4, **ALL),
    "delayed": precision.fp8("delayed", history=2, **ALL),
}
MESHES = {
    "dp": (dict(dp=4), dict(batch="dp")),
    "ep": (dict(dp=4), dict(batch="dp", experts="dp")),
    "ep of a part": (dict(dp=2, ep=2), dict(batch=("dp", "ep"), experts="ep")),
    "ep over cp": (dict(dp=2, cp=2), dict(batch="dp", seq="cp", experts=("cp", "dp"))),
    "ep, etp": (dict(dp=2, tp=2), dict(batch="dp", experts="dp", expert_ff="tp")),
    "etp, sp": (dict(dp=2, tp=2), dict(batch="dp", seq="tp", expert_ff="tp")),
    "ep at home": (dict(dp=2, tp=2), dict(batch="dp", experts="tp")),
    "gathered": (dict(dp=2, cp=2), dict(batch="dp", seq="cp", experts=("dp", "cp"), dispatch="all_gather")),
    "bounded": (dict(dp=4), dict(batch="dp", experts="dp", dispatch_bound=4.0)),
    "zero3": (dict(dp=2, tp=2), dict(batch=("dp", "tp"), experts="tp", params=dict(expert_embed="dp"))),
    "blocks cut": (dict(tp=4), dict(expert_ff="tp")),  # in four: of two blocks of four
}


def _step(recipe):
    """Two steps, so that delayed scales are of the first."""
    grad = fmeg.value_and_grad(lambda p, b: loss(p, b, "rows"), precision=recipe)

    def step(p, b):
        if not recipe.delayed:
            return grad(p, b)
        (_, aux), _ = grad(p, b)
        return grad(p, b, amax=aux["amax"])

    return step


def _check(name, where, routing="random", backend=None, **options):
    mesh, layout = MESHES[where]
    params, batch = problem(embed=8, ff=8, layers=2, routing=routing, drop=True)
    axes = {"p": AXES, "b": {k: BATCH_AXES[k] for k in batch}}
    on = Mesh(mesh, backend=backend) if backend else Mesh(mesh)
    assert_equivalent(
        _step(RECIPES[name]), params, batch, mesh=on, layout=Layout(**layout), axes=axes, tol=1e-11, **options
    )


SOME = ["dp", "ep of a part", "ep, etp", "bounded", "zero3"]


@pytest.mark.parametrize(
    ("name", "where"),
    [(n, w) for n in RECIPES for w in (MESHES if n in ("tensorwise", "blockwise") else SOME)],
)
def test_a_mesh_is_one_device(name, where):
    _check(name, where, strict=where != "blocks cut")


@pytest.mark.parametrize("where", ["dp", "ep over cp", "ep, etp"])
@pytest.mark.parametrize("routing", ["empty", "one expert", "in order", "skewed"])
def test_wherever_tokens_go(where, routing):
    _check("blockwise", where, routing, strict=True)


@pytest.mark.parametrize("where", ["dp", "bounded"])
def test_vmap_meshes_too(where):
    for name in ("tensorwise", "rowwise", "nvfp4"):
        _check(name, where, backend="vmap")


def _lowered(name, where):
    mesh, layout = MESHES[where]
    params, batch = problem(embed=8, ff=8, layers=2)
    axes = {"p": AXES, "b": {k: BATCH_AXES[k] for k in batch}}
    f = fmeg.jit(_step(RECIPES[name]), mesh=Mesh(mesh), layout=Layout(**layout), axes=axes, strict=True)
    return f.lower(params, batch).explain()


def test_an_expert_on_one_rank_asks_nobody_for_its_scales():
    """Its rows and its matrices lie there. Where its rows lie on several, or its columns do, a maximum is reduced."""
    plain = fmeg.jit(
        lambda p, b: fmeg.value_and_grad(lambda p, b: loss(p, b, "rows"))(p, b),
        mesh=Mesh(dp=4),
        layout=Layout(**MESHES["ep"][1]),
        axes={"p": AXES, "b": {k: BATCH_AXES[k] for k in ("indices", "target")}},
    )
    params, batch = problem(embed=8, ff=8, layers=2)
    want = plain.lower(params, batch).explain().executed()
    for name in ("rowwise", "blockwise"):
        assert _lowered(name, "ep").executed() == want, name
    sent = _lowered("tensorwise", "ep").executed()  # two layers: one scale for all tokens, one for their cotangents
    assert sent == {**want, "all_reduce": want["all_reduce"] + 4}
    assert _lowered("tensorwise", "ep, etp").executed()["all_reduce"] > sent["all_reduce"]
    assert _lowered("blockwise", "dp").executed()["all_gather"] >= 1  # all tokens' choices, to know places


@pytest.mark.parametrize("name", ["tensorwise", "delayed"])
@pytest.mark.parametrize("where", ["ep", "ep over cp"])
def test_tokens_travel_in_a_byte(name, where):
    table = str(_lowered(name, where))
    for way, dtype in (("scan body  ", "f8e4m3"), ("scan body backward", "f8e5m2")):
        wide = [
            line for line in table.splitlines() if line.startswith(way) and "exchange_rows" in line and ", 8]" in line
        ]
        assert len(wide) == (2 if name == "tensorwise" else 4) and sum(dtype in line for line in wide) == len(wide) // 2


def test_blocks_may_lie_on_several_ranks():
    recipe = precision.fp8("blockwise", block=4, **ALL)
    params, batch = problem(embed=8, ff=8, layers=1)
    axes = {"p": AXES, "b": {k: BATCH_AXES[k] for k in batch}}
    grad = fmeg.value_and_grad(lambda p, b: loss(p, b, "rows"), precision=recipe)
    mesh, layout = Mesh(ta=2, tb=2), Layout(expert_ff=("ta", "tb"))
    assert_equivalent(
        lambda p, b: grad(p, b), params, batch, mesh=mesh, layout=layout, axes=axes, tol=1e-11, strict=True
    )


def test_strict_refuses_blocks_that_are_cut_unevenly():
    with pytest.raises(ShardingError, match="strict: .*all_gather"):
        _check("blockwise", "blocks cut", strict=True)
