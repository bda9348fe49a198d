"""Programs as text: a line a node, its type with placement, and the user's source line at the right.

    train(
      a: f32[8@tp, 16]                                                # params.w
      b: f32[4@dp, 8@tp]                                              # batch
    ) {
      c: f32[4@dp, 16]{P:tp} = einsum("b d, d f -> b f", b, a)    # model.py:7 mlp
      d: f32[4@dp, 16] = all_reduce[axes=("tp",), op="sum"](c)    # shard; model.py:8 mlp
      return d
    }

Names are given in the order of definition, through nested bodies too, so two traces of one function print alike. A body
is printed inside the node that runs it; the backward half of a scan goes on with the names of its forward half. Where a
body has both phases, F or B stands before each node. In a local Program sizes are global ones, with the mesh axes that
share them; a value within the local code of one rule has no placement and is marked `local`. A node that is done again
in the backward pass says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.program.ir import Node, Program, TensorType, Value, dtype_name
from fmeg.program.structured import Loop, loop_of, walk

WIDTH = 120
_INDENT = "  "
# what stands in a collective's args after (tensors, axes)
_COLLECTIVES = {
    "all_reduce": ("op",),
    "all_gather": ("dims",),
    "reduce_scatter": ("dims",),
    "all_to_all": ("split", "concat"),
    "ppermute": ("perm",),
    "exchange_rows": ("back", "rows", "width"),
    "axis_index": (),
    "local_slice": ("dims",),
}


def letters(n: int) -> str:
    """The n-th name: a … z, aa, ab, …

    >>> letters(0), letters(25), letters(26), letters(702)
    ('a', 'z', 'aa', 'aaa')
    """
    out = ""
    n += 1
    while n:
        n, r = divmod(n - 1, 26)
        out = chr(ord("a") + r) + out
    return out


def is_collective(node: Node) -> bool:
    """Whether a node is a collective (or asks for its rank, or slices by it): args are (tensors, axes, …)."""
    return type(node.op).__name__ == "Collective"


@dataclass
class Names:
    """Names of values, given when they are first met."""

    known: dict[int, str] = field(default_factory=dict)

    def __call__(self, v: Value) -> str:
        return self.known.setdefault(id(v), letters(len(self.known)))

    def __contains__(self, v: Value) -> bool:
        return id(v) in self.known


def show(arg: Any, names: Names) -> str:
    """An argument as Python would write it, tensors by name.

    >>> show([1, torch.float32, slice(None)], Names())
    '[1, f32, slice(None, None, None)]'
    """
    if isinstance(arg, Value):
        return names(arg)
    if isinstance(arg, str):
        return '"' + arg.replace('"', '\\"') + '"'
    if isinstance(arg, tuple):
        return "(" + ", ".join(show(a, names) for a in arg) + ("," if len(arg) == 1 else "") + ")"
    if isinstance(arg, list):
        return "[" + ", ".join(show(a, names) for a in arg) + "]"
    if isinstance(arg, dict):
        return "{" + ", ".join(f"{k}: {show(a, names)}" for k, a in arg.items()) + "}"
    if isinstance(arg, torch.dtype):
        return dtype_name(arg)
    tensor = getattr(arg, "tensor", None)
    if isinstance(tensor, torch.Tensor):
        small = tensor.numel() <= 8 and not tensor.is_meta
        return str(tensor.tolist()) if small else repr(TensorType.of(tensor))
    if callable(arg):
        return getattr(arg, "__qualname__", type(arg).__name__)
    return repr(arg)


def format_node(node: Node, names: Names) -> str:
    """The right-hand side of a node's line: operation and arguments."""
    if (loop := loop_of(node)) is not None:
        flat = "" if _bound(node, loop) else f"({', '.join(names(v) for v in node.operands())})"
        return f"{node.opname}[times={loop.times}]{flat}"
    if is_collective(node):
        rest = zip(_COLLECTIVES.get(node.op.name, ()), node.args[2:], strict=False)
        options = [f"axes={show(node.args[1], names)}", *(f"{k}={show(v, names)}" for k, v in rest)]
        return f"{node.opname}[{', '.join(options)}]({', '.join(show(x, names) for x in node.args[0])})"
    args = [show(a, names) for a in node.args]
    kwargs = [f"{k}={show(v, names)}" for k, v in node.kwargs.items()]
    return f"{node.opname}({', '.join([*args, *kwargs])})"


