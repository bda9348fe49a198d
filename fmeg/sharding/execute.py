"""Running a local Program on a backend: one loop over instructions, values dropped after their last use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, AXIS_INDEX, PPERMUTE, REDUCE_SCATTER, Collective
from fmeg.program.gradient import MIRROR
from fmeg.program.ir import Node, Program, Value, values_in
from fmeg.program.primitive import Primitive
from fmeg.program.recorder import Literal, constant
from fmeg.sharding.local import LocalAccumulate, LocalScan, LocalScanBackward
from fmeg.sharding.partition import LOCAL_SLICE

aten = torch.ops.aten
Step = Callable[[list[Any]], None]


class Executable:
    """A compiled local Program: call it with one value an input; returns one value an output."""

    def __init__(self, program: Program, backend: Any) -> None:
        self.backend = backend
        self.slots: dict[int, int] = {}
        for v in program.inputs:
            self._slot(v)
        self.n_inputs = len(program.inputs)
        last: dict[int, int] = {}
        for i, n in enumerate(program.nodes):
            for v in n.operands():
                last[self._slot(v)] = i
            for v in n.outs:
                last.setdefault(self._slot(v), i)
        kept = {self._slot(v) for v in values_in(program.outputs)}
        dead: dict[int, list[int]] = {}
        for slot, i in last.items():
            if slot not in kept:
                dead.setdefault(i, []).append(slot)
        self.steps = [(self._step(n), tuple(dead.get(i, ()))) for i, n in enumerate(program.nodes)]
        self.outputs = [(True, self._slot(o)) if isinstance(o, Value) else (False, o) for o in program.outputs]

    def _slot(self, v: Value) -> int:
        return self.slots.setdefault(id(v), len(self.slots))

    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        env: list[Any] = [None] * len(self.slots)
        env[: self.n_inputs] = inputs
        for step, dead in self.steps:
            step(env)
            for slot in dead:
                env[slot] = None
        return [env[o] if is_slot else o for is_slot, o in self.outputs]

    # -- one node ---------------------------------------------------------------------------------------------------
    def _step(self, node: Node) -> Step:
        op = node.op
        outs = tuple(self._slot(v) for v in node.outs)
        if isinstance(op, Collective):
            return self._collective(node, outs)
        if isinstance(op, LocalScan):
            return self._scan(node, op, outs)
        if isinstance(op, LocalScanBackward):
            return self._scan_backward(node, op, outs)
        if isinstance(op, LocalAccumulate):
            return self._accumulate(node, op, outs)
        return self._compute(node, outs)

    def _reader(self, nested: Any) -> Callable[[list[Any]], Any]:
        """A function that fills nested args from the environment."""
        if isinstance(nested, Value):
            slot = self._slot(nested)
            return lambda env: env[slot]
        if isinstance(nested, (tuple, list)) and any(True for _ in values_in(nested)):
            readers = [self._reader(x) for x in nested]
            kind = type(nested)
            if kind is tuple:
                return lambda env: tuple([r(env) for r in readers])
            return lambda env: [r(env) for r in readers]
        if isinstance(nested, dict) and any(True for _ in values_in(nested)):
            items = [(k, self._reader(v)) for k, v in nested.items()]
            return lambda env: {k: r(env) for k, r in items}
        return lambda env: nested

    def _compute(self, node: Node, outs: tuple[int, ...]) -> Step:
        fn = lowering(node, self.backend.device)
        call, args, kwargs = self.backend.call, self._reader(node.args), self._reader(node.kwargs)
        results = node.tags.get("results")
        if len(outs) == 1 and results is None and not returns_sequence(node):
            out = outs[0]

            def one(env: list[Any]) -> None:
                env[out] = call(fn, args(env), kwargs(env))

            return one

        def many(env: list[Any]) -> None:
            got = call(fn, args(env), kwargs(env))
            picked = got if results is None else [got[i] for i in results]
            for slot, value in zip(outs, picked, strict=True):
                env[slot] = value

        return many

    def _collective(self, node: Node, outs: tuple[int, ...]) -> Step:
        b, op = self.backend, node.op
        axes, rest = node.args[1], node.args[2:]
        xs = self._reader(list(node.args[0]))

        def run(env: list[Any]) -> None:
            values = xs(env)
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
            elif op is AXIS_INDEX:
                got = [b.axis_index(axes)]
            else:
                assert op is LOCAL_SLICE, op
                got = [b.call(take_part, (values[0], b.axis_index(axes), rest[0][0], b.mesh.axis_size(axes)), {})]
            for slot, value in zip(outs, got, strict=True):
                env[slot] = value

        return run

    # -- structured nodes -------------------------------------------------------------------------------------------
    def _scan(self, node: Node, op: LocalScan, outs: tuple[int, ...]) -> Step:
        b, body, read = self.backend, Executable(op.body, self.backend), self._reader(node.args)
        n_c, n_x, n_y = op.n_carry, op.n_xs, op.n_ys

        def run(env: list[Any]) -> None:
            args = read(env)
            carry, consts = list(args[:n_c]), args[n_c + n_x :]
            slices = [b.call(torch.unbind, (x,), {}) for x in args[n_c : n_c + n_x]]
            ys: list[list[Any]] = [[] for _ in range(n_y)]
            handle: list[list[Any]] = []
            for i in range(op.length):
                got = body([*carry, *(s[i] for s in slices), *consts])
                carry = got[:n_c]
                for y, v in zip(ys, got[n_c : n_c + n_y], strict=True):
                    y.append(v)
                if op.keeps:
                    handle.append(got[n_c + n_y :])
            stacked = [b.call(torch.stack, (y,), {}) for y in ys]
            for slot, value in zip(outs, [*carry, *stacked, handle], strict=False):
                env[slot] = value

        return run

    def _scan_backward(self, node: Node, op: LocalScanBackward, outs: tuple[int, ...]) -> Step:
        b, body, read = self.backend, Executable(op.body, self.backend), self._reader(node.args)
        n_c, n_x = op.n_carry, op.n_ct_xs

        def run(env: list[Any]) -> None:
            ct_carries, ct_ys, handle, xs, consts = read(env)
            cts = list(ct_carries)
            y_slices = [b.call(torch.unbind, (y,), {}) for y in ct_ys]
            x_slices = [b.call(torch.unbind, (x,), {}) for x in xs]
            per_layer: list[list[Any]] = [[] for _ in range(n_x)]
            sums: list[Any] | None = None
            for i in reversed(range(op.length)):
                kept = handle.pop()
                got = body([*cts, *(y[i] for y in y_slices), *kept, *(x[i] for x in x_slices), *consts])
                cts = got[:n_c]
                for g, v in zip(per_layer, got[n_c : n_c + n_x], strict=True):
                    g.append(v)
                sums = add(b, sums, got[n_c + n_x :])
            stacked = []
            for g in per_layer:
                g.reverse()
                stacked.append(b.call(torch.stack, (g,), {}))
                g.clear()
            for slot, value in zip(outs, [*cts, *stacked, *(sums or [])], strict=True):
                env[slot] = value

        return run

    def _accumulate(self, node: Node, op: LocalAccumulate, outs: tuple[int, ...]) -> Step:
        b, body, read = self.backend, Executable(op.body, self.backend), self._reader(node.args)

        def run(env: list[Any]) -> None:
            args = read(env)
            split = [b.call(torch.unbind, (a,), {}) if batched else None for a, batched in zip(args, op.batched, strict=True)]
            sums: list[Any] | None = None
            for j in range(op.steps):
                got = body([a if s is None else s[j] for a, s in zip(args, split, strict=True)])
                sums = add(b, sums, got)
            for slot, value in zip(outs, sums or [], strict=True):
                env[slot] = value

        return run


def add(backend: Any, sums: list[Any] | None, new: list[Any]) -> list[Any]:
    """Running sums, in order."""
    if sums is None:
        return list(new)
    return [backend.call(torch.add, (s, v), {}) for s, v in zip(sums, new, strict=True)]


def take_part(x: torch.Tensor, index: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
    """Part `index` of `parts` along `dim`."""
    size = x.shape[dim] // parts
    return x.unflatten(dim, (parts, size)).index_select(dim, index.reshape(1)).squeeze(dim)


def returns_sequence(node: Node) -> bool:
    """True when the operation returns a tuple or list even of one tensor."""
    if isinstance(node.op, torch._ops.OpOverload):
        returns = node.op._schema.returns
        return len(returns) != 1 or "[]" in str(returns[0].type) or "List" in str(returns[0].type)
    return len(node.outs) > 1


def lowering(node: Node, device: torch.device) -> Callable[..., Any]:
    """The callable that runs a compute node on local tensors."""
    op = node.op
    if op is constant:
        return lambda literal: literal.tensor.to(device) if isinstance(literal, Literal) else literal
    if op is MIRROR:
        return op
    if isinstance(op, Primitive):
        return op.run()
    if op in (aten.view.default, aten._unsafe_view.default):
        return torch.reshape
    if isinstance(op, torch._ops.OpOverload) and not node.operands() and any(a.name == "device" for a in op._schema.arguments):
        return lambda *args, **kwargs: op(*args, **{**kwargs, "device": device})
    return op
