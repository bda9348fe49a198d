"""From global to local Programs: sizes, values made on demand, and what the backward pass keeps."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fmeg import (
    Layout,
    Mesh,
    P,
    TensorType,
    einsum,
    jit,
    name,
    ops,
    random,
    remat,
    save_names,
    scan,
    shard,
    tree,
    value_and_grad,
)
from fmeg.program.errors import ShardingError
from fmeg.program.ir import values_in
from fmeg.program.structured import loop_of, walk
from fmeg.sharding.local import LocalScan

F64 = torch.float64
L, B, S, D, E = 3, 4, 8, 16, 48


def lower(fn, *args, mesh: Mesh, layout: Layout, **kw):
    return jit(fn, mesh=mesh, layout=layout, **kw).lower(*args)


def nodes(low):
    return [n for n, _, _ in walk(low.program)]


# -- values made on demand --------------------------------------------------------------------------------------------
def test_creation_at_local_size():
    """Constants, ranges, masks and draws are made at the size of a rank's part, and never moved."""

    def fn(x: Tensor, key: Tensor) -> Tensor:
        rows = torch.arange(8.0, dtype=F64)[:, None]
        mask = torch.ones(8, 16, dtype=torch.bool).tril(2)
        noise = random.normal(key, (8, 16), dtype=F64) * 0.5 + rows
        return torch.where(mask, x + torch.zeros(16, dtype=F64) + torch.full_like(x, 2.0), noise)

    x, key = torch.randn(8, 16, dtype=F64), random.key(3)
    for rows, columns in [("a", None), (None, "a"), ("a", "b"), (("b", "a"), None)]:
        mesh, layout = Mesh(a=2, b=2), Layout(r=rows, c=columns)
        low = lower(fn, x, key, mesh=mesh, layout=layout, axes={"x": "r c"})
        assert not low.explain().rows
        parts = tuple(mesh.axis_size(e if isinstance(e, tuple) else (e,)) if e else 1 for e in (rows, columns))
        largest = max(o.type.numel for n in nodes(low) for o in n.outs)
        assert largest == 8 * 16 // (parts[0] * parts[1])
        got = jit(fn, mesh=mesh, layout=layout, axes={"x": "r c"})(x, key)
        assert torch.equal(got.global_value(), fn(x, key))


@pytest.mark.parametrize("spec", ["a", "b", ("a", "b"), ("b", "a"), None], ids=str)
def test_initial_values_do_not_depend_on_the_mesh(spec):
    """Each rank draws its own part; together they are the draw of one device, scaled or not."""

    def init(key: Tensor) -> dict:
        k = random.split(key, 2)
        return {"w": random.normal(k[0], (8, 4)) * 0.02, "b": torch.zeros(8), "u": 1 + random.uniform(k[1], (8, 4))}

    axes = {"w": "in out", "b": "in", "u": "in out"}
    got = jit(init, mesh=Mesh(a=2, b=2), layout=Layout(params={"in": spec}), out_axes=axes)(random.key(0))
    want = init(random.key(0))
    for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.equal(a.global_value(), b), path
        wanted = spec if isinstance(spec, tuple) else (spec,) if spec else ()
        assert a.spec[0] == wanted


def test_a_draw_used_in_two_placements_is_the_same_draw():
    def fn(x: Tensor, y: Tensor, key: Tensor) -> Tensor:
        n = random.normal(key, (8, 8), dtype=F64)
        return (x * n).sum(1) + (n * y).sum(0)

    x, y = torch.randn(2, 8, 8, dtype=F64)
    axes = {"x": "r _", "y": "_ r"}
    got = jit(fn, mesh=Mesh(a=2), layout=Layout(r="a"), axes=axes)(x, y, random.key(1))
    assert torch.allclose(got.global_value(), fn(x, y, random.key(1)), atol=1e-14)


# -- residuals --------------------------------------------------------------------------------------------------------
def layer(x: Tensor, p: dict) -> Tensor:
    h = shard(ops.rms_norm(x, p["norm"]), P("batch", "seq", None))
    u = name(torch.tanh(einsum("b s d, d f -> b s f", h, p["up"])), "hidden")
    return x + shard(einsum("b s f, f d -> b s d", u * u, p["down"]), P("batch", "res_seq", None))


