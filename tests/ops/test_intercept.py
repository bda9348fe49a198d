"""Plain torch calls become primitives exactly where the two agree, with torch's own numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg.mesh import Mesh
from fmeg.program.trace import trace
from fmeg.sharding.execute import Executable

_gen = torch.Generator().manual_seed(0)


def f(*shape: int) -> Tensor:
    return torch.randn(shape, generator=_gen, dtype=torch.float64)


def ids(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=_gen)


def run(fn: Callable[..., Tensor], *args: Tensor) -> tuple[list[str], Tensor]:
    """Names of the traced nodes, and the Program's result."""
    program = trace(fn, *args).program
    return [n.opname for n in program.nodes], Executable(program, Mesh().backend())(args)[0]


TARGETS = torch.tensor([[1, 2, -100], [0, -100, 3]])
MASK = torch.tensor([[True, False, True], [False, False, False]])
q, k, v = f(2, 4, 3, 8), f(2, 4, 3, 8), f(2, 4, 3, 5)

MAPPED: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "linear": ("einsum", F.linear, (f(2, 3, 4), f(5, 4))),
    "linear with bias": ("einsum", F.linear, (f(2, 3, 4), f(5, 4), f(5))),
    "@": ("einsum", lambda x, w: x @ w, (f(2, 3, 4), f(4, 5))),
    "matmul": ("einsum", torch.matmul, (f(2, 6, 3, 4), f(6, 4, 5))),
    "Tensor.matmul": ("einsum", lambda x, y: x.matmul(y), (f(3, 4), f(2, 4, 5))),
    "einsum": ("einsum", lambda x, w: torch.einsum("bsd,dhe->bhse", x, w), (f(2, 3, 4), f(4, 2, 5))),
    "einsum, implicit": ("einsum", lambda x, w: torch.einsum("bij, jk", x, w), (f(2, 3, 4), f(4, 5))),
    "einsum, list": ("einsum", lambda x, w: torch.einsum("ij,jk->k", [x, w]), (f(3, 4), f(4, 5))),
    "layer_norm": ("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b, 1e-3), (f(2, 3, 4), f(4), f(4))),
    "layer_norm, plain": ("layer_norm", lambda x: F.layer_norm(x, (4,)), (f(2, 3, 4),)),
    "rms_norm": ("rms_norm", lambda x, w: F.rms_norm(x, (4,), w, 1e-3), (f(2, 3, 4), f(4))),
    "rms_norm, default eps": ("rms_norm", lambda x: F.rms_norm(x * 1e-8, (4,)), (f(2, 3, 4),)),
    "embedding": ("embedding", lambda i, w: F.embedding(i, w), (ids(7, 2, 3), f(7, 4))),
    "cross_entropy": ("cross_entropy", F.cross_entropy, (f(6, 5), ids(5, 6))),
    "cross_entropy, one": ("cross_entropy", F.cross_entropy, (f(5), ids(5))),
    "cross_entropy, ignored": ("cross_entropy", lambda x, t: F.cross_entropy(x, t), (f(2, 5, 3), TARGETS)),
    "cross_entropy, sum": ("cross_entropy", lambda x, t: F.cross_entropy(x, t, reduction="sum"), (f(2, 5, 3), TARGETS)),
    "cross_entropy, none": (
        "cross_entropy",
        lambda x, t: F.cross_entropy(x, t, reduction="none", ignore_index=2, label_smoothing=0.1),
        (f(2, 5, 3), TARGETS.clamp(0)),
    ),
    "cross_entropy, smoothed": (
        "cross_entropy",
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2),
        (f(2, 5, 3), TARGETS),
    ),
    "sdpa": ("attention", F.scaled_dot_product_attention, (q, k, v)),
    "sdpa, causal": (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3),
        (q, k, v),
    ),
    "sdpa, groups": (
        "attention",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (q, f(2, 2, 6, 8), f(2, 2, 6, 8)),
    ),
    "sdpa, bool mask": (
        "einsum",
        lambda q, k, v, m: F.scaled_dot_product_attention(q[:, :, :2], k, v, m),
        (q, k, v, MASK),
    ),
    "sdpa, float mask": (
        "einsum",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        (q, f(2, 2, 3, 8), f(2, 2, 3, 8), f(2, 1, 3, 3)),
    ),
    "sdpa, causal with more keys": (
        "einsum",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (q, f(2, 4, 5, 8), f(2, 4, 5, 8)),
    ),
}


