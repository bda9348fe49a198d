"""Tables of sharding rules, and what is said when an operation is in none.

Keys are printed names: `aten.add.Tensor` for one overload, `aten.add` for all overloads of an operation. A primitive
needs no entry: it carries its rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from string import ascii_lowercase
from typing import Any

from fmeg.program.errors import NoRuleError
from fmeg.program.ir import Node, op_name
from fmeg.program.rule import Rule

RuleFn = Callable[[Node], Rule]


class Table(dict[str, RuleFn]):
    """Rules by operation name.

    >>> table = Table()
    >>> @table.register("aten.relu", "aten.exp.default")
    ... def any_dim(node): ...
    >>> sorted(table)
    ['aten.exp.default', 'aten.relu']
    """

    def register(self, *ops: Any) -> Callable[[RuleFn], RuleFn]:
        """Decorator: `fn(node) -> Rule` is the rule of each of `ops` (see `fmeg.sharding.rules.register`)."""
        keys = [str(op) for op in _flat(ops)]

        def add(fn: RuleFn) -> RuleFn:
            for key in keys:
                if key in self:
                    raise ValueError(
                        f"register: {key} has a sharding rule already ({self[key].__module__}.{self[key].__qualname__})"
                    )
                self[key] = fn
            return fn

        return add

    def include(self, other: Table) -> None:
        """Add all of another table's rules."""
        for name, fn in other.items():
            self.register(name)(fn)

    def find(self, name: str) -> RuleFn | None:
        """The entry of an overload, else of its packet."""
        return self.get(name) or self.get(name.rpartition(".")[0])


def _flat(ops: Iterable[Any]) -> Iterable[Any]:
    for op in ops:
        if isinstance(op, (list, tuple)):
            yield from _flat(op)
        else:
            yield op


def no_rule(node: Node) -> NoRuleError:
    """The error for an operation that no rule covers; it shows how to write one.

    >>> import torch
    >>> from fmeg.program.ir import TensorType, Value
    >>> x = Value(TensorType((4, 8), torch.float32))
    >>> y = Value(TensorType((4, 4), torch.float32))
    >>> node = Node(torch.ops.aten.glu.default, (x,), {}, (y,), source="model.py:3 mlp")
    >>> print(no_rule(node))
    no sharding rule for aten.glu.default at model.py:3 mlp: f32[4, 8] -> f32[4, 4]
    Say which dimensions belong together, and which may not be split, for example
        from fmeg.sharding.rules import register, rule
        @register("aten.glu.default")
        def glu(node):
            shapes = [v.shape for v in node.operands()], [v.shape for v in node.outs]
            return rule("a b -> a c", *shapes, whole=frozenset("abc"))
    """
    name = op_name(node.op)
    ins, outs = node.operands(), node.outs
    types = f"{', '.join(str(v.type) for v in ins)} -> {', '.join(str(v.type) for v in outs)}"
    text, used = _example([v.shape for v in ins], [v.shape for v in outs])
    word = name.removeprefix("aten.").partition(".")[0]
    word = word if word.isidentifier() else "my_op"
    where = f" at {node.source}" if node.source else ""
    return NoRuleError(
        f"no sharding rule for {name}{where}: {types}\n"
        "Say which dimensions belong together, and which may not be split, for example\n"
        "    from fmeg.sharding.rules import register, rule\n"
        f'    @register("{name}")\n'
        f"    def {word}(node):\n"
        "        shapes = [v.shape for v in node.operands()], [v.shape for v in node.outs]\n"
        f'        return rule("{text}", *shapes, whole=frozenset("{used}"))'
    )


def _example(ins: list[tuple[int, ...]], outs: list[tuple[int, ...]]) -> tuple[str, str]:
    """A rule text that fits the shapes, with a letter a size (a guess: equal sizes may be different factors)."""
    letters: dict[tuple[int, int], str] = {}

    def term(shape: tuple[int, ...]) -> str:
        seen: dict[int, int] = {}
        words = []
        for n in shape:
            seen[n] = seen.get(n, 0) + 1
            words.append("1" if n == 1 else letters.setdefault((n, seen[n]), ascii_lowercase[len(letters) % 26]))
        return " ".join(words)

    text = f"{', '.join(map(term, ins))} -> {', '.join(map(term, outs))}"
    return text, "".join(letters.values())


def refuse(why: str) -> RuleFn:
    """A rule that explains why an operation can have none."""

    def rule(node: Node) -> Rule:
        where = f" at {node.source}" if node.source else ""
        raise NoRuleError(f"{op_name(node.op)}{where} has no sharding rule: {why}")

    rule.__doc__ = f"Refused: {why}."
    return rule
