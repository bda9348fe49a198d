"""Values that skip over stages travel with the carry.

What depends on the batch alone, or on parameters alone, every stage can make for itself. What depends on both, or on a
scan over layers, and is used behind a later scan, or in one as a constant, must come along: it becomes one more carry
of every scan in between, which the bodies hand on unchanged. This is done before differentiation, so its cotangent
travels back by the same rule as any carry's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fmeg.pipeline.places import Places, dependencies, place
from fmeg.pipeline.sums import sums_into_scans
from fmeg.program.ir import Node, Program, Value, map_values, values_in
from fmeg.program.structured import Scan


def carry_along(program: Program, params: Iterable[int]) -> tuple[Program, dict[int, int]]:
    """The same function, with sums over layers made inside the scans, whose scans carry what skips over them.

    params   the inputs that are parameters
    Returns the Program and, where nodes had to change their order, by id of each node its place in the given one: the
    order in which uses of a value are told apart. A program in which nothing travels comes back as it is.
    """
    given = {id(v): frozenset("p" if i in set(params) else "b") for i, v in enumerate(program.inputs)}
    order = {id(n): i for i, n in enumerate(program.nodes)}
    program = sums_into_scans(program, layer_scans(program, given), given, order)
    scans = layer_scans(program, given)
    places, _ = place(program.nodes, given, list(values_in(program.outputs)), scans)
    nodes = _by_gap(program, places, scans)
    positions = [order[id(n)] for n in nodes]
    moved = positions != sorted(positions)
    last = _last_gaps(program, places, scans)
    swap: dict[int, Value] = {}
    out: list[Node] = []
    changed = False
    k = 0
    for n in nodes:
        if k < len(scans) and n is scans[k]:
            k += 1
            travelling = _travelling(n, k, places, last)
            new = _carrying(n, travelling, swap)
            changed = changed or bool(travelling)
        else:
            new = n
            if any(id(v) in swap for v in n.operands()):
                args, kwargs = map_values(lambda v: swap.get(id(v), v), (n.args, n.kwargs))
                new = Node(n.op, args, kwargs, (), n.source, n.phase, n.tags)
                new.outs = tuple(Value(o.type, new, i) for i, o in enumerate(n.outs))
                swap.update({id(o): c for o, c in zip(n.outs, new.outs, strict=True)})
        order[id(new)] = order[id(n)]
        out.append(new)
    if not (changed or moved):
        return program, {}
    outputs = tuple(map_values(lambda v: swap.get(id(v), v), list(program.outputs)))
    result = Program(program.inputs, out, outputs, program.names, program.name)
    return result, {id(n): order[id(n)] for n in out}


def layer_scans(program: Program, given: Mapping[int, frozenset[str]]) -> list[Node]:
    """Scans over something that is made of parameters alone."""
    deps = dependencies(program.nodes, given)
    return [
        n
        for n in program.nodes
        if isinstance(n.op, Scan) and any(deps[id(v)] == {"p"} for v in n.args[n.op.n_carry : n.op.n_carry + n.op.n_xs])
    ]


def _by_gap(program: Program, places: Places, scans: Sequence[Node]) -> list[Node]:
    """The nodes in an order in which each is in its gap; as it was where that is so already."""
    number = {id(n): k for k, n in enumerate(scans, 1)}
    key: dict[int, int] = {}
    passed = 0
    for n in program.nodes:
        passed = number.get(id(n), passed)
        home = places.home.get(id(n.outs[0])) if n.outs and id(n) not in number else None
        key[id(n)] = 2 * number[id(n)] - 1 if id(n) in number else 2 * (passed if home is None else home)
    for n in reversed(program.nodes):
        for v in n.operands():
            if v.node is not None and places.shared(v):
                key[id(v.node)] = min(key[id(v.node)], key[id(n)])
    return sorted(program.nodes, key=lambda n: key[id(n)])


def _last_gaps(program: Program, places: Places, scans: Sequence[Node]) -> dict[int, tuple[int, Value]]:
    """For each placed value the last gap in which it is used, in the order of use; a scan uses it in the gap before."""
    number = {id(n): k for k, n in enumerate(scans, 1)}
    last: dict[int, tuple[int, Value]] = {}

    def use(v: Value, gap: int) -> None:
        if id(v) in places.home:
            last[id(v)] = (max(gap, last[id(v)][0]) if id(v) in last else gap, v)

    for n in program.nodes:
        gap = number[id(n)] - 1 if id(n) in number else places.home.get(id(n.outs[0]), 0) if n.outs else 0
        for v in n.operands():
            use(v, gap)
    for o in values_in(program.outputs):
        use(o, len(scans))
    return last


def _travelling(scan: Node, k: int, places: Places, last: Mapping[int, tuple[int, Value]]) -> list[tuple[Value, int]]:
    """What scan k must carry beyond its own carries: (value, which argument it was, or -1), its constants first."""
    op: Scan = scan.op
    rest = enumerate(scan.args[op.n_carry + op.n_xs :], op.n_carry + op.n_xs)
    constants = [(v, i) for i, v in rest if id(v) in places.home]
    known = {id(v) for v, _ in constants}
    later = [(v, -1) for gap, v in last.values() if gap >= k and places.home[id(v)] < k and id(v) not in known]
    return constants + later


def _carrying(scan: Node, travelling: Sequence[tuple[Value, int]], swap: dict[int, Value]) -> Node:
    """The scan with more carries, which its body hands on; `swap` then maps them, and the results, to what comes
    out."""
    op: Scan = scan.op
    mapped = [swap.get(id(v), v) for v in scan.args]
    if not travelling and all(a is b for a, b in zip(mapped, scan.args, strict=True)):
        return scan
    n_c, n_fixed, inputs = op.n_carry, op.n_carry + op.n_xs, op.body.inputs
    extra = [inputs[i] if i >= 0 else Value(v.type, name="travels") for v, i in travelling]
    taken = {i for _, i in travelling}
    rest = [i for i in range(n_fixed, len(inputs)) if i not in taken]
    body = Program(
        (*inputs[:n_c], *extra, *inputs[n_c:n_fixed], *(inputs[i] for i in rest)),
        op.body.nodes,
        (*op.body.outputs[:n_c], *extra, *op.body.outputs[n_c:]),
        name=op.body.name,
    )
    starts = [swap.get(id(v), v) for v, _ in travelling]
    args = (*mapped[:n_c], *starts, *mapped[n_c:n_fixed], *(mapped[i] for i in rest))
    node = Node(Scan(body, op.length, n_c + len(extra), op.n_xs), args, {}, (), scan.source, scan.phase, scan.tags)
    types = [*(o.type for o in scan.outs[:n_c]), *(v.type for v, _ in travelling), *(o.type for o in scan.outs[n_c:])]
    node.outs = tuple(Value(t, node, i) for i, t in enumerate(types))
    after = node.outs[n_c : n_c + len(extra)]
    swap.update({id(v): o for (v, _), o in zip(travelling, after, strict=True)})
    own = (*node.outs[:n_c], *node.outs[n_c + len(extra) :])
    swap.update({id(o): new for o, new in zip(scan.outs, own, strict=True)})
    return node
