"""Running a local Program on a backend: compute nodes in generated runs, collectives and loops between them.

Values are dropped after their last use. A collective that is begun and waited for later (see `groups`) reads its
operands and writes its results meanwhile. Nothing else can touch that memory: the results are not known to the steps
between, the backend holds the operands, steps write only into tensors that they made themselves, and an input whose
memory is reused counts as read until the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
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
from fmeg.sharding import compiled, loops, segment
from fmeg.sharding.early import early
from fmeg.sharding.groups import Group, alone, first_ahead, grouped, opaque
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward
from fmeg.sharding.loops import store
from fmeg.sharding.partition import LOCAL_SLICE
from fmeg.sharding.reuse import apart, lying_in
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
        bodies: dict[Any, Any] | None = None,
        mode: Mode = "eager",
        into: Mapping[int, int] = NOTHING,
        later: bool = False,
        adds: bool = False,
    ) -> None:
        """`bodies`: compiled bodies by their Program's id, for several Programs that share them. `mode`: whether runs
        of compute nodes are Python, or compiled by Inductor. `into`: results, by number, that compiled code may write
        into the memory of an input, by number, whose last reader is in the same run; it `adds` them to what is there,
        if so. `later`: it is for `start`."""
        self.backend, self.name, self.mode, self.adds = backend, program.name, mode, adds
        self.overlap = getattr(backend, "overlap", False)
        self.bodies: dict[Any, Any] = {} if bodies is None else bodies
        self.slots: dict[int, int] = {}
        for v in program.inputs:
            self._slot(v)
        self.n_inputs = len(program.inputs)
        nodes = early(program.nodes) if self.overlap else program.nodes
        groups, at_end = grouped(nodes, self.overlap, later)
        for n in (n for g in groups for n in g.nodes):
            for v in (*n.operands(), *n.outs):
                self._slot(v)
        self.outputs = [(True, self._slot(o)) if isinstance(o, Value) else (False, o) for o in program.outputs]
        kept = {slot for is_slot, slot in self.outputs if is_slot}
        self.into = {self.outputs[o][1]: i for o, i in into.items() if self.outputs[o][0]}
        self.left = self._left(groups) if self.into and later else {}
        dying, unused = self._deaths(groups, at_end, kept)
        self.unused = tuple(s for s in range(self.n_inputs) if s in unused and s not in self.left.values())
        waits = {i: self._wait(g, d) for i, (g, d) in enumerate(zip(groups, dying, strict=True)) if g.begins}
        self.steps: list[Step] = [_nothing] * len(groups)
        for i, (g, d) in reversed([*enumerate(zip(groups, dying, strict=True))]):
            riding: list[Step] = []
            for k in takewhile(lambda k: groups[k].rides, range(i + 1, len(groups) if g.carries else 0)):
                riding.append(self.steps[k])
                self.steps[k] = _nothing
            self.steps[i] = _after([waits[w] for w in g.waits], self._step(g, d, riding))
        if self.overlap:
            self._begin_ahead(groups)
        self.last = [waits[w] for w in at_end]
        self.pause = next((i for i, g in enumerate(groups) if g.waits), len(groups))

    @property
    def written(self) -> dict[int, int]:
        """Results, by number, that lie in the memory of an input, by number, once it has run."""
        return {i: self.into[s] for i, (is_slot, s) in enumerate(self.outputs) if is_slot and s in self.into}

    def _slot(self, v: Value) -> int:
        return self.slots.setdefault(id(v), len(self.slots))

    def _deaths(
        self, groups: Sequence[Group], at_end: Sequence[int], kept: set[int]
    ) -> tuple[list[set[int]], set[int]]:
        """For each group the slots that nothing after it needs, and those that nothing needs at all."""
        last: dict[int, int] = {}
        for i, g in enumerate(groups):
            for n in g.nodes:
                last.update(dict.fromkeys((self.slots[id(v)] for v in (*n.operands(), *n.outs)), i))
        made = {
            self.slots[id(v)]: i
            for i, g in enumerate(groups)
            if not (alone(g.nodes[0]) or g.rides)
            for n in g.nodes
            for v in n.outs
        }
        read = dict(last)
        for i, waits in (*enumerate(g.waits for g in groups), (len(groups), at_end)):
            for v in (v for w in waits for v in groups[w].nodes[0].operands()):
                read[self.slots[id(v)]] = max(read[self.slots[id(v)]], i)
        until = self._needed_until(groups, read, kept)
        if self.adds:  # a sum in a result's place is for nobody who wants that result alone
            results = [slot for is_slot, slot in self.outputs if is_slot]
            self.into = {o: i for o, i in self.into.items() if results.count(o) == 1 and last.get(o) == made.get(o)}
        self.into = {
            o: i for o, i in self.into.items() if o in made and max(read.get(i, 0), until.get(i, -1) + 1) <= made[o]
        }
        last.update((i, made[o]) for o, i in self.into.items())
        dying: list[set[int]] = [set() for _ in groups]
        for slot, i in last.items():
            if slot not in kept:
                dying[i].add(slot)
        return dying, set(self.slots.values()) - set(last) - kept

    def _left(self, groups: Sequence[Group]) -> dict[int, int]:
        """Results of reductions that are begun and may be left in memory that nothing reads, given for them."""
        if not getattr(self.backend, "leaves", False):
            return {}
        read = {self.slots[id(v)] for g in groups for n in g.nodes for v in n.operands()}
        begun = [n for g in groups if g.begins for n in g.nodes if n.op is REDUCE_SCATTER]
        made = {self.slots[id(v)] for n in begun for v in n.outs}
        return {o: i for o, i in self.into.items() if o in made and i not in read}

    def _needed_until(self, groups: Sequence[Group], read: Mapping[int, int], kept: set[int]) -> dict[int, int]:
        """For inputs that are to be written into, by slot: the last group that reads something else that lies there and
        was made before that group, or the number of groups if a result lies there."""
        wanted = set(self.into.values())
        nodes = [n for g in groups for n in g.nodes] if wanted else []
        size = self.backend.mesh.axis_size
        found = lying_in(
            nodes, {i for i, slot in self.slots.items() if slot in wanted}, lambda axes: size(tuple(axes)) == 1
        )
        self.lying = frozenset(self.slots[v] for v in found)
        made = {self.slots[id(v)]: k for k, g in enumerate(groups) for n in g.nodes for v in n.outs}
        until: dict[int, int] = {}
        for v, where in found.items():
            slot = self.slots[v]
            for i in (self.slots[w] for w in where):
                if slot in kept:
                    until[i] = len(groups)
                elif slot != i:
                    end = read.get(slot, -1)
                    until[i] = max(until.get(i, -1), end - (made[slot] == end))
        return until

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        return self.run(list(inputs))

    def run(self, inputs: list[Any]) -> list[Any]:
        return self.start(inputs)()

    def start(self, inputs: list[Any]) -> Callable[[], list[Any]]:
        """`run` up to where it must wait for the first time; the result does the rest."""
        env: list[Any] = [None] * len(self.slots)
        env[: self.n_inputs] = inputs
        inputs.clear()
        for slot in self.unused:
            env[slot] = None
        for step in self.steps[: self.pause]:
            step(env)
        return partial(self._finish, env)

    def _finish(self, env: list[Any]) -> list[Any]:
        for step in self.steps[self.pause :]:
            step(env)
        for wait in self.last:
            wait(env)
        return [env[o] if is_slot else o for is_slot, o in self.outputs]

    # -- steps ------------------------------------------------------------------------------------------------------
    def _begin_ahead(self, groups: Sequence[Group]) -> None:
        """What loops gather for their first steps is begun where it can be."""
        for i, g in enumerate(groups):
            if g.carries and (start := loops.head_start(self, g.nodes[0])) is not None:
                needs, begin = start
                at = first_ahead(groups, i, needs)
                if at < i:
                    self.steps[at] = _after([begin], self.steps[at])

    def _step(self, group: Group, dying: set[int], riding: Sequence[Step] = ()) -> Step:
        nodes = group.nodes
        op = nodes[0].op
        if isinstance(op, Collective):
            return self._begin(nodes[0], dying) if group.begins else self._collective(nodes[0], dying)
        if isinstance(op, LocalScan):
            return loops.scan(self, nodes[0], dying, riding)
        if isinstance(op, LocalScanBackward):
            return loops.scan_backward(self, nodes[0], dying, riding)
        if isinstance(op, LocalAccumulate):
            return loops.accumulate(self, nodes[0], dying)
        if hasattr(op, "build"):
            return self._alone(nodes, dying, self._built(nodes[0], op, dying))
        if self.backend.plain:
            where = (nodes, self.slots, dying, self.backend.device, f"fmeg/{self.name}")
            if self.mode == "eager" or opaque(nodes[0]):
                return self._alone(nodes, dying, segment.in_place(*where))
            made = {self.slots[id(v)] for n in nodes for v in n.outs}
            into = {o: i for o, i in self.into.items() if o in made}
            return compiled.in_place(*where, into, self.adds, self.lying)
        return self._segment(nodes, dying)

    def body(self, program: Program, writes: Sequence[int] = (), later: bool = False, adds: bool = False) -> Executable:
        """A body of a loop, made once. `writes`: its results that may be written into memory given after its inputs,
        one more input for each, or with `adds` added to what is there."""
        key = (id(program), tuple(writes), later, adds)
        if key not in self.bodies:
            memory = tuple(Value(program.outputs[o].type) for o in writes)
            wider = replace(program, inputs=(*program.inputs, *memory)) if writes else program
            into = {o: len(program.inputs) + k for k, o in enumerate(writes)}
            made = Executable(wider, self.backend, self.bodies, self.mode, into, later, adds)
            self.bodies[key] = program, made  # the Program too: its id is its own while it lives
        return self.bodies[key][1]

    def _alone(self, nodes: Sequence[Node], dying: set[int], step: Step) -> Step:
        """The step; of its results only those known to lie in an input that is to be written into may do so."""
        given = {self.slots[id(v)] for n in nodes for v in n.operands()} & self.lying
        made = tuple({self.slots[id(v)] for n in nodes for v in n.outs} - dying - self.lying)
        if not given or not made:
            return step

        def run(env: list[Any]) -> None:
            values = [env[s] for s in given]
            step(env)
            for s in made:
                env[s] = apart(env[s], values)

        return run

    def _built(self, node: Node, op: Any, dying: set[int]) -> Step:
        """An operation that brings its own way to run."""
        fn, read, outs = op.build(self.backend, self.mode), self.reader(node.args, dying), self.outs(node)

        def run(env: list[Any]) -> None:
            store(env, outs, fn(read(env)))

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

    def reader(self, nested: Any, dying: set[int]) -> Callable[[list[Any]], Any]:
        """A function that fills nested args from the environment, from which dying values are taken out."""
        slots = {id(v): self.slots[id(v)] for v in values_in(nested)}
        gone = tuple(s for s in set(slots.values()) if s in dying)

        def read(env: list[Any]) -> Any:
            filled = map_values(lambda v: env[slots[id(v)]], nested)
            for slot in gone:
                env[slot] = None
            return filled

        return read

    def outs(self, node: Node) -> tuple[int, ...]:
        return tuple(self.slots[id(v)] for v in node.outs)

    def _begin(self, node: Node, dying: set[int]) -> Step:
        """Begins a collective; until it is waited for, what waits is where its first result will be."""
        axes, rest, outs = node.args[1], node.args[2:], self.outs(node)
        start = getattr(self.backend, f"start_{node.op.name}")
        read, first = self.reader(list(node.args[0]), dying), outs[0]
        memory = [self.left.get(s) for s in outs]

        def run(env: list[Any]) -> None:
            env[first] = start(read(env), axes, *rest)

        def run_into(env: list[Any]) -> None:
            given = [None if m is None else env[m] for m in memory]
            env[first] = start(read(env), axes, *rest, given)

        if any(m is not None for m in memory):
            return run_into

        return run

    def _wait(self, group: Group, dying: set[int]) -> Step:
        outs = self.outs(group.nodes[0])
        dead = tuple(s for s in outs if s in dying)

        def run(env: list[Any]) -> None:
            store(env, outs, env[outs[0]]())
            for slot in dead:
                env[slot] = None

        return run

    def _collective(self, node: Node, dying: set[int]) -> Step:
        b, op, outs = self.backend, node.op, self.outs(node)
        axes, rest = node.args[1], node.args[2:]
        read = self.reader(list(node.args[0]), dying)
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


def _after(waits: Sequence[Step], step: Step) -> Step:
    if not waits:
        return step

    def run(env: list[Any]) -> None:
        for wait in waits:
            wait(env)
        step(env)

    return run


def _nothing(env: list[Any]) -> None:
    """A step that has run already, in a loop before it."""


def take_part(x: torch.Tensor, index: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """Part `index` of `parts` along `dim`."""
    size = x.shape[dim] // parts
    return x.unflatten(dim, (parts, size)).index_select(dim, index.reshape(1)).squeeze(dim)
