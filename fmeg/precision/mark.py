"""Before differentiation: which products run in low precision, and in which layers.

The Program is copied; a product of two operands of which one is a parameter, but no vector, (through casts, views and
annotations, into scan bodies) that the recipe matches, or of rows sorted by expert with such parameters, is tagged with
its `Use`, which its gradients inherit. A scan over layers becomes up to three: the first layers and the last ones with
the body as it was, those between with the tagged one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import count

import torch

from fmeg.ops.einsum import einsum_p
from fmeg.ops.grouped import grouped_matmul_p
from fmeg.ops.shard import name_p, shard_p
from fmeg.precision.delayed import ROLES, tap_p
from fmeg.precision.layers import JOIN_LAYERS, SPLIT_LAYERS
from fmeg.precision.recipe import Recipe
from fmeg.precision.scaled import as_matmul
from fmeg.program.errors import TraceError
from fmeg.program.ir import Node, Program, TensorType, Value, map_values
from fmeg.program.structured import Scan

aten = torch.ops.aten
TAG = "precision"
_SAME = {
    shard_p,
    name_p,
    aten._to_copy.default,
    aten.view.default,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.select.int,
    aten.slice.Tensor,
    aten.clone.default,
}


@dataclass(frozen=True)
class Use:
    """A product in low precision: by which recipe, which operand is the parameter, the parameter's path, and a name."""

    recipe: Recipe
    parameter: int
    path: str
    site: str = ""


def mark(program: Program, recipe: Recipe, paths: Sequence[str]) -> tuple[Program, list[str]]:
    """A copy of `program` whose chosen products are tagged; `paths` are those of its first inputs, the parameters.

    For "delayed" it has one more input a site, of the largest values known (see `fmeg.precision.delayed`), f32[3] or,
    in a scan, f32[layers, 3]; the sites' names are the second result. TraceError where nothing is chosen, or where one
    of the recipe's patterns matches no product.
    """
    whole = _Marker(replace(recipe, skip_first=0, skip_last=0))
    whole.copy(program, dict(enumerate(paths)), marking=True, layers=False)
    marker = _Marker(recipe, ends=(whole.scans[0], whole.scans[-1]) if whole.scans else (0, 0))
    out, sites = marker.copy(program, dict(enumerate(paths)), marking=True, layers=False)
    if not marker.chosen:
        raise TraceError(
            f"precision: no product has a parameter that matches {', '.join(map(repr, recipe.match))} in a layer that "
            f"is not left out (skip_first={recipe.skip_first}, skip_last={recipe.skip_last}). Products have "
            f"{', '.join(sorted(marker.seen)) or 'no parameters'}"
        )
    unused = [p for p in recipe.match if not any(fnmatchcase(path, p) for path in marker.seen)]
    if unused:
        raise TraceError(
            f"precision: no product has a parameter that matches {', '.join(map(repr, unused))} of `match`. Products "
            f"have {', '.join(sorted(marker.seen))}; leave out the patterns that say nothing of this model"
        )
    out = Program((*out.inputs, *sites.values()), out.nodes, out.outputs, (), out.name)
    out.check()
    return out, list(sites)


Sites = dict[str, Value]


