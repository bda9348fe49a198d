"""Who decides a placement: weights stay, cotangents mirror, values move once; what nobody asked for is named."""

from __future__ import annotations

import pytest
import torch

from fmeg import Layout, Mesh, P, TensorType, einsum, jit, ops, shard, value_and_grad
from fmeg.program.errors import ShardingError
from fmeg.program.ir import TensorType as Type
from fmeg.program.rule import rule
from fmeg.sharding.policy import Solver, drop_minor, split_dims
from fmeg.sharding.value import Placed, Placement

F64 = torch.float64
MESH = Mesh(dp=2, tp=2)
SIZES = {"dp": 2, "tp": 2}


def placed(*dims: str, weight: bool = False, pending: str = "", shape: tuple[int, ...] = ()) -> Placed:
    """A value of 8 x 8 … elements; each dimension's axes as "dp tp"."""
    home = Placement(tuple(tuple(d.split()) for d in dims), frozenset(pending.split()))
    return Placed(Type(shape or (8,) * len(dims), F64), home, weight=weight)


def solve(text: str, *operands: Placed, hints=None, linear=(), joint=False, backward=False, whole=(), **kw):
    r = rule(
        text, [p.type.shape for p in operands], linear=frozenset(linear), joint=joint, whole=frozenset(whole), **kw
    )
    return Solver(r, operands, hints or [None] * len(r.outs), SIZES, backward).solve()


def dims(*ds: str, pending: str = "") -> Placement:
    return placed(*ds, pending=pending).home


# -- one node ---------------------------------------------------------------------------------------------------------
def test_the_same_factor_on_both_stays():
    s = solve("a b, a b -> a b", placed("dp", "tp"), placed("dp", "tp"))
    assert s.outs == [dims("dp", "tp")] and s.reasons == ["", ""]


def test_on_one_only_the_other_is_sliced():
    s = solve("a b, a b -> a b", placed("dp", ""), placed("", ""))
    assert s.targets == [dims("dp", ""), dims("dp", "")] and s.reasons == ["", "slice"]


def test_weights_stay_activations_move():
    """ZeRO-3's conflict, had the weight not been gathered: the axis belongs to the weight."""
    s = solve("b d, d f -> b f", placed("tp", ""), placed("", "tp", weight=True), linear=(0, 1))
    assert s.outs == [dims("", "tp")]
    assert s.targets == [dims("", ""), dims("", "tp")] and s.reasons == ["weights stay", ""]


def test_a_contraction_of_sharded_factors_is_pending():
    s = solve("b d, d f -> b f", placed("dp", "tp"), placed("tp", "", weight=True), linear=(0, 1))
    assert s.outs == [dims("dp", "", pending="tp")]


def test_the_larger_activation_wins_and_the_loser_is_a_conflict():
    large, small = placed("", "tp", shape=(8, 64)), placed("tp", shape=(8,))
    s = solve("a b, a -> a b", large, small)
    assert s.targets == [large.home, dims("")] and s.reasons == ["", "conflict"]


def test_a_mirror_claims_before_activations():
    s = solve(
        "b f, d f -> b d", placed("", "tp"), placed("dp", "tp"), hints=[dims("tp", "")], linear=(0, 1), backward=True
    )
    assert s.outs == [dims("tp", "dp")]
    assert s.reasons[0] == "mirror"


def test_pending_sums_pass_what_is_linear():
    assert solve("a -> a", placed("", pending="dp"), linear=(0,)).outs == [dims("", pending="dp")]
    nonlinear = solve("a -> a", placed("", pending="dp"))
    assert nonlinear.outs == [dims("")] and nonlinear.reasons == ["pending sum"]
    product = solve("a b, b c -> a c", placed("", "", pending="dp"), placed("", "tp"), linear=(0, 1))
    assert product.outs == [dims("", "tp", pending="dp")]
    both = solve("a b, b c -> a c", placed("", "", pending="dp"), placed("", "", pending="dp"), linear=(0, 1))
    assert both.outs == [dims("", "")]


def test_sums_of_pending_sums():
    """Linear in both together: all are pending, or none is; a placed one decides where the other's sum goes."""
    both = solve(
        "a b, a b -> a b", placed("", "", pending="dp"), placed("", "", pending="dp"), linear=(0, 1), joint=True
    )
    assert both.outs == [dims("", "", pending="dp")]
    one = solve("a b, a b -> a b", placed("", "", pending="dp"), placed("dp", ""), linear=(0, 1), joint=True)
    assert one.targets[0] == dims("dp", "") and one.outs == [dims("dp", "")]
    whole = solve("a b, a b -> a b", placed("", "", pending="dp"), placed("", ""), linear=(0, 1), joint=True)
    assert whole.outs == [dims("", "")]


