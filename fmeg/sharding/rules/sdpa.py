"""torch's own attention kernels: batch and heads may be sharded, sequences are whole.

Traced code rarely meets them (`fmeg.ops.intercept` makes `fmeg.ops.attention` of the calls that it covers), and they
cannot split a sequence: `fmeg.ops.attention` can.
"""

from __future__ import annotations

from fmeg.program.errors import NoRuleError
from fmeg.program.ir import Node
from fmeg.program.rule import Dims, Rule
from fmeg.sharding.rules.common import Call
from fmeg.sharding.rules.table import Table

RULES = Table()

KERNELS = (
    "flash_attention_for_cpu",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)


def _shapes(call: Call) -> tuple[dict[str, Dims], dict[str, int]]:
    """Dims of q "b (k g) s e", k "b k t e", v "b k t f" and of the masks; sizes of all factors."""
    if call["dropout_p"]:
        raise NoRuleError(
            f"{call.op} at {call.node.source}: dropout in attention would depend on the mesh; use dropout_p=0"
        )
    b, h, s, e = call.shape("query")
    kv, t = call.shape("key")[1:3]
    f = call.shape("value")[3]
    sizes = {n: z for n, z in zip("bkgstef", (b, kv, h // kv, s, t, e, f), strict=True) if z != 1}

    def dims(*terms: str) -> Dims:
        return tuple(tuple(x for x in term if x in sizes) for term in terms)

    out = {
        "query": dims("b", "kg", "s", "e"),
        "key": dims("b", "k", "t", "e"),
        "value": dims("b", "k", "t", "f"),
        "out": dims("b", "kg", "s", "f"),
    }
    for name in ("attn_mask", "attn_bias"):
        mask = call[name]
        if mask is not None:
            full = dims("b", "kg", "s", "t")[4 - mask.ndim :]
            out[name] = tuple(() if n == 1 else d for d, n in zip(full, mask.shape, strict=True))
    return out, sizes


def _statistics(shape: tuple[int, ...], names: dict[str, Dims], sizes: dict[str, int]) -> tuple[Dims, dict[str, int]]:
    """Dims of the log-sum-exp "b (k g) s", whose s a kernel may pad, or of a small result of the kernel."""
    if len(shape) < 3:
        return tuple((f"r{i}",) if n != 1 else () for i, n in enumerate(shape)), {
            f"r{i}": n for i, n in enumerate(shape) if n != 1
        }
    b, h, s, _ = names["query"]
    if s and shape[2] != sizes["s"]:
        return (b, h, ("padded",)), {"padded": shape[2]}
    return (b, h, s, *(() for _ in shape[3:])), {}


@RULES.register(*(f"aten._scaled_dot_product_{k}" for k in KERNELS))
def forward(node: Node) -> Rule:
    """`softmax(scale q kᵀ + mask) v` and the kernel's statistics."""
    call = Call(node)
    names, sizes = _shapes(call)
    outs: list[Dims] = [names["out"]]
    for v in node.outs[1:]:
        dims, more = _statistics(v.shape, names, sizes)
        outs.append(dims)
        sizes = sizes | more
    return Rule(call.ins(**names), tuple(outs), sizes, whole=frozenset(sizes) - set("bkg"))


@RULES.register(*(f"aten._scaled_dot_product_{k}_backward" for k in KERNELS))
def backward(node: Node) -> Rule:
    """Gradients of q, k, v (and of a bias): linear in the incoming one."""
    call = Call(node)
    names, sizes = _shapes(call)
    by_name: dict[str, Dims] = dict(names)
    grad = next(n for n in call.given if n.startswith("grad_out"))
    by_name[grad] = names["out"]
    for name in ("logsumexp", "cum_seq_q", "cum_seq_k", "philox_seed", "philox_offset", "rng_state", "unused"):
        if name in call.given and call.index[name]:
            by_name[name], more = _statistics(call.shape(name), names, sizes)
            sizes = sizes | more
    outs = call.kept(names["query"], names["key"], names["value"], names.get("attn_bias", ()))[: len(node.outs)]
    return Rule(call.ins(**by_name), outs, sizes, whole=frozenset(sizes) - set("bkg"), linear=frozenset({0}))
