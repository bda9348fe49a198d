"""Which ranks each token goes to, and which rows a rank makes of the tokens that come: what a rank computes from all
ranks' choices. Each is a primitive that is kept for the backward pass.

A slot's place is m * each + e: the member of the group of ranks that has its expert, and which of that member's `each`
experts it is; members * each for a slot that goes nowhere.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from fmeg.ops.routing import sort_slots
from fmeg.program.primitive import Primitive


def goals(places: Tensor, each: int, members: int) -> Tensor:
    """[tokens, k] -> [tokens, min(k, members)]: the members that a token goes to, in their order, each once; `members`
    in the columns that are left.

    >>> goals(torch.tensor([[5, 0, 1], [2, 6, 6]]), 2, 3).tolist()
    [[0, 3, 2], [3, 1, 3]]
    """
    member = places // each
    if members <= places.shape[1]:
        every = torch.arange(members, device=places.device)
        return torch.where((member[:, :, None] == every).any(1), every, members)
    member = torch.sort(member, 1).values
    again = member[:, 1:] == member[:, :-1]
    return torch.cat([member[:, :1], torch.where(again, members, member[:, 1:])], 1)


def depart(places: Tensor, each: int, members: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copies of tokens by the members that they go to: those of one in the order of tokens. (order, inverse, counts) as
    of `sort_slots`, with a slot for each column of `goals`.

    >>> order, inverse, counts = depart(torch.tensor([[0, 1, 3], [2, 3, 2]]), 2, 2)
    >>> order.tolist(), counts.tolist()                      # token 0 to both, token 1 to member 1
    ([0, 1, 3, 2], [1, 2])
    """
    return sort_slots(goals(places, each, members).flatten(), members)


def arrive(
    places: Tensor, me: Tensor, each: int, members: int, width: int | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of all ranks' places [members * tokens, k]: the slots of the copies that come here, sorted by local expert.

    Copies lie member after member, or with `width` in a block of so many from each. (order, inverse, counts) as of
    `sort_slots`, over the k slots of every copy; copies of each member. Without `width` there are slots for all tokens,
    those of copies first.

    >>> order, inverse, counts, received = arrive(torch.tensor([[0, 1], [2, 0], [3, 3]]), torch.tensor(1), 2, 1, None)
    >>> order.tolist(), counts.tolist(), received.tolist()   # copies: token 1, token 2
    ([0, 2, 3, 1, 4, 5], [1, 2], [2])
    """
    here = places.long() - me * each
    here = torch.where((here >= 0) & (here < each), here, each)
    comes = (here < each).any(1).view(members, -1)
    blocks = comes if width is not None else comes.view(1, -1)
    tokens = torch.sort(~blocks, dim=1, stable=True).indices[:, :width]
    if width is not None:
        tokens = tokens + torch.arange(members, device=places.device)[:, None] * comes.shape[1]
    return *sort_slots(here.index_select(0, tokens.flatten()).flatten(), each), comes.sum(1)


def size_table(sent: Tensor, received: Tensor, counts: Tensor, k: int) -> Tensor:
    """[members + 2, 2], for `exchange_rows`: copies to and from each member; rows here; slots of the copies that came.

    >>> size_table(torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([3, 1]), 2).tolist()
    [[1, 0], [2, 2], [4, 4], [4, 4]]
    """
    here = torch.stack([counts.sum(), received.sum() * k])
    return torch.cat([torch.stack([sent, received], 1), here[:, None].expand(2, 2)])


def even_copies(tokens: int, k: int, each: int, members: int) -> int:
    """Copies that a rank receives if all choices of k experts are equally likely: what types say.

    >>> even_copies(1000, 8, 64, 2), even_copies(1000, 8, 2, 64)      # of 128 experts
    (1994, 7780)
    """
    experts = each * members
    missing = comb(experts - each, k) / comb(experts, k) if k <= experts - each else 0.0
    return round(members * tokens * (1 - missing))


depart_p = Primitive("depart", depart, flops=lambda n: 0, keep=True)
arrive_p = Primitive("arrive", arrive, flops=lambda n: 0, keep=True)
size_table_p = Primitive("size_table", size_table, flops=lambda n: 0)
to_host_p = Primitive("to_host", lambda table: table.to("cpu"), fake=torch.clone, flops=lambda n: 0, keep=True)
