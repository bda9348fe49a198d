"""What goes wrong in practice ends in one error that names the thing, what was expected and what to try."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from fmeg import (
    Layout,
    Mesh,
    P,
    TensorType,
    TrainState,
    check_finite,
    einsum,
    jit,
    optim,
    scan,
    shard,
    tree,
    value_and_grad,
)
from fmeg.models import llama
from fmeg.program.errors import MeshError, ShardingError, TraceError

F64 = torch.float64
W, X = torch.randn(8, 6, dtype=F64), torch.randn(4, 8, dtype=F64)
AXES = {"params": {"w": "embed ff"}}
OUTSIDE = torch.randn(8, 6, dtype=F64)


def loss(p: dict, batch: Tensor) -> tuple[Tensor, int]:
    return (batch @ p["w"]).square().sum(), batch.shape[0]


def run(loss_fn=loss, mesh=None, layout=None, axes=AXES, microbatches=1, batch=X, **options):
    def train_step(params, batch):
        return value_and_grad(loss_fn, microbatches=microbatches)(params, batch)

    return jit(train_step, mesh=mesh or Mesh(dp=2, tp=2), layout=layout, axes=axes, **options)({"w": W}, batch)


def says(error: type[Exception], *parts: str):
    """The error's message holds all parts, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, parts)))


# -- names ------------------------------------------------------------------------------------------------------------
def test_a_mesh_axis_that_is_not_there():
    with says(ShardingError, "mesh axis 'pd'", "the mesh has 'dp', 'tp'", "add pd= to the Mesh"):
        run(layout=Layout(batch="pd"))
    with says(ShardingError, "mesh axis 'dp'", "the mesh has none"):
        jit(lambda batch: batch, layout=Layout(batch="dp"))(X)


def test_a_logical_axis_that_nobody_declared():
    with says(ShardingError, "'bach'", "did you mean 'batch'?", "'batch', 'embed', 'ff', 'seq'", "by jit's axes="):
        run(layout=Layout(bach="dp"))
    with says(ShardingError, "'heads', which nobody declared.", "Declared are"):
        run(layout=Layout(heads="dp"))


def test_a_mesh_axis_for_two_dimensions():
    with says(
        ShardingError, "jit(train_step): params.w, in the params view", "('embed', 'ff')", "mesh axis 'tp'", "none"
    ):
        run(layout=Layout(embed="tp", ff="tp"))
    with says(ShardingError, "shard at test_bad_input.py:", "('batch', 'dp')", "mesh axis 'dp'"):
        run(lambda p, b: (shard(b, P("batch", "dp")).sum(), 1), layout=Layout(batch="dp"))


@pytest.mark.parametrize(
    ("axes", "parts"),
    [
        ({"params": {"v": "embed ff"}}, ["jit(train_step)", "params.v, which is not there", "It has w"]),
        ({"params": {"w": "embed"}}, ["params.w has shape (8, 6)", "'embed'", "one name a dimension"]),
        ({"params": {"w": "embed ff", "ww": "ff"}}, ["params.ww, which is not there; did you mean 'w'?"]),
        ({"parms": {"w": "embed ff"}}, ["axes are given for 'parms', which is not a parameter; it has params, batch"]),
    ],
    ids=["other", "rank", "more", "argument"],
)
def test_axes_that_do_not_fit_the_parameters(axes, parts):
    with says(ShardingError, *parts):
        run(axes=axes)


def test_parameters_without_axes():
    f = jit(lambda params: params["w"].sum(), mesh=Mesh(tp=2), axes={"params": {"v": "embed ff"}})
    with says(ShardingError, "params.w, of shape (8, 6), has no logical axes", "such as 'embed ff'"):
        f({"w": W, "v": W})
    for axes, parts in [
        ({"v": "embed ff"}, ["no entry for parameter 'w'"]),
        ({"w": "embed"}, ["'w' has shape (8, 6)"]),
    ]:
        with says(ValueError, *parts):
            TrainState.create({"w": W}, optim.sgd(0.1), axes)


