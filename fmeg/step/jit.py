"""`jit`: a function on global tensors, run on a mesh under a layout."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fmeg import tree
from fmeg.lower import check_lowering, lower, vendor_kernels
from fmeg.mesh import Mesh
from fmeg.ops.collectives import Collective
from fmeg.pipeline.op import Storage, start_early
from fmeg.program import recorder
from fmeg.program.cost import Cost, cost
from fmeg.program.errors import ShardingError, TraceError
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.structured import Accumulate, Gradient, SplitRows, walk
from fmeg.program.trace import Traced, argument_paths, trace, type_of
from fmeg.sharding.array import Array
from fmeg.sharding.coalesce import coalesce_where
from fmeg.sharding.execute import Executable, Mode, check_mode
from fmeg.sharding.graph import Graph
from fmeg.sharding.kept import Memory, memory
from fmeg.sharding.local import LocalScan
from fmeg.sharding.partition import Context, Partitioner
from fmeg.sharding.peak import peak
from fmeg.sharding.spec import Layout, resolve
from fmeg.sharding.value import Placed, Placement, Sizes, count, local_size
from fmeg.step.stacks import stored_stacks
from fmeg.step.state import Axes, TrainState

BATCH_AXES = ("batch", "seq")
log = logging.getLogger("fmeg")


@dataclass(frozen=True)
class Leaf:
    """One tensor at the edge: its path, type, role ("params", "opt" or "data") and logical axes."""

    path: str
    type: TensorType
    role: str
    axes: tuple[str | None, ...]
    note: str = ""  # for errors: where the type comes from


@dataclass(eq=False)
class Lowered:
    """A function traced and partitioned for a mesh and a layout; nothing has run."""

    name: str
    mesh: Mesh
    layout: Layout
    traced: Traced
    program: Program
    inputs: list[Placement]
    outputs: list[Placement | None]
    blocks: list[int]
    stacks_in: list[int | None] = field(default_factory=list)  # the scan whose layers the first dimension is
    stacks_out: list[int | None] = field(default_factory=list)
    stages: Storage | None = None  # how a pipeline stores its layers
    donated: list[bool] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def order_of(self, p: Placement, stack: int | None) -> tuple[int, ...] | None:
        """In which order a leaf stores its first dimension, if that is a stack of layers; None: as it is."""
        if self.stages is None or stack is None or p.dims[:1] != ((self.stages.axis,),):
            return None
        return self.stages.orders[stack]

    def compile(self, mode: Mode = "eager", lowering: str | None = None) -> Compiled:
        """Ready to run on the mesh's backend. `mode` and `lowering` as in `jit`."""
        check_mode("compile", mode)
        check_lowering("compile", lowering)
        program, backend = start_early(self.program), self.mesh.backend()
        if mode == "eager":
            return Compiled(self, Executable(vendor_kernels(program, lowering), backend))
        into = self._reused() if backend.plain else {}
        executable = Executable(vendor_kernels(lower(program), lowering), backend, mode=mode, into=into)
        if mode == "inductor":
            return Compiled(self, executable)
        if any(isinstance(n.op, LocalScan) and n.op.host for n, _, _ in walk(program)):
            raise ValueError(
                "compile: a CUDA graph cannot hold copies to the host (remat policy offload); use 'inductor'"
            )
        if not backend.plain or backend.device.type != "cuda":
            raise ValueError(
                f"compile: a CUDA graph records one CUDA device, this mesh is {self.mesh} on {backend.device.type}; "
                "use mode='inductor'"
            )
        return Compiled(self, executable, Graph(executable.run, executable.written))

    def _reused(self) -> dict[int, int]:
        """For results, the input that is given up and has the same type and placement: the first such, in order."""
        free: dict[Any, list[int]] = {}
        for i, (v, p, given) in enumerate(zip(self.program.inputs, self.inputs, self.donated, strict=False)):
            if given:
                free.setdefault((v.type, p.dims), []).append(i)
        found = {}
        for o, (v, out) in enumerate(zip(self.program.outputs, self.outputs, strict=True)):
            if out is not None and (here := free.get((v.type, out.dims))):
                found[o] = here.pop(0)
        return found

    def explain(self) -> Any:
        """Every collective: kind, axes, bytes, count, source line and reason. A table with `_repr_html_`."""
        from fmeg.sharding.explain import explain

        return explain(self.program, self.mesh)

    def cost(self) -> Cost:
        """One rank's arithmetic, memory traffic and peak memory (see fmeg.program.cost)."""
        return cost(self.program)

    def memory(self) -> Memory:
        """What a layer of each scan keeps for the backward pass on one rank, and what is done again. A table."""
        return memory(self.program)

    def predicted_peak(self, mode: Mode = "eager") -> int:
        """Bytes that one rank's allocator will show as its peak when the step runs in `mode`, arguments included (see
        fmeg.sharding.peak). What `donate` names is taken to be the step's own."""
        check_mode("predicted_peak", mode)
        owned = [i for i, given in enumerate(self.donated) if given]
        if mode == "eager":
            return peak(self.program, False, owned)
        return peak(lower(self.program), True, owned, self._reused())

    def text(self, stage: str = "local") -> str:
        """The Program as text: "local", one rank's with its collectives, or "global", before it was partitioned."""
        if stage not in ("local", "global"):
            raise ValueError(f"Lowered.text: stage must be 'local' or 'global', given {stage!r}")
        return str(self.program if stage == "local" else self.traced.program)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"Lowered({self.program!r}, {self.mesh}, {self.layout})"


