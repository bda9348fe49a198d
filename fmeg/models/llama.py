"""Llama and its relatives, as functions: Llama 2 and 3, Mistral, Qwen2 and Qwen3.

Pre-norm blocks of rotary, grouped-query attention and SwiGLU. The relatives differ by what `Config` says: a scaled
rotary embedding (Llama 3.1), a window (Mistral), biases on q, k, v (Qwen2), norms on q and k (Qwen3).

    x ← x + wo·attention(rope(wq·norm1(x)), rope(wk·norm1(x)), wv·norm1(x))
    x ← x + w_down·(silu(w_gate·norm2(x)) ⊙ w_up·norm2(x))

Sources (arXiv): Llama 2 2307.09288, Llama 3 2407.21783, Mistral 7B 2310.06825, Qwen2.5 2412.15115, Qwen3 2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg import P, einsum, name, ops, region, remat, scan, shard
from fmeg.models import rotary
from fmeg.models.padding import blank
from fmeg.models.table import Param, axes_of, batch_axes, cast, count_params, init_params, round_up, visible

__all__ = [
    "Config",
    "apply",
    "batch_axes",
    "block",
    "flops_per_token",
    "from_hf_config",
    "init",
    "logical_axes",
    "loss",
    "num_params",
    "parameters",
    "to_hf_config",
]


@dataclass(frozen=True)
class Config:
    """Sizes bear the names of their logical axes; see `fmeg.models.presets` for published ones.

    window          a query sees this many keys, its own included; None: all before it
    sinks           each head has a learned logit that takes up attention (gpt-oss)
    attn_gate       attention's result is gated by the sigmoid of a product with the input (Qwen3-Next)
    vocab_multiple  embedding and head are padded up to a multiple of this; the loss never sees the padding
    dtype           of the parameters
    compute_dtype   the parameters are cast to it where they are used; None: `dtype`
    remat           what the backward pass recomputes of a layer, a policy of `fmeg.remat`; None: what costs little.
                    `fmeg.recompute` knows the regions "norm", "core_attn" and "mlp"
    z_loss          weight of log² Z, which keeps the softmax's normaliser near one (PaLM, arXiv 2204.02311)
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ff: int
    max_seq: int = 8192
    rope_base: float = 10000.0
    rope_scaling: ops.RopeScaling | None = None
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    attn_gate: bool = False
    tied: bool = False
    norm_eps: float = 1e-5
    init_std: float = 0.02
    vocab_multiple: int = 128
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    remat: Any = None
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"Config: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"Config: head_dim={self.head_dim} must be even, since rope turns pairs")

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab_size, self.vocab_multiple)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each logical axis of the parameters."""
        same = ("embed", "layers", "heads", "kv_heads", "head_dim", "ff")
        return {"vocab": self.padded_vocab, **{a: getattr(self, a) for a in same}}


def attention_rows(cfg: Any, std: float, out: float) -> dict[str, Param]:
    """The table's rows of what `attend` reads, and its norm. `std` and `out`: of the initial values."""
    at = "model.layers.{}.self_attn."
    rows = {
        "norm1": Param("layers embed", "ones", "model.layers.{}.input_layernorm.weight"),
        "wq": Param("layers embed heads head_dim", std, at + "q_proj.weight", "(heads head_dim) embed"),
        "wk": Param("layers embed kv_heads head_dim", std, at + "k_proj.weight", "(kv_heads head_dim) embed"),
        "wv": Param("layers embed kv_heads head_dim", std, at + "v_proj.weight", "(kv_heads head_dim) embed"),
        "wo": Param("layers heads head_dim embed", out, at + "o_proj.weight", "embed (heads head_dim)"),
    }
    if cfg.qkv_bias:
        rows |= {
            "bq": Param("layers heads head_dim", "zeros", at + "q_proj.bias", "(heads head_dim)"),
            "bk": Param("layers kv_heads head_dim", "zeros", at + "k_proj.bias", "(kv_heads head_dim)"),
            "bv": Param("layers kv_heads head_dim", "zeros", at + "v_proj.bias", "(kv_heads head_dim)"),
        }
    if cfg.qk_norm:
        rows |= {
            "q_norm": Param("layers head_dim", "ones", at + "q_norm.weight"),
            "k_norm": Param("layers head_dim", "ones", at + "k_norm.weight"),
        }
    if cfg.sinks:
        rows["sinks"] = Param("layers heads", "zeros", at + "sinks")
    if cfg.attn_gate:
        gate = at + "gate_proj.weight"
        rows["w_attn_gate"] = Param("layers embed heads head_dim", std, gate, "(heads head_dim) embed")
    return rows


