"""What every optimizer here promises: a state that keeps its form, a traceable update, no step that depends on data."""

import pytest
import torch

from fmeg import optim, tree
from fmeg.program.ir import TensorType, map_values
from fmeg.program.trace import trace
from tests.optim.problem import make_grads, make_params

lr = optim.cosine(0.1, 10, warmup=2)
clip = optim.clip_by_global_norm(1.0)
OPTIMIZERS = {
    "adamw": optim.adamw(lr),
    "adamw, other dtypes": optim.adamw(0.1, mu_dtype=torch.bfloat16, nu_dtype=torch.float32),
    "adamw, masked decay": optim.adamw(0.1, weight_decay=lr, mask=optim.decay_matrices),
    "sgd": optim.sgd(lr),
    "sgd, nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": optim.lion(lr),
    "adafactor": optim.adafactor(lr, min_dim=1),
    "adafactor, not factored, momentum": optim.adafactor(0.1, b1=0.9),
    "muon": optim.muon(lr),
    "muon, bfloat16": optim.muon(0.1, dtype=torch.bfloat16, mu_dtype=torch.float32),
    "identity": optim.identity(),
    "freeze": optim.freeze(),
    "clip": clip,
    "chain": optim.chain(clip, optim.adamw(lr)),
    "skip_nonfinite": optim.skip_nonfinite(optim.chain(clip, optim.muon(lr))),
    "masked": optim.masked(optim.lion(0.1), optim.decay_matrices),
    "split_master": optim.split_master(optim.chain(clip, optim.adamw(lr))),
    "stochastic_rounding": optim.skip_nonfinite(optim.stochastic_rounding(optim.adamw(lr, mu_dtype=torch.float32))),
    "partition": optim.partition(
        {"a": optim.adamw(lr), "b": optim.freeze()}, lambda path, leaf: "a" if "layers" in path else "b"
    ),
}
PASSING = ("identity", "clip", "freeze", "partition", "masked")  # they leave some gradients or parameters as they are
every = pytest.mark.parametrize("name", OPTIMIZERS)
PARAM_PATHS = tree.paths(make_params())


def types(value):
    return tree.structure(value), [TensorType.of(x) for x in tree.leaves(value)]


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [None, torch.float32])
def test_state_keeps_structure_shapes_and_dtypes(name, dtype, grad_dtype):
    opt, params = OPTIMIZERS[name], make_params(dtype)
    grads = tree.map(lambda p: p.to(grad_dtype or dtype), make_grads(params, 0))
    state = opt.init(params)
    updates, new = opt.update(grads, state, params)
    assert types(new) == types(state)
    assert tree.structure(updates) == tree.structure(params)
    assert [u.shape for u in tree.leaves(updates)] == [p.shape for p in tree.leaves(params)]
    after = optim.apply_updates(params, updates)
    assert types(after) == types(params)
    assert all(x.isfinite().all() for x in tree.leaves((after, new)))


@every
def test_state_leaves_are_scalars_or_named_and_ranked_as_their_parameter(name):
    """So a layout finds a leaf's parameter by the end of its path; dimensions of size 1 are not the parameter's."""
    params = make_params()
    by_path = dict(zip(PARAM_PATHS, tree.leaves(params), strict=True))
    state = OPTIMIZERS[name].init(params)
    for path, x in zip(tree.paths(state), tree.leaves(state), strict=True):
        owner = [p for p in PARAM_PATHS if path.endswith(f".{p}")]
        if not owner and path.split(".")[-1] == "key":
            assert x.shape == (2,) and x.dtype == torch.int64, path
            continue
        if not owner:
            assert x.shape == () and x.dtype == torch.int64, path
            continue
        p = by_path[max(owner, key=len)]
        assert x.ndim == p.ndim and all(a in (1, b) for a, b in zip(x.shape, p.shape, strict=True)), path


@every
def test_update_does_not_write_into_its_arguments(name):
    opt, params = OPTIMIZERS[name], make_params()
    args = (make_grads(params, 0), opt.init(params), params)
    before = [x.clone() for x in tree.leaves(args)]
    opt.update(*args)
    assert all(torch.equal(x, y) for x, y in zip(tree.leaves(args), before, strict=True))


@every
def test_traced_update_is_the_update(name):
    """As a Program (which refuses writes and questions about data) it gives the same bits, also after two steps."""
    opt, params = OPTIMIZERS[name], make_params()
    state = opt.init(params)
    traced = trace(opt.update, make_grads(params, 0), state, params)
    for step in range(3):
        grads = make_grads(params, step)
        want = opt.update(grads, state, params)
        got = tree.unflatten(traced.out_tree, run(traced.program, tree.leaves((grads, state, params))))
        assert all(torch.equal(x, y) for x, y in zip(tree.leaves(got), tree.leaves(want), strict=True))
        state = want[1]


def run(program, inputs):
    env = dict(zip(map(id, program.inputs), inputs, strict=True))
    read = lambda value: map_values(lambda v: env[id(v)], value)
    for node in program.nodes:
        out = node.op(*read(node.args), **read(node.kwargs))
        env.update(zip(map(id, node.outs), out if isinstance(out, tuple) else (out,), strict=True))
    return [read(o) for o in program.outputs]


@every
def test_init_traces(name):
    """So that a state can be made in its own placement, never whole."""
    params = make_params()
    state = OPTIMIZERS[name].init(params)
    program = trace(OPTIMIZERS[name].init, params).program
    assert [o.type for o in program.outputs] == types(state)[1]


@every
def test_many_ranks_at_once_by_vmap(name):
    opt, params = OPTIMIZERS[name], make_params()
    ranks = [(make_grads(params, r), opt.init(params), params) for r in range(3)]
    stacked = tree.map(lambda *xs: torch.stack(xs), *ranks)
    leaves, treedef = tree.flatten(stacked)
    flat = lambda *xs: tuple(tree.leaves(opt.update(*tree.unflatten(treedef, xs))))
    got = torch.func.vmap(flat)(*leaves)
    want = [tree.leaves(opt.update(*args)) for args in ranks]
    for r in range(3):
        for x, y in zip(got, want[r], strict=True):
            rough = x.dtype == torch.bfloat16 or "bfloat16" in name
            torch.testing.assert_close(x[r], y, rtol=1e-2 if rough else 1e-10, atol=1e-2 if rough else 1e-12)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in PASSING])
def test_descends_a_quadratic_in_bfloat16(name):
    """bfloat16 parameters, whatever the moments: the loss Σ p² falls."""
    opt, params = OPTIMIZERS[name], make_params(torch.bfloat16)
    loss = lambda: sum(p.double().square().sum() for p in tree.leaves(params))
    state, first = opt.init(params), loss()
    for _ in range(8):
        updates, state = opt.update(params, state, params)
        params = optim.apply_updates(params, updates)
    assert loss() < 0.9 * first
