"""Running local Programs: the generated code, what loops collect, when values are dropped."""

import traceback
import weakref

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, scan
from fmeg.mesh.loop import LoopBackend
from fmeg.mesh.vmap import VmapBackend
from fmeg.program.primitive import Primitive
from fmeg.program.trace import trace
from fmeg.sharding.buffers import Stack, Sum
from fmeg.sharding.execute import Executable
from fmeg.sharding.lowering import _BUILTINS
from fmeg.sharding.segment import by_variation

MESH = Mesh(dp=2, tp=3)
BACKENDS = {
    "single": lambda: Mesh().backend(),
    "loop": lambda: LoopBackend(MESH),
    "loop, every rank": lambda: LoopBackend(MESH, dedupe=False),
    "vmap": lambda: VmapBackend(MESH),
}
aten = torch.ops.aten


@pytest.fixture(params=BACKENDS)
def backend(request):
    return BACKENDS[request.param]()


def local(backend, tensors):
    """A value that is `tensors[r]` on rank r, and on a single device the first."""
    if len(backend.ranks) == 1:
        return tensors[0]
    whole = torch.stack(tensors)
    stacked = backend.scatter(whole, (("dp", "tp"), ()))
    return backend.call(torch.squeeze, (stacked, 0))


def steps_of(backend):
    """Values of four steps, each varying over other axes, and what every rank holds of each."""
    n = len(backend.ranks)
    base = torch.arange(4.0 * 6 * 3, dtype=torch.float64).reshape(4, 6, 3).sin()
    same = [base[0, 0]] * n
    varying = [base[1, r] for r in range(n)]
    index = backend.axis_index(("tp",)) if n > 1 else torch.tensor(0)
    over_tp = backend.call(lambda x, i: x * i, (base[2, 0], index))
    values = [same[0], local(backend, varying), over_tp, local(backend, [base[3, r] for r in range(n)])]
    ranks = [same, varying, [base[2, 0] * (r % 3) for r in range(n)], [base[3, r] for r in range(n)]]
    return values, ranks


def test_stacked_steps(backend):
    """In any order, and whatever the axes over which a step varies."""
    values, ranks = steps_of(backend)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 1, 0, 3]):
        stack = Stack(backend, 4)
        for i in order:
            stack.put(i, values[i])
        for rank, got in enumerate(backend.local(stack.result())):
            assert torch.equal(got, torch.stack([step[rank] for step in ranks]))


def test_summed_steps_leave_the_terms_alone(backend):
    values, ranks = steps_of(backend)
    for order in ([0, 1, 2, 3], [1, 0, 2, 3], [0, 2, 0, 1]):
        total = Sum(backend)
        for i in order:
            total.add(values[i])
        for rank, got in enumerate(backend.local(total.result())):
            want = ranks[order[0]][rank]
            for i in order[1:]:
                want = want + ranks[i][rank]
            assert torch.equal(got, want)
    for value, want in zip(values, ranks, strict=True):
        for rank, got in enumerate(backend.local(value)):
            assert torch.equal(got, want[rank])


def everything(x, y):
    """Lists, nested results, constants of all kinds, values used twice, results unused."""
    parts = torch.split(x, 2)
    top, _ = torch.max(torch.cat([*parts, y]), dim=0, keepdim=True)
    masked = torch.where(x > 0.5, x, -torch.inf).clamp(min=-1.0, max=None)
    half = x.to(torch.float32).to(torch.float64) / 3
    return {"a": top + masked, "b": torch.stack([half, x]), "c": x, "d": (y.expand(4, 3) * 1e-300, torch.zeros(2))}


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2), Mesh(dp=2, backend="vmap")], ids=str)
def test_generated_code_computes_what_the_function_does(mesh):
    x, y = torch.linspace(0, 1, 12, dtype=torch.float64).view(4, 3), torch.ones(1, 3, dtype=torch.float64)
    f = fmeg.jit(everything, mesh=mesh, layout=Layout(rows="dp" if mesh.size > 1 else ()), axes={"x": "rows _"})
    want = everything(x, y)
    for _ in range(2):
        got = f(x, y)
        for path, a, b in zip(fmeg.tree.paths(want), fmeg.tree.leaves(got), fmeg.tree.leaves(want), strict=True):
            assert torch.equal(a.global_value(), b), path


def test_tracebacks_show_the_users_line():
    def boom(x):
        raise RuntimeError("no luck")

    p = Primitive("boom", boom, fake=lambda x: x + 0)
    run = Executable(trace(lambda x: p(x * 2), torch.ones(3)).program, Mesh().backend())
    try:
        run([torch.ones(3)])
    except RuntimeError as error:
        shown = "".join(traceback.format_exception(error))
    assert "# test_execute.py:" in shown
    assert "test_tracebacks_show_the_users_line" in shown


