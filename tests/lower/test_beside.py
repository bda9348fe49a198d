"""Gathers with their products, and products with their reduction, as one operation each: the same bits on virtual
meshes; the same numbers where processes read one another's memory."""

from __future__ import annotations

import socket
import tempfile
from functools import cache

import pytest
import torch
import torch.distributed as dist

import fmeg
from fmeg import Layout, Mesh, tree
from fmeg.lower import beside, lower
from fmeg.lower.beside import GatheredProducts, ProductScattered
from fmeg.mesh.distributed import DistributedBackend
from fmeg.mesh.symmetric import hosts
from fmeg.ops.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Collective
from fmeg.ops.einsum import einsum_p
from fmeg.ops.into import product_of_rows
from fmeg.pipeline.op import LocalPipeline
from fmeg.program.cost import flops
from fmeg.program.errors import MeshError
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.program.structured import walk
from fmeg.sharding.early import early
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScan, LocalScanBackward
from fmeg.testing import verify
from fmeg.testing.matrix import cases
from tests.mesh import processes
from tests.mesh.peers import Files, Group

CFG = verify.config()
TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp", res_seq="tp")
SPLIT = ("tk", "tr")
CASES = [c for c in cases(verify.sizes_of(CFG), 8) if c.name.endswith("+sp")]
PEERS = DistributedBackend.peers
SOME = ("tp4+sp", "dp2 tk2,tr2+sp", "zero3 ring2 tp2+sp", "zero2 tp2+sp")


def tensor_axes(layout):
    return layout.view("compute")["heads"]


def same(a, b):
    """Bit for bit: states and metrics of two runs."""
    for path, x, y in zip(tree.paths(a), tree.leaves(a), tree.leaves(b), strict=True):
        assert torch.equal(x.global_value(), y.global_value()), path


def kinds(program):
    return [type(n.op) for n, _, _ in walk(program)]


def step_of(case, **how):
    one = verify.make_step(CFG, verify.optimizer_under_test(), case.microbatches)
    return fmeg.jit(one, mesh=case.mesh, layout=case.layout, **how)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name, marks=[] if c.name in SOME else pytest.mark.slow) for c in CASES]
)
def test_the_same_bits_in_every_layout_with_sequence_parallelism(case):
    state, batch = verify.problem(CFG)
    low = step_of(case).lower(state, batch)
    for program in (low.program, lower(low.program)):
        new = beside(program, tensor_axes(case.layout))
        new.check()
        assert kinds(new).count(GatheredProducts) == kinds(new).count(ProductScattered) == 5
        assert flops(new) == flops(program)
    plain = verify.run_steps(step_of(case), state, batch, 2)
    same(verify.run_steps(step_of(case, overlap=tensor_axes(case.layout)), state, batch, 2), plain)


