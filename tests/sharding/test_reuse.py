"""Results written into operands: where it is allowed, and that nothing ever notices."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmeg import Mesh
from fmeg.ops.shard import name_p
from fmeg.program.ir import values_in
from fmeg.program.primitive import Primitive
from fmeg.program.trace import trace
from fmeg.sharding.execute import Executable
from fmeg.sharding.reuse import IN_PLACE, writers

same = Primitive("same", lambda x: x)  # a result that is its operand


def written(fn, *args):
    """Names of the operations of fn's program that write into an operand."""
    program = trace(fn, *args).program
    found = writers(program.nodes, {id(v) for v in (*program.inputs, *values_in(program.outputs))})
    return [n.opname.split(".")[1] for n in program.nodes if id(n) in found]


X = torch.linspace(0.1, 1.0, 6, dtype=torch.float64).view(2, 3)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: ((x * 2) + x).sqrt(), ["add", "sqrt"]),
        (lambda x: x + (x * 2), []),  # the first operand is an input
        (lambda x: (x * 2, (x * 2).exp()), ["exp"]),
        (lambda x: (lambda a: (a, a.exp()))(x * 2), []),  # the operand is a result
        (lambda x: (lambda a: a * a)(x * 2), []),  # used twice
        (lambda x: (lambda a: a * a.sum(0))(x * 2), ["mul"]),
        (lambda x: (lambda a: a * a[0])(x * 2), []),  # used twice, once by a view
        (lambda x: (lambda a, v: a.exp() + v)(*(lambda a: (a, a[0]))(x * 2)), ["add"]),  # a view is used later
        (lambda x: (lambda a: (a[0] * 1.0, a.exp()))(x * 2), ["exp"]),  # a view was used before
        (lambda x: (x * 2).t().exp(), []),  # the operand is a view
        (lambda x: (lambda a, b: a.exp() + b)(*(lambda a: (a, same(a)))(x * 2)), ["add"]),  # may be the same tensor
        (lambda x: same(x * 2).exp(), []),
        (lambda x: (x * 2).to(torch.float32) / 3, ["div"]),
        (lambda x: (x * 2) > 1, []),
        (lambda x: (x.sum(0) + 1) * x, ["add"]),  # the result is larger than its operand
    ],
)
def test_who_writes(fn, expected):
    assert written(fn, X) == expected


STEPS = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - 2 * b,
    "scale": lambda a, b: a * 0.5,
    "neg": lambda a, b: -a,
    "square": lambda a, b: a**2,
    "tanh": lambda a, b: torch.tanh(a),
    "clamp": lambda a, b: a.clamp(-0.5, 0.5),
    "transpose": lambda a, b: a.t(),
    "row": lambda a, b: a[:1].expand(3, 3),
    "view": lambda a, b: a.reshape(9).view(3, 3),
    "same": lambda a, b: same(a),
    "name": lambda a, b: name_p(a, "tag"),
    "sum": lambda a, b: a.sum(0, keepdim=True) + b,
    "split": lambda a, b: torch.cat(a.split(1)[::-1]),
    "mask": lambda a, b: a.masked_fill(b > 0, 0.25),
}


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=14
    ),
    results=st.lists(st.integers(0, 30), min_size=1, max_size=3),
)
def test_random_programs_give_the_same_bits(steps, results):
    """On one device and rank by rank; and the inputs stay as they were."""

    def f(x, y):
        made = [x, y]
        for name, i, j in steps:
            made.append(STEPS[name](made[-1 - i % len(made)], made[-1 - j % len(made)]))
        return [made[-1 - r % len(made)] for r in results]

    x, y = (
        torch.linspace(-1, 1, 9, dtype=torch.float64).view(3, 3),
        torch.linspace(2, -1, 9, dtype=torch.float64).view(3, 3),
    )
    kept = x.clone(), y.clone()
    want = f(x, y)
    program = trace(f, x, y).program
    for backend in (Mesh().backend(), Mesh(dp=2).backend()):
        run = Executable(program, backend)
        values = [x, y]
        if not backend.plain:
            index = backend.axis_index(("dp",))
            values = [backend.call(lambda v, i: v + 0 * i, (v, index)) for v in values]
        for got, w in zip(run(values), want, strict=True):
            for t in backend.local(got):
                assert torch.equal(t, w)
        for v, k in zip(values, kept, strict=True):
            for t in backend.local(v):
                assert torch.equal(t, k)


@pytest.mark.parametrize("op", IN_PLACE, ids=str)
def test_the_writing_form_is_the_operation(op):
    args = {"masked_fill": (X > 0.5, 0.0), "pow": (3,)}
    binary = {"add", "div", "mul", "sub"}
    name = str(op).split(".")[1]
    rest = args.get(name, (X.flip(0),) if name in binary else ())
    want, x = op(X, *rest), X.clone()
    assert IN_PLACE[op](x, *rest) is x
    assert torch.equal(x, want)
