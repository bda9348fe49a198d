"""What has been moved to a placement is not moved there again."""

from __future__ import annotations

import torch

from fmeg import Layout, Mesh, P, einsum, jit, ops, shard, value_and_grad
from fmeg.ops.collectives import Collective
from fmeg.program.structured import walk

AXES = dict(params=dict(up="embed ff", down="ff embed", head="vocab embed", norm="embed"))


def mlp(params, x):
    u = ops.gelu(einsum("b s d, d f -> b s f", ops.rms_norm(x, params["norm"]), params["up"]))
    return shard(einsum("b s f, f d -> b s d", u, params["down"]), P("batch", None, None))


def loss(params, batch):
    x = mlp(params, batch)
    x = x + mlp(params, x)
    return einsum("b s d, v d -> b s v", x, params["head"]).square().sum(), 1


def test_the_cotangent_of_a_sum_is_completed_once_for_all_its_terms():
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64)
    params = dict(up=draw(8, 16), down=draw(16, 8), head=draw(4, 8), norm=draw(8))
    layout = Layout(batch="dp", ff="tp", vocab="tp")
    step = jit(
        lambda params, batch: value_and_grad(loss)(params, batch), mesh=Mesh(dp=2, tp=2), layout=layout, axes=AXES
    )
    program = step.lower(params, draw(4, 3, 8)).program
    moves = [(n.op, n.args[1:], v) for n, _, _ in walk(program) if isinstance(n.op, Collective) for v in n.operands()]
    keys = [(op.name, str(rest), id(v)) for op, rest, v in moves]
    assert len(keys) == len(set(keys))
    backward = [n.opname for n, _, path in walk(program) if isinstance(n.op, Collective) and n.phase == "B" and path]
    assert backward == ["all_reduce"] * 3  # for both terms of the sum, and for the input of each MLP