@dataclass
class _Marker:
    """`ends`: ids of the first and the last scan over layers; `scans`: those of all that have a tagged product."""

    recipe: Recipe
    ends: tuple[int, int] = (0, 0)
    scans: list[int] = field(default_factory=list)
    chosen: int = 0
    seen: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def copy(self, program: Program, paths: dict[int, str], *, marking: bool, layers: bool) -> tuple[Program, Sites]:
        """`paths` of inputs that are parameters; `layers`: inside a scan over layers. Also the inputs that the copy
        lacks:
        what is known of each site."""
        env: dict[int, Value] = {}
        origin: dict[int, str] = {}
        inputs = tuple(Value(v.type, name=v.name) for v in program.inputs)
        for i, (v, new) in enumerate(zip(program.inputs, inputs, strict=True)):
            env[id(v)] = new
            if i in paths:
                origin[id(new)] = paths[i]
        nodes: list[Node] = []
        sites: Sites = {}
        for n in program.nodes:
            args, kwargs = map_values(lambda v: env[id(v)], (n.args, n.kwargs))
            node = Node(n.op, args, kwargs, source=n.source, phase=n.phase, tags=dict(n.tags))
            node.outs = tuple(Value(v.type, node, v.index, v.name) for v in n.outs)
            if isinstance(n.op, Scan):
                outs = self._scan(node, origin, nodes, sites, marking=marking, layers=layers)
            else:
                nodes.append(node)
                outs = list(node.outs)
                if n.op in _SAME and id(args[0]) in origin:
                    origin[id(outs[0])] = origin[id(args[0])]
                elif (
                    n.op in (einsum_p, grouped_matmul_p)
                    and self._product(node, origin, marking)
                    and self.recipe.delayed
                ):
                    outs = self._tapped(node, nodes, sites)
            env.update({id(old): new for old, new in zip(n.outs, outs, strict=True)})
        results = tuple(map_values(lambda v: env[id(v)], list(program.outputs)))
        return Program(inputs, nodes, results, program.names, program.name), sites

    def _product(self, node: Node, origin: dict[int, str], marking: bool) -> bool:
        operands = node.operands()
        found = [i for i, v in enumerate(operands) if id(v) in origin]
        if node.op is grouped_matmul_p:
            fits = found == [1]
        else:
            mm = as_matmul(node.args[0])
            fits = len(found) == 1 and mm is not None and bool((mm.left, mm.right)[found[0]])
        if not fits:
            return False
        path = origin[id(operands[found[0]])]
        self.seen.add(path)
        if not (marking and self.recipe.matches(path)):
            return False
        self.chosen += 1
        site = next(s for i in count() if (s := f"{path}:{i}" if i else path) not in self.names)
        self.names.add(site)
        node.tags[TAG] = Use(self.recipe, found[0], path, site)
        return True

    def _tapped(self, node: Node, nodes: list[Node], sites: Sites) -> list[Value]:
        site = node.tags[TAG].site
        sites[site] = Value(TensorType((ROLES,), torch.float32), name=f"amax.{site}")
        return _append(node, tap_p, (node.outs[0], sites[site], site), [node.outs[0].type], nodes)

    def _scan(
        self, node: Node, origin: dict[int, str], nodes: list[Node], sites: Sites, *, marking: bool, layers: bool
    ) -> list[Value]:
        scan: Scan = node.op
        paths = {i: origin[id(v)] for i, v in enumerate(node.args) if id(v) in origin and i >= scan.n_carry}
        over_layers = any(i < scan.n_carry + scan.n_xs for i in paths)
        outermost = over_layers and not layers
        first, last = (outermost and id(scan) == end for end in self.ends)
        skip = (self.recipe.skip_first * first, self.recipe.skip_last * last)
        middle = scan.length - sum(skip)
        before = self.chosen
        low, inner = self.copy(scan.body, paths, marking=marking and middle > 0, layers=layers or over_layers)
        if outermost and self.chosen > before:
            self.scans.append(id(scan))
        start = scan.n_carry + scan.n_xs
        low = Program((*low.inputs[:start], *inner.values(), *low.inputs[start:]), low.nodes, low.outputs, (), low.name)
        length = middle if self.chosen > before else scan.length
        known = [Value(TensorType((length, *v.shape), v.dtype), name=v.name) for v in inner.values()]
        sites.update(zip(inner, known, strict=True))
        if self.chosen == before or skip == (0, 0):
            args = (*node.args[:start], *known, *node.args[start:])
            return self._emit(
                node, Scan(low, scan.length, scan.n_carry, scan.n_xs + len(known), scan.name), args, nodes
            )
        plain, _ = self.copy(scan.body, paths, marking=False, layers=True)
        parts = [(n, b, k) for n, b, k in ((skip[0], plain, []), (middle, low, known), (skip[1], plain, [])) if n]
        sizes = tuple(n for n, _, _ in parts)
        carry, xs = list(node.args[: scan.n_carry]), node.args[scan.n_carry : start]
        split = [self._split(node, x, sizes, nodes) for x in xs]
        ys = []
        for k, (length, body, more) in enumerate(parts):
            args = (*carry, *(s[k] for s in split), *more, *node.args[start:])
            op = Scan(body, length, scan.n_carry, scan.n_xs + len(more), scan.name)
            got = self._emit(node, op, args, nodes)
            carry, y = got[: scan.n_carry], got[scan.n_carry :]
            ys.append(y)
        joined = [self._join(node, [y[i] for y in ys], nodes) for i in range(scan.n_ys)]
        return [*carry, *joined]

    def _emit(self, like: Node, op: Scan, args: Sequence[Value], nodes: list[Node]) -> list[Value]:
        types = [o.type for o in op.body.outputs[: op.n_carry]]
        types += [TensorType((op.length, *o.type.shape), o.type.dtype) for o in op.body.outputs[op.n_carry :]]
        return _append(like, op, tuple(args), types, nodes)

    def _split(self, like: Node, x: Value, sizes: tuple[int, ...], nodes: list[Node]) -> list[Value]:
        types = [TensorType((n, *x.shape[1:]), x.dtype) for n in sizes]
        return _append(like, SPLIT_LAYERS, (x, sizes), types, nodes)

    def _join(self, like: Node, parts: list[Value], nodes: list[Node]) -> Value:
        t = TensorType((sum(p.shape[0] for p in parts), *parts[0].shape[1:]), parts[0].dtype)
        return _append(like, JOIN_LAYERS, (parts,), [t], nodes)[0]


def _append(like: Node, op: object, args: tuple, types: Sequence[TensorType], nodes: list[Node]) -> list[Value]:
    node = Node(op, args, {}, source=like.source, phase=like.phase, tags=dict(like.tags))
    node.outs = tuple(Value(t, node, i) for i, t in enumerate(types))
    nodes.append(node)
    return list(node.outs)
