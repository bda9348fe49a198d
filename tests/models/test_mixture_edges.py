"""Models with experts where there is next to nothing: one token, one expert, none but padding, axes of size 1."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fmeg import Layout, Mesh, random, tree, value_and_grad
from fmeg.testing import assert_equivalent
from tests.models.test_padding import setup
from tests.models.test_padding_on_meshes import TP

ALL = dict(dp=1, cp=1, tp=1)
SPREAD = dict(TP, batch="dp", seq="cp", res_seq=("cp", "tp"), experts=("dp", "cp", "tp"))
FLAT = dict(groups=1, top_groups=1)
CASES = {
    "one token": (1, 1, ALL, SPREAD, {}, {}),
    "one token, experts on axes of their own": (1, 1, dict(ep=2, tp=2), dict(TP, experts=("ep", "tp")), {}, {}),
    "one place, a padding": (1, 1, dict(ep=2), dict(experts="ep"), {}, dict(real=0)),
    "one row": (1, 4, dict(cp=4), dict(seq="cp", res_seq="cp", experts="cp"), {}, {}),
    "one expert": (
        2,
        4,
        dict(dp=2, tp=2),
        dict(TP, batch="dp", expert_ff="tp"),
        dict(top_k=1, **FLAT),
        dict(experts=1),
    ),
    "all experts": (2, 4, dict(dp=2, tp=2), dict(TP, batch="dp", experts=("dp", "tp")), dict(top_k=8, **FLAT), {}),
    "room for one": (2, 4, dict(dp=2), dict(batch="dp", experts="dp"), dict(capacity_factor=0.01), {}),
    "the last is real": (2, 4, dict(dp=2), dict(batch="dp", experts="dp"), dict(capacity_factor=0.5), dict(real=1)),
    "balance of nothing": (2, 4, dict(dp=2), dict(batch="dp", experts="dp"), dict(select="sinkhorn"), dict(real=0)),
    "axes of size 1": (2, 4, ALL, SPREAD, {}, {}),
    "no rows": (0, 4, ALL, SPREAD, {}, {}),
    "rows of nothing": (2, 0, ALL, SPREAD, {}, {}),
}


@pytest.mark.parametrize("which", ["moe", "deepseek"])
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(which, case):
    b, s, mesh, layout, router, more = CASES[case]
    model, cfg, _ = setup(which, **router)
    experts = more.get("experts", cfg.experts)
    cfg = replace(cfg, experts=experts, router=replace(cfg.router, **({} if experts > 1 else FLAT)))
    params = model.init(random.key(0), cfg)
    torch.manual_seed(0)
    tokens, targets = torch.randint(cfg.vocab_size, (2, b, s))
    batch = {"tokens": tokens, "targets": targets, "mask": torch.ones(b, s, dtype=torch.float64)}
    if "real" in more:
        batch["real"] = torch.arange(s).expand(b, s) >= s - more["real"]

    def step(params, batch):
        return value_and_grad(lambda p, b: model.loss(p, b, cfg))(params, batch)

    (loss, aux), grads = step(params, batch)
    assert loss.isfinite() and all(g.isfinite().all() for g in tree.leaves(grads))
    tokens = int(batch["real"].sum()) if "real" in batch else b * s
    assert (aux["counts"].sum(-1) == tokens * cfg.router.top_k).all()
    if not tokens:
        assert loss == 0 and not any(g.any() for g in tree.leaves(grads))
    have = {a for axes in tree.leaves(model.logical_axes(cfg)) for a in axes.split()} | {"batch", "seq", "res_seq"}
    layout = Layout(**{k: v for k, v in layout.items() if k in have})
    axes = {"params": model.logical_axes(cfg), "batch": dict.fromkeys(batch, "batch seq")}
    assert_equivalent(step, params, batch, mesh=Mesh(**mesh), layout=layout, axes=axes, strict=True)
