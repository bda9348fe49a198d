"""A traced function partitioned: its inputs and outputs placed by the layout, its Program local."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fmeg.mesh import Mesh
from fmeg.ops.collectives import Collective
from fmeg.pipeline.op import Pipeline
from fmeg.program.autocast import off
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.structured import Accumulate, SplitRows
from fmeg.program.trace import Traced
from fmeg.sharding.coalesce import coalesce_where
from fmeg.sharding.partition import Context, Partitioner
from fmeg.sharding.spec import Layout
from fmeg.sharding.value import Placed, Placement, Sizes
from fmeg.step.edge import VIEW_OF, Leaf, of_layers, place
from fmeg.step.lowered import Lowered
from fmeg.step.stacks import met, stored_stacks


@off()
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
        i for i, leaf in enumerate(edge) if of_layers(leaf) and at_rest.get(str(leaf.axes[0]), ()) == along != ()
    ]
    _layers_rest_where_used(name, traced, edge, layout, sizes)
    stages, stacks = stored_stacks(traced.program, [leaf.path for leaf in edge], layered, layout.view("compute"), sizes)
    if stages is not None:
        sizes = Sizes(sizes, stages.axis, dict(stages.stored))
    ctx = Context(sizes, layout.view("compute"), layout.options(), strict, dict(mesh.sizes))
    part = Partitioner(ctx, name)
    program = traced.program
    differentiated = any(isinstance(n.op, Accumulate) for n in program.nodes)
    blocks = _blocks(program)
    inputs, placements = [], []
    for i, (v, leaf, b) in enumerate(zip(program.inputs, edge, blocks, strict=True)):
        rows, shown = leaf.type.shape[0] // b if b > 1 else 0, leaf
        if b > 1:
            note = (
                f" (a microbatch: {leaf.type.shape[0]} rows in {b} microbatches; the rows must divide by microbatches "
                "times the devices that share the batch)"
            )
            shown = replace(leaf, type=TensorType((rows, *leaf.type.shape[1:]), leaf.type.dtype), note=note)
        home = place(shown, layout, sizes, VIEW_OF[leaf.role], name)
        placed = Placed(v.type, home, blocks=b)
        if leaf.role == "params":
            placed.layers = i in layered
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
    part.run(program.nodes if stages is None else met(program.nodes, stacks, stages))
    part.phase, part.source, part.tags = "B", "", {}
    outs: list[Any] = []
    out_placements: list[Placement | None] = []
    for v, wanted in zip(program.outputs, out_edge, strict=True):
        if not isinstance(v, Value):
            outs.append(v)
            out_placements.append(None)
            continue
        p = part.placed(v)
        target = place(wanted, layout, sizes, VIEW_OF[wanted.role], name) if wanted else p.home.whole()
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


_JOINED = {"all_reduce": ("gradient", "scalar", "output"), "reduce_scatter": ("gradient",), "all_gather": ("output",)}


def _joinable(node: Node) -> bool:
    """Collectives of the step itself that may share one call: gradients, scalars, parameters on their way out."""
    return (
        isinstance(node.op, Collective)
        and len(node.outs) == 1
        and node.tags.get("reason") in _JOINED.get(node.op.name, ())
    )


def _layers_rest_where_used(
    name: str, traced: Traced, edge: Sequence[Leaf], layout: Layout, sizes: Mapping[str, int]
) -> None:
    """Raise ShardingError if a pipeline's layers rest elsewhere than on the axis of its stages."""
    if not any(isinstance(n.op, Pipeline) for n in traced.program.nodes):
        return
    used, rest = layout.view("compute"), layout.view("params")
    for axis in dict.fromkeys(str(leaf.axes[0]) for leaf in edge if of_layers(leaf)):
        if any(a in sizes for a in used.get(axis, ())) and used[axis] != rest[axis]:
            raise ShardingError(
                f"jit({name}): the layout puts {axis!r} on {used[axis]}, and at rest on {rest[axis]}; a pipeline keeps "
                f"layers on the axis of its stages. Leave {axis!r} out of params="
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
