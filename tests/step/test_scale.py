"""The cost of tracing and partitioning depends on neither the number of layers nor that of ranks."""

from dataclasses import replace

import torch

import fmeg
from fmeg import Layout, Mesh
from fmeg.models import llama, presets
from fmeg.program.ir import Program, TensorType
from fmeg.program.trace import trace

TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
LAYOUT = Layout(batch="dp", seq="cp", res_seq=("cp", "tp"), params=dict(embed="dp"), **TP)


def lowered(layers: int, mesh: Mesh):
    """Loss and gradient of a model of Llama 405B's widths; nothing is allocated."""
    cfg = replace(presets.get("llama3-8b"), layers=layers, embed=16384, ff=53248, heads=128)
    params = trace(lambda key: llama.init(key, cfg), fmeg.random.key(0))
    types = fmeg.tree.unflatten(params.out_tree, [v.type for v in params.program.outputs])
    ids = TensorType((256, 8192), torch.int64)
    batch = {"tokens": ids, "targets": ids, "mask": TensorType((256, 8192), torch.float32)}
    grad = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))

    def step(params, batch):
        return grad(params, batch)

    axes = {"params": llama.logical_axes(cfg)}
    return fmeg.jit(step, mesh=mesh, layout=LAYOUT, axes=axes, strict=True).lower(types, batch)


def nodes(program: Program) -> int:
    """Nodes of a Program and of the bodies in it."""
    inner = (n.op.body for n in program.nodes if isinstance(getattr(n.op, "body", None), Program))
    return len(program.nodes) + sum(map(nodes, inner))


def test_layers_and_ranks_cost_nothing():
    few, many = Mesh(dp=2, cp=2, tp=2), Mesh(dp=128, cp=16, tp=8)
    shallow, deep, wide = lowered(2, few), lowered(96, few), lowered(96, many)
    assert nodes(shallow.program) == nodes(deep.program) == nodes(wide.program)
    assert many.size == 16384
    assert many._built is None  # nothing of the mesh's size was made