def mlp_rows(std: float, out: float) -> dict[str, Param]:
    """Those of what `swiglu` reads."""
    mlp = "model.layers.{}.mlp."
    return {
        "w_gate": Param("layers embed ff", std, mlp + "gate_proj.weight", "ff embed"),
        "w_up": Param("layers embed ff", std, mlp + "up_proj.weight", "ff embed"),
        "w_down": Param("layers ff embed", out, mlp + "down_proj.weight", "embed ff"),
    }


def parameters(cfg: Config) -> dict[str, Any]:
    """Every parameter: its axes, how it starts, what Hugging Face calls it and how it lies there."""
    std, out = cfg.init_std, cfg.init_std / (2 * cfg.layers) ** 0.5
    layers = attention_rows(cfg, std, out) | {
        "norm2": Param("layers embed", "ones", "model.layers.{}.post_attention_layernorm.weight"),
        **mlp_rows(std, out),
    }
    table = {
        "embed": Param("vocab embed", std, "model.embed_tokens.weight"),
        "layers": layers,
        "final_norm": Param("embed", "ones", "model.norm.weight"),
    }
    if not cfg.tied:
        table["head"] = Param("vocab embed", std, "lm_head.weight")
    return table


def init(key: Int[Tensor, "2"], cfg: Config) -> dict[str, Any]:
    """Initial parameters: normal with `init_std`, over √(2·layers) where a block adds to the residual (GPT-2's rule).

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> params = init(random.key(0), presets.get("tiny"))
    >>> params["layers"]["wq"].shape
    torch.Size([2, 64, 4, 16])
    """
    return init_params(key, parameters(cfg), cfg.sizes, cfg.dtype)


def logical_axes(cfg: Config) -> dict[str, Any]:
    """What each dimension of each parameter is.

    >>> from fmeg.models import presets
    >>> logical_axes(presets.get("tiny"))["layers"]["wo"]
    'layers heads head_dim embed'
    """
    return axes_of(parameters(cfg))


def norm(x: Float[Tensor, "b s d"], weight: Float[Tensor, "d"], eps: float) -> Float[Tensor, "b s d"]:
    """RMS norm of the residual stream, a region of its own."""
    with region("norm"):
        return ops.rms_norm(x, weight, eps)


def attend(
    p: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    rope: Float[Tensor, "... s half 2"],
    segments: Int[Tensor, "b s"] | None,
    cfg: Any,
) -> Float[Tensor, "b s d"]:
    """What attention adds to the residual stream `x` (batch res_seq embed)."""
    h = shard(norm(x, p["norm1"], cfg.norm_eps), P("batch", "seq", None))
    q = einsum("b s d, d h e -> b s h e", h, p["wq"])
    k = einsum("b s d, d k e -> b s k e", h, p["wk"])
    v = einsum("b s d, d k e -> b s k e", h, p["wv"])
    if cfg.qkv_bias:
        q, k, v = q + p["bq"], k + p["bk"], v + p["bv"]
    if cfg.qk_norm:
        q, k = ops.rms_norm(q, p["q_norm"], cfg.norm_eps), ops.rms_norm(k, p["k_norm"], cfg.norm_eps)
    gate = einsum("b s d, d h e -> b s h e", h, p["w_attn_gate"]) if cfg.attn_gate else None
    q, k = ops.rope(q, rope), ops.rope(k, rope)
    with region("core_attn"):
        o = ops.attention(
            q,
            k,
            v,
            window=cfg.window,
            segments=segments,
            sinks=p["sinks"] if cfg.sinks else None,
            gate=gate,
        )
    o = einsum("b s h e, h e d -> b s d", name(o, "attention"), p["wo"])
    return shard(o, P("batch", "res_seq", None))


