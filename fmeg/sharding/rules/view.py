"""Views that merge and split dimensions, and those that only rename them."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod

from torch import Tensor

from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Local, Rule
from fmeg.sharding.rules.common import Call, changed, dims_of, local_shape, node_rule
from fmeg.sharding.rules.table import Table, refuse

RULES = Table()


def factorise(a: Sequence[int], b: Sequence[int]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Common factors of two shapes with equally many elements: dims of each, sizes, and the factors that must be whole.

    Both shapes are read from the left, each time taking what the current dimensions have in common. Where sizes share
    nothing more (`(3, 2) -> (2, 3)`), the dimensions up to the next common border stay whole.

    >>> factorise((2, 12), (2, 3, 4))[:2]
    ((('f0',), ('f1', 'f2')), (('f0',), ('f1',), ('f2',)))
    >>> ins, outs, sizes, whole = factorise((6, 4), (4, 6))
    >>> ins, outs, sizes
    ((('f0', 'f1'), ('f4',)), (('f0', 'f2'), ('f3',)), {'f0': 2, 'f1': 3, 'f2': 2, 'f3': 6, 'f4': 4})
    >>> sorted(whole)
    ['f1', 'f2', 'f3', 'f4']
    """
    dims: tuple[list[list[str]], list[list[str]]] = ([[] for _ in a], [[] for _ in b])
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def factor(size: int) -> str:
        name = f"f{len(sizes)}"
        sizes[name] = size
        return name

    def keep_whole(side: int, i: int, size: int) -> None:
        if size != 1:
            name = factor(size)
            whole.add(name)
            dims[side][i].append(name)

    shapes = (list(a), list(b))
    if prod(a) == 0:
        for side in (0, 1):
            for i, n in enumerate(shapes[side]):
                keep_whole(side, i, n)
        return _frozen(dims[0]), _frozen(dims[1]), sizes, frozenset(whole)
    at = [0, 0]
    left = [shapes[s][0] if shapes[s] else 1 for s in (0, 1)]

    def advance() -> bool:
        for s in (0, 1):
            while left[s] == 1 and at[s] + 1 < len(shapes[s]):
                at[s] += 1
                left[s] = shapes[s][at[s]]
        return left[0] != 1 or left[1] != 1

    while advance():
        common = gcd(left[0], left[1])
        if common > 1:
            name = factor(common)
            for s in (0, 1):
                dims[s][at[s]].append(name)
                left[s] //= common
            continue
        reach = [left[0], left[1]]
        for s in (0, 1):
            keep_whole(s, at[s], left[s])
        while reach[0] != reach[1]:
            s = 0 if reach[0] < reach[1] else 1
            at[s] += 1
            reach[s] *= shapes[s][at[s]]
            keep_whole(s, at[s], shapes[s][at[s]])
        left[:] = [1, 1]
    return _frozen(dims[0]), _frozen(dims[1]), sizes, frozenset(whole)


def _frozen(dims: list[list[str]]) -> Dims:
    return tuple(tuple(d) for d in dims)


@RULES.register("aten.view.default", "aten._unsafe_view", "aten.squeeze", "aten.unsqueeze")
def view(node: Node) -> Rule:
    """The same elements in another shape: `"(a b) -> a b"`."""
    a, b, sizes, whole = factorise(node.operands()[0].shape, node.outs[0].shape)

    def local(info: Local, x: Tensor, *args: object) -> Tensor:
        return x.reshape(local_shape(info, b))

    return Rule((a,), (b,), sizes, whole=whole, linear=frozenset({0}), local=local)


@RULES.register("aten.view.dtype")
def reinterpreted(node: Node) -> Rule:
    """The same bits as numbers of another type; of half the size, twice as many: `"n -> (n parts)"`."""
    x, y = node.operands()[0], node.outs[0]
    dims = dims_of(x.shape if x.dtype.itemsize >= y.dtype.itemsize else y.shape)
    if x.dtype.itemsize == y.dtype.itemsize:
        return node_rule(node, (dims,), (dims,))
    parted = (*dims[:-1], (*dims[-1], "parts"))
    wide, narrow = (x, y) if x.dtype.itemsize > y.dtype.itemsize else (y, x)
    sizes = {d[0]: n for d, n in zip(dims, wide.shape, strict=True) if d}
    sizes["parts"] = wide.dtype.itemsize // narrow.dtype.itemsize
    ins, out = (dims, parted) if x is wide else (parted, dims)
    return Rule((ins,), (out,), sizes, whole=frozenset({"parts"}))


@RULES.register("aten.expand")
def expand(node: Node) -> Rule:
    """Repeat dimensions of size 1: they may then be sharded, at no cost."""
    shape = node.outs[0].shape
    out = dims_of(shape)
    x = node.operands()[0].shape
    ins = tuple(() if n == 1 else d for n, d in zip(x, out[len(out) - len(x) :], strict=True))
    return node_rule(
        node, (ins,), (out,), linear=frozenset({0}), local=changed(node.op, size=lambda info: local_shape(info, out))
    )


def _order(call: Call, ndim: int) -> list[int]:
    """The dimension of the operand that each dimension of the result is."""
    order = list(range(ndim))
    name = str(call.op).split(".")[1]
    if name == "permute":
        return [d % ndim for d in call["dims"]]
    i, j = (0, -1) if name == "t" else (call["dim0"], call["dim1"])
    if ndim > 1:
        order[i], order[j] = order[j], order[i]
    return order


@RULES.register("aten.permute", "aten.transpose.int", "aten.t")
def permute(node: Node) -> Rule:
    """Dimensions in another order."""
    dims = dims_of(node.operands()[0].shape)
    out = tuple(dims[i] for i in _order(Call(node), len(dims)))
    return node_rule(node, (dims,), (out,), linear=frozenset({0}))


@RULES.register("aten.detach", "aten.alias", "aten.lift", "aten.lift_fresh_copy")
def same(node: Node) -> Rule:
    """The operand itself."""
    dims = dims_of(node.operands()[0].shape)
    return node_rule(node, (dims,), (dims,), linear=frozenset({0}))


@RULES.register("aten.repeat")
def repeat(node: Node) -> Rule:
    """Whole copies: `n -> (copies n)`."""
    shape, out = node.operands()[0].shape, node.outs[0].shape
    lead = len(out) - len(shape)
    padded = (1,) * lead + tuple(shape)
    copies = [n // max(s, 1) for n, s in zip(out, padded, strict=True)]
    names = dims_of(padded)
    outs = tuple(((f"c{i}",) if c != 1 else ()) + d for i, (c, d) in enumerate(zip(copies, names, strict=True)))
    sizes = {f"c{i}": c for i, c in enumerate(copies) if c != 1} | {
        d[0]: n for d, n in zip(names, padded, strict=True) if d
    }
    local = changed(node.op, repeats=lambda info: [info.size(f"c{i}") if c != 1 else 1 for i, c in enumerate(copies)])
    return Rule((names[lead:],), (outs,), sizes, linear=frozenset({0}), local=local)


as_strided = RULES.register("aten.as_strided", "aten.as_strided_scatter", "aten.as_strided_copy")(
    refuse("strides speak of one device's memory; use slicing, expand or permute")
)
