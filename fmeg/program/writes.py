"""In-place operations in functional form: a write computes what the tensor holds then, and stores it.

`x[mask] = 3` is a `where`, `x.add_(1)` an `add`, `x.t_()` makes x a view of what it was. What writes into an argument,
changes sizes or has no functional form is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fmeg.program.errors import TraceError
from fmeg.program.ir import TensorType
from fmeg.program.lines import user_line
from fmeg.program.views import Entry, fresh, is_view, store

if TYPE_CHECKING:
    from fmeg.program.recorder import Recorder

aten = torch.ops.aten


def write(rec: Recorder, func: Any, args: tuple, kwargs: dict) -> Any:
    """Record an operation that writes into its first argument; returns that.

    Raises TraceError for other writes, into arguments of the program, and of what the tensor cannot hold.
    """
    name = func._schema.name.split("::")[1]
    target = args[0] if args else None
    in_place_view = torch.Tag.inplace_view in func.tags
    if in_place_view and (op := _functional_form(func)) is not None and is_view(op):
        return _reshape(rec, op, func, args, kwargs)
    if not name.endswith("_") or name.endswith("__") or not isinstance(target, torch.Tensor) or in_place_view:
        raise TraceError(
            f"{rec.name}: {func} writes into its argument at {user_line()}; use the form that returns its result"
        )
    _refuse_argument(rec, func, rec.entry(target))
    with rec.pause():
        shape, dtype = tuple(target.shape), target.dtype
    new = _functional(rec, name, func, args, kwargs)
    if tuple(new.shape) != shape:
        raise TraceError(f"{rec.name}: {func} would change the shape of its argument at {user_line()}")
    if not torch.can_cast(new.dtype, dtype) and name != "copy_":
        raise TraceError(
            f"{rec.name}: {func} at {user_line()} has a result of {new.dtype}, which cannot be written into a tensor "
            f"of {dtype}; cast first"
        )
    store(rec, fresh(rec, rec.entry(target)), rec.value(_cast(rec, new, dtype)))
    return target


def _reshape(rec: Recorder, op: Any, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """`x.squeeze_()` and its like: the tensor becomes a view of what it was."""
    target, rest = args[0], rec.to_values(args[1:])
    old = fresh(rec, rec.entry(target))
    _refuse_argument(rec, func, old)
    old.tensor = rec.fake_like(old.value.type)
    with rec.pause():
        func(*args, **kwargs)
    value = rec.emit(op, (old.value, *rest), dict(kwargs), (TensorType.of(target),))[0]
    rec.entries[id(target)] = Entry(target, value, old, (op, rest, dict(kwargs), None), 0, old.version)
    return target


def _functional(rec: Recorder, name: str, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
    """What the tensor holds after the write."""
    target = args[0]
    if name == "copy_":
        src = _cast(rec, args[1], target.dtype)
        if src.shape != target.shape:
            src = rec.call(aten.expand.default, (src, list(target.shape)), {})
        return src
    if name == "zero_":
        return rec.call(aten.zeros_like.default, (target,), {})
    if name == "fill_" and not isinstance(args[1], torch.Tensor):
        return rec.call(aten.full_like.default, (target, args[1]), {})
    if name == "index_put_" and (mask := _only_mask(args)) is not None:
        return rec.call(
            aten.where.self, (_mask_like(rec, mask, target), _scalar_like(rec, args[2], target), target), {}
        )
    op = _functional_form(func)
    if op is None:
        raise TraceError(f"{rec.name}: no functional form of {func} is known, at {user_line()}; write it functionally")
    return rec.call(op, args, kwargs)


def _functional_form(func: Any) -> Any:
    """The overload with the same arguments that writes nothing (`pow_.Scalar` is `pow.Tensor_Scalar`)."""
    packet = getattr(aten, func._schema.name.split("::")[1][:-1], None)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads() if packet else ():
        schema = getattr(packet, name)._schema
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == wanted:
            return getattr(packet, name)
    return None


def _only_mask(args: tuple) -> torch.Tensor | None:
    """The mask of `x[mask] = number`."""
    indices, value = args[1], args[2]
    plain = (
        len(indices) == 1
        and indices[0] is not None
        and indices[0].dtype == torch.bool
        and value.numel() == 1
        and not (len(args) > 3 and args[3])
    )
    return indices[0] if plain else None


def _mask_like(rec: Recorder, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A mask over the first dimensions, ready to broadcast."""
    with rec.pause():
        shape = [*mask.shape, *[1] * (target.ndim - mask.ndim)]
    return rec.call(aten.view.default, (mask, shape), {}) if len(shape) > mask.ndim else mask


def _scalar_like(rec: Recorder, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if value.ndim:
        value = rec.call(aten.view.default, (value, []), {})
    return _cast(rec, value, target.dtype)


def _cast(rec: Recorder, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value if value.dtype == dtype else rec.call(aten._to_copy.default, (value,), {"dtype": dtype})


def _refuse_argument(rec: Recorder, func: Any, entry: Entry) -> None:
    while entry.base is not None:
        entry = entry.base
    if entry.argument:
        what = (
            f"its argument {entry.value.name!r}"
            if entry.value.name and not entry.value.name.startswith("captured")
            else "an argument, or a tensor from outside"
        )
        raise TraceError(
            f"{rec.name}: {func} at {user_line()} writes into {what}. A traced function returns what it changes and "
            "leaves its arguments as they are: use the form without the underscore, or clone() first"
        )
