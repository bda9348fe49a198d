"""What a Recorder knows of a tensor: the value it stands for, and the view it is of another.

A write to a tensor gives it a new value, and its base one with that scattered in (`store`), up to the tensor that is no
view. Other views of the base are then stale; each is re-made when it is read (`fresh`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fmeg.program.errors import TraceError
from fmeg.program.ir import TensorType, Value
from fmeg.program.lines import user_line

if TYPE_CHECKING:
    from fmeg.program.recorder import Recorder

aten = torch.ops.aten

_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_RESHAPES = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
}


@dataclass(eq=False)
class Entry:
    """One tensor object. `base_version` is the version of its base that `value` was made from."""

    tensor: torch.Tensor
    value: Value
    base: Entry | None = None
    view: tuple[Any, tuple, dict, int | None] | None = None  # op, args, kwargs, index among the op's results
    version: int = 0
    base_version: int = 0
    argument: bool = False  # an input of the program: writing to it would change what the caller holds


def is_view(func: Any) -> bool:
    """Whether an operation's results share the memory of its arguments."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)


def fresh(rec: Recorder, entry: Entry) -> Entry:
    """The entry, its value re-made if its base was written since."""
    if entry.base is not None:
        base = fresh(rec, entry.base)
        if base.version != entry.base_version:
            assert entry.view is not None
            op, args, kwargs, index = entry.view
            if op is aten.alias.default:
                entry.value = base.value
            else:
                with rec.pause():
                    out = op(base.tensor, *args, **kwargs)
                types = [TensorType.of(t) for t in (out if isinstance(out, (tuple, list)) else (out,))]
                entry.value = rec.emit(op, (base.value, *args), kwargs, types)[index or 0]
            entry.base_version = base.version
            entry.version += 1
    return entry


def store(rec: Recorder, entry: Entry, value: Value) -> None:
    """Make `value` the content of the tensor, and of the tensors it is a view of."""
    entry.value = value
    entry.version += 1
    if entry.base is not None:
        base = fresh(rec, entry.base)
        store(rec, base, _scatter(rec, base, entry, value))
        entry.base_version = base.version


def _scatter(rec: Recorder, base: Entry, view: Entry, value: Value) -> Value:
    """The base's value with that of its view put in."""
    assert view.view is not None
    op, args, kwargs, index = view.view
    full, bt = (TensorType.of(base.tensor),), base.value
    if op in (aten.alias.default, aten.detach.default):
        return value
    if op in _SCATTERS:
        return rec.emit(_SCATTERS[op], (bt, value, *args), kwargs, full)[0]
    if op is aten.unbind.int:
        return rec.emit(aten.select_scatter.default, (bt, value, *(args or (0,)), index), {}, full)[0]
    if op in (aten.split.Tensor, aten.split_with_sizes.default):
        dim = args[1] if len(args) > 1 else 0
        sizes = args[0] if isinstance(args[0], (list, tuple)) else [args[0]] * (index or 0)
        start = sum(sizes[:index])
        return rec.emit(aten.slice_scatter.default, (bt, value, dim, start, start + value.shape[dim]), {}, full)[0]
    if op in _RESHAPES:
        return rec.emit(aten.view.default, (value, list(full[0].shape)), {}, full)[0]
    if op in (aten.t.default, aten.transpose.int):
        return rec.emit(op, (value, *args), {}, full)[0]
    if op is aten.permute.default:
        inverse = [0] * len(args[0])
        for i, d in enumerate(args[0]):
            inverse[d] = i
        return rec.emit(op, (value, inverse), {}, full)[0]
    raise TraceError(f"{rec.name}: in-place write to a view made by {op}, at {user_line()}; write it functionally")
