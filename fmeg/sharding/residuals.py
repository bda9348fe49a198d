"""What the backward pass keeps and what it does again, chosen on local Programs by local bytes.

inside a remat region   nothing is kept but what the policy names; "min_cut" and "budget" choose (see `mincut`)
all_gather              its (smaller) input is kept and gathered again; a parameter's shard is there anyway
cheap operations        done again when all they need is kept or free
everything else         kept
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, AXIS_INDEX, EXCHANGE_ROWS, Collective
from fmeg.ops.remat import Policy
from fmeg.ops.shard import name_p
from fmeg.program.cost import node_bytes
from fmeg.program.ir import Node, Program, Value, map_values, values_in
from fmeg.program.literal import constant
from fmeg.program.passes import dce
from fmeg.program.primitive import Primitive
from fmeg.sharding.coalesce import coalesce, coalesce_where
from fmeg.sharding.mincut import Forward, seconds

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}
_PRODUCT_NAMES = {"einsum", "grouped_matmul", "scaled_einsum", "scaled_grouped", "attention", "attention_fwd"}


CHOSEN = ("min_cut", "budget")  # kinds of policies that weigh bytes against work


def is_cheap(node: Node) -> bool:
    """Whether to do it again costs little: pointwise operations, views, norms."""
    op = node.op
    if op is constant or op is AXIS_INDEX:
        return True
    if isinstance(op, Collective):
        return op.name == "local_slice"
    if isinstance(op, Primitive):
        return op.cheap
    if isinstance(op, torch._ops.OpOverload):
        return torch.Tag.pointwise in op.tags or not node.operands() or _is_view(op) or op is aten._to_copy.default
    return False


def _is_view(op: Any) -> bool:
    return any(r.alias_info is not None for r in op._schema.returns) or op is aten._unsafe_view.default


def _keeps(node: Node) -> bool:
    """Whether results are small and kept even inside a remat region: those of a routing."""
    return (isinstance(node.op, Primitive) and node.op.keep) or (node.op is EXCHANGE_ROWS and not node.args[1])


def _forced(node: Node) -> bool:
    region = node.tags.get("remat")
    if region is None or _keeps(node):
        return False
    policy: Policy = region[1]
    if policy.kind in ("none", *CHOSEN):
        return False
    if policy.kind == "dots":
        return not (node.op in _PRODUCTS or (isinstance(node.op, Primitive) and node.op.name in _PRODUCT_NAMES))
    return True


def _policy(node: Node) -> Policy | None:
    region = node.tags.get("remat")
    return region[1] if region is not None else None


def _named(joint: Program, host: bool = False) -> set[int]:
    """Nodes, by id, of which a result has a name that its region keeps (in the host's memory): all their results are
    kept, since to make one of them again is to make them all. The name sees through an exchange."""
    named: set[int] = set()
    for n in joint.nodes:
        if n.op is not name_p or (p := _policy(n)) is None:
            continue
        if n.args[1] in (p.names if not host else p.host or ()):
            made = n.args[0].node
            while made is not None:
                named.add(id(made))
                made = made.operands()[0].node if made.op is ALL_TO_ALL or made.op is name_p else None
    return named


def _hosted(joint: Program, residuals: Iterable[Value]) -> tuple[int, ...]:
    """Which residuals, by number, wait in the host's memory."""
    every = any(p.host == frozenset() for n in joint.nodes if n.phase == "F" and (p := _policy(n)) is not None)
    named = _named(joint, host=True)
    return tuple(i for i, v in enumerate(residuals) if every or (v.node is not None and id(v.node) in named))


def _is_structured(node: Node) -> bool:
    return any(isinstance(getattr(node.op, f, None), Program) for f in ("body",))


def _grows(node: Node) -> bool:
    return node.op is ALL_GATHER and sum(o.type.nbytes for o in node.outs) > sum(v.type.nbytes for v in node.operands())


def _regather(joint: Program) -> set[int]:
    """Gathers worth doing again: all in a body; in a program with loops, those that would be kept across a loop."""
    loops = [i for i, n in enumerate(joint.nodes) if n.phase == "F" and _is_structured(n)]
    end = loops[-1] if loops else len(joint.nodes)
    return {id(n) for n in joint.nodes[:end] if _grows(n)}


@dataclass
class _Choice:
    """Decides for each forward value whether it is kept (`saved`) or its producer redone."""

    inputs: set[int]
    regather: set[int]  # ids of gathers that may be done again
    named: set[int]  # ids of nodes whose results a policy keeps
    saved: dict[int, Value] = field(default_factory=dict)
    redone: set[int] = field(default_factory=set)  # ids of nodes

    def need(self, values: Iterable[Value]) -> None:
        """First round: everything but the cheap operations outside remat regions."""
        todo = list(values)
        while todo:
            v = todo.pop()
            node = v.node
            if id(v) in self.inputs or id(v) in self.saved or (node is not None and id(node) in self.redone):
                continue
            if node is None or id(node) in self.named:
                self.saved[id(v)] = v
            elif not _is_structured(node) and (_forced(node) or id(node) in self.regather or not node.operands()):
                self.redone.add(id(node))
                todo += node.operands()
            elif not is_cheap(node):
                self.saved[id(v)] = v

    def settle(self, nodes: Iterable[Node], wanted: dict[int, Value]) -> None:
        """Second round, for cheap operations: redo what follows from what is kept or free, keep the rest.

        In the order in which values are made: what is kept early lets what follows from it be redone.
        """
        for v in wanted.values():
            if v.node is None and id(v) not in self.inputs:
                self.saved[id(v)] = v
        ready = self.inputs | set(self.saved)
        for node in nodes:
            cheap = is_cheap(node) and id(node) not in self.named
            free = id(node) in self.redone or (cheap and all(id(u) in ready for u in node.operands()))
            for o in node.outs:
                if not free and id(o) in wanted:
                    self.saved.setdefault(id(o), o)
                if free or id(o) in self.saved:
                    ready.add(id(o))
        todo = list(wanted.values())
        while todo:
            v = todo.pop()
            if (
                id(v) not in self.inputs
                and id(v) not in self.saved
                and v.node is not None
                and id(v.node) not in self.redone
            ):
                self.redone.add(id(v.node))
                todo += v.node.operands()

    def drop(self, nodes: Iterable[Node], wanted: Iterable[Value]) -> None:
        """Forget named values that nothing reads after all."""
        used = {id(v) for v in wanted} | {id(u) for n in nodes if id(n) in self.redone for u in n.operands()}
        for i in [i for i, v in self.saved.items() if v.node is not None and id(v.node) in self.named]:
            if i not in used:
                del self.saved[i]


def _choose(joint: Program, free: Iterable[Value]) -> _Choice:
    """`free`: inputs that the backward pass has anyway."""
    choice = _Choice({id(v) for v in free}, _regather(joint), _named(joint))
    wanted: dict[int, Value] = {}
    forward = {id(n): n for n in joint.nodes if n.phase == "F"}
    inputs = {id(v) for v in joint.inputs}

    for n in joint.nodes:
        if n.phase == "B":
            for v in n.operands():
                if id(v) in inputs or (v.node is not None and id(v.node) in forward):
                    wanted.setdefault(id(v), v)
    policy = _chosen(forward.values())
    if policy is not None:
        return _cut(joint, list(forward.values()), choice, list(wanted.values()), policy)
    choice.need(wanted.values())
    every = dict(wanted)
    every.update({id(u): u for n in joint.nodes if id(n) in choice.redone for u in n.operands()})
    every.update({id(o): o for n in forward.values() if id(n) in choice.named for o in n.outs})
    choice.settle(forward.values(), every)
    choice.drop(forward.values(), wanted.values())
    return choice


def _chosen(forward: Iterable[Node]) -> Policy | None:
    """The policy of a body that weighs bytes against work."""
    found = {p for n in forward if (p := _policy(n)) is not None and p.kind in CHOSEN}
    if len(found) > 1:
        raise ValueError(f"remat: one body has several of the policies {', '.join(map(str, found))}; give it one")
    return next(iter(found), None)


def _given(forward: list[Node], choice: _Choice) -> set[int]:
    """Nodes, by id, that lead by cheap operations and gathers from what the backward pass has anyway: casts of
    parameters, which are done once for both directions where they can be."""
    have, found = set(choice.inputs), set()
    for n in forward:
        small = is_cheap(n) or id(n) in choice.regather
        if small and id(n) not in choice.named and all(id(v) in have for v in n.operands()):
            found.add(id(n))
            have |= {id(o) for o in n.outs}
    return found


def _cut(joint: Program, forward: list[Node], choice: _Choice, wanted: list[Value], policy: Policy) -> _Choice:
    """The choice by a minimum cut."""

    def fixed(n: Node) -> bool:
        """Never done again."""
        return _is_structured(n) or id(n) in choice.named or _keeps(n)

    def free(n: Node) -> bool:
        return _forced(n) or id(n) in choice.regather or not n.operands()

    def price(n: Node) -> float | None:
        if fixed(n):
            return None
        return 0.0 if free(n) else policy.per_byte * node_bytes(n) if is_cheap(n) else None

    def time(n: Node) -> float | None:
        if id(n) in given:
            return 0.0
        if fixed(n) or (isinstance(n.op, Collective) and not free(n) and not is_cheap(n)):
            return None
        if not (free(n) or is_cheap(n) or _policy(n) == policy):
            return None
        return seconds(n, policy.flops, policy.bandwidth)

    given = _given(forward, choice) if policy.kind == "budget" else set()
    again = {id(n) for n in forward if (_forced(n) and not fixed(n)) or id(n) in given}
    again |= {id(n) for n in forward if n.op is name_p and id(n.args[0].node) in choice.named}
    never = {id(o) for n in forward if id(n) in again for o in n.outs}
    graph = Forward(joint, forward, choice.inputs, wanted, never)
    found = graph.cut(price) if policy.kind == "min_cut" else graph.within(policy.limit, time)
    order = {id(o): i for i, o in enumerate((*joint.inputs, *(o for n in forward for o in n.outs)))}
    choice.saved = dict(sorted(found.kept.items(), key=lambda item: order[item[0]]))
    choice.redone = found.again
    return choice


def _rewrite(joint: Program, choice: _Choice, swap: dict[int, Value]) -> list[Node]:
    """Backward nodes with redone operations cloned before their first use; `swap` maps kept values."""

    place = {id(n): i for i, n in enumerate(joint.nodes)}

    def bring(values: Iterable[Value], out: list[Node]) -> None:
        """Clone what `values` need and nothing has brought yet."""
        todo, needed = list(values), {}
        while todo:
            v = todo.pop()
            if id(v) not in swap and v.node is not None and id(v.node) in choice.redone and id(v.node) not in needed:
                needed[id(v.node)] = v.node
                todo += v.node.operands()
        for node in sorted(needed.values(), key=lambda n: place[id(n)]):
            out.append(copy(node, again=True))

    def copy(node: Node, **tags: Any) -> Node:
        args, kwargs = map_values(lambda v: swap.get(id(v), v), (node.args, node.kwargs))
        clone = Node(node.op, args, kwargs, source=node.source, phase="B", tags={**node.tags, **tags})
        clone.outs = tuple(Value(o.type, clone, i, placement=o.placement) for i, o in enumerate(node.outs))
        swap.update({id(o): c for o, c in zip(node.outs, clone.outs, strict=True)})
        return clone

    nodes: list[Node] = []
    for node in joint.nodes:
        if node.phase != "B":
            continue
        bring(node.operands(), nodes)
        nodes.append(copy(node))
    return nodes


def rematerialise(joint: Program) -> Program:
    """A joint Program in one piece: forward, then a backward that redoes what is not worth keeping."""
    if not any(n.phase == "B" for n in joint.nodes):
        return joint
    choice = _choose(joint, joint.inputs)
    swap: dict[int, Value] = {}
    backward = _rewrite(joint, choice, swap)
    outputs = tuple(
        swap.get(id(v), v) if isinstance(v, Value) and v.node is not None and v.node.phase == "B" else v
        for v in joint.outputs
    )
    forward = [n for n in joint.nodes if n.phase == "F"]
    return dce(Program(joint.inputs, [*forward, *backward], outputs, joint.names, joint.name))


def split(joint: Program, n_inputs: int, n_outputs: int, n_carry: int) -> tuple[Program, Program, int, tuple[int, ...]]:
    """Cut the joint body of a scan: (forward, backward, number of residuals, those that wait in the host's memory).

    forward    inputs joint.inputs[:n_inputs] -> joint.outputs[:n_outputs], residuals
    backward   inputs cotangents, residuals, then the forward inputs but the carries -> the rest of the outputs
    """
    free = joint.inputs[n_carry:]
    choice = _choose(joint, free)
    residuals = list(choice.saved.values())
    stand_ins = [Value(v.type, name=f"residual{i}", placement=v.placement) for i, v in enumerate(residuals)]
    swap = {id(v): s for v, s in zip(residuals, stand_ins, strict=True)}
    backward_nodes = _rewrite(joint, choice, swap)
    grads = joint.outputs[n_outputs:]
    missing = [v for v in values_in(grads) if id(v) not in swap and v.node is not None and v.node.phase == "F"]
    assert not missing, "a gradient of a scan body is a forward value"
    outputs = tuple(swap.get(id(v), v) for v in grads)
    extra = [v for v in joint.inputs[:n_carry] if any(o is v for o in outputs)]
    assert not extra, "a gradient of a scan body is its carry"
    forward = Program(
        joint.inputs[:n_inputs],
        [n for n in joint.nodes if n.phase == "F"],
        (*joint.outputs[:n_outputs], *residuals),
        name=joint.name,
    )
    inputs = (*joint.inputs[n_inputs:], *stand_ins, *joint.inputs[n_carry:n_inputs])
    backward = Program(inputs, backward_nodes, outputs, name=f"{joint.name}.backward")
    return _joined(forward), _joined(backward), len(residuals), _hosted(joint, residuals)


def _joined(body: Program) -> Program:
    """Without dead nodes, and with fewer collectives: maxima (of scales, of a softmax) and gathers of parameters that
    need not wait for one another are one, where the first is used."""
    body = coalesce(dce(body))
    after: dict[int, list[Node]] = {}  # gathers of parameters, where their operand is made
    for n in body.nodes:
        if _gathers_parameter(n) and (made := n.operands()[0].node) is not None:
            after.setdefault(id(made), []).append(n)
    moved = {id(n) for nodes in after.values() for n in nodes}
    body.nodes = [m for n in body.nodes if id(n) not in moved for m in (n, *after.get(id(n), ()))]
    return coalesce_where(body, lambda n: _gathers_parameter(n) or _is_maximum(n))


def _gathers_parameter(node: Node) -> bool:
    return node.op is ALL_GATHER and node.tags.get("reason") == "parameter" and len(node.outs) == 1


def _is_maximum(node: Node) -> bool:
    return node.op is ALL_REDUCE and node.args[2] == "max" and len(node.outs) == 1
