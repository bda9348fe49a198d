"""GPT-2, as functions: layer norms, learned positions, biases everywhere, a GELU of the tanh kind.

    x ← x + wo·attention(wq·norm1(x), wk·norm1(x), wv·norm1(x))
    x ← x + w_down·gelu(w_up·norm2(x))

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Dropout falls on the embeddings
and on what each block adds to the residual stream, not on attention's probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg import P, einsum, name, ops, random, remat, scan, shard
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

    max_seq         how many positions have an embedding
    dropout         rate, applied only where `loss` or `apply` is given a key
    vocab_multiple  the embedding is padded up to a multiple of this; the loss never sees the padding
    dtype           of the parameters
    compute_dtype   the parameters are cast to it where they are used; None: `dtype`
    remat           what the backward pass recomputes of a layer, a policy of `fmeg.remat`; None: what costs little
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    head_dim: int
    ff: int
    max_seq: int = 1024
    tied: bool = True
    dropout: float = 0.0
    norm_eps: float = 1e-5
    init_std: float = 0.02
    vocab_multiple: int = 128
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    remat: Any = None

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab_size, self.vocab_multiple)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each logical axis of the parameters; as many kv_heads as heads."""
        same = {a: getattr(self, a) for a in ("embed", "layers", "heads", "head_dim", "ff")}
        return {"vocab": self.padded_vocab, "positions": self.max_seq, "kv_heads": self.heads, **same}


def parameters(cfg: Config) -> dict[str, Any]:
    """Every parameter: its axes, how it starts, what Hugging Face calls it and how it lies there."""
    std, out = cfg.init_std, cfg.init_std / (2 * cfg.layers) ** 0.5
    h = "transformer.h.{}."
    qkv = {}
    for i, (c, n) in enumerate(zip("qkv", ("heads", "kv_heads", "kv_heads"), strict=True)):
        part = (i, 3)
        qkv["w" + c] = Param(f"layers embed {n} head_dim", std, h + "attn.c_attn.weight", f"embed ({n} head_dim)", part)
        qkv["b" + c] = Param(f"layers {n} head_dim", "zeros", h + "attn.c_attn.bias", f"({n} head_dim)", part)
    layers = {
        "norm1": Param("layers embed", "ones", h + "ln_1.weight"),
        "norm1_bias": Param("layers embed", "zeros", h + "ln_1.bias"),
        **qkv,
        "wo": Param("layers heads head_dim embed", out, h + "attn.c_proj.weight", "(heads head_dim) embed"),
        "bo": Param("layers embed", "zeros", h + "attn.c_proj.bias"),
        "norm2": Param("layers embed", "ones", h + "ln_2.weight"),
        "norm2_bias": Param("layers embed", "zeros", h + "ln_2.bias"),
        "w_up": Param("layers embed ff", std, h + "mlp.c_fc.weight"),
        "b_up": Param("layers ff", "zeros", h + "mlp.c_fc.bias"),
        "w_down": Param("layers ff embed", out, h + "mlp.c_proj.weight"),
        "b_down": Param("layers embed", "zeros", h + "mlp.c_proj.bias"),
    }
    table = {
        "embed": Param("vocab embed", std, "transformer.wte.weight"),
        "pos_embed": Param("positions embed", std, "transformer.wpe.weight"),
        "layers": layers,
        "final_norm": Param("embed", "ones", "transformer.ln_f.weight"),
        "final_norm_bias": Param("embed", "zeros", "transformer.ln_f.bias"),
    }
    if not cfg.tied:
        table["head"] = Param("vocab embed", std, "lm_head.weight")
    return table


def init(key: Int[Tensor, "2"], cfg: Config) -> dict[str, Any]:
    """Initial parameters: normal with `init_std`, over √(2·layers) where a block adds to the residual; biases zero.

    >>> from fmeg.models import presets
    >>> params = init(random.key(0), presets.get("tiny-gpt2"))
    >>> params["pos_embed"].shape
    torch.Size([64, 64])
    """
    return init_params(key, parameters(cfg), cfg.sizes, cfg.dtype)


