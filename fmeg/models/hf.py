"""Hugging Face checkpoints, both ways: `config.json` and safetensors files, one or many.

Each model's table of parameters says what a parameter is called there and how it lies. The vocabulary's padding is
added on the way in and cut off on the way out, so a checkpoint read and written again has the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fmeg import tree
from fmeg.models.registry import model_of, model_of_hf
from fmeg.models.table import Param

_INDEX = "model.safetensors.index.json"
# What some checkpoints hold beside parameters: constants, and shared embeddings and heads written out again.
_NOT_READ = (
    ".rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".embed_tokens.weight",
    ".shared_head.head.weight",
)


def from_hf(state: Mapping[str, Tensor], cfg: Any, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Parameters of a state dict with Hugging Face's names; layers are stacked, the vocabulary padded with zeros.

    dtype   of the parameters; None: as they are in `state`

    Raises ValueError naming the tensors that are missing or left over, or the first whose shape is not what `cfg` says.

    >>> import fmeg
    >>> from fmeg.models import llama, presets
    >>> cfg = presets.get("tiny")
    >>> params = llama.init(fmeg.random.key(0), cfg)
    >>> again = from_hf(to_hf(params, cfg), cfg)
    >>> torch.equal(again["layers"]["wq"], params["layers"]["wq"])
    True
    """
    rows = _rows(cfg)
    names = {n: n for p in rows.values() for n in _names(p, cfg)}
    if not any(n in state for n in names):  # a bare base model has no prefix: `h.0.…` for `transformer.h.0.…`
        names = {n: n.split(".", 1)[1] if "." in n else n for n in names}
    missing = [n for n in names.values() if n not in state]
    known = set(names.values())
    extra = [
        n for n in state if n not in known and not n.endswith(_NOT_READ) and not (cfg.tied and n == "lm_head.weight")
    ]
    if missing or extra:
        raise ValueError(
            f"from_hf: missing {_some(missing)}, left over {_some(extra)}; does the config fit the checkpoint?"
        )

    def read(path: str, p: Param) -> Tensor:
        theirs = _names(p, cfg)
        like = state[names[next(iter(theirs))]]
        out = torch.zeros(p.shape(cfg.sizes), dtype=dtype or like.dtype, device=like.device)
        for name, index in theirs.items():
            one = _theirs_to_ours(path, p, state[names[name]], cfg)
            out[index][tuple(slice(n) for n in one.shape)] = one  # the rest, if any, is padding
        return out

    return tree.map_with_path(read, model_of(cfg).parameters(cfg))


def _some(names: list[str]) -> str:
    return f"{names[:5]}" + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def to_hf(params: Mapping[str, Any], cfg: Any) -> dict[str, Tensor]:
    """The state dict with Hugging Face's names and shapes: the inverse of `from_hf`."""
    return dict(_hf_tensors(params, cfg))


def load(directory: str | Path, *, dtype: torch.dtype | None = None, **changes: Any) -> tuple[dict[str, Any], Any]:
    """(parameters, config) of a directory with `config.json` and safetensors files.

    dtype     of the parameters; None: as in the files
    changes   to fields of the config, such as `compute_dtype` or `remat`
    """
    directory = Path(directory)
    hf = json.loads((directory / "config.json").read_text())
    cfg = model_of_hf(hf["model_type"]).from_hf_config(hf, **changes)
    index = directory / _INDEX
    files = (
        sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    )
    with ExitStack() as stack:
        return from_hf(_Files([stack.enter_context(safe_open(directory / f, "pt")) for f in files]), cfg, dtype), cfg


