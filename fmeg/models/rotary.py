"""Rotary embeddings in Hugging Face's `config.json`: read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fmeg import ops

_LLAMA3 = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}
_YARN = {
    "factor": "factor",
    "original_max_position": "original_max_position_embeddings",
    **{k: k for k in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate")},
}
_KINDS: dict[str, tuple[type, dict[str, str]]] = {
    "llama3": (ops.Llama3Scaling, _LLAMA3),
    "yarn": (ops.YarnScaling, _YARN),
}


def from_hf(hf: Mapping[str, Any]) -> tuple[float, ops.RopeScaling | None]:
    """(base, scaling) of a config, old (`rope_theta`, `rope_scaling`) or new (`rope_parameters`).

    Raises ValueError for kinds other than default, llama3 and yarn, and where only a part of a head turns.

    >>> from_hf({"rope_theta": 500.0, "rope_scaling": {"type": "yarn", "factor": 4.0,
    ...          "original_max_position_embeddings": 32768}})[1].original_max_position
    32768
    """
    rope = {
        "rope_theta": hf.get("rope_theta", 10000.0),
        **(hf.get("rope_scaling") or {}),
        **(hf.get("rope_parameters") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default" and kind not in _KINDS:
        raise ValueError(f"from_hf_config: this model has no rope_type={kind!r} (known: default, {', '.join(_KINDS)})")
    if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError(f"from_hf_config: this model has no partial_rotary_factor={rope['partial_rotary_factor']}")
    base = float(rope["rope_theta"])
    if kind == "default":
        return base, None
    if rope.get("factor") is None:
        raise ValueError(f"from_hf_config: this model has no rope_type={kind!r} without a factor")
    scaling, names = _KINDS[kind]
    return base, scaling(**{ours: rope[theirs] for ours, theirs in names.items() if rope.get(theirs) is not None})


def to_hf(base: float, scaling: ops.RopeScaling | None) -> dict[str, Any]:
    """What a config says of them.

    >>> to_hf(10000.0, None)
    {'rope_theta': 10000.0}
    """
    for kind, (cls, names) in _KINDS.items():
        if isinstance(scaling, cls):
            values = {theirs: getattr(scaling, ours) for ours, theirs in names.items()}
            given = {name: value for name, value in values.items() if value is not None}
            return {"rope_theta": base, "rope_scaling": {"rope_type": kind, "type": kind, **given}}
    if scaling is not None:
        raise ValueError(f"to_hf_config: Hugging Face has no name for the scaling {scaling!r}")
    return {"rope_theta": base}
