"""A stack of layers is one by what its name ends in: optimizers take `dense_layers` as they take `layers`."""

import pytest
import torch

from fmeg import optim, tree


@pytest.mark.parametrize(
    "make", [lambda: optim.adafactor(0.1, min_dim=1), lambda: optim.muon(0.1)], ids=["adafactor", "muon"]
)
@pytest.mark.parametrize("name", ["dense_layers", "first_layers", "mtp_layers"])
def test_a_stack_by_any_name(make, name):
    g = torch.Generator().manual_seed(0)
    stack = {"w": torch.randn(3, 4, 6, generator=g, dtype=torch.float64)}
    grads = tree.map(lambda x: torch.randn(x.shape, generator=g, dtype=x.dtype), stack)
    opt = make()
    want, _ = opt.update({"layers": grads}, opt.init({"layers": stack}), {"layers": stack})
    got, _ = opt.update({name: grads}, opt.init({name: stack}), {name: stack})
    assert torch.equal(got[name]["w"], want["layers"]["w"])
    one = {"layers": tree.map(lambda x: x[:1], stack)}
    alone, _ = opt.update(tree.map(lambda x: x[:1], {"layers": grads}), opt.init(one), one)
    assert torch.allclose(alone["layers"]["w"][0], want["layers"]["w"][0], rtol=1e-12)
