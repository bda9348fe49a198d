"""The Recorder: runs a function on fake tensors and writes down each operation as a node.

A `TorchDispatchMode` above a `FakeTensorMode`: every aten operation that reaches it becomes a `Node`; primitives and
structured operations call `record` themselves. In-place operations are written down in functional form: each tensor
remembers the view it is of its base, a write makes a new value of the base, and stale views are re-made when read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fmeg.program.errors import TraceError
from fmeg.program.ir import Node, Program, TensorType, Value, values_in
from fmeg.program.lines import custom_function, user_line, variable_name

aten = torch.ops.aten

_LOCAL = threading.local()


def active() -> Recorder | None:
    """The recorder that is writing now on this thread, if any."""
    stack = getattr(_LOCAL, "stack", None)
    if not stack or stack[-1].paused:
        return None
    return stack[-1]


@dataclass(eq=False)
class _Entry:
    """What the recorder knows of one tensor object: its value, and the view it is of another tensor."""

    tensor: torch.Tensor
    value: Value
    base: _Entry | None = None
    view: tuple[Any, tuple, dict, int | None] | None = None  # op, args, kwargs, index among the op's results
    version: int = 0
    base_version: int = 0
    argument: bool = False  # an input of the program: writing to it would change what the caller holds


_IDENTITY = {aten.detach.default, aten.alias.default, aten.lift.default, aten.lift_fresh_copy.default}
_DROPPED_KWARGS = ("device", "pin_memory", "layout")
_SCATTERS = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}


class Recorder(TorchDispatchMode):
    """Records operations into a list of nodes.

    parent     the recorder of the enclosing program, for scan bodies; tensors of the parent that the body uses are
               captured as further inputs
    """

    def __init__(self, parent: Recorder | None = None, name: str = "program") -> None:
        super().__init__()
        self.parent = parent
        self.name = name
        self.fake: FakeTensorMode = parent.fake if parent else FakeTensorMode(allow_non_fake_inputs=False)
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []
        self.captured: list[tuple[torch.Tensor, Value]] = []
        self.paused = False
        self.phase = "F"
        self.source: str | None = None
        inherited = parent.tags.get("remat") if parent else None  # a body inside a region belongs to it
        self.tags: dict[str, Any] = {"remat": inherited} if inherited else {}
        self.declared_axes: set[str] = parent.declared_axes if parent else set()
        self.mesh_sizes: dict[str, int] | None = parent.mesh_sizes if parent else None
        self.counter = 0
        self.stopping = True  # note where gradients stop; off once a Program is differentiated
        self._entries: dict[int, _Entry] = {}
        self._parent_paused = False
        self._modes: list[ExitStack] = []

    # -- entering ---------------------------------------------------------------------------------------------------
    def __enter__(self) -> Recorder:
        stack = _LOCAL.__dict__.setdefault("stack", [])
        if self.parent is None:
            self.fake.__enter__()
        else:
            self._parent_paused, self.parent.paused = self.parent.paused, True
        stack.append(self)
        modes = ExitStack()  # a trace begins with gradients on, wherever it is called
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.enable_grad())
        self._modes.append(modes)
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._modes.pop().close()
        _LOCAL.stack.pop()
        if self.parent is None:
            self.fake.__exit__(*exc)
        else:
            self.parent.paused = self._parent_paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Run without recording."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    @contextmanager
    def marking(self, *, phase: str | None = None, source: str | None = None, **tags: Any) -> Iterator[None]:
        """Give the nodes recorded inside a phase, a source line and tags."""
        before = self.phase, self.source, self.tags
        self.phase, self.source = phase or self.phase, source or self.source
        self.tags = {**self.tags, **tags}
        try:
            yield
        finally:
            self.phase, self.source, self.tags = before

    # -- tensors and values -----------------------------------------------------------------------------------------
    def fake_like(self, t: TensorType) -> torch.Tensor:
        """A fresh fake tensor, unbound."""
        with self.pause(), self.fake, torch.inference_mode(False):
            return torch.empty(t.shape, dtype=t.dtype, device="cpu")

    def new_input(self, t: TensorType, name: str = "") -> torch.Tensor:
        """A fresh fake tensor bound to a new input."""
        tensor = self.fake_like(t)
        value = Value(t, name=name)
        self.inputs.append(value)
        self.bind(tensor, value)
        self._entries[id(tensor)].argument = True
        return tensor

    def bind(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        """Make `tensor` stand for `value`."""
        self._entries[id(tensor)] = _Entry(tensor, value)
        return tensor

    def alias(self, tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Make `tensor` another name of `of`."""
        entry = self._entry(of)
        self._entries[id(tensor)] = _Entry(
            tensor, entry.value, entry, (aten.alias.default, (), {}, None), 0, entry.version
        )
        return tensor

    def value(self, tensor: torch.Tensor) -> Value:
        """The current value of a tensor, re-making a view whose base was written."""
        return self._fresh(self._entry(tensor)).value

    def _entry(self, tensor: torch.Tensor) -> _Entry:
        entry = self._entries.get(id(tensor))
        if entry is not None:
            return entry
        outer = self.parent
        while outer is not None:
            if id(tensor) in outer._entries:
                return self._capture(tensor)
            outer = outer.parent
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake:
            raise TraceError(
                f"{self.name}: a tensor of type {TensorType.of(tensor)} was made where tracing was off, at "
                f"{user_line()}; "
                "make it inside the traced function, or pass it as an argument"
            )
        what = variable_name(tensor)
        raise TraceError(
            f"{self.name}: the traced function uses {what} of type {TensorType.of(tensor)}, which is not an argument, "
            f"at {user_line()}. A traced function is closed over no tensors: pass it as an argument"
        )

    def _capture(self, tensor: torch.Tensor) -> _Entry:
        value = Value(TensorType.of(tensor), name=f"captured{len(self.captured)}")
        self.captured.append((tensor, value))
        self.bind(tensor, value)
        self._entries[id(tensor)].argument = True
        return self._entries[id(tensor)]

    def _fresh(self, entry: _Entry) -> _Entry:
        if entry.base is not None:
            base = self._fresh(entry.base)
            if base.version != entry.base_version:
                assert entry.view is not None
                op, args, kwargs, index = entry.view
                if op is aten.alias.default:
                    entry.value = base.value
                else:
                    with self.pause():
                        out = op(base.tensor, *args, **kwargs)
                    types = [TensorType.of(t) for t in (out if isinstance(out, (tuple, list)) else (out,))]
                    entry.value = self.emit(op, (base.value, *args), kwargs, types)[index or 0]
                entry.base_version = base.version
                entry.version += 1
        return entry

    # -- recording --------------------------------------------------------------------------------------------------
    def emit(
        self, op: Any, args: tuple, kwargs: dict, types: Iterable[TensorType], source: str | None = None
    ) -> tuple[Value, ...]:
        """Append a node whose tensor arguments are already Values."""
        node = Node(
            op, args, kwargs, source=source or self.source or user_line(), phase=self.phase, tags=dict(self.tags)
        )
        if self.stopping:
            if not torch.is_grad_enabled():
                node.tags["no_grad"] = True
            if function := custom_function():
                node.tags["custom"] = function
        node.outs = tuple(Value(t, node, i) for i, t in enumerate(types))
        self.nodes.append(node)
        return node.outs

    def to_values(self, tree: Any) -> Any:
        """Nested args with tensors replaced by their values."""
        if isinstance(tree, torch.Tensor):
            return self.value(tree)
        if isinstance(tree, (tuple, list)):
            return (
                type(tree)(self.to_values(t) for t in tree)
                if type(tree) in (tuple, list)
                else tuple(self.to_values(t) for t in tree)
            )
        if isinstance(tree, dict):
            return {k: self.to_values(v) for k, v in tree.items()}
        return tree

    def record(self, op: Any, args: tuple, kwargs: dict) -> Any:
        """Record a primitive: shapes from its `fake` or its reference on fake tensors."""
        vargs, vkwargs = self.to_values(args), self.to_values(kwargs)
        with self.pause():
            out = (op.fake or op.reference)(*args, **kwargs)
        return self.record_as(op, vargs, vkwargs, out)

    def record_as(self, op: Any, vargs: tuple, vkwargs: dict, out: Any) -> Any:
        """Record a node whose results look like the fake tensors `out` (a tensor or a tuple); returns fresh ones."""
        many = isinstance(out, (tuple, list))
        outs = list(out) if many else [out]
        values = self.emit(op, vargs, vkwargs, [TensorType.of(t) for t in outs])
        fresh = [self.bind(self.fake_like(v.type), v) for v in values]
        return tuple(fresh) if many else fresh[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and torch.device(device).type != "meta":
            kwargs = {**kwargs, "device": "cpu"}  # a Program knows no device; whoever runs it says which
        if self.paused:
            return func(*args, **kwargs)
        return self._aten(func, args, kwargs)

    def _aten(self, func: Any, args: tuple, kwargs: dict) -> Any:
        if func in _IDENTITY or func is aten.lift_fresh.default:
            return self._identity(func, args)
        if func is aten._to_copy.default and not isinstance(args[0], torch.Tensor):  # vmap of `x / 2` casts the 2
            func, args, kwargs = aten.scalar_tensor.default, (args[0],), {"dtype": kwargs["dtype"]}
        self._refuse(func, args, kwargs)
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        vargs = self.to_values(args)
        vkwargs = {k: self.to_values(v) for k, v in kwargs.items() if k not in _DROPPED_KWARGS}
        out = func(*args, **kwargs)
        tensors = out if isinstance(out, (tuple, list)) else (out,)
        if not all(isinstance(t, torch.Tensor) for t in tensors):
            return self._mixed(func, vargs, vkwargs, out)
        takes_dtype = any(a.name == "dtype" for a in func._schema.arguments)
        if takes_dtype and vkwargs.get("dtype") is None and not any(True for _ in values_in(vargs)):
            vkwargs["dtype"] = out.dtype  # a default, of the moment, becomes part of the program
        values = self.emit(func, vargs, vkwargs, [TensorType.of(t) for t in tensors])
        for i, (t, v) in enumerate(zip(tensors, values, strict=True)):
            self.bind(t, v)
            if _is_view(func) and args and isinstance(args[0], torch.Tensor):
                entry, base = self._entries[id(t)], self._entry(args[0])
                index = i if isinstance(out, (tuple, list)) else None
                entry.base, entry.base_version, entry.view = base, base.version, (func, vargs[1:], vkwargs, index)
        return out

    def _mixed(self, func: Any, vargs: tuple, vkwargs: dict, out: Any) -> Any:
        """An operation with results that are not tensors (None, ints: SDPA's); keep the tensors only, by index."""
        outs = out if isinstance(out, (tuple, list)) else (out,)
        kept = [(i, t) for i, t in enumerate(outs) if isinstance(t, torch.Tensor)]
        if not kept:
            return out
        with self.marking(results=tuple(i for i, _ in kept)):
            values = self.emit(func, vargs, vkwargs, [TensorType.of(t) for _, t in kept])
        for (_, t), v in zip(kept, values, strict=True):
            self.bind(t, v)
        return out

    def _identity(self, func: Any, args: tuple) -> Any:
        source = args[0]
        if func is aten.detach.default and self.stopping:
            return self._detach(source)
        if func is aten.lift_fresh.default and not isinstance(source, FakeTensor):
            with self.pause():
                out = self.fake.from_tensor(source)
            with _disable_current_modes():
                kept = source.detach().clone()
            value = self.emit(constant, (Literal(kept),), {}, (TensorType.of(out),))[0]
            return self.bind(out, value)
        out = func(*args)
        return self.alias(out, source)

    def _detach(self, source: torch.Tensor) -> torch.Tensor:
        """A view that stops the gradient."""
        entry = self._entry(source)
        value = self._fresh(entry).value
        with self.pause():
            out = source.detach()
        if value.type.is_float and not _creates(value.node):
            value = self.emit(aten.detach.default, (value,), {}, (value.type,))[0]
        self._entries[id(out)] = _Entry(out, value, entry, (aten.detach.default, (), {}, None), 0, entry.version)
        return out

    def _refuse(self, func: Any, args: tuple, kwargs: dict) -> None:
        if func is aten._local_scalar_dense.default or func is aten.is_nonzero.default:
            raise TraceError(
                f"{self.name}: Python needs the value of a tensor at {user_line()} (an `if`, `while`, `int()`, "
                "`.item()` "
                "or `bool()` on a traced tensor). A traced function's path may not depend on data: use torch.where, or "
                "pass a Python number as a static argument"
            )
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs):
            raise TraceError(
                f"{self.name}: {func} draws from torch's global generator at {user_line()}; results would depend on "
                "the "
                "mesh. Use fmeg.random (normal, uniform, bernoulli with a key) or fmeg.ops.dropout"
            )
        if torch.Tag.dynamic_output_shape in func.tags and not _indexes_by_numbers(func, args):
            raise TraceError(
                f"{self.name}: the result shape of {func} depends on data, at {user_line()}; use a masked form "
                "(torch.where) instead"
            )

    # -- writes -----------------------------------------------------------------------------------------------------
    def _write(self, func: Any, args: tuple, kwargs: dict) -> Any:
        name = func._schema.name.split("::")[1]
        target = args[0] if args else None
        in_place_view = torch.Tag.inplace_view in func.tags
        if in_place_view and (op := _functional_form(func)) is not None and _is_view(op):
            return self._reshape(op, func, args, kwargs)
        if not name.endswith("_") or name.endswith("__") or not isinstance(target, torch.Tensor) or in_place_view:
            raise TraceError(
                f"{self.name}: {func} writes into its argument at {user_line()}; use the form that returns its result"
            )
        self._refuse_argument(func, self._entry(target))
        with self.pause():
            shape, dtype = tuple(target.shape), target.dtype
        new = self._functional(name, func, args, kwargs)
        if tuple(new.shape) != shape:
            raise TraceError(f"{self.name}: {func} would change the shape of its argument at {user_line()}")
        if not torch.can_cast(new.dtype, dtype) and name != "copy_":
            raise TraceError(
                f"{self.name}: {func} at {user_line()} has a result of {new.dtype}, which cannot be written into a "
                f"tensor of {dtype}; cast first"
            )
        if new.dtype != dtype:
            new = self._aten(aten._to_copy.default, (new,), {"dtype": dtype})
        self._store(self._fresh(self._entry(target)), self.value(new))
        return target

    def _reshape(self, op: Any, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        """`x.squeeze_()` and its like: the tensor becomes a view of what it was."""
        target, rest = args[0], self.to_values(args[1:])
        old = self._fresh(self._entry(target))
        self._refuse_argument(func, old)
        old.tensor = self.fake_like(old.value.type)
        with self.pause():
            func(*args, **kwargs)
        value = self.emit(op, (old.value, *rest), dict(kwargs), (TensorType.of(target),))[0]
        self._entries[id(target)] = _Entry(target, value, old, (op, rest, dict(kwargs), None), 0, old.version)
        return target

    def _functional(self, name: str, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        target = args[0]
        if name == "copy_":
            src = args[1]
            if src.dtype != target.dtype:
                src = self._aten(aten._to_copy.default, (src,), {"dtype": target.dtype})
            if src.shape != target.shape:
                src = self._aten(aten.expand.default, (src, list(target.shape)), {})
            return src
        if name == "zero_":
            return self._aten(aten.zeros_like.default, (target,), {})
        if name == "fill_" and not isinstance(args[1], torch.Tensor):
            return self._aten(aten.full_like.default, (target, args[1]), {})
        if name == "index_put_" and (mask := _only_mask(args)) is not None:
            return self._aten(
                aten.where.self, (self._mask_like(mask, target), self._scalar_like(args[2], target), target), {}
            )
        op = _functional_form(func)
        if op is None:
            raise TraceError(
                f"{self.name}: no functional form of {func} is known, at {user_line()}; write it functionally"
            )
        return self._aten(op, args, kwargs)

    def _mask_like(self, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """A mask over the first dimensions, ready to broadcast."""
        with self.pause():
            shape = [*mask.shape, *[1] * (target.ndim - mask.ndim)]
        return self._aten(aten.view.default, (mask, shape), {}) if len(shape) > mask.ndim else mask

    def _scalar_like(self, value: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if value.ndim:
            value = self._aten(aten.view.default, (value, []), {})
        return (
            self._aten(aten._to_copy.default, (value,), {"dtype": target.dtype})
            if value.dtype != target.dtype
            else value
        )

    def _refuse_argument(self, func: Any, entry: _Entry) -> None:
        while entry.base is not None:
            entry = entry.base
        if entry.argument:
            what = (
                f"its argument {entry.value.name!r}"
                if entry.value.name and not entry.value.name.startswith("captured")
                else "an argument, or a tensor from outside"
            )
            raise TraceError(
                f"{self.name}: {func} at {user_line()} writes into {what}. A traced function returns what it changes "
                "and leaves "
                "its arguments as they are: use the form without the underscore, or clone() first"
            )

    def _store(self, entry: _Entry, value: Value) -> None:
        """Make `value` the content of the tensor, and of the tensors it is a view of."""
        entry.value = value
        entry.version += 1
        if entry.base is not None:
            base = self._fresh(entry.base)
            self._store(base, self._scatter(base, entry, value))
            entry.base_version = base.version

    def _scatter(self, base: _Entry, view: _Entry, value: Value) -> Value:
        assert view.view is not None
        op, args, kwargs, index = view.view
        full, bt = (TensorType.of(base.tensor),), base.value
        if op in (aten.alias.default, aten.detach.default):
            return value
        if op in _SCATTERS:
            return self.emit(_SCATTERS[op], (bt, value, *args), kwargs, full)[0]
        if op is aten.unbind.int:
            return self.emit(aten.select_scatter.default, (bt, value, *(args or (0,)), index), {}, full)[0]
        if op in (aten.split.Tensor, aten.split_with_sizes.default):
            dim = args[1] if len(args) > 1 else 0
            sizes = args[0] if isinstance(args[0], (list, tuple)) else [args[0]] * (index or 0)
            start = sum(sizes[:index])
            return self.emit(aten.slice_scatter.default, (bt, value, dim, start, start + value.shape[dim]), {}, full)[0]
        if op in (
            aten.view.default,
            aten._unsafe_view.default,
            aten.unsqueeze.default,
            aten.squeeze.dim,
            aten.squeeze.dims,
            aten.squeeze.default,
        ):
            return self.emit(aten.view.default, (value, list(full[0].shape)), {}, full)[0]
        if op in (aten.t.default, aten.transpose.int):
            return self.emit(op, (value, *args), {}, full)[0]
        if op is aten.permute.default:
            inverse = [0] * len(args[0])
            for i, d in enumerate(args[0]):
                inverse[d] = i
            return self.emit(op, (value, inverse), {}, full)[0]
        raise TraceError(f"{self.name}: in-place write to a view made by {op}, at {user_line()}; write it functionally")

    # -- the result -------------------------------------------------------------------------------------------------
    def program(self, outputs: Iterable[Any], names: Iterable[str] = ()) -> Program:
        """The Program recorded so far, with captured tensors as last inputs; unused nodes are dropped."""
        from fmeg.program.passes import dce

        outs = tuple(self.value(o) if isinstance(o, torch.Tensor) else o for o in outputs)
        prog = Program((*self.inputs, *(v for _, v in self.captured)), list(self.nodes), outs, tuple(names), self.name)
        return dce(prog)


@dataclass(frozen=True, eq=False)
class Literal:
    """A small tensor written into the program, as `torch.tensor(1.0)` makes."""

    tensor: torch.Tensor


class _Constant:
    name = "constant"

    def __call__(self, literal: Literal) -> torch.Tensor:
        return literal.tensor


constant: Callable[[Literal], torch.Tensor] = _Constant()


def _creates(node: Node | None) -> bool:
    """Whether a node's results have no gradient anyway; torch's creation functions call detach() on them."""
    if node is None:
        return False
    name = getattr(node.op, "__name__", "").partition(".")[0]
    return not node.operands() or node.op is aten.detach.default or name.endswith("_like") or name.startswith("new_")


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


def _functional_form(func: Any) -> Any:
    """The overload with the same arguments that writes nothing (`pow_.Scalar` is `pow.Tensor_Scalar`)."""
    packet = getattr(aten, func._schema.name.split("::")[1][:-1], None)
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads() if packet else ():
        schema = getattr(packet, name)._schema
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == wanted:
            return getattr(packet, name)
    return None


def _draws(func: Any, args: tuple, kwargs: dict) -> bool:
    """Does it draw? Attention kernels are marked random, but draw only with dropout."""
    for i, a in enumerate(func._schema.arguments):
        if a.name == "dropout_p":
            return bool(kwargs.get(a.name, args[i] if i < len(args) else a.default_value))
    return True


def _indexes_by_numbers(func: Any, args: tuple) -> bool:
    """`x[ids]` has a shape that is known; `x[mask]` has not."""
    return func is aten.index.Tensor and all(t is None or t.dtype not in (torch.bool, torch.uint8) for t in args[1])


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
