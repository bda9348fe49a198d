"""Strategies draw what is valid by construction, and all of it."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from fmeg import Array, Layout, Mesh
from fmeg.models import llama
from fmeg.sharding.spec import at_rest, resolve
from fmeg.testing import layouts, meshes, specs
from fmeg.testing.strategies import SIZES
from fmeg.testing.verify import config


@given(meshes(6))
def test_meshes_have_at_most_the_devices_asked_for(mesh):
    assert 1 <= mesh.size <= 6


SHAPES = [lambda m: m.size == 8, lambda m: 1 in m.sizes.values(), lambda m: m.axes[::-1] == ("dp", "tp")]


@pytest.mark.parametrize("wanted", SHAPES)
def test_meshes_of_every_shape(wanted):
    assert find(meshes(8), wanted)


@given(st.data())
def test_specs_divide_and_use_an_axis_once(data):
    mesh = data.draw(meshes(8))
    shape = tuple(data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), max_size=3)))
    spec = data.draw(specs(shape, mesh))
    axes = [a for entry in spec for a in entry]
    assert len(set(axes)) == len(axes)
    x = torch.arange(prod(shape)).reshape(shape)
    assert torch.equal(Array.from_global(x, mesh, spec).global_value(), x)


@settings(max_examples=200)
@given(layouts(16), st.sampled_from(["compute", "params", "opt"]))
def test_layouts_fit_every_tensor_of_a_model(pair, view):
    """No mesh axis on two dimensions of a parameter or activation, and every dimension divides."""
    mesh, layout = pair
    assert mesh.size <= 16
    assert layout.mesh_axes() <= set(mesh.axes)
    parameters = _strings(llama.logical_axes(config()))
    activations = ["batch seq", "batch res_seq embed", "batch seq heads head_dim", "batch seq vocab"]
    for text in parameters + (activations if view == "compute" else []):
        names = text.split()
        shape = [{**SIZES, "res_seq": SIZES["seq"], "layers": 2}[name] for name in names]
        spec = names if view == "compute" else at_rest(names, layout, view, mesh.sizes, shape)
        for n, axes in zip(shape, resolve(spec, layout.view(view), mesh.sizes), strict=True):
            assert n % mesh.axis_size(axes) == 0


def _strings(tree):
    return [s for v in tree.values() for s in ([v] if isinstance(v, str) else _strings(v))]


def compute(layout, name):
    return layout.view("compute").get(name, ())


WANTED = {
    "data": lambda m, p: m.axis_size(compute(p, "batch")) == 2,
    "hsdp": lambda m, p: len(compute(p, "batch")) == 2 and dict(p.params) == {"embed": ("dp",)} and m.size == 4,
    "zero1": lambda m, p: dict(p.opt) == {"embed": ("dp",)} and m.sizes["dp"] == 2,
    "zero3 over data and context": lambda m, p: dict(p.params) == {"embed": ("dp", "cp")} and m.size == 4,
    "several dimensions at rest": lambda m, p: (
        {k: v[-1] for k, v in p.params if m.sizes["dp"] == 2} == dict.fromkeys(("embed", "heads", "ff"), "dp")
    ),
    "split heads": lambda m, p: (
        (compute(p, "heads"), compute(p, "kv_heads")) == (("tp", "tr"), ("tp",)) and m.size == 4
    ),
    "whole key heads": lambda m, p: compute(p, "heads") == ("tr",) and m.sizes["tr"] == 2,
    "sequence": lambda m, p: compute(p, "res_seq") == ("cp", "tp") and m.size == 4,
    "ring": lambda m, p: p.attention == "ring" and m.sizes["cp"] == 4,
    "ulysses with heads": lambda m, p: p.attention == "ulysses" and m.sizes["cp"] == m.sizes["tp"] == 2,
    "an axis that nothing uses": lambda m, p: m.sizes["unused"] == 2,
    "any order": lambda m, p: m.axes.index("tp") < m.axes.index("dp"),
}


# Found is enough: nobody reads the smallest one.
QUICK = settings(max_examples=20_000, database=None, phases=[Phase.generate])


@pytest.mark.parametrize("kind", WANTED)
def test_layouts_of_every_kind(kind):
    def wanted(pair):
        try:
            return WANTED[kind](*pair)
        except (KeyError, ValueError):
            return False

    assert find(layouts(8), wanted, settings=QUICK)


@given(layouts(8, dict(batch=6, embed=9)))
def test_layouts_of_a_model_of_ones_own(pair):
    """Only the axes that there are; three rows a rank or two."""
    mesh, layout = pair
    assert layout.names() <= {"batch", "embed"}
    assert 6 % mesh.axis_size(layout.view("compute").get("batch", ())) == 0


@given(layouts(8, dict(batch=8), microbatches=4))
def test_layouts_cut_the_rows_of_a_microbatch(pair):
    mesh, layout = pair
    assert mesh.axis_size(layout.view("compute").get("batch", ())) <= 2


def test_hypothesis_shows_what_it_found():
    assert repr((Mesh(dp=2), Layout(batch="dp"))) == "(Mesh(dp=2), Layout(batch='dp'))"
