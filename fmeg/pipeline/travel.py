"""Values that skip over stages travel with the carry.

What depends on the batch alone, or on parameters alone, every stage can make for itself. What depends on both and is
used by the
scan as a constant, or again after it, must come along: it becomes one more carry that the body hands on unchanged. This
is done
before differentiation, so its cotangent travels back by the same rule as any carry's.
"""

from __future__ import annotations

from collections.abc import Iterable

from fmeg.program.ir import Node, Program, Value, map_values, values_in
from fmeg.program.structured import Scan


def carry_along(program: Program, params: Iterable[int]) -> Program:
    """The same function whose scan over layers carries what skips over it; `params` are the inputs that are parameters.

    A program without such values, or without one scan over parameters longer than any other, comes back as it is.
    """
    deps = _dependencies(program, set(params))
    scans = [
        n
        for n in program.nodes
        if isinstance(n.op, Scan) and any("p" in deps[id(v)] for v in n.args[n.op.n_carry : n.op.n_carry + n.op.n_xs])
    ]
    lengths = sorted((n.op.length for n in scans), reverse=True)
    if not scans or lengths[:1] == lengths[1:2]:
        return program
    scan = max(scans, key=lambda n: n.op.length)
    op: Scan = scan.op
    at = program.nodes.index(scan)
    before = {id(v): v for n in program.nodes[:at] for v in n.outs if deps[id(v)] >= {"p", "b"}}
    n_fixed = op.n_carry + op.n_xs
    constant = [i for i, v in enumerate(scan.args[n_fixed:]) if id(v) in before]
    later = [v for n in program.nodes[at + 1 :] for v in n.operands() if id(v) in before]
    later += [o for o in values_in(program.outputs) if id(o) in before]
    later = [v for v in {id(v): v for v in later}.values() if all(v is not scan.args[n_fixed + i] for i in constant)]
    travelling = [scan.args[n_fixed + i] for i in constant] + later
    if not travelling:
        return program
    body, inside = (
        op.body,
        [op.body.inputs[n_fixed + i] for i in constant] + [Value(v.type, name="travels") for v in later],
    )
    rest = [v for i, v in enumerate(body.inputs[n_fixed:]) if i not in constant]
    inputs = (*body.inputs[: op.n_carry], *inside, *body.inputs[op.n_carry : n_fixed], *rest)
    outputs = (*body.outputs[: op.n_carry], *inside, *body.outputs[op.n_carry :])
    grown = Program(inputs, body.nodes, outputs, name=body.name)
    args = (
        *scan.args[: op.n_carry],
        *travelling,
        *scan.args[op.n_carry : n_fixed],
        *(v for i, v in enumerate(scan.args[n_fixed:]) if i not in constant),
    )
    node = Node(
        Scan(grown, op.length, op.n_carry + len(inside), op.n_xs), args, {}, (), scan.source, scan.phase, scan.tags
    )
    types = [
        *(o.type for o in scan.outs[: op.n_carry]),
        *(v.type for v in travelling),
        *(o.type for o in scan.outs[op.n_carry :]),
    ]
    node.outs = tuple(Value(t, node, i) for i, t in enumerate(types))
    swap = {id(v): o for v, o in zip(travelling, node.outs[op.n_carry :], strict=False)}
    swap.update(
        {
            id(o): new
            for o, new in zip(
                scan.outs, (*node.outs[: op.n_carry], *node.outs[op.n_carry + len(inside) :]), strict=True
            )
        }
    )
    nodes = [*program.nodes[:at], node]
    for n in program.nodes[at + 1 :]:
        a, k = map_values(lambda v: swap.get(id(v), v), (n.args, n.kwargs))
        copy = Node(n.op, a, k, (), n.source, n.phase, n.tags)
        copy.outs = tuple(Value(o.type, copy, i) for i, o in enumerate(n.outs))
        swap.update({id(o): c for o, c in zip(n.outs, copy.outs, strict=True)})
        nodes.append(copy)
    return Program(
        program.inputs,
        nodes,
        tuple(map_values(lambda v: swap.get(id(v), v), list(program.outputs))),
        program.names,
        program.name,
    )


def _dependencies(program: Program, params: set[int]) -> dict[int, frozenset[str]]:
    """For each value: "p" if it depends on parameters, "b" if on anything else that is given."""
    deps = {id(v): frozenset("p" if i in params else "b") for i, v in enumerate(program.inputs)}
    for n in program.nodes:
        found = frozenset().union(*(deps[id(v)] for v in n.operands()))
        deps.update({id(o): found for o in n.outs})
    return deps
