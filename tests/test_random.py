from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fmeg import random

# Random123, kat_vectors: philox 4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

DRAWS = {
    "bits": random.bits,
    "uniform": random.uniform,
    "normal": random.normal,
    "truncated_normal": random.truncated_normal,
    "bernoulli": lambda k, shape: random.bernoulli(k, shape, 0.3),
    "randint": lambda k, shape: random.randint(k, shape, -5, 1000),
}


@dataclass
class FakeLocal:
    """What the partitioner tells a rule's local function: the block of one rank."""

    sizes: dict[str, int]
    offsets: dict[str, object] = field(default_factory=dict)

    def size(self, factor):
        return self.sizes[factor]

    def offset(self, factor):
        return self.offsets.get(factor, 0)


def global_node(draw, shape):
    """The node that a draw of this shape becomes in a Program."""
    from fmeg.program.trace import trace

    (node,) = trace(lambda k: draw(k, shape), random.key(0)).program.nodes
    return node


def local_draw(node, key, sizes, offsets):
    rule = node.op.rule(node)
    names = [dims[0] for dims in rule.outs[0]]
    info = FakeLocal(dict(zip(names, sizes, strict=True)), dict(zip(names, offsets, strict=True)))
    return rule.local(info, key, *node.args[1:], **node.kwargs)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_known_answers(counter, key, words):
    assert random.philox(counter, key) == words
    as_tensors = random.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(w) for w in as_tensors) == words


@given(st.lists(st.integers(0, 2**32 - 1), min_size=6, max_size=6))
def test_philox_on_tensors_is_philox_on_python_ints(words):
    counter, key = tuple(words[:4]), tuple(words[4:])
    got = random.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(w) for w in got) == plain_philox(counter, key)


def plain_philox(counter, key):
    """Philox as the paper writes it, on Python ints."""
    c, (k0, k1), mask = list(counter), key, 0xFFFFFFFF
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k0, b & mask, (a >> 32) ^ c[3] ^ k1, a & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return tuple(c)


@pytest.mark.parametrize("name", DRAWS)
def test_an_element_depends_on_key_and_flat_index_only(name):
    draw, k = DRAWS[name], random.key(3)
    flat = draw(k, (120,))
    assert torch.equal(draw(k, (120,)), flat)
    assert torch.equal(draw(k, (2, 3, 20)), flat.reshape(2, 3, 20))
    assert torch.equal(draw(k, (37,)), flat[:37])
    assert not torch.equal(draw(random.key(4), (120,)), flat)


def test_word_i_of_a_draw_is_word_i_mod_4_of_block_i_div_4():
    want = [w for block in range(5) for w in plain_philox((block, 0, 0, 0), (9, 1))]
    assert random.bits(random.key(9 + (1 << 32)), (18,)).tolist() == want[:18]


def test_a_draw_longer_than_a_chunk():
    x = random.bits(random.key(5), (4 * 2**14 + 7,))
    want = [w for block in (2**14, 2**14 + 1) for w in plain_philox((block, 0, 0, 0), (5, 0))]
    assert x[-7:].tolist() == want[:7]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("offset_type", [int, torch.tensor])
