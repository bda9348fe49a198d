"""Where two Programs differ by structure: operations, arguments, types, placements, bodies. Identity does not count."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.program.ir import Node, Program, Value, op_name
from fmeg.program.printing import Names, format_node, format_program
from fmeg.program.structured import Loop, loop_of

_TAGS = ("results", "primal", "hints", "remat")  # tags that change what a node means


def compare(a: Program, b: Program, *, limit: int = 10, sources: bool = False) -> list[str]:
    """The first `limit` differences between `a` and `b`, one readable line each; [] when they are the same.

    Values correspond if they were defined at the same place. Input names are compared, names of Programs are not, nor
    source lines unless `sources` is set. Where one body has another operation than the other, or more nodes, the rest
    of that body is left out: everything after it would differ.

    >>> from fmeg.program.trace import trace
    >>> x = torch.zeros(2)
    >>> a, b, c = (trace(f, x).program for f in (lambda x: x.sin() + 1, lambda x: x.sin() + 1, lambda x: x.sin() + 2))
    >>> compare(a, b)
    []
    >>> compare(a, c)
    ['node 1 aten.add.Tensor(b, 1): argument 1 is 1, not 2']
    """
    c = _Comparison(limit, sources)
    for program, names in ((a, c.names_a), (b, c.names_b)):
        format_program(program, names=names)  # so that values are called as they print
    c.program(a, b, "")
    return c.found[:limit]


@dataclass
class _Comparison:
    limit: int
    sources: bool
    found: list[str] = field(default_factory=list)
    same: dict[int, Value] = field(default_factory=dict)  # value of a -> value of b
    names_a: Names = field(default_factory=Names)
    names_b: Names = field(default_factory=Names)

    def note(self, where: str, text: str) -> None:
        self.found.append(f"{where}{text}")

    def full(self) -> bool:
        return len(self.found) >= self.limit

    def bind(self, where: str, kind: str, old: tuple[Value, ...], new: tuple[Value, ...]) -> None:
        for i, (v, w) in enumerate(zip(old, new, strict=True)):
            self.same.setdefault(id(v), w)
            if v.type != w.type:
                self.note(where, f"{kind} {i} is {v.type}, not {w.type}")
            elif v.placement != w.placement:
                self.note(where, f"{kind} {i} is {v.placement}, not {w.placement}")

    def program(self, a: Program, b: Program, where: str) -> None:
        if len(a.inputs) != len(b.inputs):
            self.note(where, f"{len(a.inputs)} inputs, not {len(b.inputs)}")
            return
        self.bind(where, "input", a.inputs, b.inputs)
        if a.names != b.names:
            self.note(where, f"inputs are called {', '.join(a.names)}, not {', '.join(b.names)}")
        for i, (m, n) in enumerate(zip(a.nodes, b.nodes, strict=False)):
            if self.full() or not self.node(m, n, f"{where}node {i} {format_node(m, self.names_a)}: "):
                return
        if len(a.nodes) != len(b.nodes):
            more, names = (a.nodes, self.names_a) if len(a.nodes) > len(b.nodes) else (b.nodes, self.names_b)
            first = more[min(len(a.nodes), len(b.nodes))]
            self.note(where, f"{len(a.nodes)} nodes, not {len(b.nodes)}; the first more is {format_node(first, names)}")
            return
        if len(a.outputs) != len(b.outputs):
            self.note(where, f"{len(a.outputs)} outputs, not {len(b.outputs)}")
            return
        for i, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True)):
            self.arg(where, f"output {i}", x, y)

    def node(self, m: Node, n: Node, where: str) -> bool:
        """Compare two nodes; False when the rest of the body is not worth comparing."""
        lm, ln = loop_of(m), loop_of(n)
        if not _same_op(m.op, n.op) or (lm is None) != (ln is None):
            self.note(where, f"the other has {format_node(n, self.names_b)}")
            return False
        if len(m.outs) != len(n.outs):
            self.note(where, f"{len(m.outs)} results, not {len(n.outs)}")
            return False
        if m.phase != n.phase:
            self.note(where, f"phase {m.phase}, not {n.phase}")
        if self.sources and m.source != n.source:
            self.note(where, f"from {m.source!r}, not {n.source!r}")
        if len(m.args) != len(n.args):
            self.note(where, f"{len(m.args)} arguments, not {len(n.args)}")
        for i, (x, y) in enumerate(zip(m.args, n.args, strict=False)):
            self.arg(where, f"argument {i}", x, y)
        if m.kwargs.keys() != n.kwargs.keys():
            self.note(where, f"keywords {sorted(m.kwargs)}, not {sorted(n.kwargs)}")
        for k in m.kwargs.keys() & n.kwargs.keys():
            self.arg(where, k, m.kwargs[k], n.kwargs[k])
        for k in _TAGS:
            self.arg(where, f"tag {k!r}", m.tags.get(k), n.tags.get(k))
        self.bind(where, "result", m.outs, n.outs)
        if lm is not None and ln is not None:
            self.loop(lm, ln, where)
        return True

    def loop(self, a: Loop, b: Loop, where: str) -> None:
        for name in ("times", "carried", "stacked", "kept", "summed"):
            if getattr(a, name) != getattr(b, name):
                self.note(where, f"{name} {getattr(a, name)}, not {getattr(b, name)}")
        self.program(a.body, b.body, f"{where}{a.label}: ")

    def arg(self, where: str, what: str, x: Any, y: Any) -> None:
        """Compare two arguments: nested containers element by element, values by where they were defined."""
        if isinstance(x, Value) and isinstance(y, Value):
            if self.same.get(id(x)) is not y:
                self.note(where, f"{what} is {self.names_a(x)}, not {self.names_b(y)}")
        elif isinstance(x, (tuple, list)) and type(x) is type(y) and len(x) == len(y):
            for i, (p, q) in enumerate(zip(x, y, strict=True)):
                self.arg(where, f"{what}[{i}]", p, q)
        elif isinstance(x, dict) and isinstance(y, dict) and x.keys() == y.keys():
            for k in x:
                self.arg(where, f"{what}[{k!r}]", x[k], y[k])
        elif not _equal(x, y):
            self.note(where, f"{what} is {_show(x)}, not {_show(y)}")


def _show(x: Any) -> str:
    return getattr(x, "__qualname__", None) or repr(x)


def _same_op(a: Any, b: Any) -> bool:
    """One operation: the same object, or structured ones of one kind (their bodies are compared after)."""
    return a is b or (type(a) is type(b) and hasattr(a, "loop") and op_name(a) == op_name(b))


def _equal(x: Any, y: Any) -> bool:
    tensors = [getattr(t, "tensor", t) for t in (x, y)]
    if all(isinstance(t, torch.Tensor) for t in tensors):
        p, q = tensors
        return p.dtype == q.dtype and p.shape == q.shape and torch.equal(p, q)
    if callable(x) and callable(y):
        return x is y or getattr(x, "__qualname__", 0) == getattr(y, "__qualname__", 1)
    return type(x) is type(y) and bool(x == y)
