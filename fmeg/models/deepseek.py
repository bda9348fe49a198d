"""DeepSeek-V2 and -V3: multi-head latent attention, first a few dense layers, then mixtures of experts.

    x ← x + latent attention(norm1(x))                        see `fmeg.models.mla`
    x ← x + mlp(norm2(x)), or the experts, in all later layers   see `fmeg.models.mixture`

V3 may also predict further tokens: see `fmeg.models.mtp`. Three stacks of layers, three scans: `dense_layers`,
`layers`, `mtp_layers`. Sources: DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg import P, einsum, ops, region, remat, scan, shard
from fmeg.models import mixture, mla, mtp, rotary
from fmeg.models.llama import norm, swiglu
from fmeg.models.padding import blank
from fmeg.models.table import Param, axes_of, batch_axes, cast, count_params, init_params, round_up, visible

__all__ = [
    "Config",
    "apply",
    "batch_axes",
    "flops_per_token",
    "from_hf_config",
    "init",
    "logical_axes",
    "loss",
    "num_params",
    "parameters",
    "to_hf_config",
]

STACKS = ("dense_layers", "layers", "mtp_layers")


@dataclass(frozen=True)
class Config:
    """Sizes bear the names of their logical axes; see `fmeg.models.presets` for published ones.

    dense_layers    how many layers with an MLP, of inner size `ff`, come before the `layers` with experts
    mtp_layers, mtp_weight                               see `fmeg.models.mtp`
    q_latent, kv_latent, nope_dim, rope_dim, v_dim       see `fmeg.models.mla`
    experts, expert_ff, router, shared_ff, router_bias   see `fmeg.models.mixture`
    vocab_multiple, dtype, compute_dtype, remat, z_loss  as in `fmeg.models.llama.Config`
    """

    vocab_size: int
    embed: int
    dense_layers: int
    layers: int
    heads: int
    q_latent: int | None
    kv_latent: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    ff: int
    experts: int
    expert_ff: int
    router: ops.Router
    shared_ff: int
    router_bias: bool = False
    mtp_layers: int = 0
    mtp_weight: float = 0.1
    max_seq: int = 163840
    rope_base: float = 10000.0
    rope_scaling: ops.YarnScaling | None = None
    tied: bool = False
    norm_eps: float = 1e-6
    latent_eps: float = 1e-6
    init_std: float = 0.02
    vocab_multiple: int = 128
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    remat: Any = None
    z_loss: float = 0.0
    shared_gate: bool = False

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"Config: layers={self.layers}, those with experts, must be at least 1")
        if self.rope_dim % 2:
            raise ValueError(f"Config: rope_dim={self.rope_dim} must be even, since rope turns pairs")

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab_size, self.vocab_multiple)

    @property
    def attn_scale(self) -> float:
        """Of the products q·k: 1/√(size of a head), times what a stretched rotary embedding asks for."""
        factor = self.rope_scaling.softmax_factor if self.rope_scaling else 1.0
        return float(factor * (self.nope_dim + self.rope_dim) ** -0.5)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each logical axis of the parameters."""
        same = {a: getattr(self, a) for a in ("embed", "ff", *STACKS)}
        own = {"vocab": self.padded_vocab, "mtp_in": 2 * self.embed}
        return own | same | mla.axis_sizes(self) | mixture.axis_sizes(self)