def test_shards_are_slices_of_the_whole(name, offset_type):
    shape, parts = (4, 6, 10), (2, 3, 5)
    node, k = global_node(DRAWS[name], shape), random.fold_in(random.key(1), "w")
    whole = DRAWS[name](k, shape)
    for cut in itertools.product(*((1, p) for p in parts)):
        sizes = [s // c for s, c in zip(shape, cut, strict=True)]
        for rank in itertools.product(*map(range, cut)):
            first = [r * s for r, s in zip(rank, sizes, strict=True)]
            block = local_draw(node, k, sizes, [offset_type(f) for f in first])
            want = whole[tuple(slice(f, f + s) for f, s in zip(first, sizes, strict=True))]
            assert block.dtype == want.dtype and torch.equal(block, want)


@given(st.data())
def test_any_block_of_any_shape(data):
    shape = data.draw(st.lists(st.integers(0, 7), max_size=4))
    first = [data.draw(st.integers(0, s)) for s in shape]
    sizes = [data.draw(st.integers(0, s - f)) for s, f in zip(shape, first, strict=True)]
    k = random.key(data.draw(st.integers(0, 2**64 - 1)))
    whole = random.bits(k, shape)
    block = random._bits(k, *first, shape=tuple(shape), block=tuple(sizes), dtype=torch.int64)
    assert whole.shape == tuple(shape) and block.shape == tuple(sizes)
    assert torch.equal(block, whole[tuple(slice(f, f + s) for f, s in zip(first, sizes, strict=True))])


def test_a_block_beyond_32_bits_of_counter():
    rows, n, row = 2**34, 6, 2**33 + 5
    block = random._bits(random.key(2), row, 1, shape=(rows, n), block=(1, 3), dtype=torch.int64)
    flat = row * n + 1
    counters = [(i // 4, i % 4) for i in range(flat, flat + 3)]
    assert block[0].tolist() == [plain_philox((c & 0xFFFFFFFF, c >> 32, 0, 0), (2, 0))[w] for c, w in counters]


@pytest.mark.parametrize("name", DRAWS)
def test_shards_under_vmap_over_ranks(name):
    node, k = global_node(DRAWS[name], (8, 5)), random.key(6)
    offsets = torch.tensor([0, 2, 4, 6])
    blocks = torch.func.vmap(lambda o: local_draw(node, k, (2, 5), (o, 0)))(offsets)
    assert torch.equal(blocks.reshape(8, 5), DRAWS[name](k, (8, 5)))
    keys = k.expand(4, 2)
    blocks = torch.func.vmap(lambda o, k: local_draw(node, k, (2, 5), (o, 0)))(offsets, keys)
    assert torch.equal(blocks.reshape(8, 5), DRAWS[name](k, (8, 5)))


def test_traced_functions_hold_one_node_a_draw_and_one_a_fold():
    from fmeg.program.trace import trace

    def fn(k, step):
        k = random.fold_in(random.fold_in(k, step), "dropout")
        a, b = random.split(k, 2)
        return random.normal(a, (3,)), random.bernoulli(b, (3,))

    program = trace(fn, random.key(0), torch.tensor(5)).program
    names = [n.opname for n in program.nodes if not n.opname.startswith("aten.")]
    assert names == ["fold_in", "fold_in", "split_key", "normal", "bernoulli"]
    for node in program.nodes:
        if node.opname in names:
            rule = node.op.rule(node)
            assert len(rule.ins) == len(node.operands())
            for dims, value in zip([*rule.ins, *rule.outs], [*node.operands(), *node.outs], strict=True):
                assert tuple(rule.sizes[d[0]] for d in dims) == value.shape


def test_draws_stop_gradients():
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (x * random.normal(random.key(0), (3,), torch.float64)).sum().backward()
    assert torch.equal(x.grad, random.normal(random.key(0), (3,), torch.float64))


# -- keys -------------------------------------------------------------------------------------------------------------
def test_key_is_two_words_of_the_seed():
    assert random.key(2**40 + 5).tolist() == [5, 2**8]
    assert random.key(-1).tolist() == [0xFFFFFFFF, 0xFFFFFFFF]
    assert random.key(0).dtype == torch.int64


def test_derived_keys_are_distinct():
    k = random.key(0)
    keys = [
        k,
        *(random.fold_in(k, i) for i in range(-3, 40)),
        *(random.fold_in(k, s) for s in ("", "a", "b", "0", "1")),
    ]
    keys += [*random.split(k, 20), random.fold_in(random.fold_in(k, 1), 2), random.fold_in(random.fold_in(k, 2), 1)]
    keys += [random.fold_in(k, 2**32), random.fold_in(k, 2**32 + 1)]
    assert len({tuple(x.tolist()) for x in keys}) == len(keys)
    assert all(x.dtype == torch.int64 and 0 <= int(x.min()) and int(x.max()) < 2**32 for x in keys)


@pytest.mark.parametrize("number", [0, 7, -1, 2**31, 2**40 + 3])
def test_fold_in_of_a_tensor_equals_fold_in_of_its_number(number):
    k = random.key(8)
    assert torch.equal(random.fold_in(k, torch.tensor(number)), random.fold_in(k, number))
    if abs(number) < 2**31:
        assert torch.equal(random.fold_in(k, torch.tensor(number, dtype=torch.int32)), random.fold_in(k, number))


def test_split_has_the_shape_of_a_scan_input():
    keys = random.split(random.key(0), 6)
    assert keys.shape == (6, 2)
    assert torch.equal(random.split(random.key(0), 3), keys[:3])


# -- distributions ----------------------------------------------------------------------------------------------------
N = 200_000
SIGMAS = 5 / math.sqrt(N)  # five standard errors of a mean


def test_bits_are_fair():
    words = random.bits(random.key(11), (N // 4,))
    ones = torch.stack([((words >> b) & 1).double().mean() for b in range(32)])
    assert (ones - 0.5).abs().max() < 0.5 * SIGMAS * 2
    neighbours = torch.corrcoef(torch.stack([words[:-1].double(), words[1:].double()]))[0, 1]
    assert abs(neighbours) < SIGMAS * 2


def test_normal_moments_and_tails():
    x = random.normal(random.key(12), (N,), torch.float64)
    for power, moment, spread in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:  # spread: variance of x^power
        assert abs((x**power).mean() - moment) < SIGMAS * math.sqrt(spread), power
    assert abs((x.abs() > 2).double().mean() - math.erfc(math.sqrt(2))) < SIGMAS
    assert abs((x[::2] * x[1::2]).mean()) < SIGMAS * math.sqrt(2)  # the pair of Box and Muller


def test_uniform_moments_and_range():
    x = random.uniform(random.key(13), (N,), torch.float64)
    assert abs(x.mean() - 0.5) < SIGMAS * math.sqrt(1 / 12)
    assert abs(x.var() - 1 / 12) < SIGMAS * math.sqrt(1 / 180)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        y = random.uniform(random.key(13), (N,), dtype)
        assert y.dtype == dtype and y.min() >= 0 and y.max() < 1
        assert (y.double() <= x).all()


@pytest.mark.parametrize(("lower", "upper"), [(-2.0, 2.0), (-1.0, 3.0), (0.5, 0.75)])
def test_truncated_normal_moments(lower, upper):
    x = random.truncated_normal(random.key(14), (N,), lower, upper, torch.float64)
    assert x.min() >= lower and x.max() <= upper
    pdf = lambda t: math.exp(-t * t / 2) / math.sqrt(2 * math.pi)
    mass = (math.erf(upper / math.sqrt(2)) - math.erf(lower / math.sqrt(2))) / 2
    mean = (pdf(lower) - pdf(upper)) / mass
    var = 1 + (lower * pdf(lower) - upper * pdf(upper)) / mass - mean**2
    assert abs(x.mean() - mean) < SIGMAS * math.sqrt(var)
    assert abs(x.var() - var) < 3 * SIGMAS * var


@pytest.mark.parametrize("draw", [random.normal, random.truncated_normal])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dtype_is_a_rounding_of_float64(draw, dtype):
    k = random.key(15)
    assert torch.equal(draw(k, (999,), dtype=dtype), draw(k, (999,), dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli_rate(p):
    x = random.bernoulli(random.key(16), (N,), p)
    assert x.dtype == torch.bool
    assert abs(x.double().mean() - p) <= SIGMAS * math.sqrt(p * (1 - p))


def test_randint_is_uniform_and_in_range():
    x = random.randint(random.key(17), (N,), -3, 5)
    share = torch.bincount(x + 3).double() / N
    assert share.numel() == 8 and (share - 1 / 8).abs().max() < SIGMAS * math.sqrt(7 / 64)
    wide = random.randint(random.key(17), (1000,), 0, 2**31)
    assert wide.min() >= 0 and wide.max() < 2**31 and wide.max() > 2**30
    assert random.randint(random.key(17), (3,), 4, 5, torch.int32).tolist() == [4, 4, 4]


# -- errors -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: random.normal(0, (2,)),
            TypeError,
            r"normal: expected key to be an int64 tensor \[2\], got 0; make one",
        ),
        (lambda: random.bits(random.split(random.key(0), 3), (2,)), TypeError, r"got a torch.int64 tensor \[3, 2\]"),
        (
            lambda: random.fold_in(random.key(0), torch.ones(2)),
            TypeError,
            r"fold_in: expected data .* got a torch.float32",
        ),
        (
            lambda: random.normal(random.key(0), (2,), torch.int64),
            TypeError,
            r"normal: expected dtype .* got torch.int64",
        ),
        (
            lambda: random.uniform(random.key(0), (2, -1)),
            ValueError,
            r"uniform: expected sizes >= 0, got shape=\(2, -1\)",
        ),
        (lambda: random.bernoulli(random.key(0), (2,), 1.5), ValueError, r"expected 0 <= p <= 1, got p=1.5"),
        (lambda: random.randint(random.key(0), (2,), 3, 3), ValueError, r"randint: expected 1 <= high - low"),
        (lambda: random.truncated_normal(random.key(0), (2,), 1, 1), ValueError, r"expected lower < upper"),
    ],
)
def test_errors_say_what_was_expected(call, error, message):
    with pytest.raises(error, match=message):
        call()
