"""Four real processes (Gloo) with unequal numbers of rows between them, against four virtual ranks, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fmeg import Layout, Mesh, jit, tree
from fmeg.ops.collectives import exchange_rows
from fmeg.program.ir import TensorType
from fmeg.program.trace import record_flat
from fmeg.sharding.execute import Executable
from tests.mesh import processes
from tests.ops.experts import AXES, BATCH_AXES, problem, step
from tests.sharding.test_experts import KINDS, LAYOUTS, ROUTINGS

NAMES = [n for n, (mesh, _) in LAYOUTS.items() if torch.tensor(list(mesh.values())).prod() == 4]


def layers_of_experts() -> None:
    """Each rank's blocks of the loss and of every gradient are the virtual rank's."""
    rank = dist.get_rank()
    for i, name in enumerate(NAMES):
        mesh, layout = LAYOUTS[name]
        for kind in KINDS:
            params, batch = problem(layers=2, routing=ROUTINGS[i % len(ROUTINGS)], drop=i % 2 == 0)
            axes = {"params": AXES, "batch": {k: BATCH_AXES[k] for k in batch}}
            runs = [
                jit(step, mesh=Mesh(mesh, backend=backend), layout=Layout(dispatch=kind, **layout), axes=axes)(
                    params, batch
                )
                for backend in ("distributed", "loop")
            ]
            for path, a, b in zip(tree.paths(runs[0]), *map(tree.leaves, runs), strict=True):
                if isinstance(a, int):
                    assert a == b
                    continue
                [mine] = a.addressable_shards
                assert torch.equal(mine.data, b.addressable_shards[rank].data), (name, kind, path)


def groups_in_another_order() -> None:
    """A group whose members are not in the order of their processes; there and back again."""
    table = torch.arange(16).view(4, 4) % 5  # rows from member i to member j

    def program(backend):
        n = 20

        def local(x, table):
            there = exchange_rows(x, table, ("b", "a"), back=False, rows=n)
            return there, exchange_rows(there, table, ("b", "a"), back=True, rows=n)

        types = [TensorType((n, 3), torch.float64), TensorType((4, 2), torch.int64)]
        rec, outs = record_flat(local, types, name="exchange", mesh_sizes={"a": 2, "b": 2})
        return Executable(rec.program(list(outs)), backend)

    results = {}
    for kind in ("distributed", "loop"):
        backend = Mesh(a=2, b=2, backend=kind).backend()
        index = [backend.index.index(r, ("b", "a")) for r in backend.ranks]
        xs = [torch.arange(60, dtype=torch.float64).view(20, 3) + 100 * i for i in index]
        tables = [torch.stack([table[i], table[:, i]], 1) for i in index]
        dims = (("a", "b"), ())
        out = program(backend)([backend.from_local(t, dims) for t in (xs, tables)])
        results[kind] = [backend.local(v) for v in out]
        if kind == "distributed":
            begun = backend.start_exchange_rows([xs[0], tables[0]], ("b", "a"), False, 20)
            later = backend.start_exchange_rows([out[0], tables[0]], ("b", "a"), True, 20)
            assert all(map(torch.equal, (*begun(), *later()), out))
        for i, x, there, back in zip(index, xs, *results[kind], strict=True):
            assert there.shape[0] == table[:, i].sum()
            sent = int(table[i].sum())
            assert torch.equal(back[:sent], x[:sent]) and not back[sent:].any() and back.shape[0] == 20
    for real, virtual in zip(results["distributed"], results["loop"], strict=True):
        assert torch.equal(real[0], virtual[dist.get_rank()])


CHECKS = [layers_of_experts, groups_in_another_order]


@pytest.fixture(scope="module")
def failures():
    return processes.run(CHECKS, world=4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [c.__name__ for c in CHECKS])
def test_real_processes(check, failures):
    assert not failures[check], "\n".join(failures[check])
