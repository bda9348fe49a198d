"""A function traced and partitioned for a mesh (`Lowered`), and ready to run on it (`Compiled`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg import tree
from fmeg.lower import beside, check_lowering, hidden, lower, vendor_kernels
from fmeg.mesh import Mesh
from fmeg.ops.collectives import Collective
from fmeg.pipeline.op import Storage, start_early
from fmeg.program import autocast
from fmeg.program.cost import Cost, cost
from fmeg.program.ir import Program
from fmeg.program.structured import walk
from fmeg.program.trace import Traced
from fmeg.sharding.array import Array
from fmeg.sharding.execute import Executable, Mode, check_mode
from fmeg.sharding.graph import Graph
from fmeg.sharding.kept import Memory, memory
from fmeg.sharding.local import LocalScan
from fmeg.sharding.peak import peak
from fmeg.sharding.spec import Layout
from fmeg.sharding.value import Placement


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

    def order_of(self, p: Placement, stack: int | None) -> tuple[int, ...] | None:
        """In which order a leaf stores its first dimension, if that is a stack of layers; None: as it is."""
        if self.stages is None or stack is None or p.dims[:1] != ((self.stages.axis,),):
            return None
        return self.stages.orders[stack]

    @autocast.off()
    def compile(self, mode: Mode = "eager", lowering: str | None = None, overlap: str | Sequence[str] = ()) -> Compiled:
        """Ready to run on the mesh's backend. `mode`, `lowering` and `overlap` as in `jit`."""
        check_mode("compile", mode)
        check_lowering("compile", lowering)
        axes = check_overlap("compile", overlap, self.mesh)
        program, backend = start_early(self.program), self.mesh.backend()
        for along in dict.fromkeys(n.args[1] for n, _, _ in walk(self.program) if isinstance(n.op, Collective)):
            backend.prepare(along)  # stages of a pipeline come to them in different orders
        if mode == "eager":
            return Compiled(self, Executable(vendor_kernels(self._beside(program, axes), lowering), backend))
        into = self._reused() if backend.plain else {}
        program = self._beside(lower(program, fused_fp8=lowering == "fp8"), axes)
        program = vendor_kernels(program, lowering)
        executable = Executable(program, backend, mode=mode, into=into)
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

    def _beside(self, program: Program, axes: tuple[str, ...]) -> Program:
        new = beside(program, axes)
        found = hidden(new)
        for a in axes:
            if self.mesh.sizes[a] > 1 and a not in found:
                raise ValueError(
                    f"jit({self.name}): overlap names {a}, but no product reads what is gathered along it, and none is "
                    "reduced and scattered along it. With tensor parallelism the layout must shard the residual stream "
                    'too, as res_seq="tp"; or leave it out of `overlap`'
                )
        return new

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
        for x, donated in zip(leaves, low.donated, strict=False):
            if donated and isinstance(x, Array):
                x.give(low.name)
        often = Counter(s for v in values for s in _storages([v])) if self.executable.into else Counter()
        for i in self.executable.into.values():
            x = leaves[i]
            alone = isinstance(x, Array) and x.own and all(often[s] == 1 for s in _storages([values[i]]))
            if not (alone and values[i].is_contiguous()):  # kernels write contiguous memory
                values[i] = values[i].clone(memory_format=torch.contiguous_format)
        shared = _storages(v for v, given in zip(values, low.donated, strict=False) if not given)
        with torch.no_grad(), autocast.off():  # its casts are recorded
            outs = (self.graph or self.executable.run)(values)
        often = Counter(s for got in outs for s in _storages([got]))
        results = []
        for got, placement, v, stack in zip(outs, low.outputs, low.traced.program.outputs, low.stacks_out, strict=True):
            if placement is None:
                results.append(got)
                continue
            here = _storages([got])
            own = bool(here) and not here & shared and all(often[s] == 1 for s in here)
            order = low.order_of(placement, stack)
            results.append(Array(got, v.type.shape, v.type.dtype, placement.dims, low.mesh, order, own))
        return tree.unflatten(low.traced.out_tree, results)


def check_overlap(who: str, overlap: str | Sequence[str], mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that are named; ValueError for one that the mesh does not have."""
    axes = (overlap,) if isinstance(overlap, str) else tuple(overlap)
    for a in axes:
        if a not in mesh.axes:
            raise ValueError(
                f"{who}: overlap must name axes of the mesh, given {a!r}; it has {', '.join(mesh.axes) or 'none'}"
            )
    return axes


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
