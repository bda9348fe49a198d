"""`P`, `Layout` and how names resolve to mesh axes."""

from __future__ import annotations

import pytest

from fmeg import Layout, P
from fmeg.program.errors import ShardingError
from fmeg.sharding.spec import logical_names, resolve


def test_entries_of_p():
    assert P("batch", None, ("cp", "tp")) == ("batch", None, ("cp", "tp"))
    assert repr(P("a", None)) == "P('a', None)" and P() == ()
    for bad in (3, ["a"], ("a", 1), ("a", None)):
        with pytest.raises(ShardingError, match="an entry must be a name, a tuple of names or None"):
            P("a", bad)


def test_views_inherit():
    layout = Layout(embed=None, ff="tp", params=dict(embed="dp"), opt=dict(ff=("tp", "dp")))
    assert layout.view("compute") == {"embed": (), "ff": ("tp",)}
    assert layout.view("params") == {"embed": ("dp",), "ff": ("tp",)}
    assert layout.view("opt") == {"embed": ("dp",), "ff": ("tp", "dp")}
    assert layout.names() == {"embed", "ff"} and layout.mesh_axes() == {"tp", "dp"}


def test_layouts_are_values():
    a, b = Layout(x="dp", params=dict(y="tp")), Layout(x=("dp",), params={"y": ("tp",)})
    assert a == b and hash(a) == hash(b) and a != Layout(x="dp")
    assert repr(a) == "Layout(x='dp', params=dict(y='tp'))"
    assert eval(repr(Layout(x=("a", "b"), y=None, attention="ring"))) == Layout(x=("a", "b"), y=(), attention="ring")
    with pytest.raises(AttributeError):
        a.attention = "ring"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout(x=3), "x must be a mesh axis name, a tuple of them or None, given 3"),
        (lambda: Layout(params=dict(y=("a", 2))), "y must be a mesh axis name"),
        (lambda: Layout(attention="magic"), "attention must be one of all_gather, ring, ulysses, given 'magic'"),
        (lambda: Layout(x=("a", "a")), "x names the mesh axis 'a' twice"),
    ],
)
def test_what_a_layout_cannot_say(make, message):
    with pytest.raises(ShardingError, match=message):
        make()


def test_check_names_what_does_not_exist_and_what_was_meant():
    layout = Layout(batch="dp", haeds="tp")
    layout.check(["dp", "tp"], None)
    with pytest.raises(ShardingError, match="names the mesh axis 'tp', but the mesh has 'dp'; add tp= to the Mesh"):
        layout.check(["dp"], None)
    with pytest.raises(ShardingError, match="mesh axis 'dp', but the mesh has none"):
        layout.check([], None)
    with pytest.raises(ShardingError, match="logical axis 'haeds', which nobody declared; did you mean 'heads'?"):
        layout.check(["dp", "tp"], ["batch", "heads", "ff"])
    with pytest.raises(ShardingError, match="'haeds', which nobody declared. Declared are 'batch'"):
        layout.check(["dp", "tp"], ["batch"])


SIZES = {"dp": 2, "tp": 2, "cp": 2, "one": 1}
TABLE = {"batch": ("dp",), "seq": ("cp", "tp"), "embed": (), "odd": ("one", "tp")}


@pytest.mark.parametrize(
    ("spec", "want"),
    [
        (P("batch", None), (("dp",), ())),
        (P("seq"), (("cp", "tp"),)),
        (P(("batch", "seq")), (("dp", "cp", "tp"),)),
        (P("dp", "embed"), (("dp",), ())),  # a mesh axis by its own name
        (P("odd", "one"), (("tp",), ())),  # axes of size 1 do not matter
        (P("unmapped", None), ((), ())),  # a logical axis that the layout leaves alone
        (P(), ()),
    ],
    ids=repr,
)
def test_resolve(spec, want):
    assert resolve(spec, TABLE, SIZES) == want


@pytest.mark.parametrize("spec", [P("batch", "batch"), P("batch", "dp"), P(("batch", "dp")), P("seq", "tp")], ids=repr)
def test_a_mesh_axis_shards_one_dimension(spec):
    with pytest.raises(ShardingError, match=r"w: \(.*\) puts two dimensions .or one twice. on the mesh axis '(dp|tp)'"):
        resolve(spec, TABLE, SIZES, "w")


def test_logical_names():
    assert logical_names("layers _ heads") == ("layers", None, "heads") and logical_names("") == ()
