"""`shard`: say where a value lives; `name`: tag a value for remat policies. Identities on one device."""

from __future__ import annotations

from typing import Any

import torch

from fmeg.program import recorder
from fmeg.program.errors import ShardingError
from fmeg.program.ir import Node
from fmeg.program.primitive import Primitive
from fmeg.program.rule import Rule


def _identity_vjp(args: Any, kwargs: Any, outs: Any, cts: Any) -> tuple[Any]:
    return (cts[0],)


def _same(node: Node) -> Rule:
    shape = node.args[0].shape
    names = tuple((f"d{i}",) for i in range(len(shape)))
    return Rule((names,), (names,), {f"d{i}": n for i, n in enumerate(shape)}, linear=frozenset({0}))


shard_p = Primitive("shard", lambda x, spec: x, vjp=_identity_vjp, rule=_same, cheap=True)
name_p = Primitive("name", lambda x, tag: x, vjp=_identity_vjp, rule=_same, cheap=True)


def _recording() -> recorder.Recorder | None:
    rec = recorder.active()
    return None if rec is None or torch._C._functorch.peek_interpreter_stack() is not None else rec


def shard(x: torch.Tensor, spec: Any) -> torch.Tensor:
    """Ask that `x` be placed as `spec` says: one entry a dimension, a logical or mesh axis name, a tuple of names, or
    None.

    The identity on one device and in eager code. In a partitioned program the only way a model asks for a placement.

    >>> import torch
    >>> from fmeg.sharding.spec import P
    >>> shard(torch.ones(2, 3), P("batch", None)).shape
    torch.Size([2, 3])
    """
    if len(spec) != x.ndim:
        raise ShardingError(
            f"shard: {spec} has {len(spec)} entries for a tensor of {x.ndim} dimensions, shape {tuple(x.shape)}; give "
            "one entry a dimension"
        )
    rec = _recording()
    if rec is None:
        return x
    for entry in spec:
        rec.declared_axes.update(() if entry is None else (entry,) if isinstance(entry, str) else entry)
    return shard_p(x, tuple(spec))


def name(x: torch.Tensor, tag: str) -> torch.Tensor:
    """Tag a value so that a remat policy (`save_names`) can keep it.

    >>> import torch
    >>> name(torch.ones(2), "attn_out").tolist()
    [1.0, 1.0]
    """
    return name_p(x, tag) if _recording() is not None else x
