"""Operations with rules. One file each: what it means, its gradient, its sharding, its cost.

contractions    einsum
norms           rms_norm, layer_norm
attention       attention, rope, rope_table, Llama3Scaling, YarnScaling
tokens          embedding, cross_entropy, shift
router          router, router_from_logits, Router, RouterOutput, loss_counts, update_bias
pointwise       swiglu, geglu, gelu, dropout
"""

from fmeg.ops.activations import geglu, gelu, swiglu
from fmeg.ops.attention import attention
from fmeg.ops.balance import loss_counts, update_bias
from fmeg.ops.cross_entropy import cross_entropy
from fmeg.ops.dropout import dropout
from fmeg.ops.einsum import einsum
from fmeg.ops.embedding import embedding
from fmeg.ops.layer_norm import layer_norm
from fmeg.ops.rms_norm import rms_norm
from fmeg.ops.rope import Llama3Scaling, RopeScaling, YarnScaling, rope, rope_table
from fmeg.ops.router import Router, RouterOutput, router, router_from_logits
from fmeg.ops.shift import shift

__all__ = [
    "Llama3Scaling",
    "RopeScaling",
    "Router",
    "RouterOutput",
    "YarnScaling",
    "attention",
    "cross_entropy",
    "dropout",
    "einsum",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "loss_counts",
    "rms_norm",
    "rope",
    "rope_table",
    "router",
    "router_from_logits",
    "shift",
    "swiglu",
    "update_bias",
]