@dataclass(eq=False)
class Compiled:
    """A runnable step."""

    lowered: Lowered
    executable: Executable
    graph: Graph | None = None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        low = self.lowered
        values = [
            _place(x, p, low.mesh, b, low.order_of(p, stack))
            for x, p, b, stack in zip(leaves, low.inputs, low.blocks, low.stacks_in, strict=True)
        ]
        for i in self.executable.into.values():
            if not (isinstance(leaves[i], Array) and leaves[i].own):
                values[i] = values[i].clone()
        for x, donated in zip(leaves, low.donated, strict=False):
            if donated and isinstance(x, Array):
                x.give(low.name)
        shared = _storages(v for v, given in zip(values, low.donated, strict=False) if not given)
        with torch.no_grad():
            outs = (self.graph or self.executable.run)(values)
        results = []
        for got, placement, v, stack in zip(outs, low.outputs, low.traced.program.outputs, low.stacks_out, strict=True):
            if placement is None:
                results.append(got)
                continue
            here = _storages([got])
            own = bool(here) and not here & shared
            shared |= here
            order = low.order_of(placement, stack)
            results.append(Array(got, v.type.shape, v.type.dtype, placement.dims, low.mesh, order, own))
        return tree.unflatten(low.traced.out_tree, results)


def _storages(values: Iterable[Any]) -> set[int]:
    """Where the memory of local tensors begins; nothing is known of values that are no tensors."""
    return {v.untyped_storage().data_ptr() for v in values if isinstance(v, torch.Tensor)}


def _place(x: Any, p: Placement, mesh: Mesh, blocks: int, order: tuple[int, ...] | None) -> Any:
    """A leaf as a backend value in its placement."""
    if isinstance(x, Array):
        if x.mesh == mesh and x.spec == p.dims and blocks == 1 and x.order == order:
            return x.value
        x = x.global_value()
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"jit: expected a tensor or an Array, given {type(x).__name__}")
    dims = p.dims
    if blocks > 1:
        x, dims = x.unflatten(0, (blocks, -1)), ((), *dims)
    if order is not None:
        padded = torch.cat([x, x.new_zeros(1, *x.shape[1:])]) if -1 in order else x  # row -1 is the padding
        x = padded[torch.tensor(order, device=x.device)]
    return mesh.backend().scatter(x.detach(), dims)


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
    ):
        self.lowering = lowering
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
        key = (treedef, tuple(types), tuple(static))
        try:
            compiled = self._cache.get(key)
        except TypeError:
            self._refuse_static(args, leaves, types)
            raise
        if compiled is None:
            if self._cache:
                log.info("jit(%s): traced again, because %s", self.name, self._why(args, key))
            compiled = self._cache[key] = self.lower(*args).compile(self.mode, self.lowering)
        return compiled([x for x, t in zip(leaves, types, strict=True) if t is not None])

    def _why(self, args: tuple, key: tuple) -> str:
        """How a call differs from the one traced last."""
        treedef, types, static = next(reversed(self._cache))
        if key[0] != treedef:
            return f"the arguments have the structure {key[0]}, had {treedef}"
        now, before = (zip(*k[1:], strict=True) for k in (key, (treedef, types, static)))
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


