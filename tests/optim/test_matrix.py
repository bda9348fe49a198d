"""Matrix specifications: reading them, deriving them from logical axes, and the view they describe."""

import einops
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg.optim import matrices
from fmeg.optim.matrix import as_matrices, matrix_of, parse_matrix


def test_logical_axes_of_a_llama_and_a_gpt2():
    axes = {
        "wq": "layers embed heads head_dim",
        "wk": "layers embed kv_heads head_dim",
        "wo": "layers heads head_dim embed",
        "bq": "layers heads head_dim",
        "q_norm": "layers head_dim",
        "w_up": "layers embed ff",
        "experts": "layers experts ff embed",
        "embed": "vocab embed",
        "pos_embed": "positions embed",
        "final_norm": "embed",
    }
    assert matrices(axes) == {
        "wq": "layers (embed) (heads head_dim)",
        "wk": "layers (embed) (kv_heads head_dim)",
        "wo": "layers (heads head_dim) (embed)",
        "bq": "layers (heads head_dim)",
        "q_norm": "layers (head_dim)",
        "w_up": "layers (embed) (ff)",
        "experts": "layers experts (ff) (embed)",
        "embed": None,
        "pos_embed": None,
        "final_norm": "(embed)",
    }
    assert matrices({"embed": "vocab embed"}, skip=()) == {"embed": "(vocab) (embed)"}
    assert matrices({"w": "head_dim embed"}) == {"w": "(head_dim) (embed)"}
    assert matrices({"conv": "in out height width"}) == {"conv": None}


@given(st.data())
def test_the_view_is_einops_rearrange_and_the_way_back_is_exact(data):
    """Any assignment of up to five dimensions to batch, rows and columns that a specification can write."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
    names = [f"d{i}" for i in range(len(sizes))]
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(sizes) - 2), st.integers(1, len(sizes) - 1))))
    start, cut = min(start, end - 1), end
    stop = data.draw(st.integers(cut + 1, len(sizes)))
    rows, cols = names[start:cut], names[cut:stop]
    batch = names[:start] + names[stop:]
    spec = " ".join([*names[:start], f"({' '.join(rows)})", f"({' '.join(cols)})", *names[stop:]])
    x = torch.arange(float(torch.tensor(sizes).prod())).reshape(sizes)
    stack, back = as_matrices(x, parse_matrix(spec))
    pattern = f"{' '.join(names)} -> {' '.join(batch)} ({' '.join(rows)}) ({' '.join(cols)})"
    assert torch.equal(stack, einops.rearrange(x, pattern))
    assert torch.equal(back(stack), x)


def test_batch_between_the_groups():
    m = parse_matrix("layers (embed) heads (head_dim)")
    assert (m.batch, m.rows, m.cols) == ((0, 2), (1,), (3,))
    stack, back = as_matrices(torch.ones(2, 8, 4, 3), m)
    assert stack.shape == (2, 4, 8, 3) and back(stack).shape == (2, 8, 4, 3)


@pytest.mark.parametrize("spec", ["(a) (b) (c)", "a ()", "((a) b)", "(a", "a) b"])
def test_malformed_specifications(spec):
    with pytest.raises(ValueError, match="at most two pairs of parentheses"):
        parse_matrix(spec)


def test_a_specification_of_another_rank_is_named():
    with pytest.raises(ValueError, match=r"muon: matrix '\(a\) \(b\)' names 2 dimensions.*'w'.*\(2, 3, 4\)"):
        matrix_of({"w": "(a) (b)"}, "muon")("w", torch.ones(2, 3, 4))
