"""The matrix of models with experts: where experts and tokens lie, how rows travel, and routings that are hard.

Every row of `cases` and `pipeline_cases`, with the dispatchers taking turns, each with and without a bound on the rows
that a rank has room for; and every hard routing on a few layouts, with every dispatcher.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, cycle
from typing import Any

import torch

from fmeg.mesh import Mesh
from fmeg.sharding.spec import DISPATCH_KINDS, Layout
from fmeg.testing.matrix import Case, cases, relaid
from fmeg.testing.pipelines import PipelineCase, over, pipeline_cases


@dataclass(frozen=True)
class Routing:
    """What makes a routing hard.

    router   changes to the model's `fmeg.ops.Router`, given the number of experts
    bias     added to the routers' biases, given the number of experts: it moves the choice of experts alone
    rows     of the batch, `seq` tokens each; None: as ever
    masked   no token counts, so that loss and gradients are those of the balance alone
    padded   rows begin and end with padding, some are nothing else (`fmeg.models.padding`)
    """

    router: Callable[[int], Mapping[str, Any]] = lambda experts: {}
    bias: Callable[[int], torch.Tensor] | None = None
    rows: int | None = None
    seq: int | None = None
    masked: bool = False
    padded: bool = False

    def configured(self, cfg: Any) -> Any:
        """The model with this router."""
        changes = self.router(cfg.experts) if hasattr(cfg, "experts") else {}
        return replace(cfg, router=replace(cfg.router, **changes)) if changes else cfg

    def batch(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A batch as this routing has it."""
        if self.masked:
            return {**batch, "mask": torch.zeros_like(batch["mask"])}
        if not self.padded:
            return batch
        rows, seq = batch["tokens"].shape
        at, row = torch.arange(seq), torch.arange(rows).unsqueeze(1)
        real = (at >= 3 * row % seq // 2) & (at < seq - 5 * row % seq // 2) & (row % 4 != 1)
        return {**batch, "real": real}

    def biased(self, path: str, p: torch.Tensor) -> torch.Tensor:
        """A parameter as this routing has it."""
        if self.bias is None or not path.endswith("router_bias"):
            return p
        return p + self.bias(p.shape[-1]).to(p.dtype)


def _only(expert: int, by: float) -> Callable[[int], torch.Tensor]:
    return lambda experts: by * (torch.arange(experts) == expert)


_PLAIN = dict(groups=1, top_groups=1)
ROUTINGS = {
    "": Routing(),
    "unbalanced": Routing(bias=lambda experts: torch.linspace(-1, 1, experts)),
    "an idle expert": Routing(bias=_only(1, -100.0)),
    "one expert": Routing(lambda experts: dict(top_k=1, **_PLAIN), _only(2, 100.0)),
    "all experts": Routing(lambda experts: dict(top_k=experts, **_PLAIN)),
    "drops": Routing(lambda experts: dict(capacity_factor=0.5)),
    "drops by position": Routing(lambda experts: dict(capacity_factor=0.75, drop="position")),
    "balance alone": Routing(masked=True),
    "one token": Routing(rows=1, seq=1),
    "padding": Routing(padded=True),
}
"""By name; "" is what chance gives."""


def _ways(mesh: Mesh) -> list[tuple[str, dict[str, Any]]]:
    """Ways rows may travel: each dispatcher, with no bound and with one that always suffices."""
    return [
        (f"{kind}{' bound' if bound else ''}", dict(dispatch=kind, dispatch_bound=bound))
        for bound in (None, float(mesh.size))
        for kind in DISPATCH_KINDS
    ]


def _hard(sizes: Mapping[str, int]) -> Iterator[Case]:
    """Layouts for the hard routings: experts on the axes of tokens; on all, folded; and split, in a ring, at rest."""
    tensor: dict[str, Any] = {
        name: "tp" for name in ("heads", "kv_heads", "ff", "shared_ff", "vocab") if sizes.get(name)
    }
    alone: dict[str, Any] = dict(experts=("ep", "tp"), **tensor)
    yield Case("ep=dp4", Mesh(dp=4), Layout(batch="dp", experts="dp"))
    yield Case("ep=tp,dp", Mesh(dp=2, tp=2), Layout(batch="dp", **tensor, res_seq="tp", experts=("tp", "dp")), 2)
    split: dict[str, Any] = dict(batch="dp", seq="cp", res_seq=("cp", "tp"), experts="cp", expert_ff="tp", **tensor)
    rest: dict[str, Any] = dict(params=dict(embed="dp", expert_embed="dp"))
    yield Case("zero3 ep=cp etp", Mesh(dp=2, cp=2, tp=2), Layout(**split, **rest, attention="ring"))
    yield over(Case("ep=dp", Mesh(dp=2), Layout(batch="dp", experts="dp")), 2, "1f1b", 4)
    yield Case("ep2 tp2", Mesh(ep=2, tp=2), Layout(**alone))
    yield Case("ep4", Mesh(ep=4), Layout(experts="ep"))


def hard_cases(sizes: Mapping[str, int], devices: int = 16) -> Iterator[Case]:
    """Every hard routing with every dispatcher: one token where its batch is whole, the others where it is not."""
    for routing, about in ROUTINGS.items():
        for case in _hard(sizes) if routing else ():
            whole = "batch" not in case.layout.names()
            if case.mesh.size <= devices and whole == (about.rows is not None):
                for way, how in _ways(case.mesh):
                    name = f"{routing}: {case.name} {way}"
                    yield replace(case, name=name, layout=relaid(case.layout, **how), routing=routing)


def _zero2_in_pipelines(sizes: Mapping[str, int], devices: int) -> Iterator[Case]:
    """Every microbatch's gradient reduce-scattered, in a pipeline; the other matrix has ZeRO-2 without one."""
    tensor: dict[str, Any] = {
        name: "tp" for name in ("heads", "kv_heads", "ff", "shared_ff", "vocab") if sizes.get(name)
    }
    tokens = Layout(batch="dp", experts="dp", grads=dict(embed="dp"))
    split = Layout(batch="dp", res_seq="tp", experts="tp", **tensor, grads=dict(embed="dp", expert_embed="dp"))
    for mesh, layout in ((Mesh(dp=2), tokens), (Mesh(dp=2, tp=2), split)):
        for schedule in ("1f1b", "zb_v") if 2 * mesh.size <= devices else ():
            yield over(Case("zero2" + " tp2+sp" * ("tp" in mesh.axes), mesh, layout), 2, schedule, 4)


def expert_cases(sizes: Mapping[str, int], devices: int = 16) -> Iterator[Case]:
    """The matrix for a model with experts whose logical axes have these sizes.

    >>> sizes = dict(batch=8, seq=16, res_seq=16, embed=16, heads=8, kv_heads=4, vocab=64, experts=8, expert_ff=8)
    >>> found = list(expert_cases(sizes))
    >>> len(found) > 300, sum(case.layout.dispatch == "all_gather" for case in found) > 100
    (True, True)
    """
    turn = cycle(range(4))
    for case in (*cases(sizes, devices), *pipeline_cases(sizes, devices), *_zero2_in_pipelines(sizes, devices)):
        if isinstance(case, PipelineCase) and case.preset:
            continue  # of another model
        way, how = _ways(case.mesh)[next(turn)]
        yield replace(case, name=f"{case.name} {way}", layout=relaid(case.layout, **how))
    yield from hard_cases(sizes, devices)


def traits(case: Case) -> frozenset[str]:
    """What a row puts to the test, coarsely.

    >>> layout = Layout(batch="dp", heads="tp", res_seq="tp", experts=("dp", "tp"), opt=dict(embed="dp"))
    >>> sorted(traits(Case("", Mesh(dp=2, tp=2), layout)))
    ['all_to_all', 'ep', 'ep on tokens', 'ep on tp', 'no bound', 'sp', 'tp', 'zero1']
    """
    layout, view = case.layout, case.layout.view("compute")
    experts, tensor, data = view.get("experts", ()), view.get("heads", ()), view.get("batch", ())
    zero = [f"zero{n}" for n, name in ((3, "params"), (2, "grads"), (1, "opt")) if getattr(layout, name)]
    found = {
        "ep": experts,
        "ep on tp": set(experts) & set(tensor),
        "ep on tokens": set(experts) - set(tensor),
        "etp": view.get("expert_ff", ()),
        "tp": tensor,
        "sp": set(tensor) & set(view.get("res_seq", ())),
        layout.attention: view.get("seq", ()),
        "cp": view.get("seq", ()),
        (zero or ["dp"])[0]: data,
        "pp": isinstance(case, PipelineCase),
        layout.dispatch: experts,
        "bound" if layout.dispatch_bound else "no bound": experts,
        case.routing: case.routing,
    }
    return frozenset(name for name, there in found.items() if there)


_BESIDE = {"tp", "sp", "cp", "dp", "zero1", "zero2", "zero3", "pp"}


def _tuples(case: Case) -> set[tuple[str, ...]]:
    """Pairs and triples of kinds of parallelism with experts, and pairs of all that experts may meet."""
    have = traits(case)
    if case.routing:
        return {(case.routing, case.layout.dispatch), (case.routing, str(isinstance(case, PipelineCase)))}
    if "ep" not in have:
        return set()
    beside = sorted(have & _BESIDE)
    return {("ep", *more) for n in (1, 2) for more in combinations(beside, n)} | set(combinations(sorted(have), 2))


def sample(matrix: Sequence[Case], limit: int, seed: int = 0) -> list[Case]:
    """At most `limit` rows, in order, chosen so that pairs and triples of kinds of parallelism occur: in an order
    that the seed decides, those that bring most that no row has brought yet.

    >>> sizes = dict(batch=8, seq=16, res_seq=16, embed=16, heads=8, kv_heads=4, vocab=64, experts=8, expert_ff=8)
    >>> some = sample(list(expert_cases(sizes)), 20)
    >>> len(some), {"ep", "pp", "zero3", "one token"} <= {t for case in some for t in traits(case)}
    (20, True)
    """
    left = {i: _tuples(case) for i, case in enumerate(matrix)}
    order = list(left)
    random.Random(seed).shuffle(order)
    chosen: list[int] = []
    while len(chosen) < limit:
        best = max(order, key=lambda i: len(left[i]), default=None)
        if best is None or not left[best]:
            break
        chosen.append(best)
        new = left[best]
        left = {i: t - new for i, t in left.items()}
    return [matrix[i] for i in sorted(chosen)]
