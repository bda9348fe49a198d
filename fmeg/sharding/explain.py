"""Every collective of a local Program: what moves, over which axes, how much, how often, from which line, and why.

Bytes are those that one rank receives in one call, by the best known algorithms, with n ranks in the group and b bytes
of input on a rank (the prices by which placements are chosen, see fmeg.sharding.reshard):

    all_gather (n-1)·b    reduce_scatter, all_to_all (n-1)/n·b    all_reduce 2(n-1)/n·b    ppermute b

How many rows an exchange_rows sends is known only as it runs: b is of the rows with the experts, whose number is taken
to be that of choices spread evenly, and (n-1)/n·b come from other ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

from fmeg.ops.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE_ROWS,
    PPERMUTE,
    REDUCE_SCATTER,
    Collective,
)
from fmeg.program.ir import Node, Program, Value
from fmeg.program.printing import size
from fmeg.program.structured import walk
from fmeg.sharding.policy import OWED

if TYPE_CHECKING:
    from rich.table import Table

    from fmeg.mesh import Mesh

_SHARE = {
    ALL_GATHER: lambda n: (n - 1, 1),
    REDUCE_SCATTER: lambda n: (n - 1, n),
    ALL_TO_ALL: lambda n: (n - 1, n),
    ALL_REDUCE: lambda n: (2 * (n - 1), n),
    PPERMUTE: lambda n: (1, 1),
    EXCHANGE_ROWS: lambda n: (n - 1, n),
}


@dataclass(frozen=True)
class Row:
    """One collective node.

    kind, axes, group   what it is, over which mesh axes, among how many ranks
    count               executions in one call of the function
    tensors             how many tensors one execution moves
    nbytes              bytes that a rank receives in one execution
    values              "before -> after" of each tensor: global type with placement, or the local type
    sources             the user's lines
    path                bodies around it, outermost first; `segment` is the innermost, "step" if there is none
    phase               "F" forward, "B" backward
    again               a repetition in the backward pass of what was not kept
    reason, owed        why it is there; whether something asked for it (else `strict` would refuse it)
    """

    kind: str
    axes: tuple[str, ...]
    group: int
    count: int
    tensors: int
    nbytes: int
    values: tuple[str, ...]
    sources: tuple[str, ...]
    path: tuple[str, ...]
    phase: str
    again: bool
    reason: str
    owed: bool

    @property
    def segment(self) -> str:
        return self.path[-1] if self.path else "step"

    @property
    def total(self) -> int:
        """Bytes that a rank receives in one call of the function."""
        return self.count * self.nbytes


@dataclass(frozen=True, repr=False)
class Explanation:
    """The collectives of a Program, in order; a table in a notebook and when printed."""

    rows: tuple[Row, ...]

    def select(self, **fields: Any) -> Explanation:
        """The rows whose fields or properties have the given values: `select(segment="scan body", phase="F")`."""
        return Explanation(tuple(r for r in self.rows if all(getattr(r, k) == v for k, v in fields.items())))

    def counts(self, **fields: Any) -> dict[str, int]:
        """Nodes of each kind, among the rows that `fields` select. A node in a loop counts once: so many a layer."""
        return dict(Counter(r.kind for r in self.select(**fields).rows))

    def executed(self, **fields: Any) -> dict[str, int]:
        """Executions of each kind in one call of the function."""
        return _total(self.select(**fields).rows, lambda r: (r.kind, r.count))

    def nbytes(self, **fields: Any) -> dict[str, int]:
        """Bytes that a rank receives in one execution of each body, by kind: so many a layer."""
        return _total(self.select(**fields).rows, lambda r: (r.kind, r.nbytes))

    def by_axes(self, **fields: Any) -> dict[tuple[str, ...], int]:
        """Bytes that a rank receives in one call of the function, by mesh axes."""
        return _total(self.select(**fields).rows, lambda r: (r.axes, r.total))

    @property
    def total(self) -> int:
        """Bytes that a rank receives in one call of the function."""
        return sum(r.total for r in self.rows)

    @property
    def implicit(self) -> tuple[Row, ...]:
        """Rows that nothing asked for."""
        return tuple(r for r in self.rows if not r.owed)

    def totals(self) -> list[tuple[str, tuple[str, ...], int, int, int]]:
        """(kind, axes, nodes, executions, bytes) for each kind and axes, largest first."""
        keys = dict.fromkeys((r.kind, r.axes) for r in self.rows)
        out = []
        for kind, axes in keys:
            rows = self.select(kind=kind, axes=axes).rows
            out.append((kind, axes, len(rows), sum(r.count for r in rows), sum(r.total for r in rows)))
        return sorted(out, key=lambda t: -t[-1])

    # -- tables -----------------------------------------------------------------------------------------------------
    def _cells(self) -> Iterator[tuple[str, ...]]:
        for r in self.rows:
            where = f"{r.segment}{' (again)' if r.again else ''}"
            values = r.values[0] if r.tensors == 1 else f"{r.values[0]} and {r.tensors - 1} more"
            lines = f"{r.sources[0]} and {len(r.sources) - 1} more" if len(r.sources) > 1 else "".join(r.sources)
            reason = r.reason if r.owed else f"{r.reason} (implicit)"
            numbers = (f"{r.count}×", size(r.nbytes), size(r.total))
            yield where, r.phase, r.kind, f"{'+'.join(r.axes)} ({r.group})", *numbers, values, reason, lines

    def _sums(self) -> Iterator[tuple[str, ...]]:
        for kind, axes, nodes, executions, total in self.totals():
            yield kind, "+".join(axes), f"{nodes} node{'s' * (nodes != 1)}", str(executions), size(total)

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self._title(), title_justify="left", show_edge=False, pad_edge=False, box=None)
        for name in _HEAD:
            table.add_column(name, justify="right" if name in _RIGHT else "left", no_wrap=name in _NO_WRAP)
        for cells in self._cells():
            table.add_row(*map(Text, cells), style="" if "(implicit)" not in cells[-2] else "bold")
        table.add_section()
        for kind, axes, nodes, executions, total in self._sums():
            table.add_row("total", "", kind, axes, f"{executions}×", "", total, nodes)
        return table

    def _title(self) -> str:
        executions, implicit = sum(r.count for r in self.rows), len(self.implicit)
        tail = f", {implicit} implicit" if implicit else ""
        return f"{len(self.rows)} collectives, {executions} executions, {size(self.total)} a rank{tail}"

    def __str__(self) -> str:
        from rich.console import Console

        out = StringIO()
        Console(file=out, width=180, color_system=None, force_jupyter=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        sums = [("total", "", k, a, f"{e}×", "", b, n, "", "") for k, a, n, e, b in self._sums()]
        body = (_html_row("td", cells) for cells in (*self._cells(), *sums))
        lines = ("<table>", "<thead>", _html_row("th", _HEAD), "</thead>", "<tbody>", *body, "</tbody>", "</table>")
        return "\n".join((f"<p>{escape(self._title())}</p>", *lines))


_HEAD = ("where", "", "collective", "over", "runs", "bytes", "in all", "value", "why", "line")
_RIGHT = ("runs", "bytes", "in all")
_NO_WRAP = ("where", "", "collective", "over", *_RIGHT)


def _html_row(tag: str, cells: Iterable[str]) -> str:
    """A row, with numbers at the right and words at the left whatever the notebook's own style is."""
    out = []
    for name, cell in zip(_HEAD, cells, strict=True):
        style = f"text-align:{'right' if name in _RIGHT else 'left'}"
        style += ";white-space:nowrap" if name in _NO_WRAP else ""
        out.append(f"<{tag} style='{style}'>{escape(cell)}</{tag}>")
    return f"<tr>{''.join(out)}</tr>"