def test_compiled_steps():
    case = next(c for c in CASES if c.name == "tp2+sp")
    state, batch = verify.problem(CFG)
    got = verify.run_steps(step_of(case, overlap="tp", mode="inductor"), state, batch, 2)
    want = verify.run_steps(step_of(case, mode="inductor"), state, batch, 2)
    for path, x, y in zip(tree.paths(got), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(x.global_value(), y.global_value(), rtol=1e-11, atol=1e-13, msg=path)


@pytest.mark.parametrize(
    ("model", "count"),
    [("tiny-gpt2", 5), ("tricky-moe", 5), pytest.param("tricky-deepseek", 17, marks=pytest.mark.slow)],
)
def test_other_models(model, count):
    cfg = verify.config(model)
    case = next(c for c in cases(verify.sizes_of(cfg), 2) if c.name == "tp2+sp")
    state, batch = verify.problem(cfg)
    one = verify.make_step(cfg, verify.optimizer_under_test())
    make = lambda **how: fmeg.jit(one, mesh=case.mesh, layout=case.layout, **how)
    new = kinds(beside(make().lower(state, batch).program, ["tp"]))
    assert new.count(GatheredProducts) == new.count(ProductScattered) == count
    same(verify.run_steps(make(overlap="tp"), state, batch, 1), verify.run_steps(make(), state, batch, 1))


def test_every_axis_at_once():
    """Gradients that ZeRO-3 scatters too; what crosses axes of both kinds."""
    case = next(c for c in CASES if c.name == "zero3 m2 tp2+sp")
    state, batch = verify.problem(CFG)
    new = kinds(beside(step_of(case).lower(state, batch).program, ["dp", "tp"]))
    assert new.count(GatheredProducts) >= 5 and new.count(ProductScattered) > 5
    got = verify.run_steps(step_of(case, overlap=("dp", "tp")), state, batch, 1)
    same(got, verify.run_steps(step_of(case), state, batch, 1))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_same_bits_within_the_stages_of_a_pipeline(schedule):
    state, batch = verify.problem(CFG)
    one = verify.make_step(CFG, verify.optimizer_under_test(), 2, schedule=schedule)
    run = lambda **how: verify.run_steps(
        fmeg.jit(one, mesh=Mesh(pp=2, tp=2), layout=Layout(layers="pp", **TP), **how), state, batch, 1
    )
    same(run(overlap="tp"), run())


def test_layers_of_all_stages_stay_one_program():
    """What is rewritten is compiled once for all stages, as what is not."""
    state, batch = verify.problem(CFG)
    one = verify.make_step(CFG, verify.optimizer_under_test(), 2, schedule="1f1b")
    low = fmeg.jit(one, mesh=Mesh(pp=2, tp=2), layout=Layout(layers="pp", **TP)).lower(state, batch)
    [body] = [n.op.body for n in low.program.nodes if isinstance(n.op, LocalPipeline)]
    known = {}
    twice = [beside(body, ["tp"], known) for _ in range(2)]
    first, second = ([n.op.body for n in p.nodes if isinstance(n.op, (LocalScan, LocalScanBackward))] for p in twice)
    assert len(first) == 2 and all(a is b for a, b in zip(first, second, strict=True))
    assert all({GatheredProducts, ProductScattered} <= set(kinds(p)) for p in first)


@pytest.fixture
def local():
    """A layer's body, forward and backward, of a step along tp."""
    case = next(c for c in CASES if c.name == "tp2+sp")
    state, batch = verify.problem(CFG)
    program = lower(step_of(case).lower(state, batch).program)
    bodies = {type(n.op): n.op.body for n in program.nodes if isinstance(n.op, (LocalScan, LocalScanBackward))}
    return bodies[LocalScan], bodies[LocalScanBackward]


def test_what_becomes_of_a_layer(local):
    """Forward: queries, keys and values; the gate and what it gates. Backward: gathers of gradients, which weights'
    gradients need whole; sums of products. What only weights' gradients read stays a gather."""
    forward, backward = (beside(p, ["tp"]) for p in local)
    products = [len(n.outs) for n in forward.nodes if isinstance(n.op, GatheredProducts)]
    assert products == [3, 2] and not any(n.op.whole for n in forward.nodes if isinstance(n.op, GatheredProducts))
    assert [len(n.op.terms) for n in forward.nodes if isinstance(n.op, ProductScattered)] == [1, 1]
    assert all(n.op.whole and len(n.outs) == 2 for n in backward.nodes if isinstance(n.op, GatheredProducts))
    assert [len(n.op.terms) for n in backward.nodes if isinstance(n.op, ProductScattered)] == [2, 3]
    moved = lambda p: [n.op for n in p.nodes if isinstance(n.op, Collective) and n.op is not ALL_REDUCE]
    assert moved(forward) == [] and moved(backward) == [ALL_GATHER] * 2


def test_collectives_of_a_body_still_begin_early(local):
    """The gathers that are left stand before products that hide them."""
    backward = beside(local[1], ["tp"])
    ordered = early(backward.nodes)
    assert {id(n) for n in ordered} == {id(n) for n in backward.nodes} and ordered != backward.nodes
    Program(backward.inputs, ordered, backward.outputs).check()
    for n in ordered:
        if n.op is ALL_GATHER:
            reader = next(m for m in ordered if any(v is n.outs[0] for v in m.operands()))
            between = ordered[ordered.index(n) + 1 : ordered.index(reader)]
            assert any(isinstance(m.op, (GatheredProducts, ProductScattered)) or m.op is einsum_p for m in between)


def test_other_axes_and_no_axes_change_nothing(local):
    assert beside(local[0], []) is local[0]
    assert not {GatheredProducts, ProductScattered} & set(kinds(beside(local[0], ["dp"])))


# -- one node at a time ------------------------------------------------------------------------------------------------
class Maker:
    """A small Program."""

    def __init__(self):
        self.inputs, self.nodes = [], []

    def input(self, *shape):
        self.inputs.append(Value(TensorType(shape, torch.float64)))
        return self.inputs[-1]

    def node(self, op, *args, shape, **kwargs):
        node = Node(op, args, kwargs)
        node.outs = (Value(TensorType(shape, torch.float64), node),)
        self.nodes.append(node)
        return node.outs[0]

    def einsum(self, equation, *operands):
        shape = torch.einsum(equation.replace(" ", ""), *(torch.empty(v.shape, device="meta") for v in operands)).shape
        return self.node(einsum_p, equation, *operands, shape=tuple(shape))

    def program(self, *outputs):
        p = Program(tuple(self.inputs), self.nodes, outputs)
        p.check()
        return p


def random_values(program, n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(n, *v.shape, dtype=torch.float64, generator=g) for v in program.inputs]


def both(program, n=2):
    """The Program's results, and those of the rewritten one through memory that ranks share; its operations."""
    new = beside(program, ["tp"])
    new.check()
    values = random_values(program, n)
    b = Mesh(tp=n, backend="loop").backend()
    own = [b.from_local(list(v), (("tp",), *((),) * (v.ndim - 2))) for v in values]
    want, again = ([b.local(x) for x in Executable(p, b)(own)] for p in (program, new))
    assert all(torch.equal(x, y) for xs, ys in zip(want, again, strict=True) for x, y in zip(xs, ys, strict=True))
    [node] = new.nodes
    order = [next(i for i, v in enumerate(program.inputs) if v is a) for a in node.args]

    def work(peers):
        run = node.op.through(peers)
        args = [values[i][peers.index] for i in order]
        before = [a.clone() for a in args]
        run(args)
        got = run(args)
        assert all(map(torch.equal, args, before))
        return dict(zip(map(id, node.outs), got, strict=True))

    group = Group(n)
    results = group.run(work)
    assert not group.races()
    for out, ranks in zip(new.outputs, want, strict=True):
        for rank, expected in enumerate(ranks):
            torch.testing.assert_close(results[rank][id(out)], expected, rtol=1e-12, atol=1e-12)
            assert results[rank][id(out)].is_contiguous()
    return node


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    ("equation", "x", "w", "dim"),
    [
        ("b s d, d f -> b s f", (2, 3, 4), (4, 5), 1),
        ("s d, d h e -> s h e", (3, 4), (4, 2, 3), 0),
        ("b s d, f d -> b s f", (1, 3, 4), (5, 4), 1),
        ("b s h e, h e d -> b s d", (2, 3, 2, 2), (2, 2, 5), 1),
        ("b s d, d f -> f s b", (2, 3, 4), (4, 5), 1),
        ("b s d, b d f -> b s f", (2, 3, 4), (2, 4, 5), 1),
        ("b s d, d -> b s", (2, 3, 4), (4,), 1),
        ("b s d, d f -> b s f", (2, 3, 4), (4, 5), 0),
        ("b s h e, e f -> b s h f", (2, 2, 3, 4), (4, 5), 2),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("read", [False, True])
def test_gathered_products(equation, x, w, dim, n, swapped, read):
    m = Maker()
    x, w = m.input(*x), m.input(*w)
    if swapped:
        left, out = equation.split("->")
        a, b = left.split(",")
        equation = f"{b.strip()}, {a.strip()} ->{out}"
    gathered = m.node(ALL_GATHER, [x], ("tp",), (dim,), shape=(*x.shape[:dim], n * x.shape[dim], *x.shape[dim + 1 :]))
    y = m.einsum(equation, *((w, gathered) if swapped else (gathered, w)))
    node = both(m.program(*((gathered, y) if read else (y,))), n)
    assert isinstance(node.op, GatheredProducts) and node.op.whole is read


@pytest.mark.parametrize("n", [2, 3])
def test_several_products_of_one_gather(n):
    m = Maker()
    x, w, u = m.input(2, 3, 4), m.input(4, 5), m.input(4, 2, 2)
    g = m.node(ALL_GATHER, [x], ("tp",), (1,), shape=(2, 3 * n, 4))
    y = m.einsum("b s d, d f -> b s f", g, w)
    z = m.einsum("b s d, d h e -> b s h e", g, u)
    again = m.einsum("b t d, d f -> t b f", g, w)
    node = both(m.program(z, y, again), n)
    assert len(node.args) == 3 and len(node.outs) == 3


def test_a_product_with_what_is_gathered_itself():
    m = Maker()
    x = m.input(3, 3)
    g = m.node(ALL_GATHER, [x], ("tp",), (0,), shape=(6, 3))
    node = both(m.program(m.einsum("s d, d f -> s f", g, x)))
    assert len(node.args) == 1


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    ("equation", "x", "w", "dim"),
    [
        ("b s f, f d -> b s d", (2, 12, 4), (4, 5), 1),
        ("b s h e, h e d -> b s d", (1, 12, 2, 2), (2, 2, 5), 1),
        ("b s f, d f -> b s d", (2, 12, 4), (5, 4), 1),
        ("f d, s f -> s d", (4, 5), (12, 4), 0),
        ("b s f, f d -> b s d", (12, 3, 4), (4, 5), 0),
        ("b s f, b f d -> b s d", (2, 12, 4), (2, 4, 3), 1),
        ("b s f, b s g -> s f g", (2, 12, 3), (2, 12, 2), 0),
        ("s f, s d -> f d", (5, 12), (5, 3), 0),
    ],
)
def test_products_scattered(equation, x, w, dim, n):
    m = Maker()
    y = m.einsum(equation, m.input(*x), m.input(*w))
    r = m.node(REDUCE_SCATTER, [y], ("tp",), (dim,), shape=(*y.shape[:dim], y.shape[dim] // n, *y.shape[dim + 1 :]))
    assert isinstance(both(m.program(r), n).op, ProductScattered)


@pytest.mark.parametrize("n", [2, 3])
def test_a_sum_of_products_and_of_what_is_none(n):
    m = Maker()
    a, b, c, w, u = m.input(2, 6, 4), m.input(2, 6, 3), m.input(2, 6, 5), m.input(4, 5), m.input(3, 5)
    first, second = m.einsum("b s f, f d -> b s d", a, w), m.einsum("b s f, f d -> b s d", b, u)
    add = torch.ops.aten.add.Tensor
    total = m.node(add, c, m.node(add, first, second, shape=(2, 6, 5)), shape=(2, 6, 5))
    r = m.node(REDUCE_SCATTER, [total], ("tp",), (1,), shape=(2, 6 // n, 5))
    node = both(m.program(r), n)
    assert [bool(equation) for equation, *_ in node.op.terms] == [False, True, True]


def untouched(m, *outputs):
    p = m.program(*outputs)
    assert beside(p, ["tp"]).nodes == p.nodes


def test_what_stays_as_it_is():
    """A contracted or shared dimension; a sum that is read elsewhere; a product that needs what the gather gave; no
    product at all; nothing in the collective; no axes."""
    m = Maker()
    g = m.node(ALL_GATHER, [m.input(2, 3)], ("tp",), (1,), shape=(2, 6))
    untouched(m, m.einsum("b s, s d -> b d", g, m.input(6, 2)))
    m = Maker()
    g = m.node(ALL_GATHER, [m.input(2, 3)], ("tp",), (0,), shape=(4, 3))
    untouched(m, m.einsum("b s, b s d -> b d", g, m.input(4, 3, 2)))
    m = Maker()
    y = m.einsum("s f, f d -> s d", m.input(4, 3), m.input(3, 2))
    untouched(m, m.node(REDUCE_SCATTER, [y], ("tp",), (0,), shape=(2, 2)), y)
    m = Maker()
    g = m.node(ALL_GATHER, [m.input(3, 2)], ("tp",), (0,), shape=(6, 2))
    untouched(m, m.einsum("s d, d f -> s f", g, m.node(torch.ops.aten.t.default, g, shape=(2, 6))))
    m = Maker()
    untouched(m, m.node(REDUCE_SCATTER, [m.input(4, 2)], ("tp",), (0,), shape=(2, 2)))
    m = Maker()
    g = m.node(ALL_GATHER, [m.input(0, 2)], ("tp",), (0,), shape=(0, 2))
    untouched(m, m.einsum("s d, d f -> s f", g, m.input(2, 2)))
    m = Maker()
    g = m.node(ALL_GATHER, [m.input(3, 2)], (), (0,), shape=(3, 2))
    untouched(m, m.einsum("s d, d f -> s f", g, m.input(2, 2)))


def test_a_later_operand_is_brought_before():
    m = Maker()
    x, w = m.input(3, 2), m.input(5, 2)
    g = m.node(ALL_GATHER, [x], ("tp",), (0,), shape=(6, 2))
    y = m.einsum("s d, d f -> s f", g, m.node(torch.ops.aten.t.default, w, shape=(2, 5)))
    new = beside(m.program(y), ["tp"])
    new.check()
    assert [n.opname for n in new.nodes] == ["aten.t.default", "gathered_products"]


@pytest.mark.parametrize("rows", [(2, 3), (1, 3), (2, 1)])
@pytest.mark.parametrize("add", [False, True])
def test_products_into_part_of_a_tensor(rows, add):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(rows[0], 9, 4, generator=g), torch.randn(4, 5, generator=g)
    y = torch.randn(rows[0], 9, 5, generator=g)
    part = slice(2, 2 + rows[1])
    want = y.clone()
    want[:, part] = x[:, part] @ w + (y[:, part] if add else 0)
    product_of_rows("b s d, d f -> b s f", 0, 1)(y[:, part], x[:, part], w, add)
    torch.testing.assert_close(y, want, rtol=1e-5, atol=1e-5)


# -- the word ----------------------------------------------------------------------------------------------------------
def test_an_axis_that_does_not_exist():
    with pytest.raises(ValueError, match=r"jit: overlap must name axes of the mesh, given 'tb'; it has dp, tp"):
        fmeg.jit(lambda x: x, mesh=Mesh(dp=2, tp=2), overlap="tb")
    low = fmeg.jit(lambda x: x, mesh=Mesh(tp=2)).lower(torch.ones(2))
    with pytest.raises(ValueError, match=r"compile: overlap must name axes of the mesh, given 'dp'; it has tp"):
        low.compile(overlap=["dp"])


@pytest.mark.parametrize(
    ("axes", "layout", "overlap", "unused"),
    [
        (dict(tp=2), {**TP, "res_seq": ()}, "tp", "tp"),
        (dict(pp=2, tp=2), {**TP, "res_seq": (), "layers": "pp"}, "tp", "tp"),
        (dict(dp=2, tp=2), {**TP, "batch": "dp"}, ("tp", "dp"), "dp"),
        (dict(pp=2, tp=2), {**TP, "layers": "pp"}, ("tp", "pp"), "pp"),
    ],
)
def test_an_axis_along_which_nothing_can_be_hidden(axes, layout, overlap, unused):
    state, batch = verify.problem(CFG)
    step = verify.make_step(CFG, verify.optimizer_under_test(), 2, schedule="1f1b" if "pp" in axes else None)
    f = fmeg.jit(step, mesh=Mesh(axes), layout=Layout(**layout), overlap=overlap)
    with pytest.raises(ValueError, match=rf'jit\(step\): overlap names {unused}, but no product .* as res_seq="tp"'):
        f(state, batch)


def test_an_axis_of_one_rank():
    state, batch = verify.problem(CFG)
    one = verify.make_step(CFG, verify.optimizer_under_test())
    run = lambda **how: verify.run_steps(
        fmeg.jit(one, mesh=Mesh(tp=1, backend="loop"), layout=Layout(**TP), **how), state, batch, 1
    )
    same(run(overlap="tp"), run())


# -- processes that read one another's memory --------------------------------------------------------------------------
def _whole_steps(axes, layout, schedule=None, **how):
    """Two optimizer steps, each process reading the files of others, against one device. Returns how often memory was
    asked for."""
    microbatches = 2 if schedule else 1
    state, batch = verify.problem(CFG)
    want = verify.on_one_device(CFG, microbatches, 2)
    about = {"schedule": schedule} if schedule else {}
    step = verify.make_step(CFG, verify.optimizer_under_test(), microbatches, **about)
    made = {}

    def peers(self, axes):
        group = self.group(axes)
        if axes not in made:
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(folder)
            made[axes] = Files(folder[0], group.ranks, group.index, group.transport.group)
        return made[axes]

    DistributedBackend.peers = peers
    run = fmeg.jit(step, mesh=Mesh(axes), layout=layout, overlap=tensor_axes(layout), **how)
    got = verify.run_steps(run, state, batch, 2)
    for path, x, y in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
        torch.testing.assert_close(x.global_value(), torch.as_tensor(y), rtol=1e-9, atol=1e-12, msg=path)
    return sum(p.uses for p in made.values())


ZERO3 = dict(batch="dp", params=dict(embed="dp"))


def tensor_and_zero3():
    """Twice two layers of eight operations, and the head's two."""
    assert _whole_steps(dict(dp=2, tp=2), Layout(**ZERO3, **TP)) == 2 * (2 * 8 + 2)


def an_axis_cut_in_two_the_other_way_round():
    """The group's order is not that of the ranks."""
    layout = Layout(heads=("tk", "tr"), kv_heads="tk", ff=("tk", "tr"), vocab=("tk", "tr"), res_seq=("tk", "tr"))
    assert _whole_steps(dict(tr=2, tk=2), layout) > 0


def stages():
    assert _whole_steps(dict(pp=2, tp=2), Layout(layers="pp", **TP), "zb_h1") > 0


def compiled():
    assert _whole_steps(dict(tp=2), Layout(**TP), mode="inductor") == 2 * (2 * 8 + 2)


def two_hosts():
    """An axis that spans both is an error, on every process."""
    b = Mesh(dp=2, tp=2, backend="distributed").backend()
    tp, _ = b.group(("tp",)), b.group(("dp",))
    b._nccl, socket.gethostname = True, lambda: f"host{dist.get_rank() // 2}"
    with pytest.raises(MeshError, match=r"the axis spans 2 hosts \(host0, host1\); its ranks must be GPUs of one"):
        PEERS(b, ("dp",))
    assert hosts(tp.transport.group) == [f"host{dist.get_rank() // 2}"] * 2


def one_process():
    """Nothing is shared by a group of one, be it that of all processes."""
    b = Mesh(tp=1, backend="distributed").backend()
    b._nccl = True
    assert PEERS(b, ("tp",)) is None


CHECKS = (tensor_and_zero3, an_axis_cut_in_two_the_other_way_round, stages, two_hosts)


@cache
def outcome():
    return processes.run(CHECKS, 4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__)
def test_processes(check):
    failures = outcome()[check.__name__]
    assert not failures, failures[0]


@pytest.mark.distributed
def test_a_process_alone():
    failures = processes.run((one_process,), 1)["one_process"]
    assert not failures, failures[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_compiled_steps_of_processes():
    failures = processes.run((compiled,), 2)["compiled"]
    assert not failures, failures[0]