def logical_axes(cfg: Config) -> dict[str, Any]:
    """What each dimension of each parameter is.

    >>> from fmeg.models import presets
    >>> logical_axes(presets.get("gpt2"))["pos_embed"]
    'positions embed'
    """
    return axes_of(parameters(cfg))


def block(
    p: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    segments: Int[Tensor, "b s"] | None,
    key: Int[Tensor, "2"] | None,
    cfg: Config,
) -> Float[Tensor, "b s d"]:
    """One layer: attention, then the MLP, each added to the residual stream `x` (batch res_seq embed)."""
    h = shard(ops.layer_norm(x, p["norm1"], p["norm1_bias"], cfg.norm_eps), P("batch", "seq", None))
    q = einsum("b s d, d h e -> b s h e", h, p["wq"]) + p["bq"]
    k = einsum("b s d, d h e -> b s h e", h, p["wk"]) + p["bk"]
    v = einsum("b s d, d h e -> b s h e", h, p["wv"]) + p["bv"]
    o = name(ops.attention(q, k, v, causal=True, segments=segments), "attention")
    o = shard(einsum("b s h e, h e d -> b s d", o, p["wo"]), P("batch", "res_seq", None)) + p["bo"]
    x = x + _dropout(o, cfg.dropout, key, "attention")

    h = shard(ops.layer_norm(x, p["norm2"], p["norm2_bias"], cfg.norm_eps), P("batch", "seq", None))
    h = name(ops.gelu(einsum("b s d, d f -> b s f", h, p["w_up"]) + p["b_up"], "tanh"), "ff")
    o = shard(einsum("b s f, f d -> b s d", h, p["w_down"]), P("batch", "res_seq", None)) + p["b_down"]
    return x + _dropout(o, cfg.dropout, key, "ff")


def _dropout(x: Tensor, rate: float, key: Tensor | None, site: str) -> Tensor:
    return x if key is None or rate == 0 else ops.dropout(x, rate, random.fold_in(key, site))


def apply(
    params: Mapping[str, Any],
    tokens: Int[Tensor, "b s"],
    cfg: Config,
    *,
    positions: Int[Tensor, "b s"] | None = None,
    segments: Int[Tensor, "b s"] | None = None,
    real: Bool[Tensor, "b s"] | None = None,
    key: Int[Tensor, "2"] | None = None,
) -> Float[Tensor, "b s v"]:
    """Logits of the next token at each position, over the padded vocabulary: those from `vocab_size` on mean nothing.

    positions  default: 0 … s - 1 in every row
    segments   tokens attend within their own segment only
    real       where tokens are, for a batch with padding: see `fmeg.models.padding`
    key        of the dropout masks; None: no dropout

    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny-gpt2")
    >>> apply(init(random.key(0), cfg), torch.tensor([[1, 2, 3]]), cfg).shape
    torch.Size([1, 3, 384])
    """
    if tokens.shape[1] > cfg.max_seq:
        raise ValueError(
            f"apply: tokens has {tokens.shape[1]} positions, cfg.max_seq={cfg.max_seq} have an embedding; shorten it"
        )
    batch = blank({"tokens": tokens, "segments": segments, "real": real})
    tokens, segments = batch["tokens"], batch.get("segments")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    outer = cast({k: v for k, v in params.items() if k != "layers"}, cfg.compute_dtype)
    x = shard(ops.embedding(outer["embed"], tokens), P("batch", "res_seq", None))
    x = _dropout(x + ops.embedding(outer["pos_embed"], positions), cfg.dropout, key, "embed")

    def body(x: Tensor, layer: Any, segments: Tensor | None, key: Tensor | None) -> tuple[Tensor, None]:
        p, i = layer
        return block(
            cast(p, cfg.compute_dtype), x, segments, None if key is None else random.fold_in(key, i), cfg
        ), None

    layers = (params["layers"], torch.arange(cfg.layers, device=tokens.device))
    x, _ = scan(remat(body, cfg.remat) if cfg.remat else body, x, layers, segments, key)
    x = ops.layer_norm(x, outer["final_norm"], outer["final_norm_bias"], cfg.norm_eps)
    x = shard(x, P("batch", "seq", None))
    return einsum("b s d, v d -> b s v", x, outer["embed" if cfg.tied else "head"])