def state_leaves(state: TrainState, prefix: str) -> list[Leaf]:
    """The tensors of a TrainState in tree order, with their roles and axes."""
    out = []
    for path, x in zip(tree.paths(state), tree.leaves(state), strict=True):
        t = type_of(x)
        if t is None:
            continue
        head, _, rest = path.partition(".")
        role = head if head in ("params", "opt") else "data"
        names = state.axes.lookup(rest, len(t.shape)) if role != "data" else None
        if names is not None and role == "opt":  # factored moments keep the parameter's rank, with dimensions of size 1
            names = tuple(None if n == 1 else name for name, n in zip(names, t.shape, strict=True))
        out.append(Leaf(f"{prefix}.{path}", t, role, names or (None,) * len(t.shape)))
    return out


def _of_layers(leaf: Leaf) -> bool:
    """Whether a leaf is a stack of layers: its first axis is `layers`, or such as `dense_layers`."""
    name = leaf.axes[0] if leaf.axes else None
    return name is not None and (name == "layers" or name.endswith("_layers"))


def place(leaf: Leaf, layout: Layout, sizes: Mapping[str, int], view: str, fn: str) -> Placement:
    """Placement of a leaf in a view. ShardingError in the style of JAX if a dimension does not divide.

    Stacked layers that do not divide are whole in a function without a pipeline: which rank has which is for a schedule
    to say.
    """
    dims = resolve(leaf.axes, layout.view(view), sizes, f"jit({fn}): {leaf.path}, in the {view} view")
    if _of_layers(leaf) and local_size(leaf.type.shape[0], dims[0], sizes) is None:
        dims = ((), *dims[1:])
    for d, (n, axes) in enumerate(zip(leaf.type.shape, dims, strict=True)):
        parts = count(axes, sizes)
        if local_size(n, axes, sizes) is None:
            over = ", ".join(f"{a!r} (size {sizes[a]})" for a in axes)
            raise ShardingError(
                f"jit({fn}): {leaf.path} of type {leaf.type}{leaf.note} has logical axes {leaf.axes}; the {view} view "
                f"puts axis {leaf.axes[d]!r} (dimension {d}, of size {n}) on the mesh axis {over}, but "
                f"{parts} does not evenly divide {n}. {KV_HEADS if leaf.axes[d] == 'kv_heads' else RESIZE}"
            )
    return Placement(dims)


RESIZE = "Change the mesh or the layout, or pad the dimension by an amount that does not depend on the layout"
KV_HEADS = (
    'Split the mesh axis, as in Mesh(tk=2, tr=2) with Layout(heads=("tk", "tr"), kv_heads="tk"), or replicate the keys '
    "and values: kv_heads=()"
)
_VIEW = {"params": "params", "opt": "opt", "data": "compute"}