def parameters(cfg: Config) -> dict[str, Any]:
    """Every parameter: its axes, how it starts, what Hugging Face calls it and how it lies there."""
    std, out = cfg.init_std, cfg.init_std / (2 * (cfg.dense_layers + cfg.layers)) ** 0.5
    table: dict[str, Any] = {"embed": Param("vocab embed", std, "model.embed_tokens.weight")}
    first = 0
    for stack in STACKS:
        if not cfg.sizes[stack]:
            continue
        row = lambda axes, init, name, theirs="", s=stack, n=first: Param(
            f"{s} {axes}", init, "model.layers.{}." + name + ".weight", theirs, first=n
        )
        rows = {
            "norm1": row("embed", "ones", "input_layernorm"),
            **mla.parameters(cfg, stack, first, std, out),
            "norm2": row("embed", "ones", "post_attention_layernorm"),
        }
        if stack == "dense_layers":
            rows |= {
                "w_gate": row("embed ff", std, "mlp.gate_proj", "ff embed"),
                "w_up": row("embed ff", std, "mlp.up_proj", "ff embed"),
                "w_down": row("ff embed", out, "mlp.down_proj", "embed ff"),
            }
        else:
            rows |= mixture.parameters(cfg, mixture.DEEPSEEK, stack, first, std, out)
        if stack == "mtp_layers":
            rows |= mtp.parameters(first, std)
        table[stack] = rows
        first += cfg.sizes[stack]
    table["final_norm"] = Param("embed", "ones", "model.norm.weight")
    if not cfg.tied:
        table["head"] = Param("vocab embed", std, "lm_head.weight")
    return table


def init(key: Int[Tensor, "2"], cfg: Config) -> dict[str, Any]:
    """Initial parameters: normal with `init_std`, over √(2·layers) where a block adds to the residual.

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> params = init(random.key(0), presets.get("tiny-deepseek"))
    >>> params["layers"]["wk"].shape, params["mtp_layers"]["w_in"].shape
    (torch.Size([2, 16, 4, 16]), torch.Size([1, 128, 64]))
    """
    return init_params(key, parameters(cfg), cfg.sizes, cfg.dtype)


def logical_axes(cfg: Config) -> dict[str, Any]:
    """What each dimension of each parameter is.

    >>> from fmeg.models import presets
    >>> logical_axes(presets.get("deepseek-v3"))["dense_layers"]["wo"]
    'dense_layers heads v_dim embed'
    """
    return axes_of(parameters(cfg))


def attend(p: Mapping[str, Tensor], x: Tensor, rope: Tensor, segments: Tensor | None, cfg: Config) -> Tensor:
    """The residual stream `x` (batch res_seq embed) with what attention adds."""
    o = mla.attention(p, norm(x, p["norm1"], cfg.norm_eps), rope, segments, cfg)
    return x + shard(o, P("batch", "res_seq", None))


def dense_block(p: Mapping[str, Tensor], x: Tensor, rope: Tensor, segments: Tensor | None, cfg: Config) -> Tensor:
    """One of the first layers."""
    x = attend(p, x, rope, segments, cfg)
    h = norm(x, p["norm2"], cfg.norm_eps)
    with region("mlp"):
        return x + swiglu(h, p["w_gate"], p["w_up"], p["w_down"])


def moe_block(
    p: Mapping[str, Tensor], x: Tensor, rope: Tensor, segments: Tensor | None, cfg: Config, real: Tensor | None = None
) -> tuple[Tensor, ops.RouterOutput]:
    """One of the later layers, and where tokens went."""
    x = attend(p, x, rope, segments, cfg)
    o, chosen = mixture.mixture(p, norm(x, p["norm2"], cfg.norm_eps), cfg, real)
    return x + o, chosen


def hidden(
    params: Mapping[str, Any], batch: Mapping[str, Tensor], cfg: Config, rope: Tensor
) -> tuple[Float[Tensor, "b s d"], mixture.Stats]:
    """What the head is applied to, and the sums of the routers' counts and losses."""
    segments, real = batch.get("segments"), batch.get("real")

    def dense(x: Tensor, p: Any, rope: Tensor, segments: Any) -> tuple[Tensor, None]:
        return dense_block(cast(p, cfg.compute_dtype), x, rope, segments, cfg), None

    def moe(carry: Any, layer: Any, rope: Tensor, segments: Any, real: Any) -> tuple[Any, None]:
        (x, stats), (p, i) = carry, layer
        x, chosen = moe_block(mixture.cast_layer(p, cfg.compute_dtype), x, rope, segments, cfg, real)
        return (x, mixture.add_stats(stats, chosen, i)), None

    x = embed(params, batch["tokens"], cfg)
    if cfg.dense_layers:
        x, _ = scan(_remat(dense, cfg), x, params["dense_layers"], rope, segments)
    layers = (params["layers"], torch.arange(cfg.layers, device=x.device))
    (x, stats), _ = scan(_remat(moe, cfg), (x, mixture.no_stats(cfg, cfg.layers, x)), layers, rope, segments, real)
    return ops.rms_norm(x, cast(params["final_norm"], cfg.compute_dtype), cfg.norm_eps), stats


