"""What the layers of each scan keep for the backward pass, and what that does again instead: bytes and work a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fmeg.program.cost import node_bytes, node_flops
from fmeg.program.ir import Node, Program, Value
from fmeg.program.memory import storages
from fmeg.program.printing import size
from fmeg.program.structured import loop_of
from fmeg.sharding.local import LocalScan, LocalScanBackward


@dataclass(frozen=True)
class Row:
    """A kept value: the operation and the user's line that make it, its type on one rank, its bytes, whether it waits
    in the host's memory."""

    op: str
    source: str
    type: str
    nbytes: int
    host: bool


@dataclass(frozen=True)
class Scanned:
    """One scan. rows: what a layer keeps, of values that share memory the first; again: operations that its backward
    pass does again, with their FLOPs and the bytes that they read and write; policies: those of its remat regions."""

    source: str
    layers: int
    rows: tuple[Row, ...]
    again: tuple[str, ...]
    flops: int
    moved: int
    policies: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that a layer keeps on the device."""
        return sum(r.nbytes for r in self.rows if not r.host)

    @property
    def host_bytes(self) -> int:
        """Bytes that a layer keeps in the host's memory."""
        return sum(r.nbytes for r in self.rows if r.host)

    def __str__(self) -> str:
        name = f"scan at {self.source}, {self.layers} layers"
        head = f"{name}, remat {' + '.join(self.policies)}" if self.policies else name
        lines = [
            f"  {r.op:24} {r.type:28} {size(r.nbytes):>10}{' host' if r.host else '':5}  {r.source}" for r in self.rows
        ]
        kept = f"  a layer keeps {size(self.nbytes)}" + (
            f", on the host {size(self.host_bytes)}" if self.host_bytes else ""
        )
        done = f"does again {len(self.again)} operations: {self.flops:,} FLOPs, {size(self.moved)} moved"
        return "\n".join((head, *lines, f"{kept}, all layers {size(self.layers * self.nbytes)}; {done}"))


@dataclass(frozen=True, repr=False)
class Memory:
    """The scans of a Program that have a gradient, in order; prints as a table."""

    scans: tuple[Scanned, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that all layers of all scans keep on the device."""
        return sum(s.layers * s.nbytes for s in self.scans)

    def __str__(self) -> str:
        return "\n".join(map(str, self.scans)) or "no scan with a gradient"

    __repr__ = __str__


def memory(program: Program) -> Memory:
    """What is kept in a local Program."""
    return Memory(tuple(_scans(program)))


def _scans(program: Program) -> Iterator[Scanned]:
    back = {id(n.args[2]): n.op for n in program.nodes if isinstance(n.op, LocalScanBackward)}
    for n in program.nodes:
        if isinstance(n.op, LocalScan) and n.op.keeps:
            yield _scanned(n, n.op, back.get(id(n.outs[-1])))
        if (loop := loop_of(n)) is not None:
            yield from _scans(loop.body)


def _scanned(node: Node, op: LocalScan, backward: LocalScanBackward | None) -> Scanned:
    again = [n for n in backward.body.nodes if n.tags.get("again")] if backward is not None else []
    policies = {str(n.tags["remat"][1]): None for n in op.body.nodes if n.tags.get("remat")}
    return Scanned(
        node.source,
        op.length,
        tuple(_rows(op)),
        tuple(n.opname for n in again),
        sum(map(node_flops, again)),
        sum(map(node_bytes, again)),
        tuple(policies),
    )


def _rows(op: LocalScan) -> Iterator[Row]:
    lies = storages(op.body)
    carries = {id(v) for v in op.body.inputs[: op.n_carry]}
    seen: set[int] = set()
    for i, v in enumerate(op.body.outputs[op.n_carry + op.n_ys :]):
        root, nbytes = lies[id(v)]
        if root not in seen:
            seen.add(root)
            yield Row(*_made(v, id(v) in carries), repr(v.type), nbytes, i in op.host)


def _made(v: Value, carry: bool) -> tuple[str, str]:
    return (v.node.opname, v.node.source) if v.node is not None else ("carry" if carry else "input", "")
