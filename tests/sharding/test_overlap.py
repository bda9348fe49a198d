"""Collectives that go on while others compute: the pieces of a body, the order of its nodes, and the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import fmeg
from fmeg import Layout, Mesh, TrainState, optim, tree
from fmeg.lower import lower
from fmeg.mesh.backend import NO_KWARGS
from fmeg.mesh.loop import LoopBackend
from fmeg.mesh.transport import Transport
from fmeg.models import llama
from fmeg.ops.collectives import ALL_GATHER, REDUCE_SCATTER
from fmeg.program.structured import walk
from fmeg.sharding import compiled, groups
from fmeg.sharding.early import early
from fmeg.sharding.execute import Executable
from fmeg.sharding.local import LocalScan, LocalScanBackward
from fmeg.sharding.pieces import pieces
from tests.mesh import processes

FSDP = dict(batch="dp", params=dict(embed="dp"), opt=dict(embed="dp"))
SEQUENCE = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp", res_seq="tp")
LAYOUTS = {
    "fsdp": (dict(dp=2), Layout(**FSDP)),
    "zero1": (dict(dp=2), Layout(batch="dp", opt=dict(embed="dp"))),
    "tensor": (dict(tp=2), Layout(heads="tp", kv_heads="tp", ff="tp", vocab="tp")),
    "sequence": (dict(tp=2), Layout(**SEQUENCE)),
    "ring": (dict(cp=2), Layout(seq="cp", attention="ring")),
    "ulysses": (dict(cp=2), Layout(seq="cp", attention="ulysses")),
    "pipeline": (dict(pp=2), Layout(layers="pp")),
    "both": (dict(dp=2, tp=2), Layout(**FSDP, **SEQUENCE)),
}


class Beginning(LoopBackend):
    """Virtual ranks whose collectives are begun; done at once or when they are waited for, as `late` says.

    Operands of those under way are compared with what they were when it began.
    """

    overlap = True
    late = False
    begun = 0
    flying = 0
    most = 0


def _starting(kind):
    def start(self, xs, *rest):
        move = getattr(self, kind)
        run = {
            "ppermute": lambda: [move(x, *rest) for x in xs],
            "exchange_rows": lambda: [move(*xs, *rest)],
        }.get(kind, lambda: move(xs, *rest))
        before = [[t.clone() for t in self.local(x)] for x in xs]
        now = None if self.late else run()
        self.begun += 1
        self.flying += 1
        self.most = max(self.most, self.flying)

        def wait():
            self.flying -= 1
            for x, ts in zip(xs, before, strict=True):
                assert all(map(torch.equal, self.local(x), ts)), "an operand was written to"
            return run() if self.late else now

        return wait

    return start


for _kind in ("all_gather", "all_reduce", "all_to_all", "exchange_rows", "ppermute", "reduce_scatter"):
    setattr(Beginning, f"start_{_kind}", _starting(_kind))


def problem(microbatches=1, schedule=None, layers=3, dtype=torch.float64):
    cfg = llama.Config(vocab_size=32, embed=16, layers=layers, heads=4, kv_heads=2, head_dim=4, ff=24)
    opt = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    params = tree.map(lambda x: x.to(dtype), llama.init(fmeg.random.key(0), cfg))
    state = TrainState.create(params, opt, llama.logical_axes(cfg))
    ids = torch.randint(0, 32, (4, 17), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(4, 16, dtype=dtype)}
    how = {"schedule": schedule} if schedule else {}

    def step(state, batch):
        loss_fn = lambda p, b: llama.loss(p, b, cfg)
        (loss, _), grads = fmeg.value_and_grad(loss_fn, microbatches=microbatches, **how)(state.params, batch)
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), loss, grads

    return step, state, batch


def lowered(name, **kwargs):
    sizes, layout = LAYOUTS[name]
    if name == "pipeline":
        kwargs = {"microbatches": 2, "schedule": "1f1b", **kwargs}
    step, state, batch = problem(**kwargs)
    mesh = Mesh(sizes, backend="loop")
    return fmeg.jit(step, mesh=mesh, layout=layout).lower(state, batch), mesh, (state, batch)


def bodies(program, kind):
    return [n.op for n, _, _ in walk(program) if isinstance(n.op, kind)]


def cut(op):
    n = len(op.body.inputs)
    if isinstance(op, LocalScan):
        return pieces(op.body, range(op.n_carry, n), range(op.n_carry, op.n_carry + op.n_ys))
    return pieces(op.body, range(n - op.n_xs - 1, n), range(op.n_carry, len(op.body.outputs)))


def test_a_layer_of_sharded_parameters_is_three_pieces():
    """Gathers ahead, reductions behind, no collective between; together they are the body."""
    low, _, _ = lowered("fsdp")
    [forward] = bodies(low.program, LocalScan)
    [backward] = bodies(low.program, LocalScanBackward)
    for op, behind in ((forward, []), (backward, [REDUCE_SCATTER])):
        found = cut(op)
        assert [n.op for n in found.ahead.nodes] == [ALL_GATHER]
        assert [n.op for n in found.behind.nodes] == behind if behind else found.behind is None
        assert not any(groups.communicates(n) for n in found.main.nodes)
        apart = [p for p in (found.ahead, found.main, found.behind) if p is not None]
        assert {id(n) for p in apart for n in p.nodes} == {id(n) for n in op.body.nodes}
        for p in apart:
            p.check()


def test_activations_stay_in_the_body():
    low, _, _ = lowered("sequence")
    for op in bodies(low.program, (LocalScan, LocalScanBackward)):
        found = cut(op)
        assert found.ahead is None and found.behind is None and found.main.nodes == op.body.nodes


def test_products_of_weights_fill_the_time_of_collectives():
    """Backward, under sequence parallelism: what is gathered again starts at once, and products that only gradients
    need stand between each reduce-scatter and its reader."""
    low, _, _ = lowered("sequence")
    [op] = bodies(low.program, LocalScanBackward)
    nodes = early(op.body.nodes)
    assert sorted(map(id, nodes)) == sorted(map(id, op.body.nodes))
    made = {id(v) for v in op.body.inputs}
    for n in nodes:
        assert all(id(v) in made for v in n.operands())
        made.update(id(o) for o in n.outs)
    found, _ = groups.grouped(nodes, begin=True)
    begun = [g.nodes[0].op for g in found if g.begins]
    assert begun.count(REDUCE_SCATTER) == 2 and begun.count(ALL_GATHER) >= 3


def run(low, mesh, args, backend):
    step = low.compile()
    executable = step.executable
    step.executable = Executable(low.program, backend)
    step.executable.into = executable.into
    return [x.value for x in tree.leaves(step([x for x in tree.leaves(args) if isinstance(x, torch.Tensor)]))]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "pipeline"])
def test_no_bit_changes(name, late):
    for microbatches in (1, 2):
        low, mesh, args = lowered(name, microbatches=microbatches, layers=1 if name == "both" else 3)
        backend = Beginning(mesh)
        backend.late = late
        got, want = run(low, mesh, args, backend), run(low, mesh, args, LoopBackend(mesh))
        for a, b in zip(got, want, strict=True):
            assert all(map(torch.equal, backend.local(a), backend.local(b)))
        assert backend.flying == 0
        assert backend.begun > 2 or name in ("tensor", "zero1")  # where nothing stands between a move and its reader


def test_two_layers_of_parameters_at_most():
    low, mesh, args = lowered("fsdp", layers=5)
    backend = Beginning(mesh)
    run(low, mesh, args, backend)
    assert 2 <= backend.most <= 3


class Logging(Beginning):
    """Writes down what begins, what is waited for and what is computed, in order: (what, kind, shape of an operand)."""

    def __init__(self, mesh):
        super().__init__(mesh)
        self.log = []

    def call(self, fn, args, kwargs=NO_KWARGS):
        if fn not in (torch.select, torch.unbind):
            self.log.append(("run", None, None))
        return super().call(fn, args, kwargs)


def _logging(kind):
    def start(self, xs, *rest):
        shape = tuple(self.local(xs[0])[0].shape)
        self.log.append(("begin", kind, shape))
        wait = getattr(super(Logging, self), f"start_{kind}")(xs, *rest)

        def done():
            self.log.append(("wait", kind, shape))
            return wait()

        return done

    return start


for _kind in ("all_gather", "reduce_scatter", "all_to_all"):
    setattr(Logging, f"start_{_kind}", _logging(_kind))


@pytest.mark.parametrize("late", [False, True])
def test_loops_hide_what_stands_beside_them(late):
    """FSDP, as compiled: the last forward layer hides the head's gather; the last layer's parameters, which the
    backward loop needs first, are gathered again before the head's gradient is reduced, which that loop hides."""
    low, mesh, args = lowered("fsdp")
    low.program = lower(low.program)
    low.program.check()
    backend = Logging(mesh)
    backend.late = late
    got, want = run(low, mesh, args, backend), run(low, mesh, args, LoopBackend(mesh))
    for a, b in zip(got, want, strict=True):
        assert all(map(torch.equal, backend.local(a), backend.local(b)))
    log = backend.log
    ran, gathers = ("run", None, None), [i for i, e in enumerate(log) if e[:2] == ("begin", "all_gather")]
    begin, wait = (log.index((what, "all_gather", (128, 8))) for what in ("begin", "wait"))
    reduce, reduced = (log.index((what, "reduce_scatter", (128, 16))) for what in ("begin", "wait"))
    assert log[:begin].count(log[gathers[0]]) == 4  # three layers' own, and the last norm's
    assert log[begin:wait].count(ran) >= 2
    again = [i for i in gathers if begin < i < reduce]
    assert len(again) == 1 and ran in log[again[0] : reduce]
    assert log[reduce:reduced].count(ran) > 3
    assert sum(e[:2] == ("begin", "reduce_scatter") for e in log) == 3 + 2  # one a layer, the head's, the last norm's


