"""The Recorder: runs a function on fake tensors and writes down each operation as a node.

A `TorchDispatchMode` above a `FakeTensorMode`: every aten operation that reaches it becomes a `Node`; primitives and
structured operations call `record` themselves. Beside it:

views      tensors that share memory: which is a view of which
writes     in-place operations, in functional form
refused    what no program can hold
literal    small constants
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from fmeg.program import autocast
from fmeg.program.errors import TraceError
from fmeg.program.ir import Node, Program, TensorType, Value, values_in
from fmeg.program.lines import custom_function, user_line, variable_name
from fmeg.program.literal import Literal, constant
from fmeg.program.passes import dce
from fmeg.program.refused import refuse
from fmeg.program.views import Entry, fresh, is_view
from fmeg.program.writes import write

aten = torch.ops.aten

_IDENTITY = {aten.detach.default, aten.alias.default, aten.lift.default, aten.lift_fresh_copy.default}
_DROPPED_KWARGS = ("device", "pin_memory", "layout")
_LOCAL = threading.local()


def active() -> Recorder | None:
    """The recorder that is writing now on this thread, if any."""
    stack = getattr(_LOCAL, "stack", None)
    if not stack or stack[-1].paused:
        return None
    return stack[-1]


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
        self.entries: dict[int, Entry] = {}
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
        self.entries[id(tensor)].argument = True
        return tensor

    def bind(self, tensor: torch.Tensor, value: Value) -> torch.Tensor:
        """Make `tensor` stand for `value`."""
        self.entries[id(tensor)] = Entry(tensor, value)
        return tensor

    def alias(self, tensor: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """Make `tensor` another name of `of`."""
        entry = self.entry(of)
        self.entries[id(tensor)] = Entry(
            tensor, entry.value, entry, (aten.alias.default, (), {}, None), 0, entry.version
        )
        return tensor

    def value(self, tensor: torch.Tensor) -> Value:
        """The current value of a tensor, re-making a view whose base was written."""
        return fresh(self, self.entry(tensor)).value

    def entry(self, tensor: torch.Tensor) -> Entry:
        """What is known of a tensor; one of an enclosing program is captured. Raises TraceError if it is of none."""
        entry = self.entries.get(id(tensor))
        if entry is not None:
            return entry
        outer = self.parent
        while outer is not None:
            if id(tensor) in outer.entries:
                return self._capture(tensor)
            outer = outer.parent
        if isinstance(tensor, FakeTensor) and tensor.fake_mode is self.fake:
            raise TraceError(
                f"{self.name}: a tensor of type {TensorType.of(tensor)} was made where tracing was off, at "
                f"{user_line()}; make it inside the traced function, or pass it as an argument"
            )
        what = variable_name(tensor)
        raise TraceError(
            f"{self.name}: the traced function uses {what} of type {TensorType.of(tensor)}, which is not an argument, "
            f"at {user_line()}. A traced function is closed over no tensors: pass it as an argument"
        )

    def _capture(self, tensor: torch.Tensor) -> Entry:
        value = Value(TensorType.of(tensor), name=f"captured{len(self.captured)}")
        self.captured.append((tensor, value))
        self.bind(tensor, value)
        self.entries[id(tensor)].argument = True
        return self.entries[id(tensor)]

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
        autocast.refuse_primitive(self.name, op.name)
        vargs, vkwargs = self.to_values(args), self.to_values(kwargs)
        with self.pause():
            out = (op.fake or op.reference)(*args, **kwargs)
        return self.record_as(op, vargs, vkwargs, out)

    def record_as(self, op: Any, vargs: tuple, vkwargs: dict, out: Any) -> Any:
        """Record a node whose results look like the fake tensors `out` (a tensor or a tuple); returns fresh ones."""
        many = isinstance(out, (tuple, list))
        outs = list(out) if many else [out]
        values = self.emit(op, vargs, vkwargs, [TensorType.of(t) for t in outs])
        new = [self.bind(self.fake_like(v.type), v) for v in values]
        return tuple(new) if many else new[0]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if (device := kwargs.get("device")) is not None and torch.device(device).type != "meta":
            kwargs = {**kwargs, "device": "cpu"}  # a Program knows no device; whoever runs it says which
        if self.paused:
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Record a call of an aten operation, and give its result."""
        if func in _IDENTITY or func is aten.lift_fresh.default:
            return self._identity(func, args)
        if func is aten._to_copy.default and not isinstance(args[0], torch.Tensor):  # vmap of `x / 2` casts the 2
            func, args, kwargs = aten.scalar_tensor.default, (args[0],), {"dtype": kwargs["dtype"]}
        refuse(self.name, func, args, kwargs)
        if func._schema.is_mutable:
            return write(self, func, args, kwargs)
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
            if is_view(func) and args and isinstance(args[0], torch.Tensor):
                entry, base = self.entries[id(t)], self.entry(args[0])
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
        entry = self.entry(source)
        value = fresh(self, entry).value
        with self.pause():
            out = source.detach()
        if value.type.is_float and not _creates(value.node):
            value = self.emit(aten.detach.default, (value,), {}, (value.type,))[0]
        self.entries[id(out)] = Entry(out, value, entry, (aten.detach.default, (), {}, None), 0, entry.version)
        return out

    # -- the result -------------------------------------------------------------------------------------------------
    def program(self, outputs: Iterable[Any], names: Iterable[str] = ()) -> Program:
        """The Program recorded so far, with captured tensors as last inputs; unused nodes are dropped."""
        outs = tuple(self.value(o) if isinstance(o, torch.Tensor) else o for o in outputs)
        prog = Program((*self.inputs, *(v for _, v in self.captured)), list(self.nodes), outs, tuple(names), self.name)
        return dce(prog)


def _creates(node: Node | None) -> bool:
    """Whether a node's results have no gradient anyway; torch's creation functions call detach() on them."""
    if node is None:
        return False
    name = getattr(node.op, "__name__", "").partition(".")[0]
    return not node.operands() or node.op is aten.detach.default or name.endswith("_like") or name.startswith("new_")
