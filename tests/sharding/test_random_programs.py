"""Random programs under random layouts: values and gradients are those of one device, whatever is sharded how."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmeg import Layout, Mesh, jit, tree, value_and_grad
from fmeg.program.ir import Program
from fmeg.program.structured import loop_of
from tests.program.random_programs import BINARY, INDEXED, UNARY, build, draw, inputs

X, Y, Z, I = inputs()
PARAMS, BATCH = {"x": X, "y": Y, "z": Z}, {"i": I}
AXES = {"params": {k: f"{k}0 {k}1" for k in "xyz"}, "batch": {"i": "i0 i1"}}
MESHES = [Mesh(a=2, b=2), Mesh(b=2, a=2), Mesh(a=2, b=1), Mesh(a=4, b=1), Mesh(a=2, b=2, backend="vmap")]
ENTRIES = [((), ()), ("a", ()), ((), "b"), ("a", "b"), ("b", "a"), (("a", "b"), ()), (("b", "a"), ()), ((), ("b", "a"))]


def view(leaves: str) -> st.SearchStrategy[dict]:
    """Mesh axes of both dimensions of each leaf."""
    each = {k: st.sampled_from(ENTRIES) for k in leaves}
    return st.fixed_dictionaries(each).map(lambda d: {f"{k}{i}": e[i] for k, e in d.items() for i in (0, 1)})


@st.composite
def layouts(draw) -> Layout:
    views = {k: draw(view("xyz")) for k in ("params", "opt") if draw(st.booleans())}
    return Layout(**draw(view("xyzi")), **views)


def bodies(program: Program) -> Iterator[Program]:
    """A local Program and those inside its loops."""
    yield program
    for node in program.nodes:
        if (loop := loop_of(node)) is not None:
            yield from bodies(loop.body)


def check(steps: list, mesh: Mesh, layout: Layout) -> None:
    fn = build(steps)

    def values(params, batch):
        return fn(params["x"], params["y"], params["z"], batch["i"])

    def step(params, batch):
        return value_and_grad(lambda p, b: (values(p, b)[0] * 1, 2))(params, batch)

    for f in (values, step):
        for body in bodies(jit(f, mesh=mesh, layout=layout, axes=AXES).lower(PARAMS, BATCH).program):
            body.check()
        want = f(PARAMS, BATCH)
        got = jit(f, mesh=mesh, layout=layout, axes=AXES)(PARAMS, BATCH)
        for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
            assert a.dtype == b.dtype
            assert torch.allclose(a.global_value(), b, rtol=1e-10, atol=1e-10)


@settings(max_examples=25)
@given(draw(5), st.sampled_from(MESHES), layouts())
def test_random_programs_under_random_layouts(steps, mesh, layout):
    check(steps, mesh, layout)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.sampled_from(MESHES), layouts())
@pytest.mark.parametrize("op", [*UNARY, *BINARY, *INDEXED])
def test_each_operation(op, mesh, layout):
    check([(op, 0, 1)], mesh, layout)


def test_carries_that_swap_their_placements():
    """No placement of the two carries is the body's own: both end up where they agree."""
    layout = Layout(x0="b", y0="b", z0=("a", "b"), i0=("b", "a"))
    check([("scan, carries", 2, 0)], Mesh(a=2, b=1), layout)
    check([("scan, carries", 2, 0)], Mesh(a=2, b=2), layout)


def test_a_constant_that_is_reshaped_is_made_in_whole_rows():
    """Only the major part of a merged dimension may be sharded, of values made on demand too."""

    def fn(params, batch):
        return params["x"] * torch.arange(16.0, dtype=torch.float64).reshape(4, 4)

    for columns in ("a", "b", ("a", "b")):
        got = jit(fn, mesh=Mesh(a=2, b=2), layout=Layout(x1=columns), axes=AXES)(PARAMS, BATCH)
        assert torch.equal(got.global_value(), fn(PARAMS, BATCH))
