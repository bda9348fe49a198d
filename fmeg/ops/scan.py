"""`scan`: one body over stacked layers; traced once, whatever their number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fmeg import tree
from fmeg.program import recorder
from fmeg.program.errors import TraceError
from fmeg.program.ir import TensorType
from fmeg.program.structured import Scan
from fmeg.program.trace import record_flat


def scan(body: Callable[..., tuple[Any, Any]], carry: Any, xs: Any, *consts: Any) -> tuple[Any, Any]:
    """Run `carry, y = body(carry, x, *consts)` over the leading dimension of `xs`; returns (carry, stacked ys).

    `xs` is a pytree of tensors with one leading size L (the layers). The carry keeps its structure, shapes and dtypes.
    In eager code a Python loop; in a traced one a single node whose body is traced once.

    >>> import torch
    >>> total, ys = scan(lambda c, x: (c + x, c * x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
    >>> total.item(), ys.tolist()
    (6.0, [0.0, 2.0, 9.0])
    """
    leaves, xs_tree = tree.flatten(xs)
    if not leaves:
        raise ValueError("scan: xs has no tensors; it must hold at least one, stacked along dimension 0")
    lengths = {int(x.shape[0]) if x.ndim else -1 for x in leaves}
    if len(lengths) != 1 or -1 in lengths:
        sizes = ", ".join(f"{p}: {tuple(x.shape)}" for p, x in zip(tree.paths(xs), leaves, strict=True))
        raise ValueError(f"scan: the leaves of xs must share their first dimension, given {sizes}")
    (length,) = lengths
    rec = recorder.active()
    if rec is None or torch._C._functorch.peek_interpreter_stack() is not None or any(_grad(x) for x in tree.leaves((carry, xs, consts))):
        return _loop(body, carry, leaves, xs_tree, length, consts)
    return _record(rec, body, carry, leaves, xs_tree, length, consts)


def _grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def _loop(body: Any, carry: Any, leaves: list, xs_tree: Any, length: int, consts: tuple) -> tuple[Any, Any]:
    slices = [x.unbind(0) for x in leaves]
    ys = []
    for i in range(length):
        carry, y = body(carry, tree.unflatten(xs_tree, [s[i] for s in slices]), *consts)
        ys.append(y)
    stacked = tree.map(lambda *t: torch.stack(t), *ys) if ys else None
    return carry, stacked


def _record(rec: recorder.Recorder, body: Any, carry: Any, leaves: list, xs_tree: Any, length: int, consts: tuple) -> tuple[Any, Any]:
    carry_leaves, carry_tree = tree.flatten(carry)
    const_leaves, const_tree = tree.flatten(consts)
    static = [not isinstance(c, torch.Tensor) for c in const_leaves]
    const_tensors = [c for c, s in zip(const_leaves, static, strict=True) if not s]
    n_c, n_x = len(carry_leaves), len(leaves)
    types = [TensorType.of(c) for c in carry_leaves]
    types += [TensorType(tuple(x.shape[1:]), x.dtype) for x in leaves]
    types += [TensorType.of(c) for c in const_tensors]
    trees: dict[str, Any] = {}

    def flat(*args: torch.Tensor) -> list[Any]:
        it = iter(args[n_c + n_x :])
        full = [c if s else next(it) for c, s in zip(const_leaves, static, strict=True)]
        out = body(tree.unflatten(carry_tree, args[:n_c]), tree.unflatten(xs_tree, args[n_c : n_c + n_x]), *tree.unflatten(const_tree, full))
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TraceError(f"scan: the body must return (carry, y), given {type(out).__name__}")
        new_leaves, new_tree = tree.flatten(out[0])
        y_leaves, trees["y"] = tree.flatten(out[1])
        if new_tree != carry_tree:
            raise TraceError(f"scan: the body returns a carry of structure {new_tree}, given {carry_tree}")
        for path, new, old in zip(tree.paths(carry), new_leaves, carry_leaves, strict=True):
            if TensorType.of(new) != TensorType.of(old):
                raise TraceError(
                    f"scan: carry {path or '(whole)'} is {TensorType.of(old)} at the start but the body returns {TensorType.of(new)}; "
                    "cast or reshape it so that both agree"
                )
        return [*new_leaves, *y_leaves]

    name = getattr(body, "__name__", "body")
    inner, outs = record_flat(flat, types, parent=rec, name=name)
    program = inner.program(outs)
    args = [*carry_leaves, *leaves, *const_tensors, *(t for t, _ in inner.captured)]
    op = Scan(program, length, n_c, n_x)
    out_types = [v.type for v in program.outputs[:n_c]]
    out_types += [TensorType((length, *v.type.shape), v.type.dtype) for v in program.outputs[n_c:]]
    values = rec.emit(op, tuple(rec.value(a) for a in args), {}, out_types)
    fakes = [rec.bind(rec.fake_like(v.type), v) for v in values]
    ys = tree.unflatten(trees["y"], fakes[n_c:])
    return tree.unflatten(carry_tree, fakes[:n_c]), ys
