"""`jit`: what is traced again, what moves at the edge, and what comes out."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg import Array, Layout, Mesh, P, TensorType, TrainState, jit, optim, random, scan, shard, tree, value_and_grad
from fmeg.ops.shard import _same
from fmeg.program.errors import ShardingError, TraceError
from fmeg.program.primitive import Primitive

F64 = torch.float64
MESH = Mesh(dp=2, tp=2)
X = torch.arange(32.0, dtype=F64).reshape(4, 8)


def counted(fn):
    """`fn`, and a list that grows at each of its calls: traces, under jit."""
    calls: list[int] = []

    def wrapped(*args):
        calls.append(1)
        return fn(*args)

    return wrapped, calls


# -- the cache --------------------------------------------------------------------------------------------------------
def test_one_trace_for_equal_types():
    fn, calls = counted(lambda a, b: a * b["s"])
    f = jit(fn, mesh=MESH)
    for i in range(3):
        f(X + i, {"s": torch.tensor(2.0 * i)})
    f(f(X, {"s": torch.tensor(1.0)}), {"s": torch.tensor(1.0)})  # an Array of the same type
    assert len(calls) == 1


def test_other_types_structures_and_static_values_are_other_traces():
    fn, calls = counted(lambda a, n: a["x"] * n if isinstance(a, dict) else a[0] * n)
    f = jit(fn)
    x = torch.ones(2, 3)
    for i, (a, n) in enumerate(
        [
            ({"x": x}, 2),
            ({"x": x.double()}, 2),
            ({"x": x[:1]}, 2),
            ([x], 2),
            ({"x": x}, 3),
            ({"x": x}, 3.0),
            ({"x": x}, True),
        ]
    ):
        assert torch.equal(f(a, n).global_value(), fn(a, n))
        assert len(calls) == 2 * (i + 1)
    f({"x": x}, 2)
    assert len(calls) == 2 * 7


def test_a_retrace_says_why(caplog):
    f = jit(lambda a, n: a["x"] * n)
    x = torch.ones(2, 3)
    with caplog.at_level("INFO", logger="fmeg"):
        for a, n in [({"x": x}, 2), ({"x": x[:1]}, 2), ({"x": x[:1]}, 3), ({"x": x[:1], "y": x}, 3), ({"x": x}, 2)]:
            f(a, n)
    said = [r.getMessage() for r in caplog.records]
    assert said[0] == "jit(<lambda>): traced again, because a.x is f32[1, 3], was f32[2, 3]"
    assert said[1].endswith("because n is 3, was 2")
    assert "the arguments have the structure" in said[2] and len(said) == 3


def test_static_values_are_compared_by_type_too():
    """1, 1.0 and True are equal in Python, and not the same program."""
    f = jit(lambda x, n: x * n)
    x = torch.ones(2, dtype=torch.int64)
    assert [f(x, n).dtype for n in (1, 1.0, True)] == [torch.int64, torch.float32, torch.int64]


def test_static_arguments_may_be_anything_hashable():
    f = jit(lambda x, fn, kind: {"y": fn(x), kind: 3, "none": None})
    out = f(X, torch.sin, "k")
    assert torch.equal(out["y"].global_value(), X.sin()) and out["k"] == 3 and out["none"] is None


@pytest.mark.parametrize("bad", [X.numpy(), {1, 2}], ids=["array", "set"])
def test_static_arguments_that_cannot_be_hashed(bad):
    with pytest.raises(
        TypeError, match=r"jit\(<lambda>\): b.k is a (ndarray|set); expected a tensor, an Array, or a static value"
    ):
        jit(lambda a, b: a)(X, {"k": bad})


def test_keyword_arguments():
    f = jit(lambda a, b, c=2: a * b + c, mesh=MESH)
    assert torch.equal(f(X, b=X, c=3).global_value(), X * X + 3)
    assert torch.equal(f(b=X, a=X).global_value(), X * X + 2)
    with pytest.raises(TypeError, match="c can only be passed by keyword"):
        jit(lambda a, *, c: a)(X, c=X)
    with pytest.raises(TypeError, match="missing a required argument"):
        f(b=X)


# -- trees ------------------------------------------------------------------------------------------------------------
@tree.register_dataclass(static=("scale",))
@dataclass
class Inputs:
    x: Tensor
    scale: float


class Outputs(NamedTuple):
    y: Tensor
    rest: dict


def test_dataclasses_and_named_tuples():
    fn = lambda a, b: Outputs(a.x * a.scale, {"b": b, "n": (a.x, None)})
    f = jit(fn, mesh=MESH, layout=Layout(r="dp"), axes={"a": {"x": "r _"}})
    got = f(Inputs(X, 0.5), [X])
    assert isinstance(got, Outputs) and isinstance(got.rest["b"], list) and got.rest["n"][1] is None
    for a, b in zip(tree.leaves(got), tree.leaves(fn(Inputs(X, 0.5), [X])), strict=True):
        assert torch.equal(a.global_value(), b)
    assert got.y.spec == (("dp",), ()) and got.rest["b"][0].spec == ((), ())


# -- the edge ---------------------------------------------------------------------------------------------------------
def test_an_array_where_it_is_wanted_does_not_move(monkeypatch):
    f = jit(lambda x: x * 2, mesh=MESH, layout=Layout(r="dp", c="tp"), axes={"x": "r c"})
    y = f(X)
    assert y.spec == (("dp",), ("tp",))
    monkeypatch.setattr(Array, "global_value", lambda self: pytest.fail("gathered"))
    monkeypatch.setattr(type(MESH.backend()), "scatter", lambda *a: pytest.fail("scattered"))
    z = f(f(y))
    monkeypatch.undo()
    assert torch.equal(z.global_value(), X * 8)


def test_an_array_elsewhere_is_brought():
    f = jit(lambda x: x * 2, mesh=MESH, layout=Layout(r="dp", c="tp"), axes={"x": "r c"})
    for mesh, spec in [
        (MESH, ("tp", "dp")),
        (Mesh(dp=4), ("dp",)),
        (Mesh(), ()),
        (Mesh(dp=2, tp=2, backend="vmap"), ("dp", "tp")),
    ]:
        got = f(Array.from_global(X, mesh, spec))
        assert got.spec == (("dp",), ("tp",)) and got.mesh == MESH and torch.equal(got.global_value(), X * 2)


def test_a_function_that_returns_its_input():
    for spec in ("r c", "_ c", "_ _"):
        f = jit(lambda x: (x, x, {"again": x}), mesh=MESH, layout=Layout(r="dp", c="tp"), axes={"x": spec})
        a, b, c = f(X)
        assert torch.equal(a.global_value(), X) and a.spec == b.spec == c["again"].spec


def test_calling_twice_gives_the_same():
    """Nothing that a step does in place reaches what it was given."""
    opt = optim.adamw(1e-1)
    loss = lambda p, b: ((torch.tanh(b @ p["w"]) ** 2).sum(), b.shape[0])

    def step(state, batch):
        (value, _), g = value_and_grad(loss, microbatches=2)(state.params, batch)
        updates, new = opt.update(g, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), value

    w = torch.randn(8, 8, dtype=F64)
    state, kept, given = TrainState.create({"w": w}, opt, {"w": "a b"}), w.clone(), X.clone()
    for mesh in (Mesh(), MESH):
        f = jit(step, mesh=mesh, layout=Layout(batch="dp", b="tp") if mesh.size > 1 else None)
        one, two = f(state, X), f(state, X)
        s = one[0]
        three, four = f(s, X), f(s, X)
        for a, b in ((one, two), (three, four)):
            for p, q in zip(tree.leaves(a), tree.leaves(b), strict=True):
                assert torch.equal(p.global_value(), q.global_value())
        assert torch.equal(w, kept) and torch.equal(given, X)


def test_scalars():
    f = jit(lambda x, s: (x.sum() * s, s + 1), mesh=MESH, layout=Layout(r="dp"), axes={"x": "r _"})
    a, b = f(X, torch.tensor(2))
    assert (a.shape, float(a), int(b), b.dtype) == ((), float(X.sum() * 2), 3, torch.int64)
    assert int(jit(lambda s: s * 2, mesh=MESH)(torch.tensor(4))) == 8


def test_tensors_that_require_grad_come_out_without():
    x = X.clone().requires_grad_()
    assert not jit(lambda x: x * 2)(x).global_value().requires_grad
    with torch.no_grad():
        loss = lambda p, b: ((p * b).sum(), 1)
        (_, _), g = jit(lambda params, batch: value_and_grad(loss)(params, batch))(x, X)
    assert torch.equal(g.global_value(), X)


# -- meshes -----------------------------------------------------------------------------------------------------------
def small(params, batch):
    layer = lambda c, w: (c + shard(torch.tanh(c @ w) @ w.mT, P("batch", None)), None)
    return F.layer_norm(scan(layer, batch, params["w"])[0], (8,)).softmax(-1)


PARAMS = {"w": torch.arange(192.0, dtype=F64).reshape(3, 8, 8).sin() * 0.5}
AXES = {"params": {"w": "layers embed ff"}, "batch": "batch _"}


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(dp=1), Mesh(dp=1, tp=1), Mesh(backend="loop"), Mesh(dp=1, backend="vmap")], ids=repr
)
def test_a_mesh_of_one_is_plain_torch_bit_for_bit(mesh):
    layout = Layout(**dict(zip(("batch", "seq"), mesh.axes, strict=False)))
    assert torch.equal(jit(small, mesh=mesh, layout=layout)(PARAMS, X).global_value(), small(PARAMS, X))
    assert torch.equal(jit(small)(PARAMS, X).global_value(), small(PARAMS, X))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
@pytest.mark.parametrize("sizes", [dict(dp=1, tp=2), dict(dp=4, tp=1), dict(dp=2, tp=2), dict(dp=1, tp=1)], ids=str)
def test_axes_of_size_one_change_nothing(sizes, backend):
    layout = Layout(batch="dp", ff="tp", params=dict(embed="dp"))
    f = jit(small, mesh=Mesh(sizes, backend=backend), layout=layout, axes=AXES)
    got = f(PARAMS, X)
    assert torch.allclose(got.global_value(), small(PARAMS, X), rtol=1e-13, atol=1e-13)
    assert got.spec == (("dp",) if sizes["dp"] > 1 else (), ())


@pytest.mark.parametrize(
    "view", [dict(), dict(embed="dp"), dict(embed=("dp", "tp"), ff=None), dict(layers=None, ff=("tp", "dp"))], ids=str
)
def test_inference_with_parameters_at_rest_anywhere(view):
    """Without a gradient parameters are gathered when used, too; a layer at a time inside a scan."""
    layout = Layout(batch="dp", ff="tp", params=view)
    f = jit(small, mesh=MESH, layout=layout, axes=AXES, strict=True)
    assert torch.allclose(f(PARAMS, X).global_value(), small(PARAMS, X), rtol=1e-13, atol=1e-13)
    e = f.lower(PARAMS, X).explain().select(reason="parameter")
    if view.get("embed"):
        (row,) = e.rows
        assert (row.kind, row.segment, row.count) == ("all_gather", "scan body", 3)
    f = jit(lambda params: params["w"] * 2, mesh=MESH, layout=layout, axes={"params": AXES["params"]})
    assert torch.equal(f(PARAMS).global_value(), PARAMS["w"] * 2)


# -- what comes out where ---------------------------------------------------------------------------------------------
LAYOUT = Layout(batch="dp", ff="tp", params=dict(embed="dp"), opt=dict(embed=("dp",)))


def test_results_live_where_they_were_made():
    f = jit(lambda batch: (batch * 2, batch.sum(0), batch.sum(), batch.sum(1)), mesh=MESH, layout=LAYOUT)
    assert [a.spec for a in f(X)] == [(("dp",), ()), ((),), (), (("dp",),)]


def test_out_axes():
    init = lambda key: {"w": random.normal(key, (4, 8)), "b": torch.zeros(8)}
    f = jit(init, mesh=MESH, layout=LAYOUT, out_axes={"w": "embed ff", "b": "ff"})
    got = f(random.key(0))
    assert {k: a.spec for k, a in got.items()} == {"w": (("dp",), ("tp",)), "b": (("tp",),)}
    assert torch.equal(got["w"].global_value(), init(random.key(0))["w"])
    for axes, message in [
        ({"w": "embed ff"}, r"out_axes.b, of shape \(8,\), has no logical axes"),
        ({"w": "embed", "b": "ff"}, r"out_axes.w has shape \(4, 8\), but its logical axes are 'embed'"),
        ({"v": "embed ff", "b": "ff", "w": "embed ff"}, "given for out_axes.v, which is not there"),
    ]:
        with pytest.raises(ShardingError, match=message):
            jit(init, mesh=MESH, layout=LAYOUT, out_axes=axes)(random.key(0))


def test_states_come_out_in_their_views():
    opt = optim.adamw(1e-1)
    axes = {"w": "embed ff", "b": "ff"}
    layout = Layout(batch="dp", ff="tp", opt=dict(embed="dp"))
    init = lambda key: TrainState.create({"w": random.normal(key, (4, 8)), "b": torch.zeros(8)}, opt, axes)
    s = jit(init, mesh=MESH, layout=layout)(random.key(0))
    assert {k: a.spec for k, a in s.params.items()} == {"w": ((), ("tp",)), "b": (("tp",),)}
    specs = {p: a.spec for p, a in zip(tree.paths(s), tree.leaves(s), strict=True)}
    moments = {p: spec for p, spec in specs.items() if p.startswith("opt") and p.endswith(".w")}
    assert set(moments.values()) == {(("dp",), ("tp",))} and len(moments) == 2
    assert specs["step"] == ()


def test_one_value_in_two_roles_comes_out_in_both_places():
    """An average of the parameters that begins as the parameters: the same tensor, at rest in two views."""

    class Average(NamedTuple):
        init: object

    axes = {"w": "embed ff"}
    init = lambda key: TrainState.create({"w": random.normal(key, (4, 8))}, Average(lambda p: {"mean": p}), axes)
    s = jit(init, mesh=MESH, layout=Layout(opt=dict(embed="dp"), ff="tp"))(random.key(0))
    assert s.params["w"].spec == ((), ("tp",)) and s.opt["mean"]["w"].spec == (("dp",), ("tp",))
    assert torch.equal(s.params["w"].global_value(), s.opt["mean"]["w"].global_value())


def test_parameters_are_what_is_differentiated_by():
    """An argument of any name: its gradient, its rest and its use follow the layout."""
    loss = lambda p, b: ((small(p, b) ** 2).sum(), 1)
    by_name = {
        name: jit(fn, mesh=MESH, layout=LAYOUT, axes={name: AXES["params"], "batch": "batch _"}, strict=True)
        for name, fn in {
            "params": lambda params, batch: value_and_grad(loss)(params, batch),
            "weights": lambda weights, batch: value_and_grad(loss)(weights, batch),
        }.items()
    }
    tables = {name: f.lower(PARAMS, X).explain().counts() for name, f in by_name.items()}
    assert tables["weights"] == tables["params"] and tables["params"]["reduce_scatter"] > 0
    got = [f(PARAMS, X)[1]["w"] for f in by_name.values()]
    assert got[0].spec == got[1].spec == ((), ("dp",), ("tp",)) and torch.equal(
        got[0].global_value(), got[1].global_value()
    )


# -- inside other things ----------------------------------------------------------------------------------------------
def test_a_jitted_function_inside_another_is_its_plain_self():
    inner = jit(lambda x: torch.tanh(x) * 2, mesh=Mesh(dp=8))
    f = jit(lambda x: inner(x) + 1, mesh=MESH, layout=Layout(r="dp"), axes={"x": "r _"})
    assert torch.equal(f(X).global_value(), torch.tanh(X) * 2 + 1)


def test_a_transform_goes_inside():
    f = lambda x: (x**3).sum()
    assert torch.allclose(jit(torch.func.grad(f), mesh=MESH)(X).global_value(), 3 * X**2)
    with pytest.raises(TraceError, match=r"Put the transform inside: jit\(torch.func.grad\(f\)\)"):
        torch.func.grad(jit(f))(X)
    with pytest.raises(TraceError, match="Put the transform inside"):
        torch.func.vmap(jit(f))(X)


def test_lower_needs_no_data():
    low = jit(small, mesh=MESH, layout=LAYOUT, axes=AXES).lower(
        {"w": TensorType((3, 8, 8), F64)}, TensorType((4, 8), F64)
    )
    got = low.compile()([Array.from_global(PARAMS["w"], MESH, (None, "dp", "tp")), X])
    assert torch.allclose(got.global_value(), small(PARAMS, X), rtol=1e-13, atol=1e-13)
    assert "all_gather" in low.text() and "all_gather" not in low.text("global")
    with pytest.raises(ValueError, match="'local' or 'global', given 'x'"):
        low.text("x")


# -- donation ---------------------------------------------------------------------------------------------------------
def test_a_donated_array_is_consumed():
    f = jit(
        lambda state, x: (state["a"] + x, state["b"]),
        mesh=MESH,
        layout=Layout(r="dp"),
        axes={"x": "r _"},
        donate=("state",),
    )
    state = {"a": Array.from_global(X, MESH), "b": Array.from_global(X, MESH)}
    x = Array.from_global(X, MESH, ("dp",))
    one, passed = f(state, x)
    assert (
        torch.equal(one.global_value(), 2 * X)
        and torch.equal(passed.global_value(), X)
        and torch.equal(x.global_value(), X)
    )
    assert "donated" in repr(state["a"]) and state["a"].shape == (4, 8)
    for use in (
        lambda: state["a"].global_value(),
        lambda: f(state, x),
        lambda: state["b"].numpy(),
        lambda: state["b"].addressable_shards,
    ):
        with pytest.raises(ShardingError, match=r"f64\[4, 8\], was donated to <lambda>.*Use what <lambda> returned"):
            use()


def test_a_donated_tensor_is_the_callers():
    f = jit(lambda state: state * 2, donate="state")
    assert torch.equal(f(X).global_value(), f(X).global_value())


def test_donation_names_parameters():
    with pytest.raises(ShardingError, match="donate names 'stat', which is not a parameter; it has state"):
        jit(lambda state: state, donate=("stat",))


@pytest.mark.parametrize("mesh", [Mesh(), MESH], ids=repr)
def test_donated_memory_is_free_after_its_last_use(mesh):
    alive: list[bool] = []
    watched: list[weakref.ref] = []

    def probe(x: Tensor) -> Tensor:
        alive.append(any(r() is not None for r in watched))
        return x * 1

    node = Primitive("probe", probe, rule=_same, fake=lambda x: x * 1)

    def fn(state: Tensor) -> Tensor:
        y = shard(torch.sin(state), P(None, None))
        return node(node(y).cos())

    for donate in ((), ("state",)):
        alive.clear()
        blocks = [torch.randn(4 // mesh.size, 8, dtype=F64) for _ in range(mesh.size)]
        watched = [weakref.ref(b) for b in blocks]
        a = Array.from_local(blocks, mesh, (mesh.axes,))
        del blocks
        f = jit(fn, mesh=mesh, layout=Layout(r=mesh.axes or None), axes={"state": "r c"}, donate=donate)
        f(a)
        gc.collect()
        assert alive[-1] is (not donate), (donate, alive)
