"""Compiled steps: the numbers of eager ones; donated memory is written into, and nobody else's."""

from __future__ import annotations

from copy import copy
from functools import partial

import pytest
import torch

import fmeg
from fmeg import Array, Layout, Mesh, TrainState, optim, tree
from fmeg.ops.collectives import all_gather, all_reduce, ppermute
from fmeg.program.primitive import Primitive
from fmeg.sharding.compiled import Inductor
from fmeg.sharding.graph import Graph

OPT = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))


def train_step(state, batch, microbatches=1):
    def loss_fn(p, b):
        def layer(x, w):
            return torch.tanh(fmeg.einsum("b d, d e -> b e", x, w)), None

        x, _ = fmeg.scan(layer, b["x"], p["w"])
        return ((x - b["y"]) ** 2).sum(), x.numel()

    (loss, _), grads = fmeg.value_and_grad(loss_fn, microbatches=microbatches)(state.params, batch)
    updates, opt = OPT.update(grads, state.opt, state.params)
    return state.next(params=optim.apply_updates(state.params, updates), opt=opt), loss


def example():
    g = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(3, 4, 4, dtype=torch.float64, generator=g)}
    batch = {k: torch.randn(6, 4, dtype=torch.float64, generator=g) for k in "xy"}
    return TrainState.create(params, OPT, {"w": "layers embed ff"}), batch


def run(mode, mesh, layout, steps=3, microbatches=1):
    state, batch = example()
    step = fmeg.jit(partial(train_step, microbatches=microbatches), mesh=mesh, layout=layout, donate="state", mode=mode)
    losses = []
    for _ in range(steps):
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, state


def test_equal_to_eager_and_written_in_place():
    want, plain = run("eager", Mesh(), Layout())
    got, state = run("inductor", Mesh(), Layout())
    assert got == pytest.approx(want, rel=1e-13)
    for a, b in zip(tree.leaves(state), tree.leaves(plain), strict=True):
        assert torch.allclose(a.global_value(), b.global_value(), rtol=1e-12, atol=1e-15)


def test_microbatches_add_their_gradients_where_they_lie():
    want, plain = run("eager", Mesh(), Layout(), microbatches=3)
    got, state = run("inductor", Mesh(), Layout(), microbatches=3)
    assert got == pytest.approx(want, rel=1e-13)
    for a, b in zip(tree.leaves(state), tree.leaves(plain), strict=True):
        assert torch.allclose(a.global_value(), b.global_value(), rtol=1e-12, atol=1e-15)


def test_donated_memory_is_reused_and_a_callers_tensors_are_not():
    state, batch = example()
    before = tree.map(torch.clone, state)
    step = fmeg.jit(train_step, mesh=Mesh(), layout=Layout(), donate="state", mode="inductor")
    first, _ = step(state, batch)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(state), tree.leaves(before), strict=True))
    assert all(x.own for x in tree.leaves(first))
    where = [x.value.data_ptr() for x in tree.leaves(first)]
    second, _ = step(first, batch)
    assert [x.value.data_ptr() for x in tree.leaves(second)] == where
    placed = tree.map(lambda x: Array.from_global(x, Mesh()), before)  # shares the caller's memory
    kept = tree.map(torch.clone, before)
    step(placed, batch)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves(kept), strict=True))


def test_a_virtual_mesh_takes_the_mode_too():
    want, _ = run("eager", Mesh(), Layout())
    got, _ = run("inductor", Mesh(dp=2), Layout(batch="dp", params=dict(embed="dp")))
    assert got == pytest.approx(want, rel=1e-12)


def test_unknown_modes_and_graphs_without_a_gpu_are_refused():
    state, batch = example()
    with pytest.raises(ValueError, match="eager, inductor, cudagraph"):
        fmeg.jit(train_step, mode="fast")(state, batch)
    with pytest.raises(ValueError, match="CUDA graph"):
        fmeg.jit(train_step, mode="cudagraph")(state, batch)


def test_as_many_runs_are_compiled_for_many_layers_as_for_few(monkeypatch):
    made = []
    init = Inductor.__init__

    def counted(self, fn, name):
        made.append(name)
        init(self, fn, name)

    monkeypatch.setattr(Inductor, "__init__", counted)
    counts = []
    for layers in (2, 32):
        made.clear()
        state, batch = example()
        params = {"w": state.params["w"][:1].expand(layers, 4, 4).clone()}
        deep = TrainState.create(params, OPT, {"w": "layers embed ff"})
        fmeg.jit(train_step, mesh=Mesh(), layout=Layout(), mode="inductor").lower(deep, batch).compile("inductor")
        counts.append(len(made))
    assert counts[0] == counts[1] > 0


