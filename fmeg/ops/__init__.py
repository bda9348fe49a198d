"""Operations with rules. One file each: what it means, its gradient, its sharding, its cost.

contractions    einsum
norms           rms_norm, layer_norm
attention       attention, rope, rope_table, Llama3Scaling, YarnScaling
tokens          embedding, cross_entropy, shift
router          router, router_from_logits, Router, RouterOutput, loss_counts, update_bias
experts         dispatch, combine, grouped_matmul, grouped_bias, dispatch_weights, scale_rows, route, Routing
pointwise       swiglu, geglu, gelu, dropout
"""

from fmeg.ops.activations import geglu, gelu, swiglu
from fmeg.ops.attention import attention
from fmeg.ops.balance import loss_counts, update_bias
from fmeg.ops.cross_entropy import cross_entropy
from fmeg.ops.dispatch import combine, dispatch, dispatch_weights
from fmeg.ops.dropout import dropout
from fmeg.ops.einsum import einsum
from fmeg.ops.embedding import embedding
from fmeg.ops.grouped import grouped_bias, grouped_matmul, scale_rows
from fmeg.ops.layer_norm import layer_norm
from fmeg.ops.rms_norm import rms_norm
from fmeg.ops.rope import Llama3Scaling, RopeScaling, YarnScaling, rope, rope_table
from fmeg.ops.router import Router, RouterOutput, router, router_from_logits
from fmeg.ops.routing import Routing, route
from fmeg.ops.shift import shift

__all__ = [
    "Llama3Scaling",
    "RopeScaling",
    "Router",
    "RouterOutput",
    "Routing",
    "YarnScaling",
    "attention",
    "combine",
    "cross_entropy",
    "dispatch",
    "dispatch_weights",
    "dropout",
    "einsum",
    "embedding",
    "geglu",
    "gelu",
    "grouped_bias",
    "grouped_matmul",
    "layer_norm",
    "loss_counts",
    "rms_norm",
    "rope",
    "rope_table",
    "route",
    "router",
    "router_from_logits",
    "scale_rows",
    "shift",
    "swiglu",
    "update_bias",
]