def embed(params: Mapping[str, Any], tokens: Int[Tensor, "b s"], cfg: Config) -> Float[Tensor, "b s d"]:
    """The beginning of the residual stream."""
    return shard(ops.embedding(cast(params["embed"], cfg.compute_dtype), tokens), P("batch", "res_seq", None))


def head(params: Mapping[str, Any], x: Float[Tensor, "b s d"], cfg: Config) -> Float[Tensor, "b s v"]:
    """Logits over the padded vocabulary."""
    w = cast(params["embed" if cfg.tied else "head"], cfg.compute_dtype)
    return einsum("b s d, v d -> b s v", shard(x, P("batch", "seq", None)), w)


def table(batch: Mapping[str, Tensor], cfg: Config) -> Tensor:
    """The rotary table."""
    tokens, positions = batch["tokens"], batch.get("positions")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    return ops.rope_table(positions, cfg.rope_dim, cfg.rope_base, cfg.rope_scaling)


def _remat(body: Any, cfg: Config) -> Any:
    return remat(body, cfg.remat) if cfg.remat else body


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
    >>> cfg = presets.get("tiny-deepseek")
    >>> apply(init(random.key(0), cfg), torch.tensor([[1, 2, 3]]), cfg).shape
    torch.Size([1, 3, 384])
    """
    batch = blank({"tokens": tokens, "positions": positions, "segments": segments, "real": real})
    return head(params, hidden(params, batch, cfg, table(batch, cfg))[0], cfg)


def loss(params: Mapping[str, Any], batch: Mapping[str, Tensor], cfg: Config) -> tuple[list[Any], dict[str, Tensor]]:
    """([(Σ mask · cross entropy, Σ mask), a pair for each depth, a pair for each loss of the router], {"counts": …}).

    Counts of tokens an expert are "layers experts", those of `mtp_layers` last; summed over a step they are what
    `update_bias` takes.

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny-deepseek")
    >>> tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    >>> batch = {"tokens": tokens, "targets": targets, "mask": torch.ones(1, 3)}
    >>> pairs, aux = loss(init(random.key(0), cfg), batch, cfg)
    >>> [count.item() for _, count in pairs], aux["counts"].shape
    ([3.0, 2.0, 1.0], torch.Size([3, 8]))
    """
    batch = blank(batch)
    rope = table(batch, cfg)
    x, stats = hidden(params, batch, cfg, rope)
    losses = ops.cross_entropy(head(params, x, cfg), batch["targets"], z_loss=cfg.z_loss, vocab=cfg.vocab_size)
    mask = batch["mask"].to(losses.dtype)
    pairs = [((losses * mask).sum(), mask.sum())]
    if cfg.mtp_layers:
        more, stats = mtp.further(params, batch, cfg, x, stats, rope, layer=moe_block, embed=embed, head=head)
        pairs += more
    return pairs + mixture.loss_pairs(stats, batch, cfg, losses), {"counts": stats["counts"]}


def update_bias(
    params: Mapping[str, Any], counts: Int[Tensor, "l e"], cfg: Config, rate: float = 1e-3
) -> dict[str, Any]:
    """Parameters with the routers' biases moved towards equal use of experts; after the optimizer, once a step.

    counts   `loss`'s, summed over the step

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny-deepseek")
    >>> params = init(random.key(0), cfg)
    >>> counts = torch.arange(8).expand(3, 8)
    >>> update_bias(params, counts, cfg)["layers"]["router_bias"][0, :2]
    tensor([0.0010, 0.0010])
    """
    out = dict(params)
    for stack, part in zip(("layers", "mtp_layers"), counts.split([cfg.layers, cfg.mtp_layers]), strict=True):
        if cfg.sizes[stack]:
            bias = ops.update_bias(params[stack]["router_bias"], part, rate)
            out[stack] = {**params[stack], "router_bias": bias}
    return out


def num_params(cfg: Config) -> int:
    """How many parameters, the vocabulary's padding apart; multi-token prediction and biases of routers count.

    >>> from fmeg.models import presets
    >>> num_params(presets.get("deepseek-v2-lite"))
    15706484224
    """
    return count_params(parameters(cfg), cfg.sizes | {"vocab": cfg.vocab_size})


def flops_per_token(cfg: Config, seq: int) -> float:
    """Model FLOPs of a training step per token, as `fmeg.models.llama.flops_per_token` counts them, multi-token
    prediction and its use of the head included.

    >>> from fmeg.models import presets
    >>> flops_per_token(presets.get("deepseek-v2-lite"), 4096) / 1e9
    16.406544384
    """
    qk = cfg.nope_dim + cfg.rope_dim
    q = cfg.embed * cfg.heads * qk
    if cfg.q_latent is not None:
        q = cfg.q_latent * (cfg.embed + cfg.heads * qk)
    kv = cfg.embed * (cfg.kv_latent + cfg.rope_dim) + cfg.kv_latent * cfg.heads * (cfg.nope_dim + cfg.v_dim)
    attn = q + kv + cfg.heads * cfg.v_dim * cfg.embed + visible(seq, None) * cfg.heads * (qk + cfg.v_dim)
    moe, top = attn + mixture.active(cfg), cfg.vocab_size * cfg.embed
    total = cfg.dense_layers * (attn + 3 * cfg.embed * cfg.ff) + cfg.layers * moe + top
    return 6 * (total + cfg.mtp_layers * (moe + 2 * cfg.embed**2 + top))


HF_TYPES = ("deepseek_v2", "deepseek_v3")


def from_hf_config(hf: Mapping[str, Any], **changes: Any) -> Config:
    """Config of a Hugging Face `config.json` (deepseek_v2, deepseek_v3); `changes` override fields.

    The balance loss is over sequences, as in both papers. `transformers` saves no modules of multi-token prediction,
    whatever its config says: for its own checkpoints give `mtp_layers=0`.

    >>> from fmeg.models import presets
    >>> cfg = presets.get("deepseek-v2")
    >>> from_hf_config(to_hf_config(cfg)).router == cfg.router
    True
    """
    kind = hf["model_type"]
    base, scaling = rotary.from_hf(hf)
    v3, grouped = kind == "deepseek_v3", hf.get("topk_method", "noaux_tc") != "greedy"
    for bad, what in [
        (kind not in HF_TYPES, f"model_type={kind!r} (known: {', '.join(HF_TYPES)})"),
        (scaling is not None and not isinstance(scaling, ops.YarnScaling), f"rotary embedding with {scaling}"),
        (hf.get("hidden_act", "silu") != "silu", f"hidden_act={hf.get('hidden_act')!r} (known: silu)"),
        (bool(hf.get("attention_bias")) or bool(hf.get("mlp_bias")), "attention_bias or mlp_bias"),
        (not v3 and bool(hf.get("norm_topk_prob")), "norm_topk_prob=True in DeepSeek-V2, which transformers ignores"),
        (v3 and not hf.get("rope_interleave", True), "rope_interleave=False"),
        (hf.get("moe_layer_freq", 1) != 1, "moe_layer_freq other than 1"),
    ]:
        if bad:
            raise ValueError(f"from_hf_config: this model has no {what}")
    dense = hf.get("first_k_dense_replace", 0)
    router = ops.Router(
        hf["num_experts_per_tok"],
        "sigmoid" if v3 else "softmax",
        renormalize=v3 and bool(hf.get("norm_topk_prob", True)),
        scale=hf.get("routed_scaling_factor", 1.0),
        groups=(hf.get("n_group") or 1) if grouped else 1,
        top_groups=(hf.get("topk_group") or 1) if grouped else 1,
        group_score="top2sum" if v3 else "max",
        sequence_loss=hf.get("aux_loss_alpha", 1e-4 if v3 else 1e-3),
    )
    fields: dict[str, Any] = dict(
        vocab_size=hf["vocab_size"],
        embed=hf["hidden_size"],
        dense_layers=dense,
        layers=hf["num_hidden_layers"] - dense,
        heads=hf["num_attention_heads"],
        q_latent=hf.get("q_lora_rank"),
        kv_latent=hf["kv_lora_rank"],
        nope_dim=hf["qk_nope_head_dim"],
        rope_dim=hf["qk_rope_head_dim"],
        v_dim=hf["v_head_dim"],
        ff=hf["intermediate_size"],
        experts=hf["n_routed_experts"],
        expert_ff=hf["moe_intermediate_size"],
        router=router,
        shared_ff=hf["moe_intermediate_size"] * hf["n_shared_experts"],
        router_bias=v3,
        mtp_layers=hf.get("num_nextn_predict_layers") or 0,
        max_seq=hf.get("max_position_embeddings", 163840),
        rope_base=base,
        rope_scaling=scaling,
        tied=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        init_std=hf.get("initializer_range", 0.02),
    )
    return Config(**(fields | changes))


def to_hf_config(cfg: Config) -> dict[str, Any]:
    """The Hugging Face `config.json` that describes the same function.

    >>> from fmeg.models import presets
    >>> to_hf_config(presets.get("deepseek-v3"))["architectures"]
    ['DeepseekV3ForCausalLM']
    """
    router, v3 = cfg.router, cfg.router.score == "sigmoid"
    plain = ops.Router(
        router.top_k,
        "sigmoid" if v3 else "softmax",
        renormalize=v3 and router.renormalize,
        scale=router.scale,
        groups=router.groups,
        top_groups=router.top_groups,
        group_score="top2sum" if v3 else "max",
        sequence_loss=router.sequence_loss,
    )
    for bad, what in [
        (router != plain, f"the router {router}"),
        (cfg.router_bias != v3, f"router_bias={cfg.router_bias} with scores by {router.score}"),
        (cfg.shared_ff % cfg.expert_ff or not cfg.shared_ff, "a shared expert that is no multiple of the others"),
        (cfg.shared_gate, "shared_gate"),
        (cfg.latent_eps != 1e-6, f"latent_eps={cfg.latent_eps}"),
    ]:
        if bad:
            raise ValueError(f"to_hf_config: no Hugging Face model of this family has {what}")
    hf: dict[str, Any] = dict(
        architectures=["DeepseekV3ForCausalLM" if v3 else "DeepseekV2ForCausalLM"],
        model_type="deepseek_v3" if v3 else "deepseek_v2",
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.embed,
        first_k_dense_replace=cfg.dense_layers,
        num_hidden_layers=cfg.dense_layers + cfg.layers,
        num_nextn_predict_layers=cfg.mtp_layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.heads,
        q_lora_rank=cfg.q_latent,
        kv_lora_rank=cfg.kv_latent,
        qk_nope_head_dim=cfg.nope_dim,
        qk_rope_head_dim=cfg.rope_dim,
        v_head_dim=cfg.v_dim,
        intermediate_size=cfg.ff,
        hidden_act="silu",
        n_routed_experts=cfg.experts,
        n_shared_experts=cfg.shared_ff // cfg.expert_ff,
        moe_intermediate_size=cfg.expert_ff,
        num_experts_per_tok=router.top_k,
        norm_topk_prob=router.renormalize,
        routed_scaling_factor=router.scale,
        n_group=router.groups,
        topk_group=router.top_groups,
        topk_method="noaux_tc" if v3 else "greedy" if router.groups == 1 else "group_limited_greedy",
        aux_loss_alpha=router.sequence_loss,
        max_position_embeddings=cfg.max_seq,
        **rotary.to_hf(cfg.rope_base, cfg.rope_scaling),
        tie_word_embeddings=cfg.tied,
        rms_norm_eps=cfg.norm_eps,
        initializer_range=cfg.init_std,
    )
    return hf
