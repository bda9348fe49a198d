"""Triton's attention under any mask, against the formula in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fmeg
from fmeg import tree
from fmeg.kernels import attention as choice
from fmeg.kernels import masked
from fmeg.models import llama
from fmeg.ops.attention import attention_bwd_p, attention_p
from fmeg.ops.attention_math import Masking, math_backward, math_forward

pytestmark = pytest.mark.gpu
SIZES = [
    (2, 300, 300, 8, 2, 64, 64),
    (1, 257, 130, 4, 4, 128, 128),
    (1, 70, 400, 4, 1, 192, 128),
    (2, 128, 128, 2, 2, 80, 72),
]
MASKS = [
    (True, None, None, 5),
    (False, None, None, 3),
    (True, 33, None, 4),
    (True, None, -40, 0),
    (True, None, 25, 0),
    (True, 50, torch.tensor(-3), 0),
    (True, None, torch.tensor(11), 2),
    (True, None, -1000, 0),
]


def normal(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def problem(size, mask, dtype):
    b, s, t, h, kv, e, f = size
    causal, window, shift, segments = mask
    g = torch.Generator().manual_seed(1)
    ids = [torch.sort(torch.randint(0, max(segments, 1), (b, n), generator=g), 1)[0].cuda() for n in (s, t)]
    ids = [ids[0], ids[0] if s == t else ids[1]] if segments else [None, None]
    shift = shift.cuda() if isinstance(shift, torch.Tensor) else shift
    tensors = [normal(b, s, h, e), normal(b, t, kv, e, seed=1), normal(b, t, kv, f, seed=2), normal(b, s, h, f, seed=3)]
    return [x.to(dtype) for x in tensors], Masking(*ids, shift, causal, window, e**-0.5)


def run(q, k, v, do, m):
    at = masked.place(q, k, m.shift)
    args = (m.segments, m.kv_segments, *at, m.causal, m.window or 0, m.scale)
    o, lse = masked.forward(q, k, v, *args)
    return o, lse, *masked.backward(q, k, v, o, lse, do, *args)


CASES = [(size, mask, torch.bfloat16) for size in SIZES for mask in MASKS]
CASES += [(SIZES[0], mask, dtype) for mask in MASKS[::3] for dtype in (torch.float16, torch.float32)]


@pytest.mark.parametrize(("size", "mask", "dtype"), CASES, ids=str)
def test_the_formula(size, mask, dtype):
    (q, k, v, do), m = problem(size, mask, dtype)
    wide = [x.double() for x in (q, k, v, do)]
    o, lse = math_forward(*wide[:3], m)
    want = (o, lse, *math_backward(*wide[:3], o, lse, wide[3], m))
    got = run(q, k, v, do, m)
    assert torch.equal(torch.isfinite(got[1]), torch.isfinite(lse))
    low = 2e-5 if dtype == torch.float32 else 1.5e-2
    for a, b in zip(got, want, strict=True):
        a, b = (torch.nan_to_num(x.double(), neginf=0.0) for x in (a, b))
        assert (a - b).norm() <= low * b.norm() + 1e-12


def test_equal_bits_each_time():
    (q, k, v, do), m = problem((2, 500, 500, 8, 2, 64, 64), MASKS[0], torch.bfloat16)
    for a, b in zip(run(q, k, v, do, m), run(q, k, v, do, m), strict=True):
        assert torch.equal(a, b)


def test_where_it_is_chosen():
    q = normal(1, 64, 4, 64)
    ask = lambda **how: choice.kernel(q, q, q, **dict(causal=True, window=None, shift=None, segments=False) | how)
    assert ask() == "cudnn" and ask(window=9) == "flash"
    assert ask(segments=True) == ask(shift=5) == ask(shift=torch.tensor(0)) == "triton"
    wide = q.float()
    assert choice.kernel(wide, wide, wide, causal=True, window=None, shift=None, segments=True) is None


def test_poison_never_reaches_a_result():
    """What lies beyond the tensors' ends is not read into them."""
    (q, k, v, do), m = problem((1, 100, 100, 2, 2, 80, 72), MASKS[0], torch.bfloat16)
    want = run(q, k, v, do, m)
    apart = []
    for x in (q, k, v, do):
        room = torch.full((x.numel() + 4096,), torch.nan, device="cuda", dtype=x.dtype)
        room[2048 : 2048 + x.numel()] = x.flatten()
        apart.append(room[2048 : 2048 + x.numel()].view(x.shape))
    for a, b in zip(run(*apart, m), want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", ["eager", "inductor"])
def test_a_packed_step(mode):
    cfg = llama.Config(vocab_size=300, embed=128, layers=2, heads=4, kv_heads=2, head_dim=32, ff=256)
    low = replace(cfg, compute_dtype=torch.bfloat16)
    params = llama.init(fmeg.random.key(0), cfg)
    ids = torch.randint(0, 300, (2, 97), generator=torch.Generator().manual_seed(0))
    segments = torch.sort(torch.randint(0, 4, (2, 96), generator=torch.Generator().manual_seed(1)), 1)[0]
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": torch.ones(2, 96), "segments": segments}
    want, exact = fmeg.value_and_grad(lambda p, b: llama.loss(p, b, cfg))(params, batch)
    with torch.device("cuda"):
        here = tree.map(lambda x: x.cuda(), (params, batch))
        (loss, _), grads = fmeg.jit(fmeg.value_and_grad(lambda p, b: llama.loss(p, b, low)), mode=mode)(*here)
    assert float(loss) == pytest.approx(float(want[0]), rel=1e-2)
    for a, b in zip(tree.leaves(grads), tree.leaves(exact), strict=True):
        assert (a.global_value().cpu() - b).norm() < 0.06 * b.norm()


def test_padding_is_a_segment_of_its_own():
    """Its id is the least of int64, which must not become 0 in int32."""
    (q, k, v, do), m = problem((1, 64, 64, 2, 2, 64, 64), (True, None, None, 0), torch.bfloat16)
    ids = torch.zeros(1, 64, dtype=torch.int64, device="cuda")
    ids[:, :20] = torch.iinfo(torch.int64).min
    got = run(q, k, v, do, m._replace(segments=ids, kv_segments=ids))
    want = run(*(x[:, 20:] for x in (q, k, v, do)), m)
    for a, b in zip(got, want, strict=True):
        assert (a[:, 20:].float() - b.float()).norm() < 1e-2 * b.float().norm()


def test_the_primitive_takes_it():
    (q, k, v, do), m = problem(SIZES[0], MASKS[0], torch.bfloat16)
    options = dict(causal=True, window=None, scale=m.scale)
    o, lse = attention_p.run()(q, k, v, m.segments, m.kv_segments, **options)
    got = (o, lse, *attention_bwd_p.run()(q, k, v, o, lse, do, m.segments, m.kv_segments, **options))
    for a, b in zip(got, run(q, k, v, do, m), strict=True):
        assert torch.equal(a, b)


FAR_IDS = [[2**40, 2**40 + 1, 2**33, -(2**63)], [-(2**40), -(2**31), 2**31, 2**63 - 1], [0, 2**32, 2**33, 1]]


@pytest.mark.parametrize("ids", FAR_IDS, ids=str)
def test_ids_beyond_int32_stay_apart(ids):
    """Hashes of documents, say: which is which counts, not how large they are, nor their dtype."""
    (q, k, v, do), m = problem((1, 256, 256, 4, 2, 64, 64), (True, None, None, 0), torch.bfloat16)
    small = torch.arange(4, device="cuda").repeat_interleave(64)[None]
    large = torch.tensor(ids, device="cuda").repeat_interleave(64)[None]
    want = run(q, k, v, do, m._replace(segments=small, kv_segments=small))
    for a, b in ((large, large), (small.to(torch.int8), small), (small.int(), small.to(torch.uint8))):
        for x, y in zip(run(q, k, v, do, m._replace(segments=a, kv_segments=b)), want, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("window", [None, 9, 2**31 - 1, 2**40])
@pytest.mark.parametrize("shift", [0, 2**31 - 1, -(2**31), 2**40, -(2**40)])
def test_windows_and_shifts_of_any_size(window, shift):
    """Sums of positions must not leave int32."""
    for at in (shift, torch.tensor(shift)):
        (q, k, v, do), m = problem((1, 200, 150, 2, 1, 64, 64), (True, window, at, 0), torch.bfloat16)
        o, lse = math_forward(q.double(), k.double(), v.double(), m)
        want = (o, lse, *math_backward(q.double(), k.double(), v.double(), o, lse, do.double(), m))
        for x, y in zip(run(q, k, v, do, m), want, strict=True):
            x, y = (torch.nan_to_num(z.double(), neginf=0.0) for z in (x, y))
            assert (x - y).norm() <= 1.5e-2 * y.norm() + 1e-12


def test_more_heads_than_a_grid_is_high():
    """Batch times heads may be beyond 65535."""
    (q, k, v, do), m = problem((9000, 3, 5, 8, 8, 16, 16), (True, None, -1, 0), torch.bfloat16)
    o, lse = math_forward(q.float(), k.float(), v.float(), m)
    want = (o, lse, *math_backward(q.float(), k.float(), v.float(), o, lse, do.float(), m))
    for x, y in zip(run(q, k, v, do, m), want, strict=True):
        x, y = (torch.nan_to_num(z.double(), neginf=0.0) for z in (x, y))
        assert (x - y).norm() <= 1.5e-2 * y.norm()


def test_fakes_lie_as_results_do():
    """What a compiler is told of the gradients' strides, where operands lie transposed."""
    (q, k, v, do), m = problem((2, 64, 64, 4, 2, 64, 64), MASKS[0], torch.bfloat16)
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    o, lse = masked.forward(q, k, v, m.segments, m.kv_segments, None, 0, True, 0, m.scale)
    args = (q, k, v, o, lse, do, m.segments, m.kv_segments, None, 0, True, 0, m.scale)
    torch.library.opcheck(masked.backward, args, test_utils="test_faketensor")


def test_operands_of_two_dtypes_go_to_no_kernel():
    q = normal(1, 64, 4, 64)
    for causal in (True, False):
        assert choice.kernel(q, q.float(), q, causal=causal, window=None, shift=None, segments=False) is None
