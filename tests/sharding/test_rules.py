"""Every sharding rule of a plain torch operation, against the operation on one device."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmeg.program.errors import NoRuleError
from fmeg.program.ir import Node, TensorType, Value, op_name
from fmeg.program.rule import Rule
from fmeg.sharding.rules import register, rule_for
from fmeg.sharding.rules.coverage import coverage
from fmeg.sharding.rules.creation import standalone
from fmeg.sharding.rules.registry import FAMILIES, TABLE
from fmeg.sharding.rules.sdpa import KERNELS
from fmeg.sharding.rules.view import factorise
from fmeg.testing.rulecheck import check_rule, make_node, validate
from tests.sharding.factors import contracted

_spec = importlib.util.spec_from_file_location("cases", Path(__file__).with_name("cases.py"))
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
CASES, f, i, b = _module.CASES, _module.f, _module.i, _module.b

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]

# no kernel on a CPU, or results that are not defined
NOT_RUN = {f"aten._scaled_dot_product_{k}{end}" for k in KERNELS[1:] for end in ("", "_backward")}
NOT_RUN |= {"aten._fused_rms_norm_backward", "aten.empty.memory_format", "aten.empty_like", "aten.new_empty"}


@pytest.mark.parametrize("name", CASES)
def test_rule(name: str) -> None:
    op, args, kwargs = CASES[name]
    check_rule(op, *args, **kwargs)


def test_every_rule_has_a_case() -> None:
    reached = set()
    for op, _, _ in CASES.values():
        name = op_name(op)
        reached.add(name if name in TABLE else name.rpartition(".")[0])
    refused = {name for name, fn in TABLE.items() if (fn.__doc__ or "").startswith("Refused")}
    missing = {name for name in TABLE if hasattr(aten, name.split(".")[1])} - reached - refused - NOT_RUN
    assert not missing


def test_names_exist() -> None:
    """A misspelt name would never be met; torch 2.11 lacks a few."""
    unknown = {name for name in TABLE if not hasattr(aten, name.split(".")[1])}
    assert unknown <= {"aten._fused_rms_norm", "aten._fused_rms_norm_backward"}


ZEROS = {
    "where": (aten.where.self, (b(4, 2), f(4, 2), torch.zeros(4, 2).double()), 2),
    "add": (aten.add.Tensor, (torch.zeros(2).double(), f(4, 2)), 0),
    "cat": (aten.cat.default, ([f(4, 2), torch.zeros(4, 1).double(), f(4, 2)], 1), 1),
    "scatter": (aten.scatter.src, (torch.zeros(4, 8).double(), 1, i(8, 4, 1), f(4, 1)), 0),
    "scatter_add": (aten.scatter_add.default, (torch.zeros(4, 8).double(), 1, i(8, 4, 4), f(4, 4)), 0),
    "index_put": (aten.index_put.default, (torch.zeros(8, 4).double(), [i(8, 4)], f(4, 4), True), 0),
    "slice_scatter": (aten.slice_scatter.default, (torch.zeros(4, 4).double(), f(4, 2), 1, 1, 3), 0),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_join_a_pending_sum(name: str) -> None:
    """The other operands may be pending alone when one is zeros by construction, and may not when it is not."""
    op, args, zero = ZEROS[name]
    node, _, _ = make_node(op, args, {}, (zero,))
    free = rule_for(node)
    bound = rule_for(make_node(op, args, {})[0])
    assert free.linear and zero not in free.linear and zero in bound.linear and bound.joint
    check_rule(op, *args, zeros=(zero,))


def _arange(info, *args):
    return aten.arange(info.size("d0"))


WRONG = {
    "exp is not linear": (aten.exp.default, (f(4),), lambda r: replace(r, linear=frozenset({0}))),
    "x + 1 is not linear": (aten.add.Tensor, (f(4), 1.0), lambda r: replace(r, linear=frozenset({0}))),
    "a + b is not linear in a alone": (aten.add.Tensor, (f(4), f(4)), lambda r: replace(r, joint=False)),
    "a * b is not linear in both": (aten.mul.Tensor, (f(4), f(4)), lambda r: replace(r, joint=True)),
    "a running sum goes on": (aten.cumsum.default, (f(4, 4), 1), lambda r: replace(r, local=None)),
    "the dimension of cumprod is whole": (aten.cumprod.default, (f(4, 4), 1), lambda r: replace(r, whole=frozenset())),
    "softmax needs sums over shards": (aten._softmax.default, (f(4, 4), 1, False), lambda r: replace(r, local=None)),
    "a mean divides by the global count": (aten.mean.default, (f(4),), lambda r: replace(r, local=None)),
    "max is no sum": (aten.amax.default, (f(4, 4), [1]), lambda r: replace(r, resolved=frozenset())),
    "a bias is added once": (aten.addmm.default, (f(4), f(2, 4), f(4, 4)), lambda r: replace(r, local=None)),
    "arange counts globally": (aten.arange.start_step, (0, 4, 1), lambda r: replace(r, local=_arange)),
    "a shard is not the table": (aten.embedding.default, (f(8, 2), i(8, 4)), lambda r: replace(r, local=None)),
    "factors fit shapes": (aten.t.default, (f(4, 2),), lambda r: replace(r, outs=r.ins)),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rules_are_found(name: str) -> None:
    op, args, spoil = WRONG[name]
    with pytest.raises(AssertionError):
        check_rule(op, *args, rule=lambda node: spoil(rule_for(node)))


def _rule(name: str) -> Rule:
    op, args, kwargs = CASES[name]
    return rule_for(make_node(op, args, kwargs)[0])


def test_what_rules_allow() -> None:
    """A rule that keeps everything whole is sound and useless: these must allow this much."""
    assert contracted(_rule("mm")) == {"k"} and _rule("mm").linear == {0, 1} and not _rule("mm").whole
    assert _rule("view merge").outs == ((("f0", "f1"), ("f2",), ()),)
    assert _rule("add.Tensor").joint and _rule("add.Tensor").linear == {0, 1}
    assert _rule("add.Tensor number").linear == frozenset() and _rule("add.Tensor zero").linear == {0}
    assert _rule("_to_copy float to int").linear == frozenset() and _rule("_to_copy int to float").linear == {0}
    assert contracted(_rule("embedding")) == {"w0"} and not _rule("embedding").whole
    assert not _rule("embedding_dense_backward").whole and not _rule("_log_softmax").whole
    assert _rule("native_layer_norm").whole == {"d2"}
    assert _rule("index_put").whole == frozenset() and contracted(_rule("index.Tensor apart")) == {"k0", "k2"}
    assert _rule("_scaled_dot_product_flash_attention_for_cpu").whole == {"s", "t", "e", "f"}
    assert _rule("nll_loss_forward plain 1").whole == frozenset()
    assert not _rule("cumsum").whole and _rule("cumsum").linear == {0} and not _rule("cumsum integers").linear


shapes = st.lists(st.sampled_from([1, 2, 3, 4, 6]), max_size=4)


@settings(max_examples=60, deadline=None)
@given(shapes, st.randoms(use_true_random=False))
def test_any_view(shape: list[int], random) -> None:
    """Factors multiply to the sizes, and views of shards are shards of views."""
    primes = [p for n in shape for p in {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3]}[n]]
    random.shuffle(primes)
    other: list[int] = []
    while primes:
        n = random.randint(1, len(primes))
        other.append(prod(primes[:n]))
        primes = primes[n:]
    other.insert(random.randint(0, len(other)), 1)
    ins, outs, sizes, whole = factorise(shape, other)
    for dims, size in ((ins, shape), (outs, other)):
        assert [prod(sizes[x] for x in d) for d in dims] == size
    assert all(sum(x in d for d in dims) == 1 for x in set(sizes) - whole for dims in (ins, outs))
    check_rule(aten.view.default, f(*shape), other, backends=("loop",))


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_gpu_attention_shapes(kernel: str) -> None:
    """Shapes of kernels that do not run here: q "b h s e", statistics "b h s" or padded."""

    def value(*shape: int) -> Value:
        return Value(TensorType(shape, torch.float16))

    q, k, v, lse, seed = value(2, 4, 6, 8), value(2, 4, 6, 8), value(2, 4, 6, 8), value(2, 4, 32), value()
    fwd = getattr(aten, f"_scaled_dot_product_{kernel}").default
    args = {
        "flash_attention": (q, k, v),
        "efficient_attention": (q, k, v, None, True),
        "cudnn_attention": (q, k, v, None, True),
    }
    node = Node(fwd, args[kernel], {}, (value(2, 4, 6, 8), lse, seed), tags={"results": (0, 1, 6)})
    validate(node, rule_for(node))
    assert set(rule_for(node).sizes) - rule_for(node).whole == {"b", "k"}
    bwd = getattr(aten, f"_scaled_dot_product_{kernel}_backward").default
    more = {
        "flash_attention": (lse, None, None, 6, 6, 0.0, True, seed, seed),
        "efficient_attention": (None, None, lse, seed, seed, 0.0, [True, True, True, False]),
        "cudnn_attention": (lse, seed, seed, None, None, None, 6, 6, 0.0, True),
    }[kernel]
    if kernel == "efficient_attention":
        given_ = (value(2, 4, 6, 8), q, k, v, None, value(2, 4, 6, 8), *more[2:])
    else:
        given_ = (value(2, 4, 6, 8), q, k, v, value(2, 4, 6, 8), *more)
    node = Node(bwd, given_, {}, tuple(value(2, 4, 6, 8) for _ in range(3)), tags={"results": (0, 1, 2)})
    validate(node, rule_for(node))
    assert rule_for(node).linear == {0}


def test_no_rule_names_the_operation_and_shows_how() -> None:
    x = Value(TensorType((4, 8), torch.float32))
    node = Node(aten.glu.default, (x,), {}, (Value(TensorType((4, 4), torch.float32)),), source="model.py:3 mlp")
    with pytest.raises(NoRuleError, match=r"no sharding rule for aten.glu.default at model.py:3 mlp: f32\[4, 8\]") as e:
        rule_for(node)
    code = "\n".join(line[4:] for line in str(e.value).splitlines() if line.startswith("    "))
    try:
        exec(code, {})
        validate(node, rule_for(node))
    finally:
        TABLE.pop("aten.glu.default", None)


def test_refusals_say_why() -> None:
    x = Value(TensorType((4, 8), torch.float32))
    node = Node(
        aten.as_strided.default, (x, [4], [8]), {}, (Value(TensorType((4,), torch.float32)),), source="m.py:1 f"
    )
    with pytest.raises(NoRuleError, match=r"as_strided.default at m.py:1 f has no sharding rule: strides"):
        rule_for(node)
    with pytest.raises(NoRuleError, match="fmeg.random"):
        rule_for(Node(aten.rand.default, ([4],), {}))
    mask = Value(TensorType((4,), torch.bool))
    with pytest.raises(NoRuleError, match=r"aten\.index\.Tensor"):
        rule_for(Node(aten.index.Tensor, (x, [mask]), {}, (x,)))


def test_a_rule_is_registered_once() -> None:
    with pytest.raises(
        ValueError, match=r"aten\.mm has a sharding rule already \(fmeg\.sharding\.rules\.matmul\.product\)"
    ):
        register("aten.mm")(lambda node: None)
    with pytest.raises(ValueError, match="already"):
        register([aten.topk])(lambda node: None)
    assert sum(len(family.RULES) for family in FAMILIES) == len(TABLE)


def test_like_operations_stand_alone() -> None:
    x = Value(TensorType((2, 3), torch.float64))
    y = Value(TensorType((4,), torch.float32))
    node = standalone(Node(aten.new_full.default, (x, [4], 2.5), {"dtype": torch.float32}, (y,), "a.py:1 f"))
    assert (node.op, node.args, node.kwargs) == (aten.full.default, ([4], 2.5), {"dtype": torch.float32})
    assert node.outs == (y,) and node.source == "a.py:1 f" and node.operands() == []
    other = Node(aten.sin.default, (x,), {}, (x,))
    assert standalone(other) is other


def test_the_coverage_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "coverage.md").read_text() == coverage(), (
        "run: python -m fmeg.sharding.rules.coverage > docs/coverage.md"
    )