def test_a_constant_joins_a_pending_scalar_once():
    """A whole 0-d value becomes a term of a sum on one rank only, be it made on demand or at hand."""
    x, y = torch.arange(32.0, dtype=F64).reshape(4, 8), torch.tensor(5.0, dtype=F64)

    def fn(x, y):
        one, s = torch.full((), 3.0, dtype=F64), x.sum()
        chosen = torch.where(y > 0, one, s), torch.where(y < 0, one, s)
        return s + one, one - s, s + y, torch.stack([s, one, y]).sum(), *chosen

    for rows in ("dp", ("tp", "dp")):
        got = jit(fn, mesh=MESH, layout=Layout(r=rows), axes={"x": "r _"})(x, y)
        assert [float(a) for a in got] == [float(b) for b in fn(x, y)]


def test_what_must_be_whole_is_gathered_with_a_reason():
    assert solve("a b -> a b", placed("", "tp"), whole="b").reasons == ["needs a whole dimension"]
    assert solve("a b -> a b", placed("", "tp"), whole="b", declared=True).reasons == ["rule"]
    s = solve("a b -> a b", placed("", "tp"), whole="b", prefer={"b": "a"})
    assert s.outs == [dims("tp", "")]


def test_axes_that_do_not_divide_are_not_taken():
    s = solve("a b, a b -> a b", placed("", "", shape=(3, 8)), placed("", "tp", shape=(3, 8)))
    assert s.outs == [dims("", "tp")]


def test_merged_dimensions():
    mesh = {"dp": 2, "tp": 4}
    assert split_dims((("a", "b"),), (("dp", "tp"),), {"a": 2, "b": 8}, mesh) == {"a": ("dp",), "b": ("tp",)}
    assert split_dims((("a", "b"),), (("tp",),), {"a": 2, "b": 8}, mesh) == {}
    assert drop_minor({"b": ("tp",)}, [(("a", "b"),)], {"a": 2, "b": 8}, mesh) == ["b"]
    assert drop_minor({"a": ("dp",), "b": ("tp",)}, [(("a", "b"),)], {"a": 2, "b": 8}, mesh) == []


# -- programs ---------------------------------------------------------------------------------------------------------
B, S, D, H = 4, 8, 16, 8
AXES = {"params": {"q": "embed heads", "k": "embed heads", "v": "embed heads", "o": "heads embed"}}
PARAMS = {k: TensorType((D, H) if k != "o" else (H, D), F64) for k in "qkvo"}
BATCH = TensorType((B, S, D), F64)
SP = Layout(batch="dp", seq=None, res_seq="tp", heads="tp")


def qkv(params, x):
    """Three projections of one value, summed back: the shape of attention."""
    x = shard(x, P("batch", "res_seq", None))
    q, k, v = (einsum("b s d, d h -> b s h", x, params[n]) for n in "qkv")
    return shard(einsum("b s h, h d -> b s d", torch.tanh(q * k) * v, params["o"]), P("batch", "res_seq", None))


def explained(layout: Layout, strict: bool = True, mesh: Mesh = MESH):
    loss = lambda p, b: (qkv(p, b).square().sum(), 1)
    step = jit(
        lambda params, batch: value_and_grad(loss)(params, batch), mesh=mesh, layout=layout, axes=AXES, strict=strict
    )
    return step.lower(PARAMS, BATCH).explain()


def test_a_value_moves_once_for_all_its_uses():
    """q, k and v need the whole sequence: one gather."""
    e = explained(SP).select(segment="microbatch")
    assert e.counts(phase="F") == {"all_gather": 1, "reduce_scatter": 1}
    # backward: the output's cotangent and the input are gathered, for what the weights' gradients need
    assert e.counts(phase="B") == {"all_gather": 2}
    assert [r.reason for r in e.rows if r.phase == "F"] == ["weights stay", "shard"]


def test_the_cotangent_goes_where_its_primal_lives():
    """Of an activation in between: the contributions of q, k and v are added before they are scattered."""
    extra = {"params": {**AXES["params"], "first": "embed embed2"}}
    params = {**PARAMS, "first": TensorType((D, D), F64)}

    def loss(p, x):
        h = shard(
            torch.tanh(einsum("b s d, d e -> b s e", shard(x, P("batch", "res_seq", None)), p["first"])),
            P("batch", "res_seq", None),
        )
        return qkv(p, h).square().sum(), 1

    step = jit(lambda params, batch: value_and_grad(loss)(params, batch), mesh=MESH, layout=SP, axes=extra, strict=True)
    e = step.lower(params, BATCH).explain().select(segment="microbatch", phase="B")
    assert e.counts()["reduce_scatter"] == 1
    (row,) = e.select(kind="reduce_scatter").rows
    assert row.reason == "mirror" and row.values == ("f64[4@dp, 8, 16]{P:tp} -> f64[4@dp, 8@tp, 16]",)


