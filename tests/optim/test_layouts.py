"""Every optimizer on a mesh equals itself on one device, in float64: parameters and states, whatever the layout."""

import pytest
import torch

from fmeg import Layout, Mesh, TrainState, jit, optim, tree

AXES = {
    "layers": {
        "wq": "layers embed heads head_dim",
        "wo": "layers heads head_dim embed",
        "w": "layers embed ff",
        "norm": "layers embed",
    },
    "embed": "vocab embed",
    "bias": "ff",
}
SIZES = dict(layers=4, embed=8, heads=4, head_dim=2, ff=12, vocab=16)
LAYOUTS = {
    "tensor": (dict(tp=2), Layout(heads="tp", ff="tp", vocab="tp")),
    "ZeRO-1": (dict(dp=2), Layout(opt=dict(embed="dp"))),
    "ZeRO-3, tensor, layers": (
        dict(dp=2, tp=2, pp=2),
        Layout(layers="pp", heads="tp", ff="tp", vocab="tp", params=dict(embed="dp"), opt=dict(embed="dp")),
    ),
}
rate = optim.cosine(0.1, 10, warmup=2)
matrix = optim.matrices(AXES)
clip = optim.clip_by_global_norm(1.0)
OPTIMIZERS = {
    "adamw": optim.adamw(rate, mask=optim.decay_by_axes(AXES)),
    "sgd": optim.sgd(rate, momentum=0.9, nesterov=True, weight_decay=0.1),
    "lion": optim.lion(rate),
    "adafactor": optim.adafactor(rate, matrix=optim.matrices(AXES, skip=()), min_dim=1),
    "adafactor, not factored": optim.adafactor(rate, b1=0.9),
    "muon": optim.muon(rate, matrix),
    "everything": optim.skip_nonfinite(optim.chain(clip, optim.muon(rate, matrix, optim.lion(rate)))),
}


def normal(seed):
    g = torch.Generator().manual_seed(seed)
    return tree.map(lambda s: torch.randn([SIZES[n] for n in s.split()], generator=g, dtype=torch.float64), AXES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_mesh_equals_one_device(name, layout):
    opt = OPTIMIZERS[name]

    def step(state, noise):
        grads = tree.map(torch.add, state.params, noise)
        updates, opt_state = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=opt_state)

    sizes, view = LAYOUTS[layout]
    on_mesh = jit(step, mesh=Mesh(**sizes), layout=view, axes={"noise": AXES}, params=())
    want = got = TrainState.create(normal(0), opt, AXES)
    for seed in (1, 2):
        want, got = step(want, normal(seed)), on_mesh(got, normal(seed))
    whole = lambda x: x.global_value() if hasattr(x, "global_value") else x
    for path, x, y in zip(*map(tree.leaves, (tree.paths(want), got, want)), strict=True):
        torch.testing.assert_close(whole(x), y, rtol=1e-12, atol=1e-12, msg=lambda m, path=path: f"{path}: {m}")