@pytest.mark.parametrize("name", MAPPED)
def test_mapped(name: str) -> None:
    primitive, fn, args = MAPPED[name]
    names, out = run(fn, *args)
    assert primitive in names and not any("mm" in n or "flash" in n or "nll" in n or "native" in n for n in names)
    torch.testing.assert_close(out, fn(*args), rtol=1e-12, atol=1e-12)


THROUGH: dict[str, tuple[str, Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "a matrix is one operation already": ("aten.addmm.default", F.linear, (f(3, 4), f(5, 4), f(5))),
    "broadcast batches": ("aten.bmm.default", torch.matmul, (f(2, 1, 3, 4), f(2, 6, 4, 5))),
    "integers": ("aten.mul.Tensor", lambda x, y: torch.einsum("ij,ij->ij", x, y), (ids(5, 2, 2), ids(5, 2, 2))),
    "einsum with a diagonal": ("aten.diagonal.default", lambda x: torch.einsum("ii->i", x), (f(3, 3),)),
    "einsum with an ellipsis": (
        "aten.bmm.default",
        lambda x, y: torch.einsum("...ij,jk->...ik", x, y),
        (f(2, 3, 4), f(4, 5)),
    ),
    "two normalised dimensions": ("aten.native_layer_norm.default", lambda x: F.layer_norm(x, (3, 4)), (f(2, 3, 4),)),
    "padding_idx": ("aten.embedding.default", lambda i, w: F.embedding(i, w, padding_idx=0), (ids(7, 2), f(7, 4))),
    "class weights": (
        "aten.nll_loss_forward.default",
        lambda x, t, w: F.cross_entropy(x, t, w),
        (f(6, 5), ids(5, 6), f(5).abs()),
    ),
    "class probabilities": ("aten._log_softmax.default", F.cross_entropy, (f(6, 5), f(6, 5).softmax(-1))),
}


@pytest.mark.parametrize("name", THROUGH)
def test_let_through(name: str) -> None:
    op, fn, args = THROUGH[name]
    names, out = run(fn, *args)
    assert op in names and not {"einsum", "attention", "cross_entropy", "layer_norm", "embedding"} & set(names)
    torch.testing.assert_close(out, fn(*args), rtol=1e-12, atol=1e-12)


def test_a_mean_of_no_targets_is_nan_as_in_torch() -> None:
    targets = torch.full((4,), -100)
    _, out = run(F.cross_entropy, f(4, 5), targets)
    assert out.isnan() and F.cross_entropy(f(4, 5), targets).isnan()


def test_sixteen_bits_keep_their_dtype() -> None:
    x, w = f(2, 3, 8).bfloat16(), f(8).bfloat16()
    names, out = run(lambda x, w: F.layer_norm(x, (8,), w), x, w)
    assert names == ["layer_norm"] and out.dtype == torch.bfloat16
    torch.testing.assert_close(out, F.layer_norm(x, (8,), w), rtol=1e-2, atol=1e-2)
    names, out = run(F.cross_entropy, f(6, 5).bfloat16(), ids(5, 6))
    assert "cross_entropy" in names and out.dtype == torch.bfloat16
    assert "rms_norm" not in run(lambda x: F.rms_norm(x, (8,)), x)[0]  # its default eps is not ours to know


def test_a_module_called_functionally() -> None:
    layer = torch.nn.Linear(4, 5).double()
    names, out = run(
        lambda x, w, b: torch.func.functional_call(layer, {"weight": w, "bias": b}, (x,)),
        f(2, 3, 4),
        layer.weight.detach(),
        layer.bias.detach(),
    )
    assert names == ["einsum", "aten.add.Tensor"] and out.shape == (2, 3, 5)


def test_nothing_changes_under_transforms() -> None:
    """Gradients of nodes are taken by torch on the operations themselves."""
    x, w = f(2, 3, 4), f(5, 4)
    names, out = run(lambda x, w: torch.func.grad(lambda w: F.linear(x, w).square().sum())(w), x, w)
    assert "einsum" not in names
    torch.testing.assert_close(out, torch.func.grad(lambda w: F.linear(x, w).square().sum())(w), rtol=1e-12, atol=1e-12)


def test_eager_calls_are_torchs_own() -> None:
    x, w = f(2, 3, 4), f(5, 4)
    seen: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    from fmeg.ops.intercept import Intercept

    with Watch(), Intercept():
        F.linear(x, w)
    assert seen == ["linear"]
