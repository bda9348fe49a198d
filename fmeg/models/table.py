"""A model's parameters as a table: one row a parameter, everything about it in the row.

A row (`Param`) says what the dimensions are, how the values start, and where Hugging Face keeps them. From the table
come the initial values, the logical axes, the number of parameters and the checkpoint's names, so none can disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from fmeg import random, tree


@dataclass(frozen=True)
class Param:
    """One parameter.

    axes      logical axes, one a dimension
    init      standard deviation of a normal, or "ones" or "zeros"
    hf        name in a Hugging Face checkpoint; a `{}` for the index along each leading axis that is stacked here but
              not there: the layer, or the layer and the expert
    hf_axes   how it lies there (einops; default: as here, without the stacked axes); `a|b` is a dimension in which a
              parameter with an axis `a` comes before one with `b`
    part      (i, n): the i-th of n equal parts of the last dimension there
    first     the number there of the first layer of the stack
    step      how far apart the numbers there of its layers are
    """

    axes: str
    init: float | Literal["ones", "zeros"]
    hf: str
    hf_axes: str = ""
    part: tuple[int, int] = (0, 1)
    first: int = 0
    step: int = 1

    @property
    def stacked(self) -> tuple[str, ...]:
        """The leading axes that are stacked here but not there.

        >>> Param("layers experts embed ff", 0.02, "layers.{}.experts.{}.w").stacked
        ('layers', 'experts')
        """
        return tuple(self.axes.split()[: self.hf.count("{}")])

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Sizes of the dimensions.

        >>> Param("layers embed ff", 0.02, "w").shape({"layers": 2, "embed": 3, "ff": 4})
        (2, 3, 4)
        """
        return tuple(sizes[a] for a in self.axes.split())


def init_params(key: Int[Tensor, "2"], table: Any, sizes: Mapping[str, int], dtype: torch.dtype) -> Any:
    """Initial values of a table: each leaf is drawn with `fold_in(key, path)`, so it depends on nothing but its path.

    >>> table = {"w": Param("ff", 0.02, "w"), "b": Param("ff", "zeros", "b")}
    >>> params = init_params(random.key(0), table, {"ff": 3}, torch.float32)
    >>> params["w"].shape, params["b"]
    (torch.Size([3]), tensor([0., 0., 0.]))
    """

    def leaf(path: str, p: Param) -> Tensor:
        shape = p.shape(sizes)
        if p.init == "ones":
            return torch.ones(shape, dtype=dtype, device=key.device)
        if p.init == "zeros":
            return torch.zeros(shape, dtype=dtype, device=key.device)
        return random.normal(random.fold_in(key, path), shape, dtype=dtype) * p.init

    return tree.map_with_path(leaf, table)


def axes_of(table: Any) -> Any:
    """The logical axes of a table, in a tree of the parameters' own structure.

    >>> axes_of({"w": Param("embed ff", 0.02, "w")})
    {'w': 'embed ff'}
    """
    return tree.map(lambda p: p.axes, table)


def count_params(table: Any, sizes: Mapping[str, int]) -> int:
    """How many numbers a table holds.

    >>> count_params({"w": Param("embed ff", 0.02, "w")}, {"embed": 3, "ff": 4})
    12
    """
    return sum(math.prod(p.shape(sizes)) for p in tree.leaves(table))


def batch_axes(packed: bool = False, padded: bool = False) -> dict[str, str]:
    """Logical axes of a batch: tokens, the tokens they should predict, and which of those count.

    A packed batch holds several documents a row: `segments` numbers them, `positions` counts within each. A padded one
    has places without a token: `real` says which have one (`fmeg.models.padding`).

    >>> batch_axes()
    {'tokens': 'batch seq', 'targets': 'batch seq', 'mask': 'batch seq'}
    """
    names = (
        "tokens",
        "targets",
        "mask",
        *(("segments", "positions") if packed else ()),
        *(("real",) if padded else ()),
    )
    return dict.fromkeys(names, "batch seq")


def round_up(n: int, multiple: int) -> int:
    """The least multiple of `multiple` that is at least `n`.

    >>> round_up(50257, 128)
    50304
    """
    return -(-n // multiple) * multiple


def visible(seq: int, window: int | None) -> float:
    """How many keys a causal query sees on average, counting half of its own: seq/2, or w(1 - w/2seq) in a window of w.

    >>> visible(4096, None), visible(4096, 1024)
    (2048.0, 896.0)
    """
    w = seq if window is None else min(window, seq)
    return w * (1 - w / (2 * seq))


def cast(params: Any, dtype: torch.dtype | None) -> Any:
    """Parameters in the dtype to compute in (None: as they are).

    A model casts a layer's parameters inside the layer: on a mesh each is then cast where it rests, moved in the small
    dtype, and its gradient reduced in the large one.

    >>> cast({"w": torch.ones(2)}, torch.bfloat16)["w"].dtype
    torch.bfloat16
    """
    return params if dtype is None else tree.map(lambda p: p.to(dtype), params)