def swiglu(
    h: Float[Tensor, "b s d"],
    w_gate: Float[Tensor, "d f"],
    w_up: Float[Tensor, "d f"],
    w_down: Float[Tensor, "f d"],
) -> Float[Tensor, "b s d"]:
    """The MLP: what it adds to the residual stream, from the normed stream."""
    h = shard(h, P("batch", "seq", None))
    gate = einsum("b s d, d f -> b s f", h, w_gate)
    up = einsum("b s d, d f -> b s f", h, w_up)
    gate, up = name(gate, "ff_in"), name(up, "ff_in")
    o = einsum("b s f, f d -> b s d", name(ops.swiglu(gate, up), "ff"), w_down)
    return shard(o, P("batch", "res_seq", None))


def block(
    p: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    rope: Float[Tensor, "... s half 2"],
    segments: Int[Tensor, "b s"] | None,
    cfg: Config,
) -> Float[Tensor, "b s d"]:
    """One layer: attention, then SwiGLU, each added to the residual stream `x` (batch res_seq embed)."""
    x = x + attend(p, x, rope, segments, cfg)
    h = norm(x, p["norm2"], cfg.norm_eps)
    with region("mlp"):
        return x + swiglu(h, p["w_gate"], p["w_up"], p["w_down"])


def apply(
    params: Mapping[str, Any],
    tokens: Int[Tensor, "b s"],
    cfg: Config,
    *,
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    real: Bool[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b s v"]:
    """Logits of the next token at each position, over the padded vocabulary: those from `vocab_size` on mean nothing.

    positions  default: 0 … s - 1 in every row
    segments   tokens attend within their own segment only
    real       where tokens are, for a batch with padding: see `fmeg.models.padding`

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny")
    >>> apply(init(random.key(0), cfg), torch.tensor([[1, 2, 3]]), cfg).shape
    torch.Size([1, 3, 384])
    """
    batch = blank({"tokens": tokens, "segments": segments, "real": real})
    tokens, segments = batch["tokens"], batch.get("segments")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    rope = ops.rope_table(positions, cfg.head_dim, cfg.rope_base, cfg.rope_scaling)
    outer = cast({k: v for k, v in params.items() if k != "layers"}, cfg.compute_dtype)
    x = shard(ops.embedding(outer["embed"], tokens), P("batch", "res_seq", None))

    def body(x: Tensor, p: Any, rope: Tensor, segments: Tensor | None) -> tuple[Tensor, None]:
        return block(cast(p, cfg.compute_dtype), x, rope, segments, cfg), None

    x, _ = scan(remat(body, cfg.remat) if cfg.remat else body, x, params["layers"], rope, segments)
    x = shard(ops.rms_norm(x, outer["final_norm"], cfg.norm_eps), P("batch", "seq", None))
    return einsum("b s d, v d -> b s v", x, outer["embed" if cfg.tied else "head"])


def loss(
    params: Mapping[str, Any], batch: Mapping[str, Tensor], cfg: Config
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """(Σ mask · cross entropy, Σ mask) of a batch with the entries of `batch_axes`; the mean is their quotient.

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny")
    >>> tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    >>> batch = {"tokens": tokens, "targets": targets, "mask": torch.tensor([[1.0, 1.0, 0.0]])}
    >>> total, count = loss(init(random.key(0), cfg), batch, cfg)
    >>> count
    tensor(2.)
    """
    batch = blank(batch)
    logits = apply(params, batch["tokens"], cfg, positions=batch.get("positions"), segments=batch.get("segments"))
    losses = ops.cross_entropy(logits, batch["targets"], z_loss=cfg.z_loss, vocab=cfg.vocab_size)
    mask = batch["mask"].to(losses.dtype)
    return (losses * mask).sum(), mask.sum()


def num_params(cfg: Config) -> int:
    """How many parameters, the vocabulary's padding apart.

    >>> from fmeg.models import presets
    >>> num_params(presets.get("llama3-8b"))
    8030261248
    """
    return count_params(parameters(cfg), cfg.sizes | {"vocab": cfg.vocab_size})


def flops_per_token(cfg: Config, seq: int) -> float:
    """Model FLOPs of a training step per token: 3 (forward, two gradients) × 2 (multiply, add) × matmul sizes.

    Megatron's convention: causal attention counts the half that it needs, for q·kᵀ and p·v 2 · seq/2 · heads · head_dim
    a layer (less in a window); the head counts; the embedding, norms and recomputation do not.

    >>> from fmeg.models import presets
    >>> flops_per_token(presets.get("llama3-8b"), 8192) / 1e9
    51.470401536
    """
    attn = cfg.embed * cfg.head_dim * ((3 if cfg.attn_gate else 2) * cfg.heads + 2 * cfg.kv_heads)
    core = 2 * visible(seq, cfg.window) * cfg.heads * cfg.head_dim
    return 6 * (cfg.layers * (attn + core + 3 * cfg.embed * cfg.ff) + cfg.vocab_size * cfg.embed)


HF_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def from_hf_config(hf: Mapping[str, Any], **changes: Any) -> Config:
    """Config of a Hugging Face `config.json` (llama, mistral, qwen2, qwen3); `changes` override fields.

    >>> hf = dict(model_type="llama", vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...           intermediate_size=16, rms_norm_eps=1e-6)
    >>> from_hf_config(hf).head_dim
    4
    """
    kind = hf["model_type"]
    base, scaling = rotary.from_hf(hf)
    sliding = kind.startswith("qwen") and bool(hf.get("use_sliding_window"))
    layer_types = set(hf.get("layer_types") or ())
    for bad, what in [
        (kind not in HF_TYPES, f"model_type={kind!r} (known: {', '.join(HF_TYPES)})"),
        (hf.get("hidden_act", "silu") != "silu", f"hidden_act={hf.get('hidden_act')!r} (known: silu)"),
        (bool(hf.get("attention_bias")), "attention_bias=True, a bias on the output projection"),
        (bool(hf.get("mlp_bias")), "mlp_bias=True"),
        (sliding or "sliding_attention" in layer_types, "layers of which only some have a window"),
    ]:
        if bad:
            raise ValueError(f"from_hf_config: this model has no {what}")
    heads = hf["num_attention_heads"]
    fields: dict[str, Any] = dict(
        vocab_size=hf["vocab_size"],
        embed=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        ff=hf["intermediate_size"],
        max_seq=hf.get("max_position_embeddings", 8192),
        rope_base=base,
        rope_scaling=scaling,
        window=hf.get("sliding_window") if kind == "mistral" else None,
        qkv_bias=kind == "qwen2",
        qk_norm=kind == "qwen3",
        tied=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        init_std=hf.get("initializer_range", 0.02),
    )
    return Config(**(fields | changes))


def to_hf_config(cfg: Config) -> dict[str, Any]:
    """The Hugging Face `config.json` that describes the same function.

    >>> from fmeg.models import presets
    >>> to_hf_config(presets.get("qwen3-8b"))["architectures"]
    ['Qwen3ForCausalLM']
    """
    traits = {"mistral": cfg.window is not None, "qwen2": cfg.qkv_bias, "qwen3": cfg.qk_norm}
    kinds = [kind for kind, has in traits.items() if has]
    for field in ("sinks", "attn_gate"):
        if getattr(cfg, field):
            raise ValueError(f"to_hf_config: no Hugging Face model of this family has {field}")
    if len(kinds) > 1:
        raise ValueError(f"to_hf_config: no Hugging Face model has the traits of {' and '.join(kinds)} together")
    kind = kinds[0] if kinds else "llama"
    hf: dict[str, Any] = dict(
        architectures=[f"{kind.capitalize()}ForCausalLM"],
        model_type=kind,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.embed,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        intermediate_size=cfg.ff,
        hidden_act="silu",
        max_position_embeddings=cfg.max_seq,
        **rotary.to_hf(cfg.rope_base, cfg.rope_scaling),
        tie_word_embeddings=cfg.tied,
        rms_norm_eps=cfg.norm_eps,
        initializer_range=cfg.init_std,
    )
    if kind == "mistral":
        hf["sliding_window"] = cfg.window
    return hf
