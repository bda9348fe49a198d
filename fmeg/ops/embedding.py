"""Rows of a table by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from fmeg.ops._common import check_float, row_names
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Local, Rule, rule


def _reference(table: Tensor, ids: Tensor) -> Tensor:
    return F.embedding(ids, table)


def _reference_bwd(ct: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(ct, ids, num_rows, -1, False)


def _mine(info: Local, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Local row numbers, and which ids have their row on this rank."""
    local = ids - info.offset("v")
    n = info.size("v")
    return local.clamp(0, n - 1), (local >= 0) & (local < n)


def _local(info: Local, table: Tensor, ids: Tensor) -> Tensor:
    if info.parts("v") == 1:
        return embedding_p(table, ids)
    rows, mine = _mine(info, ids)
    return torch.where(mine.unsqueeze(-1), embedding_p(table, rows), 0.0)


def _local_bwd(info: Local, ct: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    if info.parts("v") == 1:
        return embedding_bwd_p(ct, ids, num_rows)
    rows, mine = _mine(info, ids)
    return embedding_bwd_p(torch.where(mine.unsqueeze(-1), ct, 0.0), rows, info.size("v"))


def _vjp(args: tuple, kwargs: dict, outs: tuple, cts: tuple) -> tuple[Tensor, None]:
    table, ids = args
    return embedding_bwd_p(cts[0], ids, table.shape[0]), None


def _rule(node: Node) -> Rule:
    shapes = [v.shape for v in node.operands()]
    rows = row_names(len(shapes[1]))
    return rule(f"v d, {rows} -> {rows} d", shapes, linear=frozenset({0}), local=_local)


def _rule_bwd(node: Node) -> Rule:
    """Row dimensions are contracted; v, which no operand has, may be sharded: each rank adds up its own rows."""
    shapes = [v.shape for v in node.operands()]
    rows = row_names(len(shapes[1]))
    sizes = {"v": node.args[2]}
    return rule(f"{rows} d, {rows} -> v d", shapes, sizes=sizes, linear=frozenset({0}), local=_local_bwd)


embedding_p = Primitive("embedding", _reference, vjp=_vjp, rule=_rule, flops=lambda n: 0, cheap=True)
embedding_bwd_p = Primitive("embedding_bwd", _reference_bwd, rule=_rule_bwd, flops=lambda n: n.operands()[0].type.numel)


def embedding(table: Float[Tensor, "v d"], ids: Int[Tensor, "*rows"]) -> Float[Tensor, "*rows d"]:
    """Look up rows: out[…] = table[ids[…]].

    ids     integers in [0, v), of any shape. Out of range is an error of torch's in eager mode; in a compiled step
            nothing checks it.

    On a mesh with v sharded, each rank looks up the rows that it holds and the result is a pending sum.

    >>> embedding(torch.tensor([[0.0, 1.0], [2.0, 3.0]]), torch.tensor([1, 0, 1]))
    tensor([[2., 3.],
            [0., 1.],
            [2., 3.]])
    """
    check_float("embedding", table=table)
    if table.ndim != 2:
        raise ValueError(f"embedding: table must be 'v d', given shape {tuple(table.shape)}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: ids must be int64 or int32, given {ids.dtype}")
    return embedding_p(table, ids)