def real_processes() -> None:
    """Gloo's threads: each rank's results are those of a step whose collectives are waited for where they stand, and
    of the virtual rank."""
    rank = dist.get_rank()
    for name in ("fsdp", "sequence", "pipeline"):
        sizes, layout = LAYOUTS[name]
        how = {"microbatches": 2, "schedule": "1f1b"} if name == "pipeline" else {}
        results = []
        for overlap in (True, False, None):
            step, state, batch = problem(**how)
            mesh = Mesh(sizes, backend="loop" if overlap is None else "distributed")
            if overlap is not None:
                mesh.backend().overlap = overlap
            results.append(tree.leaves(fmeg.jit(step, mesh=mesh, layout=layout)(state, batch)))
        for a, b, virtual in zip(*results, strict=True):
            mine = a.addressable_shards[0].data
            assert torch.equal(mine, b.addressable_shards[0].data), name
            assert torch.equal(mine, virtual.addressable_shards[rank].data), name


def gradients_are_left_in_their_stacks() -> None:
    """Where the library adds, as NCCL does, a layer's reduced gradients need no copy; the bits are the same."""
    results, given = [], []

    class Library(Transport):
        def start_reduce_scatter(self, xs, dims, later=True, outs=()):
            given.extend(o for o in outs if o is not None)
            return super().start_reduce_scatter(xs, dims, later, outs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_compile", lambda fn, values: lambda *xs: fn(list(xs)))
        for library in (False, True):
            step, state, batch = problem()
            mesh = Mesh(dp=2, backend="distributed")
            backend = mesh.backend()
            if library:
                group = backend.group(("dp",))
                backend._groups["dp",] = replace(group, transport=Library(group.transport.group, 2, None, False))
            run = fmeg.jit(step, mesh=mesh, layout=Layout(**FSDP), mode="inductor")
            results.append([x.addressable_shards[0].data for x in tree.leaves(run(state, batch))])
    assert len(given) == 3 * 9  # layers, parameters of one
    assert all(map(torch.equal, *results))


CHECKS = [real_processes, gradients_are_left_in_their_stacks]


@pytest.fixture(scope="module")
def failures():
    return processes.run(CHECKS, world=2)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [c.__name__ for c in CHECKS])
def test_real_processes(check, failures):
    assert not failures[check], "\n".join(failures[check])