def both(fn, state, *args, steps=3):
    """States and metrics of steps that donate their state, compiled and eager; all results are read at the end."""
    found = []
    for mode in ("inductor", "eager"):
        step = fmeg.jit(fn, donate="state", mode=mode)
        now, metrics = state, []
        for i in range(steps):
            now, more = step(now, *(a * (i + 1) for a in args))
            metrics.append(more)
        found.append([x.global_value() for x in tree.leaves((now, metrics))])
    return found


def metric_is_state(state, x):
    w = state["w"] * 2 + x
    return {"w": w}, {"w": w}


def metric_is_old_state(state, x):
    return {"w": state["w"] * 2 + x}, {"old": state["w"], "part": state["w"][1:3]}


def states_change_places(state, x):
    return {"w": state["v"].t(), "v": state["w"].t()}, (state["w"] @ state["v"]).sum() + x


def view_read_after_a_scan(state, x):
    old, new = state["w"].t(), state["w"] * 0.5 + x
    y, _ = fmeg.scan(lambda c, _: (torch.tanh(c @ new), None), new, torch.zeros(2, dtype=new.dtype))
    return {"w": new}, (old @ y).sum()


@pytest.mark.parametrize(
    "fn", [metric_is_state, metric_is_old_state, states_change_places, view_read_after_a_scan], ids=lambda f: f.__name__
)
def test_results_that_lie_in_a_state_keep_their_values(fn):
    state = {k: torch.arange(16.0, dtype=torch.float64).reshape(4, 4) / 16 + i for i, k in enumerate("wv")}
    state = state if fn is states_change_places else {"w": state["w"]}
    got, want = both(fn, state, torch.ones((), dtype=torch.float64))
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(got, want, strict=True))


def test_a_carry_that_begins_as_what_its_scan_captures():
    def fn(x, w):
        return fmeg.scan(lambda c, k: (torch.tanh(c @ k) * x, None), x, w)[0]

    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, generator=g) for s in ((4, 4), (3, 4, 4)))
    for lengths in (w, w[:1]):
        assert torch.allclose(fmeg.jit(fn, mode="inductor")(x, lengths).global_value(), fn(x, lengths), rtol=1e-13)


def test_a_product_into_a_state_waits_for_its_readers():
    def step(state, a, b):
        new = fmeg.einsum("n i, n j -> i j", a, b).float()
        return {"g": new}, (state["g"] * 2).sum()

    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 8, generator=g).bfloat16() for _ in "ab")
    got, want = both(step, {"g": torch.randn(8, 8, generator=g)}, a, b)
    assert all(torch.allclose(x, y, rtol=0.05, atol=0.2) for x, y in zip(got, want, strict=True))


def test_arrays_that_share_memory_with_another_are_not_written_into():
    def step(state):
        return {"w": state["w"] * 2 + 1, "mean": state["mean"] * 0.5 + state["w"] * 0.5}

    jitted = fmeg.jit(step, donate="state", mode="inductor")
    state = jitted({k: torch.arange(4.0) for k in ("w", "mean")})
    twice = jitted({"w": state["w"], "mean": state["w"]})
    assert twice["w"].numpy().tolist() == [3, 7, 11, 15]
    assert twice["mean"].numpy().tolist() == [1, 3, 5, 7]
    held = [twice["w"].global_value(), twice["mean"].addressable_shards[0].data]
    jitted(twice)
    assert [x.tolist() for x in held] == [[3, 7, 11, 15], [1, 3, 5, 7]]


def test_gradients_that_are_the_same_value_are_added_once_each():
    def step(state, batch):
        def loss_fn(p, x):
            def layer(x, q):
                return torch.tanh(x @ q["w"] + q["a"] + q["b"]) + q["c"] + x, None

            x, _ = fmeg.scan(layer, x, p)
            return (x**2).sum(), x.numel()

        (loss, _), grads = fmeg.value_and_grad(loss_fn, microbatches=3)(state, batch)
        return tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    g = torch.Generator().manual_seed(0)
    shapes = {"w": (3, 4, 4), "a": (3, 4), "b": (3, 4), "c": (3, 2, 4)}
    state = {k: torch.randn(s, dtype=torch.float64, generator=g) * 0.3 for k, s in shapes.items()}
    x = torch.randn(6, 4, dtype=torch.float64, generator=g)
    want, loss = step(state, x)
    got, compiled = fmeg.jit(step, donate="state", mode="inductor", params=("state",))(state, x)
    assert float(compiled) == pytest.approx(float(loss), rel=1e-13)
    for a, b in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert torch.allclose(a.global_value(), b, rtol=1e-12, atol=1e-15)