def step(wrap):
    body = wrap(layer)

    def loss(p: dict, x: Tensor) -> tuple[Tensor, int]:
        y, _ = scan(lambda c, q: (body(c, q), None), shard(x, P("batch", "res_seq", None)), p)
        return y.square().sum(), 1

    return lambda params, batch: value_and_grad(loss)(params, batch)


TYPES = {"norm": TensorType((L, D), F64), "up": TensorType((L, D, E), F64), "down": TensorType((L, E, D), F64)}
AXES = {"params": {"norm": "layers embed", "up": "layers embed ff", "down": "layers ff embed"}}


def residuals(wrap, mesh: Mesh, layout: Layout) -> tuple[Counter, Counter]:
    """Local shapes of what a layer keeps for its backward pass, and names of what it does again there."""
    low = lower(step(wrap), TYPES, TensorType((B, S, D), F64), mesh=mesh, layout=layout, axes=AXES, strict=True)
    (forward,) = [n for n in nodes(low) if isinstance(n.op, LocalScan)]
    loop = loop_of(forward)
    kept = list(values_in(forward.op.body.outputs))[-loop.kept :] if loop.kept else []
    again = Counter(
        n.opname for n in nodes(low) if n.tags.get("again") and not n.opname.startswith(("aten.view", "name"))
    )
    return Counter(v.type.shape for v in kept), again


def nbytes(kept: Counter) -> int:
    return sum(n * torch.Size(shape).numel() * 8 for shape, n in kept.items())


PLAIN = lambda f: f
ONE, TP, SP = (Mesh(), Layout()), (Mesh(tp=2), Layout(ff="tp")), (Mesh(tp=2), Layout(ff="tp", res_seq="tp"))


def test_the_carry_and_the_products_are_kept_and_cheap_operations_redone():
    kept, again = residuals(PLAIN, *ONE)
    assert kept == Counter({(B, S, D): 1, (B, S, E): 1})  # the carry, and tanh of the product
    assert "einsum" not in again and again["aten.mul.Tensor"] == again["rms_norm"] == 1