def _total(rows: Iterable[Row], item: Any) -> dict[Any, int]:
    out: dict[Any, int] = {}
    for r in rows:
        key, n = item(r)
        out[key] = out.get(key, 0) + n
    return out


def received(op: Collective, nbytes: int, n: int) -> int:
    """Bytes that a rank receives, of `nbytes` bytes of input on each of n ranks.

    >>> received(ALL_GATHER, 100, 4), received(REDUCE_SCATTER, 100, 4), received(ALL_REDUCE, 100, 4)
    (300, 75, 150)
    """
    up, down = _SHARE[op](n)
    return up * nbytes // down


def explain(program: Program, mesh: Mesh) -> Explanation:
    """Every collective of a local Program, those in the bodies of loops included."""
    rows = [_row(node, times, path, mesh) for node, times, path in walk(program) if _moves(node)]
    return Explanation(tuple(rows))


def _moves(node: Node) -> bool:
    return node.op in _SHARE and bool(node.args[1])


def _arrives(node: Node) -> bool:
    """Whether the rows of an exchange with the experts are its results."""
    return node.op is EXCHANGE_ROWS and not node.args[2]


def _row(node: Node, times: int, path: tuple[str, ...], mesh: Mesh) -> Row:
    axes, xs = tuple(node.args[1]), node.operands()[: len(node.outs)]
    n = mesh.axis_size(axes)
    reasons = str(node.tags.get("reason", "")).split(" + ")
    return Row(
        kind=node.opname,
        axes=axes,
        group=n,
        count=times,
        tensors=len(xs),
        nbytes=sum(received(node.op, v.type.nbytes, n) for v in (node.outs if _arrives(node) else xs)),
        values=tuple(f"{_type(x)} -> {_type(y)}" for x, y in zip(xs, node.outs, strict=True)),
        sources=tuple(filter(None, node.tags.get("sources", (node.source,)))),
        path=path,
        phase=node.phase,
        again=bool(node.tags.get("again")),
        reason=" + ".join(reasons),
        owed=all(r in OWED for r in reasons),
    )


def _type(v: Value) -> str:
    return v.placement or f"local {v.type}"