def test_a_graph_leaves_the_results_of_one_state_to_their_holder_when_another_comes():
    def add(values):
        values[0] += values[1]
        return [values[0]]

    graph = Graph(add, {0: 0})
    one = torch.ones(2)
    [first] = graph([torch.zeros(2), one])
    [other] = graph([torch.full((2,), 5.0), one])
    assert first.tolist() == [1, 1]
    assert other.tolist() == [6, 6]


HANDS_ON = Primitive("hands_on", lambda x: x)


def seen_by_a_product(state, x):
    return {"w": state["w"] * 2 + x}, fmeg.einsum("a b -> b a", state["w"])


def seen_by_a_primitive(state, x):
    old = HANDS_ON(state["w"])
    y, _ = fmeg.scan(lambda c, w: (torch.tanh(c + w), None), old[0] * 1, state["w"])
    return {"w": state["w"] * 2 + x}, (old, (old * y).sum())


@pytest.mark.parametrize("fn", [seen_by_a_product, seen_by_a_primitive], ids=lambda f: f.__name__)
def test_what_operations_hand_through_is_not_written_over(fn):
    state = {"w": torch.arange(12.0, dtype=torch.float64).reshape(3, 4) / 12}
    got, want = both(fn, state, torch.ones((), dtype=torch.float64))
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "send",
    [lambda w: all_reduce(w, ("dp",)), lambda w: all_gather(w, ("dp",), 0), lambda w: ppermute(w, ("dp",), [(0, 0)])],
)
def test_what_a_collective_of_one_rank_hands_through_is_not_written_over(send):
    mesh, p = Mesh(dp=1), fmeg.P(None, None)

    def step(state):
        sent = fmeg.shard_map(send, mesh=mesh, in_specs=(p,), out_specs=p)(state["w"])
        return {"w": state["w"] * 2 + 1}, sent

    jitted = fmeg.jit(step, mesh=mesh, donate="state", mode="inductor")
    state = {"w": torch.arange(6.0).reshape(2, 3)}
    for i in range(3):
        state, sent = jitted(state)
        want = torch.arange(6.0).reshape(2, 3) * 2**i + 2**i - 1
        assert torch.equal(sent.global_value(), want)


def test_other_strides_are_compiled_anew():
    def fn(x):
        return x.reshape(3, 8).sin(), x.contiguous().view(24) * 2

    jitted = fmeg.jit(fn, mode="inductor")
    x = torch.arange(24.0, dtype=torch.float64).reshape(4, 6)
    for y in (x, x.t().contiguous().t(), x[:1].expand(4, 6), torch.cat([x, x], 1)[:, ::2], x):
        for a, b in zip(tree.leaves(jitted(y)), fn(y), strict=True):
            assert torch.allclose(a.global_value(), b, rtol=1e-13)


def test_a_carry_that_its_body_transposes():
    def fn(x, w):
        return fmeg.scan(lambda c, k: ((c.reshape(2, 8).reshape(4, 4) @ k).t(), c.flatten()), x, w)

    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, generator=g) for s in ((4, 4), (3, 4, 4)))
    for a, b in zip(tree.leaves(fmeg.jit(fn, mode="inductor")(x, w)), fn(x, w), strict=True):
        assert torch.allclose(a.global_value(), b, rtol=1e-13)


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_inputs_that_are_read_negated(mode):
    x = torch.randn(3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).conj().imag
    assert x.is_neg()
    jitted = fmeg.jit(lambda x: x * 2 + 1, mode=mode)
    for y in (x, x.clone()):
        assert torch.equal(jitted(y).global_value(), y * 2 + 1)


def test_a_copy_of_an_array_keeps_its_numbers():
    step = fmeg.jit(lambda state: {"w": state["w"] * 2}, donate="state", mode="inductor")
    state = step({"w": torch.arange(4.0)})
    before = copy(state["w"])
    step(state)
    assert before.numpy().tolist() == [0, 2, 4, 6]


def test_a_donated_leaf_that_lies_transposed_is_not_written_into():
    def step(state, a, b):
        g = fmeg.einsum("n i, n j -> i j", a, b).float()
        return {"g": g + 1, "t": state["g"].t()}

    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 8, generator=g).bfloat16() for _ in "ab")
    jitted = fmeg.jit(step, donate="state", mode="inductor")
    state = jitted({"g": torch.zeros(8, 8), "t": torch.zeros(8, 8)}, a, b)
    other = jitted({"g": state["t"], "t": state["g"]}, a, b)
    want = step({"g": torch.zeros(8, 8), "t": torch.zeros(8, 8)}, a, b)["g"]
    assert torch.allclose(other["g"].global_value(), want, rtol=0.05, atol=0.2)
    assert not other["t"].global_value().any()
