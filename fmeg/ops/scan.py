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

    `xs` is a pytree of tensors with one leading size L >= 1 (the layers). The carry is a pytree of tensors that keeps
    its
    structure, shapes and dtypes; `y` is one too, or None. In eager code a Python loop; in a traced one a single node
    whose
    body is traced once. Raises ValueError for xs that do not fit, TraceError for a body that breaks this contract.

    >>> import torch
    >>> total, ys = scan(lambda c, x: (c + x, c * x), torch.tensor(0.0), torch.tensor([1.0, 2.0, 3.0]))
    >>> total.item(), ys.tolist()
    (6.0, [0.0, 2.0, 9.0])
    """
    leaves, xs_tree = tree.flatten(xs)
    if not leaves:
        raise ValueError("scan: xs has no tensors; it must hold at least one, stacked along dimension 0")
    _tensors(xs, "xs")
    _tensors(carry, "carry")
    lengths = {int(x.shape[0]) if x.ndim else -1 for x in leaves}
    if len(lengths) != 1 or -1 in lengths:
        sizes = ", ".join(f"{p or 'xs'}: {tuple(x.shape)}" for p, x in zip(tree.paths(xs), leaves, strict=True))
        raise ValueError(f"scan: the leaves of xs must share their first dimension, given {sizes}")
    if lengths == {0}:
        raise ValueError("scan: xs has a leading size of 0; there must be at least one step")
    (length,) = lengths
    rec = recorder.active()
    if (
        rec is None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or any(_grad(x) for x in tree.leaves((carry, xs, consts)))
    ):
        return _loop(body, carry, leaves, xs_tree, length, consts)
    return _record(rec, body, carry, leaves, xs_tree, length, consts)


def _grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled()


def _tensors(values: Any, what: str) -> None:
    for path, x in zip(tree.paths(values), tree.leaves(values), strict=True):
        if not isinstance(x, torch.Tensor):
            where = f"{what}.{path}" if path else what
            raise TraceError(
                f"scan: {where} must be a tensor, given {x!r}; use torch.tensor({x!r}), or a constant closed over by "
                "the body"
            )


def _checked(out: Any, carry: Any) -> tuple[Any, Any]:
    """What a body returned, if it keeps the contract."""
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TraceError(f"scan: the body must return (carry, y), given {type(out).__name__}")
    new, y = out
    old_tree, new_tree = tree.structure(carry), tree.structure(new)
    if new_tree != old_tree:
        raise TraceError(
            f"scan: the body returns a carry of structure {new_tree}, but it began as {old_tree}; return the "
            "structure that the body was given"
        )
    _tensors(new, "the carry that the body returns")
    _tensors(y, "y")
    for path, a, b in zip(tree.paths(carry), tree.leaves(new), tree.leaves(carry), strict=True):
        if TensorType.of(a) != TensorType.of(b):
            raise TraceError(
                f"scan: carry {path or '(whole)'} is {TensorType.of(b)} at the start but the body returns "
                f"{TensorType.of(a)}; "
                "cast or reshape it so that both agree"
            )
    return new, y


def _loop(body: Any, carry: Any, leaves: list, xs_tree: Any, length: int, consts: tuple) -> tuple[Any, Any]:
    slices = [x.unbind(0) for x in leaves]
    ys = []
    for i in range(length):
        carry, y = _checked(body(carry, tree.unflatten(xs_tree, [s[i] for s in slices]), *consts), carry)
        ys.append(y)
    return carry, tree.map(lambda *t: torch.stack(t), *ys)


def _named(name: str, part: Any) -> list[str]:
    return [f"{name}.{p}" if p else name for p in tree.paths(part)]


def _record(
    rec: recorder.Recorder, body: Any, carry: Any, leaves: list, xs_tree: Any, length: int, consts: tuple
) -> tuple[Any, Any]:
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
        before = tree.unflatten(carry_tree, args[:n_c])
        out = body(before, tree.unflatten(xs_tree, args[n_c : n_c + n_x]), *tree.unflatten(const_tree, full))
        new, y = _checked(out, before)
        y_leaves, trees["y"] = tree.flatten(y)
        return [*tree.leaves(new), *y_leaves]

    name = getattr(body, "__name__", "body")
    of_consts = [n for i, c in enumerate(consts) for n in _named(f"const{i}", c)]
    names = [*_named("carry", carry), *(p or "x" for p in tree.paths(tree.unflatten(xs_tree, leaves)))]
    names += [n for n, s in zip(of_consts, static, strict=True) if not s]
    inner, outs = record_flat(flat, types, names, parent=rec, name=name)
    program = inner.program(outs, names)
    args = [*carry_leaves, *leaves, *const_tensors, *(t for t, _ in inner.captured)]
    op = Scan(program, length, n_c, n_x)
    out_types = [v.type for v in program.outputs[:n_c]]
    out_types += [TensorType((length, *v.type.shape), v.type.dtype) for v in program.outputs[n_c:]]
    values = rec.emit(op, tuple(rec.value(a) for a in args), {}, out_types)
    fakes = [rec.bind(rec.fake_like(v.type), v) for v in values]
    ys = tree.unflatten(trees["y"], fakes[n_c:])
    return tree.unflatten(carry_tree, fakes[:n_c]), ys
