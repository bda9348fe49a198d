"""Running a local Program on a backend: compute nodes in generated runs, collectives and loops between them.

Values are dropped after their last use. A collective that is begun and waited for later (see `groups`) reads its
operands and writes its results meanwhile. Nothing else can touch that memory: the results are not known to the steps
between, the backend holds the operands, steps write only into tensors that they made themselves, and an input whose
memory is reused counts as read until the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from fmeg.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    AXIS_INDEX,
    EXCHANGE_ROWS,
    PPERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from fmeg.program.ir import Node, Program, Value, map_values, values_in
from fmeg.sharding import compiled, segment
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward
from fmeg.sharding.partition import LOCAL_SLICE
from fmeg.sharding.segment import NOTHING, Chunk, as_function, by_variation

Mode = Literal["eager", "inductor", "cudagraph"]
MODES: tuple[Mode, ...] = ("eager", "inductor", "cudagraph")


def check_mode(what: str, mode: str) -> None:
    """ValueError for a mode that does not exist."""
    if mode not in MODES:
        raise ValueError(f"{what}: mode must be one of {', '.join(MODES)}, given {mode!r}")


Step = Callable[[list[Any]], None]


class Executable:
    """A compiled local Program: call it with one value an input; returns one value an output.

    `run` is the same for a list that the caller gives up: it is emptied, and values are dropped after their last use.
    """

    def __init__(
        self,
        program: Program,
        backend: Any,
        bodies: dict[int, Executable] | None = None,
        mode: Mode = "eager",
        into: Mapping[int, int] = NOTHING,
    ) -> None:
        """`bodies`: compiled bodies by their Program's id, for several Programs that share them. `mode`: whether runs
        of compute nodes are Python, or compiled by Inductor. `into`: results, by number, that compiled code may write
        into the memory of an input, by number, whose last reader is in the same run."""
        self.backend, self.name, self.mode = backend, program.name, mode
        self.bodies: dict[int, Executable] = {} if bodies is None else bodies
        self.slots: dict[int, int] = {}
        for v in program.inputs:
            self._slot(v)
        self.n_inputs = len(program.inputs)
        groups = _grouped(program.nodes)
        for n in (n for g in groups for n in g):
            for v in (*n.operands(), *n.outs):
                self._slot(v)
        self.outputs = [(True, self._slot(o)) if isinstance(o, Value) else (False, o) for o in program.outputs]
        kept = {slot for is_slot, slot in self.outputs if is_slot}
        self.into = {self.outputs[o][1]: i for o, i in into.items() if self.outputs[o][0]}
        dying, unused = self._deaths(groups, kept)
        self.unused = tuple(s for s in range(self.n_inputs) if s in unused)
        self.steps: list[Step] = [self._step(g, d) for g, d in zip(groups, dying, strict=True)]

    @property
    def written(self) -> dict[int, int]:
        """Results, by number, that lie in the memory of an input, by number, once it has run."""
        return {i: self.into[s] for i, (is_slot, s) in enumerate(self.outputs) if is_slot and s in self.into}

    def _slot(self, v: Value) -> int:
        return self.slots.setdefault(id(v), len(self.slots))

    def _deaths(self, groups: Sequence[Sequence[Node]], kept: set[int]) -> tuple[list[set[int]], set[int]]:
        """For each group the slots that nothing after it needs, and those that nothing needs at all."""
        last: dict[int, int] = {}
        for i, g in enumerate(groups):
            for n in g:
                last.update(dict.fromkeys((self.slots[id(v)] for v in (*n.operands(), *n.outs)), i))
        made = {self.slots[id(v)]: i for i, g in enumerate(groups) if not _alone(g[0]) for n in g for v in n.outs}
        self.into = {o: i for o, i in self.into.items() if o in made and last.get(i, 0) <= made[o]}
        last.update((i, made[o]) for o, i in self.into.items())
        dying: list[set[int]] = [set() for _ in groups]
        for slot, i in last.items():
            if slot not in kept:
                dying[i].add(slot)
        return dying, set(self.slots.values()) - set(last) - kept

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return self.run(list(inputs))

    def run(self, inputs: list[Any]) -> list[Any]:
        env: list[Any] = [None] * len(self.slots)
        env[: self.n_inputs] = inputs
        inputs.clear()
        for slot in self.unused:
            env[slot] = None
        for step in self.steps:
            step(env)
        return [env[o] if is_slot else o for is_slot, o in self.outputs]

    # -- steps ------------------------------------------------------------------------------------------------------
    def _step(self, group: Sequence[Node], dying: set[int]) -> Step:
        op = group[0].op
        if isinstance(op, Collective):
            return self._collective(group[0], dying)
        if isinstance(op, LocalScan):
            return self._scan(group[0], op, dying)
        if isinstance(op, LocalScanBackward):
            return self._scan_backward(group[0], op, dying)
        if isinstance(op, LocalAccumulate):
            return self._accumulate(group[0], op, dying)
        if hasattr(op, "build"):
            return self._built(group[0], op, dying)
        if self.backend.plain:
            where = (group, self.slots, dying, self.backend.device, f"fmeg/{self.name}")
            if self.mode == "eager" or _opaque(group[0]):
                return segment.in_place(*where)
            made = {self.slots[id(v)] for n in group for v in n.outs}
            return compiled.in_place(*where, {o: i for o, i in self.into.items() if o in made})
        return self._segment(group, dying)

    def _body(self, program: Program) -> Executable:
        if id(program) not in self.bodies:
            self.bodies[id(program)] = Executable(program, self.backend, self.bodies, self.mode)
        return self.bodies[id(program)]

    def _writing(self, program: Program, first: int, n: int) -> Executable:
        """The body with `n` more inputs, memory into which its results from `first` on may be written."""
        if id(program) not in self.bodies:
            memory = tuple(Value(v.type) for v in program.outputs[first : first + n])
            wider = replace(program, inputs=(*program.inputs, *memory))
            into = {first + k: len(program.inputs) + k for k in range(n)}
            self.bodies[id(program)] = Executable(wider, self.backend, self.bodies, self.mode, into)
        return self.bodies[id(program)]

    def _built(self, node: Node, op: Any, dying: set[int]) -> Step:
        """An operation that brings its own way to run."""
        fn, read, outs = op.build(self.backend, self.mode), self._reader(node.args, dying), self._outs(node)

        def run(env: list[Any]) -> None:
            _store(env, outs, fn(read(env)))

        return run

    def _segment(self, group: Sequence[Node], dying: set[int]) -> Step:
        """On several ranks: grouped by the axes over which values vary, which are known once there are values."""
        b, slots = self.backend, self.slots
        made = {slots[id(v)] for n in group for v in n.outs}
        ins = tuple(dict.fromkeys(s for n in group for v in n.operands() if (s := slots[id(v)]) not in made))
        plans: dict[tuple[int, ...], list[Chunk]] = {}

        def plan(masks: tuple[int, ...]) -> list[Chunk]:
            parts = by_variation(group, slots, dict(zip(ins, masks, strict=True)))
            chunks = []
            for i, part in enumerate(parts):
                later = {slots[id(v)] for p in parts[i + 1 :] for n in p for v in n.operands()}
                needed = later | (made - dying)
                chunks.append(as_function(part, slots, needed, b.device, f"fmeg/{self.name}"))
            return chunks

        def run(env: list[Any]) -> None:
            masks = tuple([b.varies(env[s]) for s in ins])
            chunks = plans.get(masks)
            if chunks is None:
                chunks = plans[masks] = plan(masks)
            for c in chunks:
                for slot, value in zip(c.outs, b.call(c.fn, ([env[s] for s in c.ins],)), strict=True):
                    env[slot] = value
            for slot in dying:
                env[slot] = None

        return run

    def _reader(self, nested: Any, dying: set[int]) -> Callable[[list[Any]], Any]:
        """A function that fills nested args from the environment, from which dying values are taken out."""
        slots = {id(v): self.slots[id(v)] for v in values_in(nested)}
        gone = tuple(s for s in set(slots.values()) if s in dying)

        def read(env: list[Any]) -> Any:
            filled = map_values(lambda v: env[slots[id(v)]], nested)
            for slot in gone:
                env[slot] = None
            return filled

        return read

    def _outs(self, node: Node) -> tuple[int, ...]:
        return tuple(self.slots[id(v)] for v in node.outs)

    def _collective(self, node: Node, dying: set[int]) -> Step:
        b, op, outs = self.backend, node.op, self._outs(node)
        axes, rest = node.args[1], node.args[2:]
        read = self._reader(list(node.args[0]), dying)
        dead = tuple(s for s in outs if s in dying)

        def run(env: list[Any]) -> None:
            values = read(env)
            if op is ALL_REDUCE:
                got = b.all_reduce(values, axes, rest[0])
            elif op is ALL_GATHER:
                got = b.all_gather(values, axes, rest[0])
            elif op is REDUCE_SCATTER:
                got = b.reduce_scatter(values, axes, rest[0])
            elif op is ALL_TO_ALL:
                got = b.all_to_all(values, axes, rest[0], rest[1])
            elif op is PPERMUTE:
                got = [b.ppermute(x, axes, rest[0]) for x in values]
            elif op is EXCHANGE_ROWS:
                got = [b.exchange_rows(*values, axes, *rest)]
            elif op is AXIS_INDEX:
                got = [b.axis_index(axes)]
            else:
                assert op is LOCAL_SLICE, op
                got = [b.call(take_part, (values[0], b.axis_index(axes), rest[0][0], b.mesh.axis_size(axes)), {})]
            for slot, value in zip(outs, got, strict=True):
                env[slot] = value
            for slot in dead:
                env[slot] = None

        return run

    # -- loops ------------------------------------------------------------------------------------------------------
    def _scan(self, node: Node, op: LocalScan, dying: set[int]) -> Step:
        b, body, read, outs = self.backend, self._body(op.body), self._reader(node.args, dying), self._outs(node)
        n_c, n_x, n_y = op.n_carry, op.n_xs, op.n_ys

        def run(env: list[Any]) -> None:
            given = list(read(env))
            carry, consts = given[:n_c], given[n_c + n_x :]
            slices = [b.call(torch.unbind, (x,), {}) for x in given[n_c : n_c + n_x]]
            del given
            ys = [Stack(b, op.length) for _ in range(n_y)]
            handle: list[list[Any]] = []
            for i in range(op.length):
                inputs = [*carry, *(s[i] for s in slices), *consts]
                carry.clear()
                got = body.run(inputs)
                carry = got[:n_c]
                for y, v in zip(ys, got[n_c : n_c + n_y], strict=True):
                    y.put(i, v)
                if op.keeps:
                    handle.append(got[n_c + n_y :])
                del got
            _store(env, outs, [*carry, *(y.result() for y in ys), *([handle] if op.keeps else [])])

        return run

    def _scan_backward(self, node: Node, op: LocalScanBackward, dying: set[int]) -> Step:
        b, read, outs = self.backend, self._reader(node.args, dying), self._outs(node)
        n_c, n_x, n_sums = op.n_carry, op.n_ct_xs, len(op.body.outputs) - op.n_carry - op.n_ct_xs
        direct = self.mode != "eager" and b.plain
        body = self._writing(op.body, n_c, n_x) if direct else self._body(op.body)

        def run(env: list[Any]) -> None:
            ct_carries, ct_ys, handle, xs, consts = read(env)
            cts = list(ct_carries)
            del ct_carries
            y_slices = [b.call(torch.unbind, (y,), {}) for y in ct_ys]
            x_slices = [b.call(torch.unbind, (x,), {}) for x in xs]
            stacks = [Stack(b, op.length) for _ in range(n_x)]
            if direct:
                for s, v in zip(stacks, op.body.outputs[n_c : n_c + n_x], strict=True):
                    s.buffer = torch.empty((op.length, *v.type.shape), dtype=v.type.dtype, device=b.device)
            sums = [Sum(b) for _ in range(n_sums)]
            for i in reversed(range(op.length)):
                inputs = [*cts, *(y[i] for y in y_slices), *handle.pop(), *(x[i] for x in x_slices), *consts]
                if direct:
                    inputs += [s.buffer[i] for s in stacks]
                cts.clear()
                got = body.run(inputs)
                cts = got[:n_c]
                for s, v in zip(stacks, got[n_c : n_c + n_x], strict=True):
                    s.put(i, v)
                for t, v in zip(sums, got[n_c + n_x :], strict=True):
                    t.add(v)
                del got
            _store(env, outs, [*cts, *(s.result() for s in stacks), *(t.result() for t in sums)])

        return run

    def _accumulate(self, node: Node, op: LocalAccumulate, dying: set[int]) -> Step:
        b, body, read, outs = self.backend, self._body(op.body), self._reader(node.args, dying), self._outs(node)

        def run(env: list[Any]) -> None:
            args = read(env)
            split = [
                b.call(torch.unbind, (a,), {}) if batched else None for a, batched in zip(args, op.batched, strict=True)
            ]
            sums = [Sum(b) for _ in outs]
            for j in range(op.steps):
                got = body.run([a if s is None else s[j] for a, s in zip(args, split, strict=True)])
                for t, v in zip(sums, got, strict=True):
                    t.add(v)
                del got
            _store(env, outs, [t.result() for t in sums])

        return run


def _grouped(nodes: Sequence[Node]) -> list[list[Node]]:
    """Runs of compute nodes; each collective and each loop alone. A rank's index, which needs nothing, comes first."""
    groups: list[list[Node]] = [[n] for n in nodes if n.op is AXIS_INDEX]
    open_run = False
    for n in nodes:
        alone = _alone(n)
        if n.op is AXIS_INDEX:
            continue
        if alone or not open_run or _opaque(n) != _opaque(groups[-1][0]):
            groups.append([n])
        else:
            groups[-1].append(n)
        open_run = not alone
    return groups


def _opaque(node: Node) -> bool:
    """Whether its shapes, or what it does, depend on data: it runs as it is written and is not compiled."""
    return "opaque" in node.tags


def _alone(node: Node) -> bool:
    """Whether a node is a step of its own: a collective, a loop, or what brings its own way to run."""
    return isinstance(node.op, (Collective, *_LOOPS)) or hasattr(node.op, "build")


def _store(env: list[Any], slots: Sequence[int], values: Sequence[Any]) -> None:
    for slot, value in zip(slots, values, strict=False):
        env[slot] = value


def take_part(x: torch.Tensor, index: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """Part `index` of `parts` along `dim`."""
    size = x.shape[dim] // parts
    return x.unflatten(dim, (parts, size)).index_select(dim, index.reshape(1)).squeeze(dim)