# -- sizes ------------------------------------------------------------------------------------------------------------
def test_a_parameter_that_does_not_divide():
    with says(
        ShardingError, "jit(train_step): params.w of type f64[8, 6]", "('embed', 'ff')", "params view", "'ff'",
        "dimension 1, of size 6", "'tp' (size 4)", "4 does not evenly divide 6", "pad the dimension",
    ):  # fmt: skip
        run(mesh=Mesh(tp=4), layout=Layout(ff="tp"))
    with says(ShardingError, "params.w", "opt view", "dimension 0, of size 8", "'dp' (size 3)"):
        run(mesh=Mesh(dp=3), layout=Layout(opt=dict(embed="dp")))


def test_a_batch_that_does_not_divide():
    with says(ShardingError, "batch of type f64[4, 8]", "'dp' (size 3)", "3 does not evenly divide 4"):
        run(mesh=Mesh(dp=3), layout=Layout(batch="dp"))
    with says(ShardingError, "value_and_grad(loss): 3 microbatches do not divide the 4 rows of batch", "divisor of 4"):
        run(microbatches=3)
    with says(ShardingError, "f64[2, 8]", "4 rows in 2 microbatches", "microbatches times the devices", "divide 2"):
        run(microbatches=2, mesh=Mesh(dp=4), layout=Layout(batch="dp"))
    run(microbatches=2, layout=Layout(batch="dp"))


def test_heads_that_do_not_divide():
    cfg = llama.Config(vocab_size=32, embed=16, layers=1, heads=4, kv_heads=2, head_dim=4, ff=16, vocab_multiple=16)
    params = tree.map(lambda q: TensorType(q.shape(cfg.sizes), torch.float32), llama.parameters(cfg))
    tokens = TensorType((4, 8), torch.int64)
    batch = {"tokens": tokens, "targets": tokens, "mask": TensorType((4, 8), torch.float32)}
    step = lambda params, batch: value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch)
    lower = lambda mesh, layout: jit(step, mesh=mesh, layout=layout, axes={"params": llama.logical_axes(cfg)}).lower(
        params, batch
    )
    with says(
        ShardingError, "'kv_heads'", "4 does not evenly divide 2", 'heads=("tk", "tr"), kv_heads="tk"', "kv_heads=()"
    ):
        lower(Mesh(tp=4), Layout(heads="tp", kv_heads="tp"))
    with says(ShardingError, "kv_heads by ('b',)", "must be a prefix", 'kv_heads="tk"', "kv_heads=()"):
        lower(Mesh(a=2, b=2), Layout(heads=("a", "b"), kv_heads="b"))
    lower(Mesh(a=2, b=2), Layout(heads=("a", "b"), kv_heads="a"))
    lower(Mesh(tp=4), Layout(heads="tp", kv_heads=()))


def test_a_mesh_that_does_not_fit():
    with says(MeshError, "axis 'dp' must have a size that is an int >= 1, got 0"):
        Mesh(dp=0)
    with says(MeshError, "torchrun", "virtual mesh"):
        run(mesh=Mesh(dp=3, backend="distributed"))


# -- functions --------------------------------------------------------------------------------------------------------
def test_a_loss_closed_over_a_tensor():
    with says(TraceError, "the tensor `OUTSIDE` of type f64[8, 6]", "test_bad_input.py:", "pass it as an argument"):
        run(lambda p, b: ((b @ OUTSIDE).sum(), 1))
    inside = W * 2
    with says(TraceError, "the tensor `inside`"):
        run(lambda p, b: (scan(lambda c, r: (c + r @ inside, None), b[0] @ p["w"], b)[0].sum(), 1))


def test_a_branch_on_data():
    with says(TraceError, "Python needs the value of a tensor at test_bad_input.py:", "torch.where", "static argument"):
        run(lambda p, b: ((b @ p["w"]).sum() if b.sum() > 0 else b.sum(), 1))