def test_values_are_dropped_after_their_last_use():
    """Of a chain of operations, one that looks sees its own operand and nothing older."""
    refs, seen = [], []

    def look(x):
        if not isinstance(x, torch._subclasses.FakeTensor):
            seen.append([r() is not None for r in refs])
            refs.append(weakref.ref(x))
        return x + 1

    p = Primitive("look", look)
    run = Executable(trace(lambda x: p(p(p(p(x)))), torch.ones(3)).program, Mesh().backend())
    values = [torch.ones(3)]
    assert torch.equal(run.run(values)[0], torch.full((3,), 5.0))
    assert values == []
    assert seen == [[], [False], [False, False], [False, False, False]]


def test_calling_keeps_the_callers_values():
    run = Executable(trace(lambda x: (x * 2, x), torch.ones(3)).program, Mesh().backend())
    values = [torch.ones(3)]
    for _ in range(2):
        doubled, same = run(values)
        assert same is values[0]
        assert torch.equal(doubled, torch.full((3,), 2.0))


def test_a_loop_holds_its_gradients_once():
    """Stacked gradients of layers are never held beside the gradients of the layers."""
    layers, width = 8, 128
    w = torch.randn(layers, width, width, dtype=torch.float64)
    x = torch.randn(4, width, dtype=torch.float64)

    def loss(w, batch):
        out, _ = scan(lambda x, w: (torch.tanh(x @ w), None), batch, w)
        return out.sum(), batch.shape[0]

    step = fmeg.jit(fmeg.value_and_grad(loss), mesh=Mesh())
    step(w, x)
    with torch.profiler.profile(profile_memory=True) as prof:
        step(w, x)
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = top = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        held += e.nbytes()
        top = max(top, held)
    assert w.nbytes <= top < 1.5 * w.nbytes


def test_groups_by_the_axes_over_which_values_vary():
    def f(x, y, z):
        a = x + 1
        b = a * y
        c = x * 2
        d = c * z
        return b * d, torch.zeros(3) + c

    program = trace(f, *[torch.ones(3)] * 3).program
    slots = {}
    for v in (*program.inputs, *(o for n in program.nodes for o in n.outs)):
        slots[id(v)] = len(slots)
    groups = by_variation(program.nodes, slots, {0: 0, 1: 0b01, 2: 0b10})
    names = [[n.opname.split(".")[1] for n in g] for g in groups]
    assert names == [["add", "mul", "zeros", "add"], ["mul"], ["mul"], ["mul"]]
    done = {0, 1, 2}
    for n in (n for g in groups for n in g):
        assert {slots[id(v)] for v in n.operands()} <= done
        done |= {slots[id(v)] for v in n.outs}


X, Y, I = torch.rand(3, 3) + 0.5, torch.rand(3, 3) + 0.5, torch.tensor([0, 2, 1])
ARGUMENTS = {
    "all.dim": (X > 1, 0), "any.dim": (X > 1, 0), "amax": (X, [0], True), "amin": (X, [0]), "argmax": (X, 1),
    "addmm": (X, Y, X), "baddbmm": (X[None], Y[None], X[None]), "bmm": (X[None], Y[None]), "cat": ([X, Y], 1),
    "stack": ([X, Y], 1), "clamp": (X, 0.6, None), "cumsum": (X, 0), "expand": (X[:1], [3, 3]), "flip": (X, [1]),
    "gather": (X, 1, I[None]), "index_select": (X, 1, I), "masked_fill": (X, X > 1, -1.0), "mean.dim": (X, [0], True),
    "sum.dim_IntList": (X, [0], True), "logsumexp": (X, [0]), "permute": (X, [1, 0]), "pow.Scalar": (2.0, X),
    "pow.Tensor_Scalar": (X, 3), "rsub": (X, 2.0, 3), "select": (X, 1, 2), "squeeze": (X[None], 0), "round": (X,),
    "transpose": (X, 0, 1), "unsqueeze": (X, 0), "view": (X, [9]), "_unsafe_view": (X, [9]), "reshape": (X, [9]),
    "where": (X > 1, X, Y), "bitwise_and": (I, I + 1), "bitwise_or": (I, I + 1), "bitwise_not": (I,),
    "logical_and": (X > 1, Y > 1), "logical_or": (X > 1, Y > 1), "logical_not": (X > 1,),
}  # fmt: skip


@pytest.mark.parametrize("op", _BUILTINS, ids=str)
def test_a_builtin_is_its_operation(op):
    name = str(op).removeprefix("aten.")
    short = name.split(".")[0]
    args = ARGUMENTS.get(name, ARGUMENTS.get(short))
    if args is None:
        arity = sum(a.type.kind() == "TensorType" for a in op._schema.arguments)
        args = (X, Y)[:arity] if "Scalar" not in name else (X, 0.75)
    got, want = _BUILTINS[op](*args), op(*args)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