def save(params: Mapping[str, Any], cfg: Any, directory: str | Path, *, max_file_bytes: int = 5 << 30) -> None:
    """Write `config.json` and safetensors files that `load` and `transformers` read.

    max_file_bytes   when one file would be larger, there are several and an index (a larger tensor has a file alone)
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    dtype = str(tree.leaves(params)[0].dtype).removeprefix("torch.")
    config = model_of(cfg).to_hf_config(cfg) | {"torch_dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")

    parts: list[dict[str, int]] = []  # of each file written, the bytes of each tensor

    def write(tensors: dict[str, Tensor]) -> None:
        save_file(tensors, directory / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append({n: t.nbytes for n, t in tensors.items()})

    full: dict[str, Tensor] = {}
    for name, tensor in _hf_tensors(params, cfg):
        if full and sum(t.nbytes for t in full.values()) + tensor.nbytes > max_file_bytes:
            write(full)
            full = {}
        full[name] = tensor
    write(full)

    if len(parts) == 1:
        (directory / "part-0").rename(directory / "model.safetensors")
        (directory / _INDEX).unlink(missing_ok=True)  # of an earlier save into the same place
        return
    where = {}
    for i, part in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        (directory / f"part-{i}").rename(directory / file)
        where.update(dict.fromkeys(part, file))
    total = sum(n for part in parts for n in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
    (directory / _INDEX).write_text(json.dumps(index, indent=2) + "\n")


class _Files(Mapping[str, Tensor]):
    """Several safetensors files as one mapping that reads a tensor when asked for it."""

    def __init__(self, files: list[Any]) -> None:
        self._file = {name: f for f in files for name in f.keys()}  # noqa: SIM118 (a safetensors file, not a dict)

    def __getitem__(self, name: str) -> Tensor:
        return self._file[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def _rows(cfg: Any) -> dict[str, Param]:
    table = model_of(cfg).parameters(cfg)
    return dict(zip(tree.paths(table), tree.leaves(table), strict=True))


def _names(p: Param, cfg: Any) -> dict[str, tuple[int, ...]]:
    """Each name there, and the place here along the stacked axes."""
    places = product(*(range(cfg.sizes[a]) for a in p.stacked))
    return {p.hf.format(*(p.first + p.step * n if i == 0 else n for i, n in enumerate(at))): at for at in places}


@dataclass(frozen=True)
class _Pattern:
    """How one tensor lies: `ours`; and `theirs` as einops reads it, `flat` with every axis a dimension.

    joined   the axes that share a dimension there, in order, and which dimension of `flat` it is; `own` is ours
    """

    ours: str
    theirs: str
    flat: str
    own: str = ""
    joined: tuple[str, ...] = ()
    dim: int = 0

    @staticmethod
    def of(p: Param) -> _Pattern:
        ours = " ".join(p.axes.split()[len(p.stacked) :])
        theirs = p.hf_axes or ours
        flat = theirs.replace("(", "").replace(")", "").split()
        for dim, axes in enumerate(flat):
            if "|" in axes:
                joined = tuple(axes.split("|"))
                (own,) = set(joined) & set(ours.split())
                flat[dim] = own
                return _Pattern(ours, theirs.replace(axes, own), " ".join(flat), own, joined, dim)
        return _Pattern(ours, theirs, " ".join(flat))

    @property
    def place(self) -> int:
        """Which one of those that share a tensor it is."""
        return self.joined.index(self.own) if self.joined else 0


def _sizes(cfg: Any, pattern: str) -> dict[str, int]:
    names = set(pattern.split())
    return {a: n for a, n in (cfg.sizes | {"vocab": cfg.vocab_size}).items() if a in names}


def _theirs_to_ours(path: str, p: Param, tensor: Tensor, cfg: Any) -> Tensor:
    pattern = _Pattern.of(p)
    i, n = p.part
    sizes = _sizes(cfg, pattern.ours)
    parts = [cfg.sizes[a] for a in pattern.joined]
    whole = sizes | ({pattern.own: sum(parts)} if parts else {})
    try:
        x = rearrange(tensor.chunk(n, -1)[i], f"{pattern.theirs} -> {pattern.flat}", **whole)
        x = x.split(parts, pattern.dim)[pattern.place] if parts else x
        return rearrange(x, f"{pattern.flat} -> {pattern.ours}", **sizes)
    except Exception as e:
        raise ValueError(
            f"from_hf: {p.hf!r} (here {path!r}) should be {p.hf_axes or pattern.ours!r} with {sizes}, got "
            f"{tuple(tensor.shape)}"
        ) from e


def _ours_to_theirs(rows: list[Param], leaves: list[Tensor], cfg: Any) -> Tensor:
    """One tensor there, of those here that share it, in order."""
    patterns = [_Pattern.of(p) for p in rows]
    first = patterns[0]
    pieces = [rearrange(x, f"{q.ours} -> {q.flat}") for q, x in zip(patterns, leaves, strict=True)]
    if first.joined:
        pieces = [torch.cat(pieces, first.dim)]
    sizes = {a: n for a, n in zip(first.flat.split(), pieces[0].shape, strict=True) if a != "1"}
    return torch.cat([rearrange(x, f"{first.flat} -> {first.theirs}", **sizes) for x in pieces], -1).contiguous()


def _hf_tensors(params: Mapping[str, Any], cfg: Any) -> Iterator[tuple[str, Tensor]]:
    leaves = dict(zip(tree.paths(params), tree.leaves(params), strict=True))
    together: dict[tuple[str, int], list[str]] = {}  # Hugging Face's name -> paths of its parts, in order
    rows = _rows(cfg)
    for path, p in sorted(rows.items(), key=lambda row: (row[1].part, _Pattern.of(row[1]).place)):
        together.setdefault((p.hf, p.first), []).append(path)
    for paths in together.values():
        these = [rows[path] for path in paths]
        for name, index in _names(these[0], cfg).items():
            parts = [leaves[path][index] for path in paths]
            if _Pattern.of(these[0]).ours.startswith("vocab"):
                parts = [x[: cfg.vocab_size] for x in parts]
            yield name, _ours_to_theirs(these, parts, cfg)