def loss(
    params: Mapping[str, Any], batch: Mapping[str, Tensor], cfg: Config, key: Int[Tensor, "2"] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """(Σ mask · cross entropy, Σ mask) of a batch with the entries of `batch_axes`; the mean is their quotient.

    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny-gpt2")
    >>> tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    >>> batch = {"tokens": tokens, "targets": targets, "mask": torch.tensor([[1.0, 1.0, 0.0]])}
    >>> total, count = loss(init(random.key(0), cfg), batch, cfg)
    >>> count
    tensor(2.)
    """
    batch = blank(batch)
    where = {"positions": batch.get("positions"), "segments": batch.get("segments")}
    losses = ops.cross_entropy(
        apply(params, batch["tokens"], cfg, **where, key=key), batch["targets"], vocab=cfg.vocab_size
    )
    mask = batch["mask"].to(losses.dtype)
    return (losses * mask).sum(), mask.sum()


def num_params(cfg: Config) -> int:
    """How many parameters, the vocabulary's padding apart.

    >>> from fmeg.models import presets
    >>> num_params(presets.get("gpt2"))
    124439808
    """
    return count_params(parameters(cfg), cfg.sizes | {"vocab": cfg.vocab_size})


def flops_per_token(cfg: Config, seq: int) -> float:
    """Model FLOPs of a training step per token, as `fmeg.models.llama.flops_per_token` counts them.

    >>> from fmeg.models import presets
    >>> flops_per_token(presets.get("gpt2"), 1024) / 1e9
    0.797815...
    """
    core = 2 * visible(seq, None) * cfg.heads * cfg.head_dim
    layer = 4 * cfg.embed * cfg.heads * cfg.head_dim + core + 2 * cfg.embed * cfg.ff
    return 6 * (cfg.layers * layer + cfg.vocab_size * cfg.embed)


HF_TYPES = ("gpt2",)


def from_hf_config(hf: Mapping[str, Any], **changes: Any) -> Config:
    """Config of a Hugging Face GPT-2 `config.json`; `changes` override fields. Its dropout is not taken over.

    >>> from_hf_config(dict(model_type="gpt2", vocab_size=100, n_embd=8, n_layer=1, n_head=2)).ff
    32
    """
    for field, value in [
        ("activation_function", "gelu_new"),
        ("scale_attn_weights", True),
        ("scale_attn_by_inverse_layer_idx", False),
        ("add_cross_attention", False),
    ]:
        if hf.get(field, value) != value:
            raise ValueError(f"from_hf_config: {field}={hf[field]!r}; this model has {value!r} only")
    embed, heads = hf["n_embd"], hf["n_head"]
    fields: dict[str, Any] = dict(
        vocab_size=hf["vocab_size"],
        embed=embed,
        layers=hf["n_layer"],
        heads=heads,
        head_dim=embed // heads,
        ff=hf.get("n_inner") or 4 * embed,
        max_seq=hf.get("n_positions", 1024),
        tied=bool(hf.get("tie_word_embeddings", True)),
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        init_std=hf.get("initializer_range", 0.02),
    )
    return Config(**(fields | changes))


def to_hf_config(cfg: Config) -> dict[str, Any]:
    """The Hugging Face `config.json` that describes the same function.

    >>> from fmeg.models import presets
    >>> to_hf_config(presets.get("gpt2"))["n_embd"]
    768
    """
    if cfg.embed != cfg.heads * cfg.head_dim:
        raise ValueError(
            f"to_hf_config: GPT-2 needs embed = heads · head_dim, got {cfg.embed} and {cfg.heads} · {cfg.head_dim}"
        )
    return dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=cfg.vocab_size,
        n_embd=cfg.embed,
        n_layer=cfg.layers,
        n_head=cfg.heads,
        n_inner=cfg.ff,
        n_positions=cfg.max_seq,
        activation_function="gelu_new",
        attn_pdrop=0.0,
        embd_pdrop=cfg.dropout,
        resid_pdrop=cfg.dropout,
        tie_word_embeddings=cfg.tied,
        layer_norm_epsilon=cfg.norm_eps,
        initializer_range=cfg.init_std,
    )
