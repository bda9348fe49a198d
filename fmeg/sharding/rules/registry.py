"""All sharding rules in one table, to which users add with `register`."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from fmeg.program.ir import Node, op_name
from fmeg.program.rule import Rule
from fmeg.sharding.rules import (
    convolution,
    creation,
    indexing,
    loss,
    matmul,
    norm,
    pointwise,
    reduction,
    sdpa,
    slicing,
    softmax,
    view,
)
from fmeg.sharding.rules.table import RuleFn, Table, no_rule

FAMILIES: tuple[ModuleType, ...] = (
    pointwise,
    reduction,
    view,
    slicing,
    matmul,
    softmax,
    norm,
    indexing,
    loss,
    sdpa,
    convolution,
    creation,
)

TABLE = Table()
for _family in FAMILIES:
    TABLE.include(_family.RULES)


def register(*ops: Any) -> Callable[[RuleFn], RuleFn]:
    """Decorator that gives operations a sharding rule: `fn(node) -> Rule`.

    ops     OpOverloads, packets (all overloads), printed names such as "aten.add.Tensor", or lists of these.
            ValueError if one has a rule already

    >>> import torch
    >>> from fmeg.program.rule import rule
    >>> @register("my_library.row_scale.default")
    ... def row_scale(node):
    ...     return rule("b d, b -> b d", [v.shape for v in node.operands()], linear=frozenset({0}))
    >>> TABLE.find("my_library.row_scale.default") is row_scale
    True
    >>> _ = TABLE.pop("my_library.row_scale.default")
    """
    return TABLE.register(*ops)


def rule_for(node: Node) -> Rule:
    """The sharding rule of a node: its primitive's, else that of its overload, else that of its operation.

    Raises NoRuleError, with an example of a rule, when there is none.

    >>> import torch
    >>> from fmeg.program.ir import TensorType, Value
    >>> x = Value(TensorType((4, 8), torch.float32))
    >>> node = Node(torch.ops.aten.t.default, (x,), {}, (Value(TensorType((8, 4), torch.float32)),))
    >>> rule_for(node).outs
    ((('d1',), ('d0',)),)
    """
    own = getattr(node.op, "rule", None)
    fn = own or TABLE.find(op_name(node.op))
    if fn is None:
        raise no_rule(node)
    return fn(node)
