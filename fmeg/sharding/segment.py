"""Runs of compute nodes as generated Python: one function instead of one interpreted step a node.

The function is what one would write by hand: a line a node, its source in a comment (tracebacks show it), and a `del`
after each value's last use, so that memory is held no longer than it must:

    v7 = f0(v3, v5)  # model.py:12 block
    del v3
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from types import MappingProxyType
from typing import Any

import torch

from fmeg.kernels.grouped import grouped_dw_into
from fmeg.ops.contract import product_into
from fmeg.ops.einsum import einsum_matrices, einsum_p
from fmeg.ops.grouped import grouped_matmul_dw_p
from fmeg.program.gradient import MIRROR
from fmeg.program.ir import Node, Value, values_in
from fmeg.program.primitive import Primitive
from fmeg.sharding.lowering import lowering, returns_sequence
from fmeg.sharding.reuse import IN_PLACE, apart, writers

Slots = Mapping[int, int]  # id of a value -> its place in the environment
Run = Callable[[list[Any]], Any]
NOTHING: Slots = MappingProxyType({})


@dataclass(frozen=True)
class Chunk:
    """A generated function from a list of values, those in the slots `ins`, to a tuple of those in `outs`."""

    fn: Run
    ins: tuple[int, ...]
    outs: tuple[int, ...]


class _Source:
    """The text of a generated function, where tracebacks look for it; and the objects that it refers to."""

    def __init__(self, name: str, slots: Slots, device: torch.device) -> None:
        self.name, self.slots, self.device = name, slots, device
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"__name__": name, "__loader__": self}

    def get_source(self, name: str) -> str:
        return "\n".join(self.lines) + "\n"

    def constant(self, x: Any, prefix: str) -> str:
        name = f"{prefix}{len(self.scope)}"
        self.scope[name] = x
        return name

    def local(self, v: Value) -> str:
        return f"v{self.slots[id(v)]}"

    def expression(self, x: Any) -> str:
        """An argument: values by their names, plain data in place, everything else as a constant."""
        if isinstance(x, Value):
            return self.local(x)
        if x is None or type(x) in (bool, int, str) or (type(x) is float and isfinite(x)):
            return repr(x)
        if type(x) is tuple:
            return f"({''.join(self.expression(y) + ', ' for y in x)})"
        if type(x) is list:
            return f"[{', '.join(map(self.expression, x))}]"
        if type(x) is dict:
            return "{" + ", ".join(f"{k!r}: {self.expression(y)}" for k, y in x.items()) + "}"
        return self.constant(x, "c")

    def node(self, node: Node, last: Sequence[int], writes: bool) -> None:
        """The line that runs a node (into its first operand if it `writes`), and one that drops locals in `last`."""
        note = f"  # {node.source}".replace("\n", " ") if node.source else ""
        outs = [self.local(v) for v in node.outs]
        if node.op is MIRROR:
            self.lines.append(f"    {outs[0]} = {self.expression(node.args[0])}{note}")
        else:
            args = [self.expression(a) for a in node.args]
            args += [f"{k}={self.expression(v)}" for k, v in node.kwargs.items()]
            fn = IN_PLACE[node.op] if writes else lowering(node, self.device)
            call = f"{self.constant(fn, 'f')}({', '.join(args)})"
            picked = node.tags.get("results")
            if picked is not None:
                self.lines.append(f"    _ = {call}{note}")
                self.lines += [f"    {out} = _[{i}]" for out, i in zip(outs, picked, strict=True)]
                self.lines.append("    del _")
            elif len(outs) == 1 and not returns_sequence(node):
                self.lines.append(f"    {outs[0]} = {call}{note}")
            else:
                self.lines.append(f"    {''.join(o + ', ' for o in outs)}= {call}{note}")
        if last:
            self.lines.append(f"    del {', '.join(f'v{s}' for s in last)}")

    def product(self, node: Node, fn: Callable[..., None], into: Slots, add: bool) -> None:
        """The line that writes a product into given memory, or adds it."""
        operands = ", ".join(self.local(v) for v in node.operands())
        target = into[self.slots[id(node.outs[0])]]
        self.lines.append(f"    {self.constant(fn, 'f')}(v{target}, {operands}, {add})  # {node.source}")

    def compile(self, function: str) -> Run:
        exec(compile(self.get_source(self.name), self.name, "exec"), self.scope)
        return self.scope[function]


def _last_uses(nodes: Sequence[Node], slots: Slots) -> list[list[int]]:
    """For each node, the slots that no later one uses."""
    last = {slots[id(v)]: i for i, n in enumerate(nodes) for v in (*n.operands(), *n.outs)}
    out: list[list[int]] = [[] for _ in nodes]
    for slot, i in last.items():
        out[i].append(slot)
    return out


def in_place(nodes: Sequence[Node], slots: Slots, dying: set[int], device: torch.device, name: str) -> Run:
    """The nodes as a function on the environment itself, which values in `dying` leave and others made here enter."""
    src = _Source(name, slots, device)
    src.lines.append("def run(env):")
    here: set[int] = set()
    written = writers(nodes, {i for i, slot in slots.items() if slot not in dying})
    for node, last in zip(nodes, _last_uses(nodes, slots), strict=True):
        for v in node.operands():
            slot = slots[id(v)]
            if slot not in here:
                here.add(slot)
                src.lines.append(f"    v{slot} = env[{slot}]")
                if slot in dying:
                    src.lines.append(f"    env[{slot}] = None")
        src.node(node, (), id(node) in written)
        made = [slots[id(v)] for v in node.outs]
        here.update(made)
        src.lines += [f"    env[{slot}] = v{slot}" for slot in made if slot not in dying]
        if last:
            src.lines.append(f"    del {', '.join(f'v{s}' for s in last)}")
    return src.compile("run")


def as_function(
    nodes: Sequence[Node],
    slots: Slots,
    needed: set[int],
    device: torch.device,
    name: str,
    reuse: bool = True,
    into: Mapping[int, int] = NOTHING,
    add: bool = False,
    lying: Container[int] = (),
) -> Chunk:
    """The nodes as a function from the values that they use to those of its values that are `needed` afterwards.

    `reuse`: operations may write into the memory of values that are not needed any more. `into`: results, by slot, that
    are copied at the end into the memory of a value that is given up, or with `add` added to what is there. `lying`:
    slots of values that are known to lie in such memory; no other value may.
    """
    made = [slots[id(v)] for n in nodes for v in n.outs]
    inside = set(made)
    used = dict.fromkeys(slots[id(v)] for n in nodes for v in n.operands())
    read = set(used)
    used.update((s, None) for o, s in into.items() if o in inside)
    ins = tuple(s for s in used if s not in inside)
    outs = tuple(s for s in made if s in needed)
    src = _Source(name, slots, device)
    src.lines.append("def run(values):")
    if ins:
        src.lines.append(f"    {''.join(f'v{s}, ' for s in ins)}= values")
    kept = {i for i, slot in slots.items() if slot in needed or slot not in inside}
    written = writers(nodes, kept) if reuse else set()
    done = set()
    for node, last in zip(nodes, _last_uses(nodes, slots), strict=True):
        direct = _product_into(node, slots, into, used, read)
        if direct is not None:
            done.add(slots[id(node.outs[0])])
            src.product(node, direct, into, add)
            continue
        src.node(node, [s for s in last if s in inside and s not in needed], id(node) in written)
    given = "".join(f"v{s}, " for s in ins if s in read and s in lying)
    if given:
        alone = src.constant(apart, "f")
        src.lines += [f"    v{s} = {alone}(v{s}, ({given}))" for s in outs if s not in lying and s not in done]
    write = "add_" if add else "copy_"
    src.lines += [f"    v{into[s]}.{write}(v{s})" for s in outs if s in into and s not in done]
    src.lines.append(f"    return ({''.join(f'v{into.get(s, s)}, ' for s in outs)})")
    return Chunk(src.compile("run"), ins, outs)


def _product_into(
    node: Node, slots: Slots, into: Slots, used: Mapping[int, Any], read: Container[int]
) -> Callable[..., None] | None:
    """What writes a product straight into the memory that its result is meant for, where nothing else reads it. `read`:
    slots whose memory must stay as it is until the end."""
    out = slots[id(node.outs[0])] if len(node.outs) == 1 else None
    if out is None or out not in into or out in used or into[out] in read:
        return None
    if isinstance(node.op, Primitive) and "into" in node.op.lowerings:
        return node.op.lowerings["into"](node)
    if node.op not in (einsum_p, grouped_matmul_dw_p) or node.kwargs.get("dtype") is not torch.float32:
        return None
    if node.op is grouped_matmul_dw_p:
        return grouped_dw_into
    shape = einsum_matrices(node.args[0], *(v.shape for v in node.operands()))
    return partial(product_into, shape) if shape is not None else None


def by_variation(nodes: Sequence[Node], slots: Slots, known: Mapping[int, int]) -> list[list[Node]]:
    """Nodes grouped by the mesh axes over which their results vary: few axes first, so that no group needs a later one.

    `known` gives the axes, as bits, of the values made before; those of a node are all those of its operands.
    """
    masks = dict(known)
    groups: dict[int, list[Node]] = {}
    for n in nodes:
        mask = 0
        for v in values_in((n.args, n.kwargs)):
            mask |= masks[slots[id(v)]]
        masks.update(dict.fromkeys((slots[id(v)] for v in n.outs), mask))
        groups.setdefault(mask, []).append(n)
    return [groups[m] for m in sorted(groups, key=int.bit_count)]
