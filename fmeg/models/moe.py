"""Llama's blocks with a mixture of experts for the MLP: Mixtral, Qwen2-MoE, Qwen3-MoE.

    x ← x + attention(norm1(x))                          as in `fmeg.models.llama`
    x ← x + Σ_{i chosen} weight_i · expert_i(norm2(x))   (+ a shared expert)

The relatives differ by what `Config` says: biases on q, k, v and a gated shared expert (Qwen2), norms on q and k
(Qwen3), and how the router weighs (`fmeg.ops.Router`).

Some layers may have an MLP instead (`Config.dense`): see `fmeg.models.runs` for how they are scanned. Sources (arXiv):
Mixtral 2401.04088, Qwen2 2407.10671, Qwen3 2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from fmeg import P, einsum, ops, region, remat, scan, shard
from fmeg.models import mixture, rotary
from fmeg.models.llama import attend, attention_rows, mlp_rows, norm, swiglu
from fmeg.models.padding import blank
from fmeg.models.runs import Run, runs
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
    "update_bias",
]


@dataclass(frozen=True)
class Config:
    """Sizes bear the names of their logical axes; see `fmeg.models.presets` for published ones.

    experts, expert_ff, router, shared_ff, shared_gate, router_bias   see `fmeg.models.mixture`
    dense                                                             numbers of the layers that have an MLP, of inner
                                                                      size `ff`, instead of experts
    the others                                                        as in `fmeg.models.llama.Config`
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    expert_ff: int
    router: ops.Router
    shared_ff: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    max_seq: int = 32768
    rope_base: float = 1e6
    rope_scaling: ops.RopeScaling | None = None
    window: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    attn_gate: bool = False
    tied: bool = False
    norm_eps: float = 1e-6
    init_std: float = 0.02
    vocab_multiple: int = 128
    dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype | None = None
    remat: Any = None
    z_loss: float = 0.0
    dense: tuple[int, ...] = ()
    ff: int = 0

    def __post_init__(self) -> None:
        if not set(range(self.layers)) - set(self.dense):
            raise ValueError(f"Config: all of layers={self.layers} are in `dense`; for such a model take llama.Config")
        if list(self.dense) != sorted({i for i in self.dense if 0 <= i < self.layers}) or bool(self.dense) > self.ff:
            raise ValueError(
                f"Config: dense={self.dense} must be numbers below layers={self.layers}, in order, and the MLPs of an "
                f"inner size, given ff={self.ff}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"Config: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

    @property
    def padded_vocab(self) -> int:
        return round_up(self.vocab_size, self.vocab_multiple)

    @property
    def sizes(self) -> dict[str, int]:
        """Size of each logical axis of the parameters."""
        same = {a: getattr(self, a) for a in ("embed", "heads", "kv_heads", "head_dim", *["ff"] * bool(self.dense))}
        stacks = {run.name: run.repeats for run in self.runs}
        return {"vocab": self.padded_vocab, **stacks, **same, **mixture.axis_sizes(self)}

    @property
    def runs(self) -> tuple[Run, ...]:
        """The scans over the layers: "d" has an MLP, "s" is sparse."""
        return runs("".join("d" if i in self.dense else "s" for i in range(self.layers)))


def parameters(cfg: Config) -> dict[str, Any]:
    """Every parameter: its axes, how it starts, what Hugging Face calls it and how it lies there.

    Layers of a period of several have their number in it: `layers.0.wq`, `layers.1.wq`.
    """
    std, out = cfg.init_std, cfg.init_std / (2 * cfg.layers) ** 0.5
    names = mixture.MIXTRAL if _kind(cfg) == "mixtral" else mixture.QWEN
    both = {
        **attention_rows(cfg, std, out),
        "norm2": Param("layers embed", "ones", "model.layers.{}.post_attention_layernorm.weight"),
    }
    rows = {
        "s": {**both, **mixture.parameters(cfg, names, "layers", 0, std, out)},
        "d": {**both, **mlp_rows(std, out)},
    }
    table: dict[str, Any] = {"embed": Param("vocab embed", std, "model.embed_tokens.weight")}
    for run in cfg.runs:
        layers = [run.table(j, rows[kind]) for j, kind in enumerate(run.kinds)]
        table[run.name] = layers[0] if len(layers) == 1 else {str(j): layer for j, layer in enumerate(layers)}
    table["final_norm"] = Param("embed", "ones", "model.norm.weight")
    if not cfg.tied:
        table["head"] = Param("vocab embed", std, "lm_head.weight")
    return table


def init(key: Int[Tensor, "2"], cfg: Config) -> dict[str, Any]:
    """Initial parameters: normal with `init_std`, over √(2·layers) where a block adds to the residual.

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> params = init(random.key(0), presets.get("tiny-moe"))
    >>> params["layers"]["w_gate"].shape
    torch.Size([2, 8, 64, 32])
    """
    return init_params(key, parameters(cfg), cfg.sizes, cfg.dtype)


def logical_axes(cfg: Config) -> dict[str, Any]:
    """What each dimension of each parameter is.

    >>> from fmeg.models import presets
    >>> logical_axes(presets.get("tiny-moe"))["layers"]["w_down"]
    'layers experts expert_ff expert_embed'
    """
    return axes_of(parameters(cfg))


def block(
    p: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    rope: Float[Tensor, "... s half 2"],
    segments: Int[Tensor, "b s"] | None,
    cfg: Config,
    real: Bool[Tensor, "b s"] | None = None,
) -> tuple[Float[Tensor, "b s d"], ops.RouterOutput]:
    """One layer: attention, then the experts, each added to the residual stream `x`; and where tokens went."""
    x = x + attend(p, x, rope, segments, cfg)
    o, chosen = mixture.mixture(p, norm(x, p["norm2"], cfg.norm_eps), cfg, real)
    return x + o, chosen


def dense_block(
    p: Mapping[str, Tensor],
    x: Float[Tensor, "b s d"],
    rope: Float[Tensor, "... s half 2"],
    segments: Int[Tensor, "b s"] | None,
    cfg: Config,
) -> Float[Tensor, "b s d"]:
    """One layer without experts."""
    x = x + attend(p, x, rope, segments, cfg)
    h = norm(x, p["norm2"], cfg.norm_eps)
    with region("mlp"):
        return x + swiglu(h, p["w_gate"], p["w_up"], p["w_down"])


def hidden(
    params: Mapping[str, Any], batch: Mapping[str, Tensor], cfg: Config
) -> tuple[Float[Tensor, "b s d"], mixture.Stats]:
    """What the head is applied to, and the sums of the routers' counts and losses."""
    tokens, positions = batch["tokens"], batch.get("positions")
    if positions is None:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
    rope = ops.rope_table(positions, cfg.head_dim, cfg.rope_base, cfg.rope_scaling)
    where = rope, batch.get("segments"), batch.get("real")
    x = shard(ops.embedding(cast(params["embed"], cfg.compute_dtype), tokens), P("batch", "res_seq", None))
    found = []
    for run in cfg.runs:
        x, stats = _scan(params[run.name], x, run, cfg, where)
        found += [stats] if stats else []
    return ops.rms_norm(x, cast(params["final_norm"], cfg.compute_dtype), cfg.norm_eps), mixture.join_stats(found)


def _scan(p: Any, x: Tensor, run: Run, cfg: Config, where: tuple[Any, ...]) -> tuple[Tensor, mixture.Stats]:
    """A run's layers, and the sums of their routers, if they have any."""
    routers = run.kinds.count("s")

    def body(carry: Any, period: Any, rope: Tensor, segments: Any, real: Any) -> tuple[Any, None]:
        (x, stats), (layers, i) = carry, period
        for j, kind in enumerate(run.kinds):
            p = mixture.cast_layer(layer(layers, run, j), cfg.compute_dtype)
            if kind == "d":
                x = dense_block(p, x, rope, segments, cfg)
            else:
                x, chosen = block(p, x, rope, segments, cfg, real)
                stats = mixture.add_stats(stats, chosen, i * routers + run.kinds[:j].count("s"))
        return (x, stats), None

    start = (x, mixture.no_stats(cfg, run.repeats * routers, x) if routers else {})
    periods = (p, torch.arange(run.repeats, device=x.device))
    return scan(remat(body, cfg.remat) if cfg.remat else body, start, periods, *where)[0]


def layer(layers: Any, run: Run, j: int) -> Any:
    """The j-th layer of a period."""
    return layers if len(run.kinds) == 1 else layers[str(j)]


def head(params: Mapping[str, Any], x: Float[Tensor, "b s d"], cfg: Config) -> Float[Tensor, "b s v"]:
    """Logits over the padded vocabulary."""
    w = cast(params["embed" if cfg.tied else "head"], cfg.compute_dtype)
    return einsum("b s d, v d -> b s v", shard(x, P("batch", "seq", None)), w)


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
    >>> cfg = presets.get("tiny-moe")
    >>> apply(init(random.key(0), cfg), torch.tensor([[1, 2, 3]]), cfg).shape
    torch.Size([1, 3, 384])
    """
    batch = blank({"tokens": tokens, "positions": positions, "segments": segments, "real": real})
    return head(params, hidden(params, batch, cfg)[0], cfg)


def loss(params: Mapping[str, Any], batch: Mapping[str, Tensor], cfg: Config) -> tuple[list[Any], dict[str, Tensor]]:
    """([(Σ mask · cross entropy, Σ mask), one pair for each loss of the router], {"counts": tokens an expert}).

    Counts are "layers experts", of the layers that have some; summed over a step they are what `fmeg.ops.update_bias`
    takes.

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny-moe")
    >>> tokens, targets = torch.tensor([[1, 2, 3]]), torch.tensor([[2, 3, 4]])
    >>> batch = {"tokens": tokens, "targets": targets, "mask": torch.tensor([[1.0, 1.0, 0.0]])}
    >>> pairs, aux = loss(init(random.key(0), cfg), batch, cfg)
    >>> [count.item() for _, count in pairs], aux["counts"].sum(-1)
    ([2.0, 3.0], tensor([6, 6]))
    """
    batch = blank(batch)
    x, stats = hidden(params, batch, cfg)
    losses = ops.cross_entropy(head(params, x, cfg), batch["targets"], z_loss=cfg.z_loss, vocab=cfg.vocab_size)
    mask = batch["mask"].to(losses.dtype)
    pairs = [((losses * mask).sum(), mask.sum()), *mixture.loss_pairs(stats, batch, cfg, losses)]
    return pairs, {"counts": stats["counts"]}


def update_bias(
    params: Mapping[str, Any], counts: Int[Tensor, "l e"], cfg: Config, rate: float = 1e-3
) -> dict[str, Any]:
    """Parameters with the routers' biases moved towards equal use of experts; after the optimizer, once a step.

    counts   `loss`'s, summed over the step

    >>> from fmeg import random
    >>> from fmeg.models import presets
    >>> cfg = presets.get("tiny-moe", router_bias=True)
    >>> params = update_bias(init(random.key(0), cfg), torch.arange(8).expand(2, 8), cfg)
    >>> params["layers"]["router_bias"][0, :2]
    tensor([0.0010, 0.0010])
    """
    out = dict(params)
    parts = counts.split([run.repeats * run.kinds.count("s") for run in cfg.runs])
    for run, part in zip(cfg.runs, parts, strict=True):
        each = iter(part.unflatten(0, (run.repeats, -1)).unbind(1) if len(part) else ())
        moved = {}
        for j, kind in enumerate(run.kinds):
            p = layer(params[run.name], run, j)
            new = {"router_bias": ops.update_bias(p["router_bias"], next(each), rate)} if kind == "s" else {}
            moved[str(j)] = {**p, **new}
        out[run.name] = moved if len(moved) > 1 else moved["0"]
    return out


def num_params(cfg: Config) -> int:
    """How many parameters, the vocabulary's padding apart.

    >>> from fmeg.models import presets
    >>> num_params(presets.get("mixtral-8x7b"))
    46702792704
    """
    return count_params(parameters(cfg), cfg.sizes | {"vocab": cfg.vocab_size})


def flops_per_token(cfg: Config, seq: int) -> float:
    """Model FLOPs of a training step per token, as `fmeg.models.llama.flops_per_token` counts them: of the experts
    those that a token goes to, the shared one, and the router's product.

    >>> from fmeg.models import presets
    >>> flops_per_token(presets.get("mixtral-8x7b"), 4096) / 1e9
    79.71274752
    """
    attn = cfg.embed * cfg.head_dim * ((3 if cfg.attn_gate else 2) * cfg.heads + 2 * cfg.kv_heads)
    core = 2 * visible(seq, cfg.window) * cfg.heads * cfg.head_dim
    sparse, mlp = cfg.layers - len(cfg.dense), 3 * cfg.embed * cfg.ff
    layers = cfg.layers * (attn + core) + sparse * mixture.active(cfg) + len(cfg.dense) * mlp
    return 6 * (layers + cfg.vocab_size * cfg.embed)


HF_TYPES = ("mixtral", "qwen2_moe", "qwen3_moe")


def _kind(cfg: Config) -> str:
    return "qwen3_moe" if cfg.qk_norm else "qwen2_moe" if cfg.shared_ff else "mixtral"


def from_hf_config(hf: Mapping[str, Any], **changes: Any) -> Config:
    """Config of a Hugging Face `config.json` (mixtral, qwen2_moe, qwen3_moe); `changes` override fields.

    The router's balance loss is over the batch, with the weight that the file gives.

    >>> hf = dict(model_type="mixtral", vocab_size=100, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
    ...           intermediate_size=16, num_local_experts=4, num_experts_per_tok=2)
    >>> from_hf_config(hf).router.score
    'softmax'
    """
    kind, mixtral = hf["model_type"], hf["model_type"] == "mixtral"
    base, scaling = rotary.from_hf({"rope_theta": 1e6, **hf})
    for bad, what in [
        (kind not in HF_TYPES, f"model_type={kind!r} (known: {', '.join(HF_TYPES)})"),
        (hf.get("hidden_act", "silu") != "silu", f"hidden_act={hf.get('hidden_act')!r} (known: silu)"),
        (bool(hf.get("attention_bias")), "attention_bias=True"),
        (kind == "qwen2_moe" and not hf.get("qkv_bias", True), "qkv_bias=False"),
        (bool(hf.get("use_sliding_window")), "layers of which only some have a window"),
        (bool(hf.get("router_jitter_noise")), "router_jitter_noise; set router= with a jitter"),
    ]:
        if bad:
            raise ValueError(f"from_hf_config: this model has no {what}")
    heads, layers = hf["num_attention_heads"], hf["num_hidden_layers"]
    only, every = hf.get("mlp_only_layers") or (), hf.get("decoder_sparse_step", 1)
    dense = () if mixtral else tuple(i for i in range(layers) if i in only or (i + 1) % every)
    router = ops.Router(
        hf["num_experts_per_tok"],
        renormalize=mixtral or bool(hf.get("norm_topk_prob", False)),
        batch_loss=hf.get("router_aux_loss_coef", 0.001),
    )
    fields: dict[str, Any] = dict(
        vocab_size=hf["vocab_size"],
        embed=hf["hidden_size"],
        layers=layers,
        dense=dense,
        ff=hf["intermediate_size"] if dense else 0,
        heads=heads,
        kv_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        experts=hf["num_local_experts" if mixtral or "num_experts" not in hf else "num_experts"],
        expert_ff=hf["intermediate_size" if mixtral else "moe_intermediate_size"],
        router=router,
        shared_ff=hf["shared_expert_intermediate_size"] if kind == "qwen2_moe" else 0,
        shared_gate=kind == "qwen2_moe",
        max_seq=hf.get("max_position_embeddings", 32768),
        rope_base=base,
        rope_scaling=scaling,
        window=hf.get("sliding_window") if mixtral else None,
        qkv_bias=kind == "qwen2_moe",
        qk_norm=kind == "qwen3_moe",
        tied=bool(hf.get("tie_word_embeddings", False)),
        norm_eps=hf.get("rms_norm_eps", 1e-5 if mixtral else 1e-6),
        init_std=hf.get("initializer_range", 0.02),
    )
    return Config(**(fields | changes))


def to_hf_config(cfg: Config) -> dict[str, Any]:
    """The Hugging Face `config.json` that describes the same function.

    >>> from fmeg.models import presets
    >>> to_hf_config(presets.get("qwen3-30b-a3b"))["architectures"]
    ['Qwen3MoeForCausalLM']
    """
    kind, router = _kind(cfg), cfg.router
    plain = ops.Router(router.top_k, renormalize=router.renormalize, batch_loss=router.batch_loss)
    for bad, what in [
        (cfg.sinks or cfg.attn_gate or cfg.router_bias, "sinks, attn_gate or router_bias"),
        (router != plain, f"the router {router}"),
        (cfg.qkv_bias != (kind == "qwen2_moe"), f"qkv_bias={cfg.qkv_bias} beside what makes it {kind}"),
        (cfg.shared_gate != (kind == "qwen2_moe"), f"shared_gate={cfg.shared_gate} beside what makes it {kind}"),
        (cfg.shared_ff > 0 and kind != "qwen2_moe", f"a shared expert beside what makes it {kind}"),
        (kind == "mixtral" and not router.renormalize, "weights that are not renormalized, as Mixtral's are"),
        (cfg.window is not None and kind != "mixtral", "a window"),
        (cfg.dense and kind == "mixtral", "layers without experts"),
    ]:
        if bad:
            raise ValueError(f"to_hf_config: no Hugging Face model of this family has {what}")
    hf: dict[str, Any] = dict(
        architectures=[{"mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe"}[kind] + "ForCausalLM"],
        model_type=kind,
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.embed,
        num_hidden_layers=cfg.layers,
        num_attention_heads=cfg.heads,
        num_key_value_heads=cfg.kv_heads,
        head_dim=cfg.head_dim,
        hidden_act="silu",
        num_experts_per_tok=router.top_k,
        router_aux_loss_coef=router.batch_loss,
        max_position_embeddings=cfg.max_seq,
        **rotary.to_hf(cfg.rope_base, cfg.rope_scaling),
        tie_word_embeddings=cfg.tied,
        rms_norm_eps=cfg.norm_eps,
        initializer_range=cfg.init_std,
    )
    if kind == "mixtral":
        return hf | dict(num_local_experts=cfg.experts, intermediate_size=cfg.expert_ff, sliding_window=cfg.window)
    hf |= dict(
        num_experts=cfg.experts,
        moe_intermediate_size=cfg.expert_ff,
        norm_topk_prob=router.renormalize,
        decoder_sparse_step=1,
        mlp_only_layers=list(cfg.dense),
        intermediate_size=cfg.ff or cfg.expert_ff,
    )
    if kind == "qwen2_moe":
        if cfg.head_dim * cfg.heads != cfg.embed:
            raise ValueError("to_hf_config: Qwen2-MoE needs embed = heads · head_dim")
        hf |= dict(shared_expert_intermediate_size=cfg.shared_ff, qkv_bias=True)
    return hf
