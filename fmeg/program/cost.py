"""What a Program costs: arithmetic, memory traffic, memory. Counted, not measured; bodies as often as they run.

    flops     products and what primitives declare: 2 for a multiply-add
    other     one for each element of everything else: pointwise, reductions, copies (of the larger side)
    moved     bytes read and written if every node reads its operands and writes its results once; views are free
    peak      bytes that live at once: a value from its definition to its last use, inputs and outputs throughout

In a local Program these are one rank's. A collective has no flops; its reads and writes count, what it sends does not
(see fmeg.sharding.explain). A shard_map in a global Program counts as what one rank does. Nothing is assumed to be
fused, so `moved` is an upper bound; workspaces inside an operation are not known, so `peak` is a lower one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from fmeg.program.ir import Node, Program, map_values
from fmeg.program.memory import is_view, peak_bytes
from fmeg.program.primitive import Primitive
from fmeg.program.printing import is_collective, size
from fmeg.program.structured import loop_of


@dataclass(frozen=True)
class Cost:
    """flops, other: operations. moved, peak, inputs, outputs: bytes. by_op: flops of each operation that has some."""

    flops: int
    other: int
    moved: int
    peak: int
    inputs: int
    outputs: int
    by_op: dict[str, int]

    def __str__(self) -> str:
        shares = ", ".join(f"{k} {v / self.flops:.1%}" for k, v in self.by_op.items())
        rows = [
            ("flops", f"{self.flops:,} ({shares})" if shares else "0"),
            ("other operations", f"{self.other:,}"),
            ("moved", size(self.moved)),
            ("peak memory", f"{size(self.peak)} (inputs {size(self.inputs)}, outputs {size(self.outputs)})"),
        ]
        return "\n".join(f"{name:18}{text}" for name, text in rows)


def cost(program: Program) -> Cost:
    """All of it at once.

    >>> from fmeg.program.trace import trace
    >>> c = cost(trace(lambda x, w: (x @ w).relu(), torch.zeros(2, 3), torch.zeros(3, 4)).program)
    >>> c.flops, c.other                     # 2·2·3·4; one for each of 2·4
    (48, 8)
    >>> c.moved // 4                         # x, w -> y; y -> z
    42
    >>> c.peak // 4                          # x, w, y, z
    34
    """
    by_op: Counter[str] = Counter()
    other = moved = 0
    for node, times in _leaves(program, 1):
        f = node_flops(node)
        if f:
            by_op[node.opname] += f * times
        other += node_other(node) * times
        moved += node_bytes(node) * times
    adds = list(_loop_sums(program, 1))
    return Cost(
        flops=sum(by_op.values()),
        other=other + sum(n for n, _ in adds),
        moved=moved + sum(b for _, b in adds),
        peak=peak_bytes(program),
        inputs=sum(v.type.nbytes for v in program.inputs),
        outputs=sum(v.type.nbytes for v in {id(o): o for o in program.outputs if hasattr(o, "type")}.values()),
        by_op=dict(by_op.most_common()),
    )


def flops(program: Program) -> int:
    """`cost(program).flops`."""
    return sum(node_flops(n) * times for n, times in _leaves(program, 1))


def bytes_moved(program: Program) -> int:
    """`cost(program).moved`."""
    return sum(node_bytes(n) * times for n, times in _leaves(program, 1)) + sum(b for _, b in _loop_sums(program, 1))


def peak_memory(program: Program) -> int:
    """`cost(program).peak`: see fmeg.program.memory."""
    return peak_bytes(program)


def _leaves(program: Program, times: int) -> Iterator[tuple[Node, int]]:
    for node in program.nodes:
        if (loop := loop_of(node)) is None:
            yield node, times
        else:
            yield from _leaves(loop.body, times * loop.times)


def _loop_sums(program: Program, times: int) -> Iterator[tuple[int, int]]:
    """(additions, bytes) of the running sums that loops keep: two reads and a write for each step after the first."""
    for node in program.nodes:
        if (loop := loop_of(node)) is not None:
            yield from _loop_sums(loop.body, times * loop.times)
            first = loop.carried + loop.stacked + loop.kept
            for v in loop.body.outputs[first : first + loop.summed]:
                again = times * (loop.times - 1)
                yield again * v.type.numel, 3 * again * v.type.nbytes


def node_flops(node: Node) -> int:
    """What a primitive, or another operation, declares; for aten products and attention the formula of torch's flop
    counter; else 0."""
    if isinstance(node.op, Primitive):
        return node.op.flops(node) if node.op.flops is not None else 0
    if isinstance(node.op, torch._ops.OpOverload):
        formula: Any = flop_registry.get(node.op.overloadpacket)
        if formula is not None:
            args, kwargs = map_values(lambda v: v.shape, (node.args, node.kwargs))
            shapes = [o.shape for o in node.outs]
            return formula(*args, **kwargs, out_val=shapes[0] if len(shapes) == 1 else shapes)
        return 0
    counted = getattr(node.op, "flops", None)
    return counted(node) if counted is not None else 0


def node_other(node: Node) -> int:
    """Elements of the larger side of an aten node that is neither a product nor a view, and has an operand."""
    if not isinstance(node.op, torch._ops.OpOverload) or is_view(node) or node_flops(node):
        return 0
    sides = [sum(v.type.numel for v in side) for side in (node.operands(), node.outs)]
    return max(sides[1], *(v.type.numel for v in node.operands())) if sides[0] else 0


def node_bytes(node: Node) -> int:
    """Bytes of the operands, each once, and of the results; nothing for views."""
    if is_view(node) or (is_collective(node) and not node.operands()):
        return 0
    read = {id(v): v for v in node.operands()}
    return sum(v.type.nbytes for v in read.values()) + sum(o.type.nbytes for o in node.outs)