def test_gradients_go_straight_to_the_optimizer():
    e = explained(Layout(batch="dp", opt=dict(embed="dp")), mesh=Mesh(dp=2)).select(reason="gradient")
    assert e.counts() == {"reduce_scatter": 1} and e.rows[0].tensors == 4
    e = explained(Layout(batch="dp", params=dict(embed="dp")), mesh=Mesh(dp=2))
    assert e.counts(segment="microbatch", phase="F") == {"all_gather": 4}
    # gathered again: only `o`, which the input's cotangent needs
    assert e.counts(segment="microbatch", phase="B") == {"all_gather": 1, "reduce_scatter": 4}
    assert not e.select(reason="gradient").rows


def test_parameters_are_moved_at_first_use_once():
    def fn(params, x):
        return sum(einsum("b s d, d h -> b s h", x * i, params["q"]).sum() for i in range(3))

    step = jit(
        fn,
        mesh=Mesh(dp=2),
        layout=Layout(batch="dp", params=dict(embed="dp")),
        axes={**AXES, "x": "batch seq _"},
        strict=True,
    )
    rows = step.lower(PARAMS, BATCH).explain().select(kind="all_gather").rows
    assert [(r.reason, r.values) for r in rows] == [("parameter", ("f64[16@dp, 8] -> f64[16, 8]",))]


def test_a_cast_at_rest_is_gathered_cast():
    """Half the bytes: the parameter is cast where it lies, then gathered."""
    fn = lambda params, x: einsum("b s d, d h -> b s h", x.to(torch.bfloat16), params["q"].to(torch.bfloat16))
    step = jit(
        fn,
        mesh=Mesh(dp=2),
        layout=Layout(batch="dp", params=dict(embed="dp")),
        axes={**AXES, "x": "batch seq _"},
        strict=True,
    )
    (row,) = step.lower(PARAMS, BATCH).explain().rows
    assert row.values == ("bf16[16@dp, 8] -> bf16[16, 8]",)


# -- strict -----------------------------------------------------------------------------------------------------------
X = torch.zeros(4, 8, dtype=F64)


def strictly(fn, axes: dict, layout: Layout, *args):
    return jit(fn, mesh=MESH, layout=layout, axes=axes, strict=True).lower(*args)


def test_strict_names_what_nobody_asked_for():
    two = {"a": "p q", "b": "r s"}
    with pytest.raises(ShardingError) as e:
        strictly(lambda a, b: a * b, two, Layout(p="dp", s="dp"), X, X)
    said = str(e.value)
    for part in (
        "test_policy.py:",
        "all_to_all over ('dp',)",
        "b f64[4, 8@dp] -> f64[4@dp, 8]",
        "(conflict)",
        "shard(x, P(…))",
    ):
        assert part in said, said
    with pytest.raises(
        ShardingError, match=r"all_gather over \('tp',\) of a f64\[4, 8@tp\] -> f64\[4, 8\].*needs a whole dimension"
    ):
        strictly(lambda a: a.sort(-1).values, {"a": "p q"}, Layout(q="tp"), X)
    with pytest.raises(
        ShardingError, match=r"all_reduce over \('tp',\) of a value f64\[4, 4\]{P:tp} -> f64\[4, 4\].*pending sum"
    ):
        strictly(lambda a: torch.relu(einsum("i j, k j -> i k", a, a)), {"a": "p q"}, Layout(q="tp"), X)


def test_strict_lets_pass_what_was_asked_for():
    fn = lambda a: torch.relu(shard(einsum("i j, k j -> i k", a, a), P("dp", None)))
    strictly(fn, {"a": "p q"}, Layout(q="dp"), X)
    strictly(lambda a: (a.sum() / a.sum(0).sum() + a.softmax(-1).mean()).sqrt(), {"a": "p q"}, Layout(q="dp"), X)
    strictly(lambda a: ops.rms_norm(a, None), {"a": "p q"}, Layout(p=("dp", "tp")), X)


def test_not_strict_does_it_and_says_so():
    step = jit(lambda a, b: a * b, mesh=MESH, layout=Layout(p="dp", s="dp"), axes={"a": "p q", "b": "r s"})
    (row,) = step.lower(X, X).explain().implicit
    assert (row.kind, row.reason, row.owed) == ("all_to_all", "conflict", False)
    y = torch.arange(32.0, dtype=F64).reshape(4, 8)
    assert torch.equal(step(y, y + 1).global_value(), y * (y + 1))
