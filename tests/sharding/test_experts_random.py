"""Random meshes, layouts and routings of a layer of experts."""

from __future__ import annotations

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fmeg import Layout, Mesh, value_and_grad
from fmeg.program.errors import ShardingError
from fmeg.testing import assert_equivalent
from tests.ops.experts import AXES, BATCH_AXES, loss, problem
from tests.sharding.test_experts import KINDS, ROUTINGS


@st.composite
def layouts(draw):
    """A mesh of up to twelve devices, and a layout: axes of experts and of tokens overlap as they like."""
    mesh = draw(st.dictionaries(st.sampled_from("abc"), st.sampled_from([1, 2, 3]), min_size=1))
    size = 1
    for n in mesh.values():
        size *= n
    assume(size <= 12)

    def some(taken=()):
        free = [a for a in mesh if a not in taken]
        return tuple(draw(st.lists(st.sampled_from(free), unique=True, max_size=2))) if free else ()

    batch, experts = some(), some()
    seq, inner = some(batch), some(experts)
    view = draw(st.sampled_from(["params", "grads", "opt"]))
    return mesh, Layout(
        batch=batch,
        seq=seq,
        experts=experts,
        expert_ff=inner,
        dispatch=draw(st.sampled_from(KINDS)),
        dispatch_bound=draw(st.sampled_from([None, float(size)])),
        **{view: dict(embed=some((*experts, *inner)))},
    )


SHAPES = st.fixed_dictionaries(
    dict(
        batch=st.sampled_from([6, 12]),
        seq=st.sampled_from([6, 12]),
        ff=st.just(6),
        experts=st.sampled_from([6, 12]),
        k=st.sampled_from([1, 2, 6]),
        layers=st.sampled_from([1, 2]),
        routing=st.sampled_from(ROUTINGS),
        drop=st.booleans(),
    )
)


@settings(max_examples=25)
@given(
    layouts(), SHAPES, st.sampled_from(["combine", "rows"]), st.sampled_from(["loop", "vmap"]), st.sampled_from([1, 2])
)
def test_equals_one_device(where, shape, weighted, backend, microbatches):
    (mesh, layout), (params, batch) = where, problem(**shape)
    batch["x"] = params.pop("x")
    axes = {"params": {k: AXES[k] for k in params}, "batch": {k: {**BATCH_AXES, **AXES}[k] for k in batch}}

    def step(params, batch):
        def of(p, b):
            return loss({**p, "x": b["x"]}, b, weighted)

        return value_and_grad(of, microbatches=microbatches)(params, batch)

    try:
        assert_equivalent(step, params, batch, mesh=Mesh(mesh, backend=backend), layout=layout, axes=axes, strict=True)
    except ShardingError as e:
        assert "divide" in str(e)
        assume(False)
