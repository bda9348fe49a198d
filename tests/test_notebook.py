"""The tour runs, finds what it says, and shows today's results.

`python tests/test_notebook.py` runs it and saves the outputs.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).resolve().parent.parent
PATH = ROOT / "examples" / "tour.ipynb"


def execute(notebook: Any) -> Any:
    """Run all cells in a kernel of this very Python, which leaves nothing outside a temporary folder."""
    from ipykernel.kernelspec import write_kernel_spec
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    with tempfile.TemporaryDirectory() as folder:
        write_kernel_spec(f"{folder}/kernels/python3")
        manager = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[f"{folder}/kernels"], ensure_native_kernel=False),
            connection_file=f"{folder}/kernel.json",
            transport="ipc",
            ip=f"{folder}/kernel",
        )
        search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        places = ("IPYTHONDIR", "MPLCONFIGDIR", "HYPOTHESIS_STORAGE_DIRECTORY", "JUPYTER_CONFIG_DIR")
        kernel = {**os.environ, **dict.fromkeys(places, folder), "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
        client = nbclient.NotebookClient(
            notebook,
            km=manager,
            timeout=120,
            resources={"metadata": {"path": folder}},
            record_timing=False,
            coalesce_streams=True,
        )
        return client.execute(env=kernel)


def text(notebook: Any, cell: str) -> str:
    """What a cell printed and returned; tables as HTML."""
    found = []
    for o in next(c for c in notebook.cells if c.id == cell).outputs:
        data = o.get("data", {})
        found.append(o.get("text") or data.get("text/html") or data.get("text/plain"))
    return "\n".join(found)


def code(notebook: Any) -> list[Any]:
    return [c for c in notebook.cells if c.cell_type == "code"]


def rows(html: str) -> list[list[str]]:
    """Cells of a table's rows, without its head and totals."""
    table = [re.findall(r"<td[^>]*>(.*?)</td>", r) for r in re.findall(r"<tr>(.*?)</tr>", html)]
    return [r for r in table if r and r[0] != "total"]


@pytest.fixture(scope="module")
def saved():
    return nbformat.read(PATH, 4)


@pytest.fixture(scope="module")
def fresh():
    return execute(nbformat.read(PATH, 4))  # raises where a cell does


def test_cells_run_in_order_and_nothing_is_an_error(saved, fresh):
    for notebook in (saved, fresh):
        assert [c.execution_count for c in code(notebook)] == list(range(1, len(code(notebook)) + 1))
        outputs = [o for c in code(notebook) for o in c.outputs]
        assert not [o for o in outputs if o.output_type == "error" or o.get("name") == "stderr"]


def test_results_equal_one_device(saved, fresh):
    for notebook in (saved, fresh):
        for cell, n in dict(equal=1, layouts=5, mlp=1, vmap=1, **{"sequence-parallel": 1, "vmap-jit": 1}).items():
            found = re.findall(r"error (\S+e[-+]\d+)", text(notebook, cell))
            assert len(found) == n and all(float(e) < 1e-12 for e in found), cell
        apart = re.findall(r"at most (\S+) from one device", text(notebook, "after"))
        assert len(apart) == 3 and all(float(e) < 1e-10 for e in apart)


def test_one_line_changes_the_collectives(fresh):
    tensor = rows(text(fresh, "explain"))
    assert {r[2] for r in tensor} == {"all_reduce"} and tensor[0][-1] == "In[2]:5 loss_fn"
    lines = lambda phase: [re.sub(r".*In\[2\]:(\d+) .*", r"\1", r[-1]) for r in tensor if r[1] == phase]
    assert {"8", "11"} <= set(lines("F")) and {"6", "9"} <= set(lines("B"))
    sequence = rows(text(fresh, "sequence-parallel"))
    assert [r[2] for r in sequence if r[8] == "shard"] == ["reduce_scatter", "all_gather"] * 3
    over = {r[3]: r[7] for r in rows(text(fresh, "norm-gradients"))}
    assert over["dp+tp (4)"].startswith("f64[32]{P:dp,tp}") and over["dp (2)"].startswith("f64[")


def test_the_fault_is_found_and_shrunk(fresh):
    found = text(fresh, "local-mean")
    assert "but 7.4000 on one device" in found and "dp=2" in found and "lengths=[1, 1, 1, 2]" in found


def test_the_plot_is_there_and_training_approaches_the_entropy(saved, fresh):
    for notebook in (saved, fresh):
        assert any("image/png" in o.data for o in next(c for c in notebook.cells if c.id == "loop").outputs)
    last, entropy = (
        float(x) for x in re.search(r"last loss (\S+), .*entropy (\S+)$", text(fresh, "after"), re.S).groups()
    )
    assert abs(last - entropy) < 0.15


def test_what_is_saved_is_what_it_shows_today(saved, fresh):
    same = lambda s: re.sub(r"\d+e[-+]\d+", "small", s)
    for cell in ("loss", "jit", "explain", "sequence-parallel", "norm-gradients", "layouts", "global-mean", "vmap"):
        assert same(text(saved, cell)) == same(text(fresh, cell)), f"{cell}: run python tests/test_notebook.py"


def test_no_place_of_one_machine_is_saved(saved):
    assert saved.metadata.language_info == {"name": "python"}
    for c in code(saved):
        assert set(c.metadata) == set()
        assert not re.search(r"(?<![\w.<])/\w+/\w", text(saved, c.id)), c.id


def write() -> None:
    notebook = execute(nbformat.read(PATH, 4))
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
    nbformat.write(notebook, PATH)


if __name__ == "__main__":
    write()