def _bound(node: Node, loop: Loop) -> bool:
    """Whether the node's operands are the body's inputs one by one."""
    return len(node.operands()) == len(loop.body.inputs) and loop.residuals == (0, 0)


def _comment(node: Node) -> str:
    parts = [node.tags["reason"]] if node.tags.get("reason") else []
    if node.tags.get("again"):
        parts.append("again")
    if node.source:
        parts.append(node.source)
    return "; ".join(parts)


@dataclass
class _Printer:
    width: int
    placed: bool  # some value has a placement: the Program is local
    names: Names = field(default_factory=Names)
    lines: list[str] = field(default_factory=list)

    def line(self, depth: int, code: str, comment: str = "") -> None:
        text = _INDENT * depth + code
        self.lines.append(text + f"  # {comment}".rjust(self.width - len(text)) if comment else text)

    def typed(self, v: Value) -> str:
        kind = v.placement or (f"local {v.type}" if self.placed else repr(v.type))
        return f"{self.names(v)}: {kind}"

    def program(self, p: Program, depth: int, head: str, loop: Loop | None = None, given: list | None = None) -> None:
        self.line(depth, f"{head}(")
        before = [self.names(v) for v in p.inputs if v in self.names]
        for i, v in enumerate(p.inputs):
            if v not in self.names:
                path = p.names[i] if i < len(p.names) else v.name
                self.line(depth + 1, self.typed(v) + (f" = {self.names(given[i])}" if given else ""), path)
        if before:
            self.line(depth + 1, ", ".join(before))
        self.line(depth, ") {")
        mixed = len({n.phase for n in p.nodes}) > 1
        for node in p.nodes:
            self.node(node, depth + 1, f"{node.phase} " if mixed else "")
        self.results(p, depth + 1, loop)
        self.line(depth, "}")

    def results(self, p: Program, depth: int, loop: Loop | None) -> None:
        shown = [show(o, self.names) for o in p.outputs]
        if loop is None or not (loop.stacked or loop.kept or loop.summed):
            self.line(depth, f"return {', '.join(shown)}")
            return
        for word, n in (("carry", loop.carried), ("stack", loop.stacked), ("keep", loop.kept), ("sum", loop.summed)):
            if n:
                self.line(depth, f"{word} {', '.join(shown[:n])}")
            shown = shown[n:]

    def node(self, node: Node, depth: int, phase: str) -> None:
        loop, right = loop_of(node), format_node(node, self.names)
        outs = [self.typed(v) for v in node.outs]
        code = f"{phase}{', '.join(outs)} = {right}"
        if len(_INDENT * depth + code) > self.width and len(outs) > 1:
            for i, out in enumerate(outs):
                comma = "," if i + 1 < len(outs) else ""
                self.line(depth, (phase if i == 0 else " " * len(phase)) + out + comma)
            code = f"{' ' * len(phase)}  = {right}"
        self.line(depth, code, _comment(node))
        if loop is not None:
            self.program(loop.body, depth + 1, loop.label, loop, node.operands() if _bound(node, loop) else None)


def format_program(program: Program, width: int = WIDTH, names: Names | None = None) -> str:
    """`program` as text, comments aligned to end at column `width`. See the module docstring for the notation.

    `names` gets the names that were given to values.

    >>> from fmeg.program.trace import trace
    >>> program = trace(lambda x: torch.sin(x) + 1, torch.zeros(2)).program
    >>> for line in format_program(program).splitlines():
    ...     print(line.partition("  #")[0].rstrip())
    <lambda>(
      a: f32[2]
    ) {
      b: f32[2] = aten.sin.default(a)
      c: f32[2] = aten.add.Tensor(b, 1)
      return c
    }
    """
    values = [*program.inputs, *(o for n, _, _ in walk(program) for o in n.outs)]
    printer = _Printer(width, any(v.placement for v in values), names if names is not None else Names())
    printer.program(program, 0, program.name)
    return "\n".join(printer.lines)


def size(n: float) -> str:
    """Bytes for people.

    >>> size(512), size(1536), size(3 * 2**30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    k = 0
    while n >= 1024 and k < len(units) - 1:
        n, k = n / 1024, k + 1
    return f"{n:.{1 if k else 0}f} {units[k]}"


def summary(program: Program) -> str:
    """One line about a Program, its `repr`."""
    n, nested = len(program.nodes), sum(1 for _, _, path in walk(program) if path)
    inside = f" (and {nested} in bodies)" if nested else ""
    return f"Program({program.name}: {len(program.inputs)} inputs, {n} nodes{inside}, {len(program.outputs)} outputs)"
