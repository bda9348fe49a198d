"""Products beside copies from other GPUs' memory: in a group of one, between two processes on one GPU, on two GPUs."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fmeg
from fmeg import Layout, Mesh, tree
from fmeg.lower import beside
from fmeg.mesh import init_distributed
from fmeg.mesh.symmetric import SymmetricMemory
from fmeg.ops.collectives import ALL_GATHER, REDUCE_SCATTER
from fmeg.ops.einsum import einsum_p
from fmeg.program.errors import MeshError
from fmeg.program.ir import Node, Program, TensorType, Value
from fmeg.testing import verify

pytestmark = pytest.mark.gpu

ROWS, SEQ, EMBED, FF = 2, 256, 512, 384  # SEQ: of a rank
LAYOUT = Layout(heads="tp", kv_heads="tp", ff="tp", vocab="tp", res_seq="tp")


def layer(n, dtype):
    """Gathered tokens by two matrices; and the sum of what comes of them, by two others, scattered."""
    value = lambda *shape: Value(TensorType(shape, dtype))
    x, a, b, c, d = inputs = (
        value(ROWS, SEQ, EMBED),
        *(value(EMBED, FF) for _ in "ab"),
        *(value(FF, EMBED) for _ in "cd"),
    )
    nodes = []

    def node(op, *args, shape):
        made = Node(op, args, {})
        made.outs = (Value(TensorType(shape, dtype), made),)
        nodes.append(made)
        return made.outs[0]

    g = node(ALL_GATHER, [x], ("tp",), (1,), shape=(ROWS, n * SEQ, EMBED))
    y, z = (node(einsum_p, "b s d, d f -> b s f", g, w, shape=(ROWS, n * SEQ, FF)) for w in (a, b))
    p, q = (node(einsum_p, "b s f, f d -> b s d", v, w, shape=(ROWS, n * SEQ, EMBED)) for v, w in ((y, c), (z, d)))
    total = node(torch.ops.aten.add.Tensor, p, q, shape=(ROWS, n * SEQ, EMBED))
    out = node(REDUCE_SCATTER, [total], ("tp",), (1,), shape=(ROWS, SEQ, EMBED))
    return Program(inputs, nodes, (g, y, z, out))


def tensors(rank, dtype):
    g = torch.Generator().manual_seed(rank)
    make = lambda *shape, scale: (torch.randn(shape, generator=g, dtype=torch.float64) * scale).to("cuda", dtype)
    return [
        make(ROWS, SEQ, EMBED, scale=1),
        *(make(EMBED, FF, scale=EMBED**-0.5) for _ in range(2)),
        *(make(FF, EMBED, scale=FF**-0.5) for _ in range(2)),
    ]


def runner(peers, program):
    """The rewritten Program on this rank's tensors."""
    new = beside(program, ["tp"])
    first, second = new.nodes
    gather, scatter = first.op.through(peers), second.op.through(peers)

    def run(values):
        env = dict(zip(map(id, program.inputs), values, strict=True))
        for node, fn in ((first, gather), (second, scatter)):
            env.update(zip(map(id, node.outs), fn([env[id(v)] for v in node.args]), strict=True))
        return [env[id(v)] for v in program.outputs]

    return run


def expected(n, rank, dtype):
    every = [tensors(r, dtype) for r in range(n)]
    g = torch.cat([t[0] for t in every], 1)
    products = lambda t: (g @ t[1], g @ t[2])
    total = sum((y @ t[3] + z @ t[4]).double() for t in every for y, z in [products(t)])
    y, z = products(every[rank])
    return [g, y, z, total[:, rank * SEQ : (rank + 1) * SEQ]]


def equal(got, want, dtype):
    tolerance = 1e-11 if dtype == torch.float64 else 6e-2
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


def check_layer(peers, rounds):
    n, rank = peers.size, peers.index
    for dtype in (torch.bfloat16, torch.float64):
        run, mine, want = runner(peers, layer(n, dtype)), tensors(rank, dtype), expected(n, rank, dtype)
        equal(run(mine), want, dtype)
        held = len(peers._held)
        for _ in range(rounds - 1):
            equal(run(mine), want, dtype)
        assert len(peers._held) == held  # what was enough once is kept


def recorded(peers):
    """As one CUDA graph, replayed on other values."""
    n, rank, dtype = peers.size, peers.index, torch.bfloat16
    run, mine = runner(peers, layer(n, dtype)), tensors(rank, dtype)
    run(mine)
    torch.cuda.synchronize()
    given = [torch.zeros_like(x) for x in mine]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(given)
    for _ in range(3):
        for a, b in zip(given, mine, strict=True):
            a.copy_(b)
        graph.replay()
        equal(out, expected(n, rank, dtype), dtype)


def steps():
    """A small model in float64, two optimizer steps, against one device."""
    cfg = verify.config()
    keep = verify.optimizer_under_test()
    state, batch = verify.make_state(cfg, keep), verify.make_batch(cfg)
    want = verify.run_steps(verify.make_step(cfg, keep), state, batch, 4)
    mesh = Mesh(tp=dist.get_world_size(), backend="distributed")
    here = tree.map(lambda x: x.to(mesh.device), (state, batch))
    for mode in ("eager", "inductor", "cudagraph"):
        step = fmeg.jit(verify.make_step(cfg, keep), mesh=mesh, layout=LAYOUT, mode=mode, overlap="tp")
        got = verify.run_steps(step, *here, 4)
        for path, a, b in zip(tree.paths(want), tree.leaves(got), tree.leaves(want), strict=True):
            torch.testing.assert_close(
                a.global_value().cpu(), torch.as_tensor(b), rtol=1e-9, atol=1e-11, msg=f"{mode}, {path}"
            )


def _environment(rank, world, port):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="localhost", MASTER_PORT=str(port))
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")


def _with_nccl(rank, world, port, whole):
    _environment(rank, world, port)
    os.environ["LOCAL_RANK"] = str(rank)
    init_distributed(timeout=timedelta(seconds=120))
    backend = Mesh(tp=world, backend="distributed").backend()
    peers = backend.peers(("tp",)) if whole else SymmetricMemory(dist.group.WORLD, [0], 0, backend.device)
    check_layer(peers, 3)
    recorded(peers)
    if whole:
        steps()
    dist.destroy_process_group()


def _on_one_gpu(rank, port, folder):
    _environment(rank, 2, port)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    peers = SymmetricMemory(dist.group.WORLD, [0, 1], rank, torch.device("cuda", 0))
    try:
        peers.buffers((16,), torch.uint8)
    except MeshError as error:
        Path(folder, str(rank)).write_text(str(error))
    else:
        check_layer(peers, 3)
    dist.destroy_process_group()


def port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def test_a_group_of_one():
    mp.start_processes(_with_nccl, (1, port(), False), nprocs=1, start_method="spawn")


def test_two_processes_on_one_gpu(tmp_path):
    mp.start_processes(_on_one_gpu, (port(), str(tmp_path)), nprocs=2, start_method="spawn")
    refused = [p.read_text() for p in sorted(tmp_path.iterdir())]
    if refused:
        pytest.skip(f"two processes cannot share a GPU's symmetric memory here: {refused[0]}")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus():
    mp.start_processes(_with_nccl, (2, port(), True), nprocs=2, start_method="spawn")