def test_hidden_randomness():
    with says(TraceError, "global generator at test_bad_input.py:", "depend on the mesh", "fmeg.ops.dropout"):
        run(lambda p, b: ((torch.dropout(b, 0.5, True) @ p["w"]).sum(), 1))


def test_a_primitive_under_autocast():
    """Of torch's operations autocast's casts are recorded; a primitive would run later without any."""
    x = torch.ones(4, 4)
    product = lambda x: einsum("a b, b c -> a c", x, x)

    def inside(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return product(x)

    traced = jit(product)
    traced(x)
    with says(TraceError, "einsum under torch.autocast('cpu')", "Cast before it"):
        jit(inside)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), says(TraceError, "einsum under torch.autocast('cpu')"):
        traced(x)
    assert traced(x).dtype == torch.float32


def test_a_carry_that_changes():
    with says(TraceError, "scan: carry h is f64[4, 8] at the start but the body returns f64[4, 6]", "both agree"):
        run(lambda p, b: (scan(lambda c, w: ({"h": c["h"] @ w}, None), {"h": b}, p["w"][None])[0]["h"].sum(), 1))


def test_arguments_that_are_no_tensors():
    f = jit(lambda params, batch: batch)
    with says(TypeError, "params.w is a ndarray", "torch.as_tensor"):
        f({"w": W.numpy()}, X)
    with says(TypeError, "missing 1 required positional argument: 'batch'"):
        f({"w": W})


def test_a_shard_of_another_rank():
    with says(ShardingError, "P('dp') has 1 entries for a tensor of 2 dimensions, shape (4, 8)"):
        run(lambda p, b: (shard(b, P("dp")).sum(), 1))
    with says(ShardingError, "shard at test_bad_input.py:", "dimension 0 of f64[3, 8]", "dp=2", "does not divide 3"):
        run(lambda p, b: (shard(b[:3], P("dp", None)).sum(), 1))


# -- numbers ----------------------------------------------------------------------------------------------------------
def test_numbers_that_are_not_finite():
    metrics = {"loss": torch.tensor(1.0), "grads": [torch.tensor([1.0, math.inf, -math.inf])], "steps": 3}
    with says(FloatingPointError, "grads.0 is not finite in 2 of 3 elements (the first is inf)", "lower learning rate"):
        check_finite(metrics)
    with says(FloatingPointError, "loss is nan at step 7", "optim.clip_by_global_norm", "optim.skip_nonfinite"):
        check_finite({"loss": run(lambda p, b: ((b @ p["w"]).sum().abs().neg().sqrt(), 1))[0][0]}, step=7)
    with says(FloatingPointError, "the value is -inf"):
        check_finite(-math.inf)
    good = {"loss": torch.tensor(1.0), "n": torch.tensor(3), "name": "x", "none": None, "lr": 0.1}
    assert check_finite(good) is good
    out = run()
    assert check_finite(out) is out


def test_a_step_that_is_skipped():
    """What `check_finite` suggests: the state stays, and says so."""
    opt = optim.skip_nonfinite(optim.sgd(0.1))

    def step(state, batch):
        (value, _), g = value_and_grad(loss)(state.params, batch)
        updates, new = opt.update(g, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), value

    f = jit(step, mesh=Mesh(dp=2, tp=2), layout=Layout(batch="dp", ff="tp"), donate=("state",))
    state = TrainState.create({"w": W}, opt, AXES["params"])
    bad = X.clone()
    bad[2, 3] = math.nan
    state, value = f(state, bad)
    assert math.isnan(float(value)) and int(state.opt.skipped) == 1
    assert torch.equal(state.params["w"].global_value(), W)
    state, value = f(state, X)
    assert math.isfinite(float(value)) and int(state.opt.skipped) == 1 and int(state.step) == 2
    assert not torch.equal(state.params["w"].global_value(), W)
