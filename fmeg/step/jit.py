"""`jit`: a function on global tensors, run on a mesh under a layout."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from fmeg import tree
from fmeg.lower import check_lowering
from fmeg.mesh import Mesh
from fmeg.program import autocast, recorder
from fmeg.program.errors import ShardingError, TraceError
from fmeg.program.ir import Program, Value
from fmeg.program.structured import Accumulate, Gradient
from fmeg.program.trace import Traced, argument_paths, trace, type_of
from fmeg.sharding.execute import Mode, check_mode
from fmeg.sharding.spec import Layout
from fmeg.step.edge import Leaf, state_leaves
from fmeg.step.lowered import Compiled, Lowered, check_overlap
from fmeg.step.partition import partition
from fmeg.step.state import Axes, TrainState

BATCH_AXES = ("batch", "seq")
log = logging.getLogger("fmeg")


class Jitted:
    """What `jit` returns: call it, or `.lower(*args)` to look before running."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        layout: Layout,
        axes: Mapping[str, Any],
        params: Sequence[str],
        out_axes: Any,
        strict: bool,
        donate: Sequence[str],
        mode: Mode,
        lowering: str | None,
        overlap: str | Sequence[str],
    ):
        self.lowering, self.overlap = lowering, check_overlap("jit", overlap, mesh)
        self.fn, self.mesh, self.layout, self.strict, self.mode = fn, mesh, layout, strict, mode
        check_mode("jit", mode)
        check_lowering("jit", lowering)
        self.axes = {k: Axes.of(v) for k, v in axes.items()}
        self.params, self.out_axes = tuple(params), out_axes
        self.donate = (donate,) if isinstance(donate, str) else tuple(donate)
        self.name = getattr(fn, "__name__", type(fn).__name__)
        try:
            self.signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):
            self.signature = None
        self.arg_names = list(self.signature.parameters) if self.signature else []
        for what, names in (("axes are given for", self.axes), ("donate names", self.donate)):
            for name in names:
                if self.arg_names and name not in self.arg_names:
                    raise ShardingError(
                        f"jit({self.name}): {what} {name!r}, which is not a parameter; it has "
                        f"{', '.join(self.arg_names)}"
                    )
        self._cache: dict[Any, Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args = self._bound(args, kwargs)
        if recorder.active() is not None:
            return self.fn(*args)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise TraceError(
                f"jit({self.name}) was called under a torch.func transform, which does not see what runs on a mesh. "
                "Put the transform inside: jit(torch.func.grad(f)), or fmeg.value_and_grad"
            )
        leaves, treedef = tree.flatten(args)
        types = [type_of(x) for x in leaves]
        static = [None if t is not None else (type(x), _exact(x)) for t, x in zip(types, leaves, strict=True)]
        key = (treedef, tuple(types), tuple(static), autocast.states())
        try:
            compiled = self._cache.get(key)
        except TypeError:
            self._refuse_static(args, leaves, types)
            raise
        if compiled is None:
            if self._cache:
                log.info("jit(%s): traced again, because %s", self.name, self._why(args, key))
            compiled = self._cache[key] = self.lower(*args).compile(self.mode, self.lowering, self.overlap)
        return compiled([x for x, t in zip(leaves, types, strict=True) if t is not None])

    def _why(self, args: tuple, key: tuple) -> str:
        """How a call differs from the one traced last."""
        last = next(reversed(self._cache))
        if key[0] != last[0]:
            return f"the arguments have the structure {key[0]}, had {last[0]}"
        if key[3] != last[3]:
            cast, had = (next(filter(None, k[3]), "off") for k in (key, last))
            return f"autocast is {cast}, was {had}"
        now, before = (zip(*k[1:3], strict=True) for k in (key, last))
        for path, (t, s), (old, old_s) in zip(argument_paths(self.fn, args), now, before, strict=True):
            if (t, s) != (old, old_s):
                return f"{path} is {t or repr(s[1])}, was {old or repr(old_s[1])}"
        return "the arguments differ"

    def _bound(self, args: tuple, kwargs: dict) -> tuple:
        """Keyword arguments in their places."""
        if not kwargs:
            return args
        if self.signature is None:
            raise TypeError(f"jit({self.name}): keyword arguments need a signature; pass them by position")
        bound = self.signature.bind(*args, **kwargs)
        if bound.kwargs:
            raise TypeError(
                f"jit({self.name}): {', '.join(bound.kwargs)} can only be passed by keyword; make it a positional "
                "parameter, or close over it"
            )
        return bound.args

    def _refuse_static(self, args: Sequence[Any], leaves: Sequence[Any], types: Sequence[Any]) -> None:
        for path, x, t in zip(argument_paths(self.fn, args), leaves, types, strict=True):
            if t is None and type(x).__hash__ is None:
                raise TypeError(
                    f"jit({self.name}): {path} is a {type(x).__name__}; expected a tensor, an Array, or a static value "
                    "that can be hashed. Convert it with torch.as_tensor, or make it a tuple"
                )

    def lower(self, *args: Any) -> Lowered:
        """Trace, differentiate and partition for these arguments (tensors, Arrays or TensorTypes)."""
        edge = [leaf for i, a in enumerate(args) for leaf in self._leaves(a, self._arg_name(i))]
        traced = trace(self.fn, *args)
        wanted = _differentiated(traced.program)
        edge = [
            replace(leaf, role="params") if id(v) in wanted and leaf.role == "data" else leaf
            for v, leaf in zip(traced.program.inputs, edge, strict=True)
        ]
        lowered = partition(
            self.name,
            traced,
            edge,
            self._out_edge(traced, args),
            self.mesh,
            self.layout,
            self.strict,
            self._declared(args, traced),
        )
        lowered.donated = [
            self._arg_name(i) in self.donate
            for i, a in enumerate(args)
            for x in tree.leaves(a)
            if type_of(x) is not None
        ]
        return lowered

    def _arg_name(self, i: int) -> str:
        return self.arg_names[i] if i < len(self.arg_names) else f"args[{i}]"

    def _leaves(self, arg: Any, name: str) -> list[Leaf]:
        if isinstance(arg, TrainState):
            return state_leaves(arg, name)
        axes = self.axes.get(name)
        out = []
        role = "params" if name in self.params else "data"
        if axes is not None:
            axes.check(arg, f"jit({self.name}): ", name, every=role == "params")
        for path, x in zip(tree.paths(arg), tree.leaves(arg), strict=True):
            t = type_of(x)
            if t is None:
                continue
            names = axes.lookup(path, len(t.shape)) if axes else None
            if names is None and name == "batch" and axes is None:
                names = (BATCH_AXES + (None,) * len(t.shape))[: len(t.shape)]
            if names is None:
                names = (None,) * len(t.shape)
            out.append(Leaf(f"{name}.{path}" if path else name, t, role, names))
        return out

    def _declared(self, args: Sequence[Any], traced: Traced) -> set[str] | None:
        """All logical axes that the function knows of; None if it annotates nothing (an `init`), so that a shared
        layout may know more."""
        names = set(traced.declared_axes)
        if not names and not any(isinstance(n.op, Accumulate) for n in traced.program.nodes):
            return None
        for a in self.axes.values():
            names |= a.names()
        for i, a in enumerate(args):
            if isinstance(a, TrainState):
                names |= a.axes.names()
            elif self._arg_name(i) == "batch" and "batch" not in self.axes:
                names |= set(BATCH_AXES)
        if self.out_axes is not None:
            names |= Axes.of(self.out_axes).names()
        out = tree.unflatten(traced.out_tree, traced.program.outputs)
        for node in _states(out):
            names |= node.axes.names()
        return names

    def _out_edge(self, traced: Traced, args: Sequence[Any]) -> list[Leaf | None]:
        out = tree.unflatten(traced.out_tree, traced.program.outputs)
        if self.out_axes is not None:
            axes = Axes.of(self.out_axes)
            axes.check(out, f"jit({self.name}): ", "out_axes", every=True)
            return [
                Leaf(p, v.type, "params", axes.lookup(p, v.ndim) or (None,) * v.ndim) if isinstance(v, Value) else None
                for p, v in zip(tree.paths(out), tree.leaves(out), strict=True)
            ]
        edge: list[Leaf | None] = []
        for x in tree.leaves(out, is_leaf=lambda x: isinstance(x, TrainState)):
            known = iter(state_leaves(x, "state") if isinstance(x, TrainState) else ())
            edge += [next(known, None) if type_of(v) is not None else None for v in tree.leaves(x)]
        return edge


def _differentiated(program: Program) -> set[int]:
    """ids of the inputs by which `value_and_grad` differentiates: parameters, whatever their argument is called."""
    inputs = {id(v) for v in program.inputs}
    return {id(n.args[1]) for n in program.nodes if isinstance(n.op, Gradient)} & inputs


def _states(out: Any) -> list[TrainState]:
    return [x for x in tree.leaves(out, is_leaf=lambda x: isinstance(x, TrainState)) if isinstance(x, TrainState)]


def _exact(x: Any) -> Any:
    """A static value as a cache key: 0.0 and -0.0 differ, and nan equals itself."""
    return x.hex() if isinstance(x, float) else x


def jit(
    fn: Callable[..., Any],
    *,
    mesh: Mesh | None = None,
    layout: Layout | None = None,
    axes: Mapping[str, Any] | None = None,
    params: Sequence[str] = ("params",),
    out_axes: Any = None,
    strict: bool = False,
    donate: Sequence[str] = (),
    mode: Mode = "eager",
    lowering: str | None = None,
    overlap: str | Sequence[str] = (),
) -> Jitted:
    """`fn` on a mesh: traced once per structure and shapes, differentiated, partitioned, run.

    mesh      where it runs; None: one device
    layout    which logical axis lives on which mesh axis; None: everything replicated
    axes      logical axes of the arguments, by parameter name: trees of strings. A `TrainState` knows its own; an
              argument called `batch` has ("batch", "seq", …) unless said otherwise; all else is replicated
    params    which arguments are parameters (placed by the layout's `params=` view and moved when used); those that the
              function differentiates by are, whatever their name
    out_axes  logical axes of the result (in the `params=` view), for functions that create parameters
    strict    refuse movements that nobody asked for
    donate    arguments that the caller gives up: the memory of their Arrays is free once the step is done with them,
              and using them again is an error. For `state = step(state, batch)`: two states never exist side by side.
              A plain tensor stays the caller's. Compiled modes write the next state there: do not keep an Array's
              `value` beyond the step that takes it
    mode      "eager": operations one by one; "inductor": runs of them between collectives are fused and compiled, each
              scan body once for all its layers; "cudagraph": that, and from the third call on the step is replayed as
              one CUDA graph
    lowering  "te": TransformerEngine's kernels run attention, norms and products on CUDA where they fit, except within
              the stages of a pipeline; needs `pip install "fmeg[te]"`. "fp8": in compiled modes, Triton kernels make
              FP8 operands in both orders at once (see docs/precision.md). The mathematics and the layouts are unchanged
    overlap   mesh axes, by name, whose gathers and reductions go on beside the products that read a gather or that a
              reduction sums: `overlap="tp"` where `res_seq="tp"`. Each rank's part is multiplied while others are
              copied from the memory of their GPUs (see fmeg.mesh.beside), which must be those of one host: an error
              where they cannot be, and where there is nothing to hide. It is said here and not in the layout, because
              nothing is placed otherwise; and axis by axis and not for all processes, because another axis may span
              hosts. On virtual meshes and on CPUs the same operations run one after the other

    Arguments are global tensors or Arrays; results are Arrays. Anything else is static: it must be hashable, and
    another value is another trace; the logger "fmeg" says why a function is traced again, at level INFO. Inside a
    traced function a jitted one is its plain function.

    >>> import torch
    >>> from fmeg.mesh import Mesh
    >>> f = jit(lambda batch: (batch * 2).sum(), mesh=Mesh(dp=2), layout=Layout(batch="dp"))
    >>> float(f(torch.ones(4, 3)))
    24.0
    """
    return Jitted(
        fn,
        mesh if mesh is not None else Mesh(backend="loop"),
        layout if layout is not None else Layout(),
        axes or {},
        params,
        out_axes,
        strict,
        donate,
        mode,
        lowering,
        overlap,
    )
