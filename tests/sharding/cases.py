"""Sample arguments of every operation that has a sharding rule: `CASES[name] = (op, args, kwargs)`."""

from __future__ import annotations

from typing import Any

import torch

from fmeg.sharding.rules.pointwise import LINEAR, NONLINEAR

aten = torch.ops.aten
CASES: dict[str, tuple[Any, tuple, dict]] = {}
_gen = torch.Generator().manual_seed(1)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_gen, dtype=torch.float64)


def u(*shape: int) -> torch.Tensor:
    """In (0.1, 0.9), where most functions are defined."""
    return torch.rand(shape, generator=_gen, dtype=torch.float64) * 0.8 + 0.1


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=_gen)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_gen) > 0.5


def case(name: str, *args: Any, label: str = "", **kwargs: Any) -> None:
    """Add a case for `packet.overload`; operations that this torch does not have are left out."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(aten, packet, None), overload or "default", None)
    if op is not None:
        key = f"{name}{' ' if label else ''}{label}"
        assert key not in CASES, key
        CASES[key] = (op, args, kwargs)


# -- pointwise --------------------------------------------------------------------------------------------------------
INTEGER = {n for n in NONLINEAR if n.startswith(("bitwise", "__"))} | {"gcd", "lcm"}
SCALARS = {  # the numbers that an operation needs besides its tensors
    "threshold": (0.5, 0.1),
    "threshold_backward": (0.5,),
    "hardtanh_backward": (0.2, 0.8),
    "leaky_relu_backward": (0.1, False),
    "softplus_backward": (1.0, 20.0),
    "softshrink_backward": (0.5,),
    "hardshrink_backward": (0.5,),
    "native_dropout_backward": (1.25,),
}


def _pointwise() -> None:
    for name in [*NONLINEAR, *LINEAR]:
        packet = getattr(aten, name, None)
        if packet is None or name in ("elu_backward", "_prelu_kernel", "_conj"):
            continue
        make = (lambda *s: i(4, *s) + 1) if name in INTEGER else u
        overload = next(
            o
            for o in ("default", "Tensor", "Tensor_Tensor", "self")
            if o in packet.overloads() and "Tensor" in str(getattr(packet, o)._schema)
        )
        tensors = [
            a
            for a in getattr(packet, overload)._schema.arguments
            if str(a.type) == "Tensor" and not a.has_default_value()
        ]
        shapes = (
            [(4, 2)] * len(tensors)
            if "backward" in name or "forward" in name
            else [(4, 2), (2,), (4, 1)][: len(tensors)]
        )
        values = [make(*s) for s in shapes]
        if name in ("bitwise_and", "bitwise_or", "logical_and"):
            values = [v > 0 if name == "logical_and" else v for v in values]
        if name == "native_dropout_backward":
            values[1] = b(4, 2)
        numbers = SCALARS.get(name, (0.5,) if name in ("clamp_max", "clamp_min") else ())
        if name == "clamp":
            numbers = (0.3, 0.6)
        case(f"{name}.{overload}", *values, *numbers)


_pointwise()
case("elu_backward", f(4, 2), 1.0, 1.0, 1.0, False, f(4, 2))
case("_prelu_kernel", f(4, 2), f(4, 2))
case("pow.Tensor_Scalar", u(4, 2), 2.5)
case("pow.Tensor_Tensor", u(4, 1, 2), u(3, 2), label="broadcast")
case("pow.Scalar", 2.0, f(4, 2))
case("add.Tensor", f(4, 2), f(4, 2))
case("add.Tensor", f(4, 1, 2), f(4, 1), label="broadcast", alpha=2)
case("add.Tensor", f(4, 2), 3.0, label="number")
case("add.Tensor", f(4, 2), 0, label="zero")
case("add.Tensor", i(5, 4), i(5, 4), label="int")
case("sub.Tensor", f(4, 2), f(2))
case("sub.Tensor", f(), f(4, 2), label="0-d")
case("rsub.Tensor", f(4, 2), f(4, 2), alpha=3)
case("rsub.Scalar", f(4, 2), 1.0)
case("mul.Tensor", f(4, 2), f(4, 1))
case("mul.Tensor", f(4, 2), 3.0, label="number")
case("mul.Scalar", f(4, 2), 3.0)
case("div.Tensor", f(4, 2), u(4, 2))
case("div.Tensor", f(4, 2), 7.0, label="number")
case("div.Tensor_mode", f(4, 2), u(4, 2), rounding_mode="floor")
case("where.self", b(4, 2), f(4, 2), f(2))
case("where.ScalarOther", b(4, 2), f(4, 2), 0)
case("where.ScalarOther", b(4, 2), f(4, 2), 1.0, label="one")
case("where.ScalarSelf", b(4, 2), 0.0, f(4, 2))
case("where.Scalar", b(4, 2), 1.0, 2.0)
case("lerp.Scalar", f(4, 2), f(4, 2), 0.3)
case("lerp.Tensor", f(4, 2), f(4, 2), u(4, 2))
case("masked_fill.Scalar", f(4, 2), b(2), 0)
case("masked_fill.Scalar", f(4, 2), b(4, 2), float("-inf"), label="-inf")
case("masked_fill.Tensor", f(4, 2), b(4, 2), f())
case("addcmul", f(4, 2), f(4, 2), f(2), value=0.5)
case("addcdiv", f(4, 2), f(4, 2), u(2), value=0.5)
case("clamp.Tensor", f(4, 2), f(2), f(4, 1))
case("_to_copy", f(4, 2), dtype=torch.float64)
case("_to_copy", i(9, 4, 2), label="int to float", dtype=torch.float64)
case("_to_copy", f(4, 2) * 9, label="float to int", dtype=torch.int64)
case("_conj", torch.complex(f(4, 4), f(4, 4)))
case("copy", f(4, 2), f(2))
case("fill.Scalar", f(4, 2), 2.0)
case("fill.Tensor", f(4, 2), f())
case("view_as_real", torch.complex(f(4, 4), f(4, 4)))
case("view_as_complex", f(4, 4, 2))
case("mul.Tensor", torch.complex(f(4, 4), f(4, 4)), torch.complex(f(4), f(4)), label="complex")

# -- reductions -------------------------------------------------------------------------------------------------------
for _name in ("sum", "mean"):
    case(_name, f(4, 2))
    case(f"{_name}.{'dim_IntList' if _name == 'sum' else 'dim'}", f(4, 2, 4), [0, -1])
    case(f"{_name}.{'dim_IntList' if _name == 'sum' else 'dim'}", f(4, 2), [1], True, label="keepdim")
case("sum", b(4, 2), label="bool")
case("sum.dim_IntList", f(4, 2), None, label="all")
case("nansum", torch.where(b(4, 2), float("nan"), f(4, 2)), [0])
case("count_nonzero", b(4, 2))
case("count_nonzero.dim_IntList", i(2, 4, 4), [1])
for _name in ("amax", "amin"):
    case(_name, f(4, 4), [1])
    case(_name, f(4, 2), label="all")
for _name in ("max", "min", "median", "argmax", "argmin", "prod"):
    case(_name, f(4, 2))
for _name in ("max.dim", "min.dim", "median.dim", "nanmedian.dim", "mode"):
    case(_name, f(4, 4), 1)
case("nanmedian", f(4, 2))
case("kthvalue", f(4, 4), 2, 0)
case("argmax", f(4, 4), 1, True, label="dim")
case("argmin", f(4, 4), 0, label="dim")
case("prod.dim_int", f(4, 4), 1)
for _name in ("any", "all"):
    case(_name, b(4, 2))
    case(f"{_name}.dim", b(4, 4), 1)
    case(f"{_name}.dims", b(4, 4), [0, 1])
case("any.dim", torch.eye(4, dtype=torch.bool), 0, label="one each")
case("all.dim", ~torch.eye(4, dtype=torch.bool), 0, label="none")
case("logsumexp", f(4, 4), [1])
case("logsumexp", f(4, 4), [0, 1], True, label="all")
case("logsumexp", torch.where(torch.eye(4) > 0, f(4, 4), float("-inf")), [1], label="-inf")
for _ord in (2, 1, 3.5, 0, float("inf"), float("-inf")):
    case("linalg_vector_norm", f(4, 4), _ord, [1], label=str(_ord))
case("linalg_vector_norm", f(4, 4), label="all")
case("norm.Scalar", f(4, 4), 2)
case("norm.ScalarOpt_dim", f(4, 4), None, [1], True)
for _name in ("var", "std", "var_mean", "std_mean"):
    case(f"{_name}.correction", f(4, 4), [1])
    case(f"{_name}.correction", f(4, 4, 2), [0, 1], label="two", correction=0, keepdim=True)
    case(f"{_name}.correction", f(4, 4), label="all", correction=2)
for _name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"):
    case(_name, f(4, 4), 1)
case("cumsum", f(4, 4), -1, label="last")
case("cumsum", i(9, 8, 4, 2), 0, label="integers")
case("cumsum", b(2, 8), 1, label="bools", dtype=torch.int32)
case("cumsum", f(1), 0, label="one")
case("cumsum", f(), 0, label="0-d")

# -- views ------------------------------------------------------------------------------------------------------------
case("view", f(4, 4), [16])
case("view", f(16), [2, 2, 4], label="split")
case("view", f(4, 6), [6, 4], label="across")
case("view", f(2, 4, 1, 4), [8, 4, 1], label="merge")
case("view", f(4, 1), [4], label="drop")
case("_unsafe_view", f(4, 2, 4), [4, 8])
case("squeeze", f(1, 2, 4, 1))
case("squeeze.dim", f(2, 1, 4), 1)
case("squeeze.dim", f(2, 4), 0, label="nothing")
case("squeeze.dims", f(1, 2, 1), [0, 1])
case("unsqueeze", f(4, 2), 1)
case("view.dtype", f(4, 2), torch.int64)
case("view.dtype", f(4, 2).float(), torch.int16, label="halves")
case("view.dtype", i(9, 4, 8).to(torch.int16), torch.int32, label="joined")
case("view.dtype", i(9, 2, 1), torch.int32, label="of one")
case("view.dtype", i(9), torch.float64, label="0-d")
case("expand", f(4, 1), [2, 4, 4])
case("expand", f(), [4, 2], label="0-d")
case("permute", f(4, 2, 4), [2, 0, 1])
case("transpose.int", f(4, 2, 4), 0, -1)
case("t", f(4, 2))
for _name in ("detach", "alias", "lift", "lift_fresh_copy"):
    case(_name, f(4, 2))
case("repeat", f(4, 1), [2, 1, 3])
case("repeat", f(2, 4), [1, 2], label="one")

# -- slicing ----------------------------------------------------------------------------------------------------------
case("select.int", f(4, 4), 0, 2)
case("select.int", f(4, 4), 1, -1, label="last")
case("select.int", b(4, 4), 0, 2, label="bool")
case("slice.Tensor", f(4, 4), 1, 1, 3)
case("slice.Tensor", f(4, 4), 1, 0, 9223372036854775807, label="all")
case("slice.Tensor", f(4, 4), 0, 3, 4, label="one")
case("slice.Tensor", f(4, 4), 0, 0, 4, 2, label="step")
case("slice_backward", f(4, 2), [4, 4], 1, 1, 3, 1)
case("slice_backward", f(1, 4), [4, 4], 0, -1, 9223372036854775807, 1, label="one")
case("slice_backward", f(4, 4), [4, 4], 0, 0, 9223372036854775807, 1, label="all")
case("select_backward", f(4), [4, 4], 1, 2)
case("slice_scatter", f(4, 4), f(4, 2), 1, 1, 3)
case("slice_scatter", f(4, 4), f(4, 4), 1, label="all")
case("select_scatter", f(4, 4), f(4), 0, 1)
case("diagonal_scatter", f(2, 4, 4), f(2, 4), 0, 1, 2)
case("split.Tensor", f(4, 4), 2, 1)
case("split.Tensor", f(4, 4), 3, 0, label="uneven")
case("split.Tensor", f(4, 4), 4, 0, label="one piece")
case("split_with_sizes", f(4, 4), [1, 3], -1)
case("unbind.int", f(4, 2), 1)
case("cat", [f(4, 2), f(4, 1), f(4, 3)], -1)
case("cat", [f(4, 2)], label="one")
case("stack", [f(4, 2), f(4, 2)], 1)
case("flip", f(4, 4), [1])
case("roll", f(4, 4), [1], [1])
case("roll", f(4, 4), [3], label="all")
case("rot90", f(4, 4, 2))
case("diagonal", f(4, 2, 4), 1, 0, 2)
case("diagonal_backward", f(2, 3), [4, 2, 4], 1, 0, 2)
case("diag_embed", f(4, 2))
for _name in ("tril", "triu"):
    case(_name, b(4, 4), label="bool")
    case(_name, f(2, 4, 4))
    case(_name, f(4, 4), -1, label="below")
    case(_name, f(4, 8), 3, label="wide")
case("constant_pad_nd", f(4, 4), [1, 2])
case("constant_pad_nd", f(4, 4), [0, 0, 1, 0], 2.0, label="value")
case("unfold", f(4, 8), 1, 3, 2)
case("unfold_backward", f(4, 3, 3), [4, 8], 1, 3, 2)

# -- products ---------------------------------------------------------------------------------------------------------
case("mm", f(4, 8), f(8, 2))
case("mm", f(1, 4), f(4, 1), label="unit")
case("bmm", f(4, 2, 4), f(4, 4, 2))
case("mv", f(4, 4), f(4))
case("dot", f(4), f(4))
case("vdot", f(4), f(4))
case("addmm", f(4), f(2, 4), f(4, 4), beta=2, alpha=3)
case("addmm", f(2, 4), f(2, 4), f(4, 4), label="matrix")
case("baddbmm", f(2, 1, 4), f(2, 2, 4), f(2, 4, 4))
case("addbmm", f(2, 4), f(4, 2, 4), f(4, 4, 4))
case("addmv", f(4), f(4, 4), f(4))
case("addr", f(4, 2), f(4), f(2))

# -- softmax and norms ------------------------------------------------------------------------------------------------
for _name in ("_softmax", "_log_softmax"):
    case(_name, f(4, 4), 1, False)
    case(f"{_name}_backward_data", f(4, 4), torch.softmax(f(4, 4), 0), 0, torch.float64)
case("_safe_softmax", torch.where(b(4, 1), f(4, 4), float("-inf")), 1)
case("_softmax", torch.where(torch.eye(4) > 0, f(4, 4), float("-inf")), 1, False, label="-inf")
_x = f(4, 4, 4)
_, _mean, _rstd = aten.native_layer_norm(_x, [4], None, None, 1e-5)
case("native_layer_norm", _x, [4], f(4), f(4), 1e-5)
case("native_layer_norm", _x, [4, 4], None, None, 1e-5, label="two dims")
case("native_layer_norm_backward", f(4, 4, 4), _x, [4], _mean, _rstd, f(4), f(4), [True, True, True])
case("native_layer_norm_backward", f(4, 4, 4), _x, [4], _mean, _rstd, f(4), None, [True, True, False], label="no bias")
case("_fused_rms_norm", _x, [4], f(4), 1e-5)
_x = f(2, 8, 3, 3)
_, _mean, _rstd = aten.native_group_norm(_x, None, None, 2, 8, 9, 4, 1e-5)
case("native_group_norm", _x, f(8), f(8), 2, 8, 9, 4, 1e-5)
case("native_group_norm", _x, None, None, 2, 8, 9, 1, 1e-5, label="one group")
_norm = (_x, _mean, _rstd, f(8), 2, 8, 9, 4)
case("native_group_norm_backward", f(2, 8, 3, 3), *_norm, [False, True, True], label="no x")
case("native_group_norm_backward", f(2, 8, 3, 3), _x, _mean, _rstd, f(8), 2, 8, 9, 4, [True, True, True])

# -- indexing ---------------------------------------------------------------------------------------------------------
case("embedding", f(8, 2), i(8, 4, 2))
case("embedding_dense_backward", f(4, 2, 4), i(8, 4, 2), 8, -1, False)
case("embedding_dense_backward", f(16, 4), i(8, 16), 8, 3, False, label="padding")
case("embedding_dense_backward", f(16, 4), i(8, 16), 8, -1, True, label="by frequency")
case("gather", f(4, 8), 1, i(8, 4, 2))
case("gather", f(4, 8), 0, i(4, 4, 2), label="smaller")
case("index_select", f(4, 8, 2), 1, i(8, 4))
case("scatter.src", f(4, 8), 1, torch.stack([torch.randperm(8, generator=_gen)[:4] for _ in range(4)]), f(4, 4))
case("scatter.value", f(4, 8), 1, i(8, 4, 2), 3.0)
case("scatter.value", f(4, 8), 1, i(8, 4, 2), 0.0, label="zero")
case("scatter.value", b(2, 4, 8), -1, i(8, 2, 4, 3), True, label="bools")
case("scatter_add", f(4, 8), 1, i(8, 4, 4), f(4, 4))
case("scatter_add", f(4, 8), 0, i(4, 2, 4), f(4, 8), label="larger source")
case("scatter_reduce.two", f(4, 8), 1, i(8, 4, 4), f(4, 4), "amax")
case("index_add", f(4, 8), 1, i(8, 4), f(4, 4), alpha=2)
case("index_copy", f(4, 8), 1, torch.randperm(8, generator=_gen)[:4], f(4, 4))
case("index.Tensor", f(8, 4), [i(8, 4, 2)])
case("index.Tensor", f(8, 4), [i(8, 4) - 8], label="negative")
case("index.Tensor", f(2, 8, 4, 2), [None, i(8, 4, 1), i(4, 2)], label="adjacent")
case("index.Tensor", f(8, 2, 4), [i(8, 4), None, i(4, 4)], label="apart")
case("_unsafe_index.Tensor", f(8, 4), [None, i(4, 4)])
case("index_put", f(8, 4), [i(8, 4)], f(4, 4), True)
case("index_put", f(8, 4), [torch.randperm(8, generator=_gen)[:4]], f(4, 4), label="overwrite")
case("index_put", f(2, 8, 4), [None, i(8, 4, 1), i(4, 2)], f(4, 2), True, label="adjacent")
case("_unsafe_index_put", f(8, 4), [i(8, 4)], f(4), True)
case("gather", b(4, 8), 1, i(8, 4, 2), label="bool")
case("index_select", b(4, 8), 1, i(8, 4), label="bool")
case("index.Tensor", b(8, 4), [i(8, 4)], label="bool")
case("slice.Tensor", b(4, 4), 0, 1, 2, label="bool")
case("topk", f(4, 8), 2)
case("topk", f(4, 8), 1, 0, label="one")
case("sort", f(4, 8), 1)
case("sort.stable", f(4, 8), stable=True, dim=0)
case("bucketize.Tensor", f(4, 2), torch.linspace(-1, 1, 5, dtype=torch.float64))
case("isin.Tensor_Tensor", i(9, 4, 2), i(9, 4))

# -- losses -----------------------------------------------------------------------------------------------------------
_target = torch.tensor([1, 3, -100, 0, 2, 2, 7, 5])
for _reduction in (0, 1, 2):
    for _weight, _label in ((None, "plain"), (u(8), "weighted")):
        _out, _total = aten.nll_loss_forward(f(8, 8), _target, _weight, _reduction, -100)
        case("nll_loss_forward", f(8, 8), _target, _weight, _reduction, -100, label=f"{_label} {_reduction}")
        case(
            "nll_loss_backward",
            torch.randn_like(_out),
            f(8, 8),
            _target,
            _weight,
            _reduction,
            -100,
            _total,
            label=f"{_label} {_reduction}",
        )
case("nll_loss_forward", f(8, 8), _target.clamp(0), None, 1, 2, label="ignored class")
_out, _total = aten.nll_loss2d_forward(f(2, 4, 4, 2), i(4, 2, 4, 2), None, 1, -100)
case("nll_loss2d_forward", f(2, 4, 4, 2), i(4, 2, 4, 2), None, 1, -100)
case("nll_loss2d_backward", _out, f(2, 4, 4, 2), i(4, 2, 4, 2), None, 1, -100, _total)
for _name, _extra in (
    ("mse_loss", ()),
    ("smooth_l1_loss", (0.5,)),
    ("huber_loss", (0.5,)),
    ("binary_cross_entropy", ()),
):
    for _reduction in (0, 1, 2):
        _more = (None, _reduction) if "binary" in _name else (_reduction, *_extra)
        _grad = f(4, 2) if not _reduction else f()
        case(_name, u(4, 2), u(4, 2), *_more, label=str(_reduction))
        case(f"{_name}_backward", _grad, u(4, 2), u(4, 2), *_more, label=str(_reduction))

# -- attention and convolution ----------------------------------------------------------------------------------------
_q, _k, _v = f(2, 4, 4, 8), f(2, 4, 4, 8), f(2, 4, 4, 8)
_flash = "_scaled_dot_product_flash_attention_for_cpu"
_out, _lse = getattr(aten, _flash)(_q, _k, _v, 0.0, True)
case(_flash, _q, _k, _v, 0.0, True)
case(_flash, _q, _k, _v, label="masked", attn_mask=f(2, 1, 4, 4))
case(f"{_flash}_backward", f(2, 4, 4, 8), _q, _k, _v, _out, _lse, 0.0, True)
_x, _w = f(4, 4, 6), f(8, 4, 3)
case("convolution", _x, _w, None, [1], [1], [1], False, [0], 1)
case("convolution", _x, _w, f(8), [2], [0], [1], False, [0], 1, label="bias")
case("convolution", _x, f(8, 2, 3), f(8), [1], [0], [1], False, [0], 2, label="groups")
case("convolution", _x, f(4, 1, 3), None, [1], [2], [1], False, [0], 4, label="depthwise")
case("convolution", _x, f(4, 2, 3), f(2), [2], [0], [1], True, [0], 1, label="transposed")
_spec = ([1], [1], [1], False, [0], 1)
case("convolution_backward", f(4, 8, 6), _x, _w, [8], *_spec, [False, True, True], label="no x")
case("convolution_backward", f(4, 8, 6), _x, _w, [8], [1], [1], [1], False, [0], 1, [True, True, True])
case(
    "convolution_backward",
    f(4, 4, 8),
    _x,
    f(4, 1, 3),
    [0],
    [1],
    [2],
    [1],
    False,
    [0],
    4,
    [True, True, False],
    label="depthwise",
)

# -- creation ---------------------------------------------------------------------------------------------------------
for _name in ("zeros", "ones"):
    case(_name, [4, 2], dtype=torch.float64)
case("full", [4, 2], 3.5)
case("scalar_tensor", 2.0, dtype=torch.float64)
for _name in ("zeros_like", "ones_like"):
    case(_name, f(4, 2))
case("full_like", f(4, 2), 2.0)
case("new_zeros", f(2, 4), [4, 4])
case("new_ones", f(4), [4, 4])
case("new_full", f(4), [4], 2.0)
case("arange", 8)
case("arange.start", 2, 10, dtype=torch.float64)
case("arange.start_step", 1.0, 5.0, 0.5)
case("eye", 4)
case("eye.m", 4, 8, dtype=torch.int64)
case("linspace", 0.0, 1.0, 4)
case("logspace", 0.0, 1.0, 4)
case("tril_indices", 3, 3)
case("triu_indices", 3, 3)
case("hann_window", 4)