def partition(
    name: str,
    traced: Traced,
    edge: Sequence[Leaf],
    out_edge: Sequence[Leaf | None],
    mesh: Mesh,
    layout: Layout,
    strict: bool,
    declared: set[str] | None,
) -> Lowered:
    """Partition a traced function whose inputs and outputs have the given axes."""
    layout.check(mesh.axes, declared)
    sizes = {a: n for a, n in mesh.sizes.items() if n > 1}
    along, at_rest = layout.view("compute").get("layers", ()), layout.view("params")
    layered = [
        i for i, leaf in enumerate(edge) if _of_layers(leaf) and at_rest.get(str(leaf.axes[0]), ()) == along != ()
    ]
    stages, stacks = stored_stacks(traced.program, [leaf.path for leaf in edge], layered, layout.view("compute"), sizes)
    if stages is not None:
        sizes = Sizes(sizes, stages.axis, dict(stages.stored))
    ctx = Context(sizes, layout.view("compute"), layout.options(), strict, dict(mesh.sizes))
    part = Partitioner(ctx, name)
    program = traced.program
    differentiated = any(isinstance(n.op, Accumulate) for n in program.nodes)
    blocks = _blocks(program)
    inputs, placements = [], []
    for v, leaf, b in zip(program.inputs, edge, blocks, strict=True):
        rows, shown = leaf.type.shape[0] // b if b > 1 else 0, leaf
        if b > 1:
            note = (
                f" (a microbatch: {leaf.type.shape[0]} rows in {b} microbatches; the rows must divide by microbatches "
                "times the devices that share the batch)"
            )
            shown = replace(leaf, type=TensorType((rows, *leaf.type.shape[1:]), leaf.type.dtype), note=note)
        home = place(shown, layout, sizes, _VIEW[leaf.role], name)
        placed = Placed(v.type, home, blocks=b)
        if leaf.role == "params":
            placed.layers = _of_layers(leaf)
            placed.in_use = place(leaf, layout, sizes, "compute", name)
            placed.opt = place(leaf, layout, sizes, "opt", name)
            placed.grads = place(leaf, layout, sizes, "grads", name) if layout.grads else None
            if not differentiated:
                placed.use, placed.weight = placed.in_use, True
        local = part.input(v, placed)
        if b > 1:
            local.type = Placement(((), *home.dims)).local_type(TensorType((b, *shown.type.shape), v.type.dtype), sizes)
        inputs.append(local)
        placements.append(home)
    part.run(program.nodes)
    part.phase, part.source, part.tags = "B", "", {}
    outs: list[Any] = []
    out_placements: list[Placement | None] = []
    for v, wanted in zip(program.outputs, out_edge, strict=True):
        if not isinstance(v, Value):
            outs.append(v)
            out_placements.append(None)
            continue
        p = part.placed(v)
        target = place(wanted, layout, sizes, _VIEW[wanted.role], name) if wanted else p.home.whole()
        outs.append(part.get(p, target, "output"))
        out_placements.append(target)
    local_program = part.finish(inputs, outs, program.names)
    local_program = coalesce_where(local_program, _joinable)
    return Lowered(
        name,
        mesh,
        layout,
        traced,
        local_program,
        placements,
        out_placements,
        blocks,
        [stacks.get(id(v)) for v in program.inputs],
        [stacks.get(id(v)) for v in program.outputs],
        stages,
    )


def _exact(x: Any) -> Any:
    """A static value as a cache key: 0.0 and -0.0 differ, and nan equals itself."""
    return x.hex() if isinstance(x, float) else x


_JOINED = {"all_reduce": ("gradient", "scalar", "output"), "reduce_scatter": ("gradient",), "all_gather": ("output",)}


def _joinable(node: Node) -> bool:
    """Collectives of the step itself that may share one call: gradients, scalars, parameters on their way out."""
    return (
        isinstance(node.op, Collective)
        and len(node.outs) == 1
        and node.tags.get("reason") in _JOINED.get(node.op.name, ())
    )


def _blocks(program: Program) -> list[int]:
    """For each input, into how many microbatches all its uses split it (1: not at all, or not all of them)."""
    uses: dict[int, set[int]] = {id(v): set() for v in program.inputs}
    for n in program.nodes:
        for v in n.operands():
            if id(v) in uses:
                uses[id(v)].add(n.op.steps if isinstance(n.op, SplitRows) else 0)
    outputs = {id(v) for v in program.outputs if isinstance(v, Value)}
    return [
        next(iter(u)) if len(u := uses[id(v)]) == 1 and 0 not in u and id(v) not in outputs else 1
        for v in program.inputs
    ]


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
              A plain tensor stays the caller's
    mode      "eager": operations one by one; "inductor": runs of them between collectives are fused and compiled, each
              scan body once for all its layers; "cudagraph": that, and from the third call on the step is replayed as
              one CUDA graph
    lowering  "te": TransformerEngine's kernels run attention, norms and products on CUDA where they fit, except within
              the stages of a pipeline; needs `pip install "fmeg[te]"`. The mathematics and the layouts are unchanged

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
    )