def test_tensor_parallel_keeps_a_part_of_the_hidden_values():
    kept, _ = residuals(PLAIN, *TP)
    assert kept == Counter({(B, S, D): 1, (B, S, E // 2): 1})


def test_sequence_parallel_keeps_the_value_before_the_gather():
    kept, again = residuals(PLAIN, *SP)
    assert kept == Counter({(B, S // 2, D): 1, (B, S, E // 2): 1})
    assert again["all_gather"] == 1
    assert nbytes(kept) < nbytes(residuals(PLAIN, *TP)[0])


@pytest.mark.parametrize("where", [ONE, TP, SP], ids=["one", "tp", "sp"])
def test_full_remat_keeps_the_carry_alone(where):
    kept, again = residuals(remat, *where)
    n = 2 if where is SP else 1
    assert kept == Counter({(B, S // n, D): 1})
    assert again["einsum"] == 1 and again["rms_norm"] == 1  # the second product is not needed backward
    assert again["all_gather"] == (1 if where is SP else 0)
    assert again["reduce_scatter"] == again["all_reduce"] == 0


def test_remat_of_products():
    """The carry and the first product; the second is nobody's input."""
    kept, again = residuals(lambda f: remat(f, "dots"), *ONE)
    assert kept == Counter({(B, S, D): 1, (B, S, E): 1})
    assert "einsum" not in again and again["rms_norm"] == 1 and again["aten.tanh.default"] == 1


def test_remat_by_name():
    kept, again = residuals(lambda f: remat(f, save_names("hidden")), *ONE)
    assert kept == Counter({(B, S, D): 1, (B, S, E): 1})
    assert "einsum" not in again and "aten.tanh.default" not in again and again["rms_norm"] == 1
    assert residuals(lambda f: remat(f, save_names("other")), *ONE)[0] == residuals(remat, *ONE)[0]


def test_remat_around_a_scan():
    """Of every step its carry is kept, as with remat around the body."""

    def around(wrap):
        def loss(p: dict, x: Tensor) -> tuple[Tensor, int]:
            run = wrap(lambda x: scan(lambda c, q: (layer(c, q), None), x, p)[0])
            return run(shard(x, P("batch", "res_seq", None))).square().sum(), 1

        step = lambda params, batch: value_and_grad(loss)(params, batch)
        low = lower(step, TYPES, TensorType((B, S, D), F64), mesh=Mesh(), layout=Layout(), axes=AXES)
        (forward,) = [n for n in nodes(low) if isinstance(n.op, LocalScan)]
        kept = list(values_in(forward.op.body.outputs))[-loop_of(forward).kept :]
        return Counter(v.type.shape for v in kept)

    assert around(remat) == Counter({(B, S, D): 1})
    assert around(PLAIN) == Counter({(B, S, D): 1, (B, S, E): 1})


def test_no_remat():
    assert residuals(lambda f: remat(f, "none"), *ONE) == residuals(PLAIN, *ONE)


@pytest.mark.parametrize("wrap", [PLAIN, remat, lambda f: remat(f, "dots"), lambda f: remat(f, save_names("hidden"))])
@pytest.mark.parametrize("where", [ONE, TP, SP], ids=["one", "tp", "sp"])
def test_the_gradient_is_the_same_whatever_is_kept(wrap, where):
    g = torch.Generator().manual_seed(0)
    params = tree.map(lambda t: torch.randn(t.shape, dtype=F64, generator=g) * 0.3, TYPES)
    x = torch.randn(B, S, D, dtype=F64, generator=g)
    want = tree.leaves(step(PLAIN)(params, x))
    got = tree.leaves(jit(step(wrap), mesh=where[0], layout=where[1], axes=AXES)(params, x))
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a.global_value(), b, rtol=1e-12, atol=1e-12)


# -- scans ------------------------------------------------------------------------------------------------------------
def test_the_first_carry_is_brought_once_to_where_the_body_puts_it():
    def fn(x: Tensor, params: dict) -> Tensor:
        body = lambda c, p: (shard(torch.tanh(c * p["norm"]), P("a", None)), None)
        return scan(body, x, params)[0]

    low = lower(
        fn, TensorType((8, D), F64), {"norm": TYPES["norm"]}, mesh=Mesh(a=2), layout=Layout(c="a"), axes={"x": "_ c"}
    )
    assert low.explain().counts() == {"all_to_all": 1}
    (op,) = [n.op for n in nodes(low) if isinstance(n.op, LocalScan)]
    assert op.body.inputs[0].type.shape == (4, D)


def test_stacked_results_stay_sharded():
    def fn(x: Tensor, params: dict) -> Tensor:
        return scan(lambda c, p: (torch.tanh(c * p["norm"]), c.square()), x, params)[1]

    x, p = torch.randn(8, D, dtype=F64), {"norm": torch.randn(L, D, dtype=F64)}
    got = jit(fn, mesh=Mesh(a=2, b=2), layout=Layout(r="a", c="b"), axes={"x": "r c"})(x, p)
    assert got.spec == ((), ("a",), ("b",))
    assert torch.equal(got.global_value(), fn(x, p))


# -- sizes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("b", [1, 3, 5])
def test_odd_sizes_stay_whole(b):
    """A dimension that an axis does not divide is left whole where nothing asks for more."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return F.softmax(x @ w, -1).cumsum(0).flatten()

    x, w = torch.randn(b, 8, dtype=F64), torch.randn(8, 6, dtype=F64)
    got = jit(fn, mesh=Mesh(a=4), layout=Layout(d="a"), axes={"x": "_ d", "w": "d _"})(x, w)
    assert torch.allclose(got.global_value(), fn(x, w), rtol=1e-14, atol=1e-14)


def test_empty_tensors():
    fn = lambda x: (torch.cat([x, x[:0]]).sum(), x[:0].sum(), x[:, :0])
    x = torch.randn(4, 4, dtype=F64)
    got = jit(fn, mesh=Mesh(a=2), layout=Layout(r="a"), axes={"x": "r _"})(x)
    for a, b in zip(got, fn(x), strict=True):
        assert torch.equal(a.global_value(), b)


def test_a_spec_that_does_not_divide():
    with pytest.raises(ShardingError) as e:
        lower(lambda x: shard(x, P(None, ("a", "b"))), TensorType((4, 6), F64), mesh=Mesh(a=2, b=2), layout=Layout())
    for part in (
        "shard at test_partition.py:",
        "dimension 1 of f64[4, 6]",
        "a=2, b=2: 4 parts",
        "does not divide 6",
        "pad the dimension",
    ):
        assert part in str(e.value), str(e.value)
    with pytest.raises(ShardingError, match="2 entries for a tensor of 1 dimensions"):
        shard(torch.zeros(3), P("a", "b"))
