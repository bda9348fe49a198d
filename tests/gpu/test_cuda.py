"""The same code on a GPU: equal to the CPU in float64, on one device and on virtual meshes; bf16 near it; NCCL in a
group of one."""

from __future__ import annotations

import pytest
import torch

import fmeg
from fmeg import Layout, Mesh, TrainState, optim, tree
from fmeg.mesh import init_distributed
from fmeg.mesh.transport import PIECE_BYTES, Transport, in_pieces
from fmeg.models import llama

pytestmark = pytest.mark.gpu
TP = dict(heads="tp", kv_heads="tp", ff="tp", vocab="tp")
MESHES = [
    ({}, Layout()),
    (dict(dp=2, tp=2), Layout(batch="dp", res_seq="tp", params=dict(embed="dp"), **TP)),
    (dict(cp=4), Layout(seq="cp", res_seq="cp", attention="ring")),
    (dict(pp=2, dp=2), Layout(layers="pp", batch="dp", params=dict(embed="dp"))),
    (dict(dp=4, tp=2, cp=2), Layout(batch="dp", seq="cp", res_seq=("cp", "tp"), opt=dict(embed="dp"), **TP)),
]


def _config(**changes):
    sizes = dict(vocab_size=97, embed=32, layers=3, heads=8, kv_heads=4, head_dim=8, ff=64, vocab_multiple=16)
    return llama.Config(**{**sizes, "dtype": torch.float64, **changes})


def _batch(device):
    with torch.device("cpu"):
        g = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, 97, (8, 17), generator=g)
        mask = (torch.rand(8, 16, generator=g) > 0.3).double()
    return {k: v.to(device) for k, v in {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": mask}.items()}


def _train(cfg, device, mesh=None, layout=None, steps=3):
    opt = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))
    axes = llama.logical_axes(cfg)

    def create(key):
        return TrainState.create(llama.init(key, cfg), opt, axes)

    def train_step(state, batch):
        schedule = "zb_h1" if mesh is not None and "pp" in mesh.axes else None
        grad_fn = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg), microbatches=2, schedule=schedule)
        (loss, _), grads = grad_fn(state.params, batch)
        updates, new = opt.update(grads, state.opt, state.params)
        return state.next(params=optim.apply_updates(state.params, updates), opt=new), loss

    with torch.device(device):
        if mesh is not None:
            create, train_step = (fmeg.jit(f, mesh=mesh, layout=layout) for f in (create, train_step))
        state, batch = create(fmeg.random.key(0).to(device)), _batch(device)
        losses = []
        for _ in range(steps):
            state, loss = train_step(state, batch)
            losses.append(float(loss))
        whole = [x.global_value() if isinstance(x, fmeg.Array) else x for x in tree.leaves(state)]
    return losses, [x.cpu().double() for x in whole]


@pytest.mark.parametrize(("axes", "layout"), MESHES)
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_float64_equals_the_cpu(axes, layout, backend):
    cfg = _config()
    losses, state = _train(cfg, "cpu")
    got_losses, got = _train(cfg, "cuda", Mesh(axes, backend=backend), layout)
    assert got_losses == pytest.approx(losses, rel=1e-12)
    for a, b in zip(got, state, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(1.0, float(b.abs().max()))


def test_eager_on_the_gpu_equals_the_cpu():
    losses, _ = _train(_config(), "cpu")
    assert _train(_config(), "cuda")[0] == pytest.approx(losses, rel=1e-12)


def test_bf16_compute_is_near_float64():
    wide, _ = _train(_config(), "cpu")
    cfg = _config(dtype=torch.float32, compute_dtype=torch.bfloat16)
    for mesh, layout in [(None, None), (Mesh(dp=2, tp=2, backend="loop"), MESHES[1][1])]:
        losses, _ = _train(cfg, "cuda", mesh, layout)
        assert losses == pytest.approx(wide, rel=3e-2)
        assert losses[-1] < losses[0]


def test_initial_values_are_those_of_the_cpu():
    cfg = _config(dtype=torch.float32)
    cpu = llama.init(fmeg.random.key(1), cfg)
    with torch.device("cuda"):
        gpu = llama.init(fmeg.random.key(1).cuda(), cfg)
    for a, b in zip(tree.leaves(cpu), tree.leaves(gpu), strict=True):
        assert torch.allclose(a, b.cpu(), rtol=1e-6, atol=1e-9)


def test_nccl_group_of_one(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = Mesh(dp=1, backend="distributed")
        losses, _ = _train(_config(), "cuda", mesh, Layout(batch="dp"))
    finally:
        dist.destroy_process_group()
    assert losses == pytest.approx(_train(_config(), "cpu")[0], rel=1e-12)


def test_nccl_moves_pieces(tmp_path):
    """Several pieces of several tensors in one launch; begun; left in memory that is given."""
    import torch.distributed as dist

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        transport = Transport(dist.group.WORLD, 1, None, ordered=False)
        make = lambda *shape: torch.randn(shape, device="cuda")
        xs, dims = [make(3, 4, PIECE_BYTES // 8), make(5, 7).bfloat16(), make(2, 6), make(0, 3)], (1, 1, 0, 0)
        xs[0] = xs[0].transpose(0, 1).contiguous().transpose(0, 1)  # not contiguous
        assert in_pieces(xs[0], 1) and not in_pieces(xs[1], 1)
        outs = [torch.empty(xs[0].shape, device="cuda"), None, None, None]
        for got in (
            transport.gather(xs, dims),
            transport.start_gather(xs, dims)(),
            transport.reduce_scatter(xs, dims),
            transport.start_reduce_scatter(xs, dims, outs=outs)(),
            [outs[0], *xs[1:]],
        ):
            assert all(map(torch.equal, got, xs))
    finally:
        dist.destroy_process_group()


def test_nccl_takes_as_many_multiprocessors_as_it_may(monkeypatch):
    import torch.distributed as dist

    where = dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29641")
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    init_distributed(ctas=4, high_priority=True)
    try:
        backend = Mesh(dp=1, tp=1, backend="distributed").backend()
        world = dist.group.WORLD._get_backend(backend.device).options
        assert (world.config.max_ctas, world.is_high_priority_stream) == (4, True)
        again = backend._options()
        assert (again.config.max_ctas, again.is_high_priority_stream) == (4, True)
        group = dist.new_group([0], pg_options=again)
        x = torch.ones(3, device=backend.device)
        dist.all_reduce(x, group=group)
        assert x.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()
